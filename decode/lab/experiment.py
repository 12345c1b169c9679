"""Runs any comparison of arms and makes its result record; a command such as ksweep is a configuration of it.

The walk: prompts are encoded and measured against the context before anything is timed → warm-up → the timed pass →
the instrumented pass (stage times need synchronisation, so they never come from the timed one) → the divergence audit
→ figures per arm. A result (schema "foredraft.result/1", DESIGN's keys) also holds what its figures were computed from:

    continued    when the runs began whose saved rounds this one went on with, where it did
    complete     whether every round, stage and audit was done; a result is saved after each round of arms
    rows         one per arm, prompt and repeat: `tokens` (ids emitted), `seconds` (first emitted token to last),
                 `prefill_seconds`, `proposed_per_cycle`, `accepted_per_cycle`, `committed_per_cycle`,
                 `forwards_per_cycle` (of the target, a draft pass that runs it included), `redecided` (by a tie
                 guard's single rows), `loop_fraction`, `finish`, `place` (position in the interleaving),
                 `disturbed` (reasons, by health.rule)
    stages       one per arm and prompt of the instrumented pass: cycles, and seconds in draft, verify, commit and all
    divergences  one per arm, prompt and distinct outcome that left `plain`: see `ties`
    census       of the command ties, one per text and width: see `census`

Where an evaluation has parts (one a target, or one a context length), every row, stage, divergence and arm names its
`part`, and each part has a baseline and a plain arm of its own: nothing is compared across parts here.
"""

import copy
import dataclasses
import os
import time

from decode.lab import census, health, statistics, ties, timing
from decode.lab.prompts import spread
from drafter import manifest
from kernels.errors import UserError

SCHEMA = "foredraft.result/1"
JOINED = ("arms", "rows", "stages", "divergences")
INSTRUMENTED = 4  # prompts; assumed enough for a mean over a hundred cycles or more
SHOWN = ("MLX_", "FOREDRAFT_", "OMP_", "OPENBLAS_", "MKL_")  # environment that changes speed or rounding


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A prompt ready to run: its id and category in the set, and its token ids, template included; part: see above."""

    id: str
    category: str
    tokens: tuple[int, ...]
    part: str | None = None


def encode(target, prompts, plan, *, raw=False):
    """Encode every prompt and check that it and its answer fit the target's context. Raises UserError."""
    return [encode_one(target, prompt, plan, raw) for prompt in prompts]


def encode_one(target, prompt, plan, raw):
    """One prompt as Encoded."""
    tokens = tuple(target.encode(prompt.text, raw=raw))
    if not tokens:
        raise UserError(f"prompt {prompt.id} encodes to no tokens; give it text")
    if target.max_length and len(tokens) + plan.max_tokens > target.max_length:
        raise UserError(
            f"prompt {prompt.id} has {len(tokens)} tokens, and with --max-tokens {plan.max_tokens} exceeds the context "
            f"of {target.max_length} of {target.source}; shorten it or lower --max-tokens"
        )
    return Encoded(prompt.id, prompt.category, tokens)


def header(command, argv, config, target, drafter):
    """The head of a result: what was asked, by which code on which machine; made before the run, for files change."""
    return {
        "schema": SCHEMA,
        "command": command,
        "argv": manifest.unplaced(list(argv)),
        "config": manifest.unplaced(config),
        "provenance": manifest.provenance(argv) | {"environment": manifest.unplaced(environment())},
        "target": target.identity(),
        "drafter": drafter,
    }


def run(header, arms, prompts, plan, progress, save=lambda result: None, earlier=None, instrumented=None):
    """Measure the arms on encoded prompts. Returns the whole result, which is its caller's to save once it is done.

    arms: the baseline first, `plain` among them. progress: wraps an iterable to show how far it is, as tqdm does;
    called as progress(iterable, total=…, desc=…). save: called with the result so far after every prompt's round, so
    that a killed run leaves what it measured. earlier: such a result, to be gone on with. instrumented: the prompts of
    the stage pass (a few spread over all).
    """
    result = header | opening(earlier, arms, prompts, plan)
    rows, states = result["rows"], result["health"]
    save(result)
    for _ in progress(timing.warm_up(arms, prompts, plan), total=plan.warmup * len(arms), desc="warm-up"):
        pass
    done = {(row["repeat"], row["prompt"], row.get("part")) for row in rows}
    total = len(timing.places(arms, prompts, plan) - done)
    for found in progress(timing.rounds(arms, prompts, plan, done), total=total, desc="timed"):
        rows += as_rows(*found)
        states["between"].append(as_check(arms, *found))
        states["flagged_rows"] = flagged(rows)
        save(result)
    states["after"] = health.snapshot()
    staged = spread(prompts, INSTRUMENTED) if instrumented is None else instrumented
    pairs = [(arm, prompt) for prompt in staged for arm in arms if arm.kind != "mlx_lm"]
    result["stages"] = [as_stage(*pair, plan) for pair in progress(pairs, total=len(pairs), desc="stages")]
    save(result)
    cases = diverging(rows, [arm for arm in arms if arm.block_size])
    result["divergences"] = [examine(case, prompts, plan) for case in progress(cases, total=len(cases), desc="audit")]
    states["drift"] = drift(result)
    return result | {"complete": True, "arms": summarise(result)}


