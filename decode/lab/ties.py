"""The divergence audit: why a speculative output left the plain one, judged from caches prefilled afresh.

K proposals, V vocabulary. A divergence is the first emitted token at which an arm and `plain` differ. Both had the same
committed prefix there, so two fresh forwards over it show what the target itself says: *narrow*, one row, as the plain
loop decides; *wide*, the verify's own rows, as the speculative loop decides.

    tie              the two logits differ by at most one ULP, in narrow or in wide, and nothing beats them both there
    width_sensitive  by more, but narrow yields the plain token and wide the speculative one
    defect           anything else; only defects fail

Neither forward touches the caches of the run under audit, so a broken rollback cannot explain itself; how far the
logits recorded in that run lie from wide is reported beside the class.
"""

import dataclasses

import mlx.core as mx

from decode.verify import ulp

CLASSES = ("tie", "width_sensitive", "defect")
PREFILL_ROWS = 2048  # per forward, as mlx_lm's prefill_step_size


@dataclasses.dataclass(frozen=True)
class Verify:
    """One verify as it was run.

    start   index, among the emitted tokens, of the first token it committed
    rows    token ids it was given: the pending token and K proposals
    logits  [n,V] as recorded, of the n rows that emitted tokens, or None where they were not kept
    """

    start: int
    rows: tuple[int, ...]
    logits: mx.array | None = None


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The class of one divergence, with the two tokens' logits and their gap in ULPs, narrow first and wide second."""

    kind: str
    logits: tuple[tuple[float, float], tuple[float, float]]
    gap_ulps: tuple[float, float]


def first_divergence(plain, speculative):
    """Index of the first token that differs, or of the first that one of them lacks; None where both are equal."""
    for index, (ours, theirs) in enumerate(zip(plain, speculative, strict=False)):
        if ours != theirs:
            return index
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


def judge(narrow, wide, plain_token, speculative_token):
    """Class a divergence from the fresh logits [V] of the position it stands at. Returns a Judgement."""
    pairs = tuple((row[plain_token].item(), row[speculative_token].item()) for row in (narrow, wide))
    gaps = tuple(abs(one - other) / ulp(max(abs(one), abs(other)), narrow.dtype) for one, other in pairs)
    if any(tied(row, pair, gap) for row, pair, gap in zip((narrow, wide), pairs, gaps, strict=True)):
        kind = "tie"
    elif mx.argmax(narrow).item() == plain_token and mx.argmax(wide).item() == speculative_token:
        kind = "width_sensitive"
    else:
        kind = "defect"
    return Judgement(kind, pairs, gaps)


def tied(row, pair, gap):
    """Whether two logits of a row [V] are within one ULP of each other and no other logit is beyond that above them."""
    best = mx.max(row).item()
    return gap <= 1 and best - max(pair) <= ulp(abs(best), row.dtype)


def audit(target, prompt, plain, speculative, verify):
    """Judge the first divergence of two outputs of one prompt.

    prompt: token ids; plain, speculative: the emitted ids; verify: the Verify that committed the diverging token, or
    None where the token came from prefill. Returns a dict for the result file: class, position, tokens, logits, gaps,
    dtype, verify width, and `recorded_difference` = max |wide − recorded| over the rows that emitted tokens.
    """
    position = first_divergence(plain, speculative)
    record = {"position": position, "verify_width": verify and len(verify.rows)}
    if position >= min(len(plain), len(speculative)):
        return record | {"class": "defect", "reason": "one output stops where the other goes on"}
    if verify is None:
        return record | {"class": "defect", "reason": "the token of prefill differs, where nothing was speculated"}
    context = list(prompt) + list(plain[:position])
    narrow = fresh(target, context[:-1], context[-1:])[0]
    rows = fresh(target, [*prompt, *speculative[: verify.start - 1]], verify.rows)
    judgement = judge(narrow, rows[position - verify.start], plain[position], speculative[position])
    return record | {
        "class": judgement.kind,
        "tokens": [plain[position], speculative[position]],
        "logits": {"narrow": judgement.logits[0], "wide": judgement.logits[1]},
        "gap_ulps": {"narrow": judgement.gap_ulps[0], "wide": judgement.gap_ulps[1]},
        "dtype": str(rows.dtype).rpartition(".")[2],
        "recorded_difference": difference(rows, verify.logits),
    }


def fresh(target, committed, rows):
    """Logits [len(rows), V] of `rows` after `committed` was prefilled into a new cache."""
    return target.score(target.forward(mx.array([list(rows)]), prefilled(target, committed)).hidden)[0]


def prefilled(target, committed):
    """A new cache that holds the committed ids."""
    cache = target.make_cache()
    for start in range(0, len(committed), PREFILL_ROWS):
        target.forward(mx.array([list(committed[start : start + PREFILL_ROWS])]), cache)
        mx.eval([entry.state for entry in cache])
    return cache


def difference(rows, recorded):
    """max |rows − recorded| in float32 over the rows recorded, or None where nothing was."""
    if recorded is None:
        return None
    rows = rows[: recorded.shape[0]]
    return mx.max(mx.abs(rows.astype(mx.float32) - recorded.astype(mx.float32))).item()


def count(records):
    """{class: distinct positions}: repeats that diverge alike are one divergence, not several."""
    distinct = {(record["prompt"], record["position"], *(record.get("tokens") or ())): record for record in records}
    return {kind: sum(record["class"] == kind for record in distinct.values()) for kind in CLASSES}