def opening(earlier, arms, prompts, plan):
    """The measured part of a result before its first round, or that of an earlier result to be gone on with."""
    states = {"before": health.snapshot(), "between": [], "after": None, "rule": health.RULE, "flagged_rows": []}
    fresh = {
        "complete": False,
        "health": states | {"headline": plan.headline},
        "arms": listed(arms, prompts),
        "rows": [],
        "stages": [],
        "divergences": [],
    }
    if not earlier:
        return fresh
    kept = copy.deepcopy({key: earlier[key] for key in ("health", "rows")})
    return fresh | kept | {"continued": [*earlier.get("continued", []), earlier["provenance"]["created"]]}


def flagged(rows):
    """The indices of the disturbed rows."""
    return [index for index, row in enumerate(rows) if row["disturbed"]]


def listed(arms, prompts):
    """What a result says of its arms before their figures, part by part."""
    parts = dict.fromkeys(arm.part or prompt.part for prompt in prompts for arm in arms)
    return [described(arm, part) for part in parts for arm in arms if arm.part in (None, part)]


def described(arm, part):
    """What a result says of an arm before its figures, in the part it is listed for."""
    return {"name": arm.name, "kind": arm.kind, "block_size": arm.block_size} | marked(part)


def marked(part):
    """The key that names a record's part; none where an evaluation has one part only."""
    return {} if part is None else {"part": part}


def parts_of(records):
    """The parts that records name, in order of first appearance; [None] where they name none."""
    return list(dict.fromkeys(record.get("part") for record in records))


def in_part(records, part):
    """The records of one part."""
    return [record for record in records if record.get("part") == part]


def label(arm):
    """An arm's name, with its part where there are several."""
    return f"{arm['part']} {arm['name']}" if "part" in arm else arm["name"]


def as_check(arms, repeat, prompt, runs, ailments):
    """What was wrong with the machine around one round."""
    found = {"repeat": repeat, "prompt": prompt.id, "ailments": ailments}
    return found | marked(timing.part_of(arms, prompt))


def as_rows(repeat, prompt, runs, ailments):
    """The result rows of one round."""
    return [as_row(arm, prompt, place, repeat, run, alone + ailments) for arm, place, run, alone in runs]


def as_row(arm, prompt, place, repeat, run, disturbed):
    """The result row of one timed run."""
    return {
        "arm": arm.name,
        "prompt": prompt.id,
        "category": prompt.category,
        "repeat": repeat,
        "place": place,
        "prompt_tokens": len(prompt.tokens),
        "tokens": list(run.tokens),
        "seconds": run.seconds,
        "prefill_seconds": run.prefill_seconds,
        "finish": run.finish,
        "proposed_per_cycle": [cycle.proposed for cycle in run.cycles],
        "accepted_per_cycle": [cycle.accepted for cycle in run.cycles],
        "committed_per_cycle": [cycle.committed for cycle in run.cycles],
        "forwards_per_cycle": [cycle.forwards for cycle in run.cycles],
        "redecided": sum(cycle.redecided for cycle in run.cycles),
        "loop_fraction": statistics.loop_fraction(run.tokens),
        "disturbed": disturbed,
        **marked(arm.part or prompt.part),
        **told(run.cycles),
    }


def told(cycles):
    """What the drafter said of its proposals, where a schedule asked."""
    said = [[round(value, 5) for value in cycle.confidence] for cycle in cycles]
    return {"confidence_per_cycle": said} if any(said) else {}


def as_stage(arm, prompt, plan):
    """The stage record of one instrumented run; seconds are sums over its cycles."""
    run = arm.run(prompt.tokens, plan.max_tokens, clock=time.perf_counter)
    timing.settle()
    spent = {stage: sum(cycle.seconds[stage] for cycle in run.cycles) for stage in statistics.STAGES}
    found = {"arm": arm.name, "prompt": prompt.id, "cycles": len(run.cycles), "seconds": run.seconds}
    return found | spent | marked(arm.part or prompt.part)


def take_census(result, target, prompts, widths, progress, save):
    """Add the census of decisions over plain's texts to a measured result, saved, still as a part, after every text."""
    asked = {prompt.id: prompt.tokens for prompt in prompts}
    texts = [row for row in result["rows"] if row["arm"] == "plain" and row["repeat"] == 0]
    result["census"] = []
    for row in progress(texts, total=len(texts), desc="census"):
        found = census.count(target, asked[row["prompt"]], row["tokens"], widths)
        result["census"] += [{"prompt": row["prompt"], **counted} for counted in found]
        save(result | {"complete": False})


def diverging(rows, arms):
    """(arm, row, plain's tokens) for every distinct outcome of a speculative arm that left plain in its repeat."""
    place = lambda row: (row.get("part"), row["prompt"], row["repeat"])
    plain = {place(row): row["tokens"] for row in rows if row["arm"] == "plain"}
    by_name = {(arm.part or part, arm.name): arm for arm in arms for part in parts_of(rows)}
    cases = {}
    for row in rows:
        arm, expected = by_name.get((row.get("part"), row["arm"])), plain[place(row)]
        if arm and row["tokens"] != expected:
            key = row.get("part"), arm.name, row["prompt"], tuple(row["tokens"]), tuple(expected)
            cases.setdefault(key, (arm, row, expected))
    return list(cases.values())


def examine(case, prompts, plan):
    """Audit one diverging row: replay the arm to see what its verify was given and what logits it got."""
    arm, row, expected = case
    found = [prompt for prompt in prompts if prompt.id == row["prompt"]]
    prompt = next(prompt for prompt in found if prompt.part in (None, row.get("part")))
    tokens, verifies = arm.replay(prompt.tokens, plan.max_tokens)
    position = ties.first_divergence(expected, row["tokens"])
    replayed = list(tokens[: position + 1]) == row["tokens"][: position + 1]
    verify = locate(verifies, position) if replayed else rebuilt(row, position)
    record = ties.audit(arm.target, prompt.tokens, expected, row["tokens"], verify)
    named = {"arm": arm.name, "prompt": row["prompt"], "repeat": row["repeat"], "replayed": replayed}
    return named | record | marked(row.get("part"))


def locate(verifies, position):
    """The verify that committed the emitted token at `position`; None where prefill did."""
    return next((verify for verify in reversed(verifies) if verify.start <= position), None)


def rebuilt(row, position):
    """The verify as a row's counts give it, for a run that does not repeat itself.

    Its rejected proposals are unknown; they lie after the rows that matter, which cannot see them, so the pending
    token stands in for each and only the width has to be right.
    """
    start = 1  # the token before it came from prefill
    for proposed, committed in zip(row["proposed_per_cycle"], row["committed_per_cycle"], strict=True):
        if start <= position < start + committed:
            known = row["tokens"][start - 1 : start + committed - 1]
            return ties.Verify(start, tuple(known + known[:1] * (1 + proposed - len(known))))
        start += committed
    return None


def summarise(result):
    """A result's figures per arm, part by part, from its rows, stages and divergences alone."""
    return [arm for part in parts_of(result["arms"]) for arm in summarise_part(result, part)]


def summarise_part(result, part):
    """The figures of the arms of one part."""
    rows, arms, stages, audited = (in_part(result[name], part) for name in ("rows", "arms", "stages", "divergences"))
    arms = [arm | marked(part) for arm in statistics.summarise(rows, arms, headline(result))]
    stages, audited = statistics.group(stages, "arm"), statistics.group(audited, "arm")
    for arm in arms:
        arm["ms"] = statistics.stage_ms(stages[arm["name"]]) if arm["name"] in stages else None
        arm["divergences"] = ties.count(audited.get(arm["name"], [])) if arm["block_size"] else None
    return arms


def only(result, part):
    """What an earlier result has of one part, to be gone on with."""
    between = in_part(result["health"]["between"], part)
    return result | {"rows": in_part(result["rows"], part), "health": result["health"] | {"between": between}}


def join(header, results):
    """One result of several that were measured one after another, each part with arms of its own."""
    whole = {name: [record for found in results for record in found[name]] for name in JOINED}
    first, last = results[0], results[-1]
    between = [check for found in results for check in found["health"]["between"]]
    states = {"between": between, "after": last["health"]["after"], "flagged_rows": flagged(whole["rows"])}
    continued = {"continued": first["continued"]} if "continued" in first else {}
    joined = header | {"complete": all(found["complete"] for found in results), **continued, **whole}
    joined["health"] = first["health"] | states
    joined["health"]["drift"] = drift(joined)
    return joined


def compare(result, reference, arm):
    """`statistics.speedup` of one arm over another that is not the baseline, from the rows that headlines count."""
    by_arm = statistics.group(counted(result), "arm")
    return statistics.compare(*(by_arm.get(name, []) for name in (reference, arm)))


def drift(result):
    """How the plain loop's pace changed over the run, one a part where it can be told; see `statistics.drift`."""
    plain = statistics.group(counted(result), "arm").get("plain", [])
    found = [(part, statistics.drift(in_part(plain, part))) for part in parts_of(plain)]
    return [one | marked(part) for part, one in found if one]


def counted(result):
    """The rows that a result's headlines count."""
    return statistics.counted(result["rows"], headline(result))


def headline(result):
    """Which rows a result's headlines count; one of before there was a choice counts every row."""
    return result["health"].get("headline", statistics.EVERY)


def loops(result):
    """The prompts whose plain continuation loops."""
    return statistics.looping(statistics.group(result["rows"], "arm").get("plain", []))


def environment():
    """The variables of this process that can change speed or rounding."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}
