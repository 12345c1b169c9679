"""Runs any comparison of arms and makes its result record; a command such as ksweep is a configuration of it.

The walk: prompts are encoded and measured against the context before anything is timed → warm-up → the timed pass →
the instrumented pass (stage times need synchronisation, so they never come from the timed one) → the divergence audit
→ figures per arm. A result (schema "foredraft.result/1", DESIGN's keys) also holds what its figures were computed from:

    continued    when the runs began whose saved rounds this one went on with, where it did
    complete     whether every round, stage and audit was done; a result is saved after each round of arms
    rows         one per arm, prompt and repeat: `tokens` (ids emitted), `seconds` (first emitted token to last),
                 `prefill_seconds`, `proposed_per_cycle`, `accepted_per_cycle`, `committed_per_cycle`, `redecided` (by
                 a tie guard's single rows), `loop_fraction`, `finish`, `place` (position in the interleaving),
                 `disturbed` (reasons, by health.rule)
    stages       one per arm and prompt of the instrumented pass: cycles, and seconds in draft, verify, commit and all
    divergences  one per arm, prompt and distinct outcome that left `plain`: see `ties`
    census       of the command ties, one per text and width: see `census`
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
MEASURED = ("complete", "health", "arms", "rows", "stages", "divergences")
INSTRUMENTED = 4  # prompts; assumed enough for a mean over a hundred cycles or more
SHOWN = ("MLX_", "FOREDRAFT_", "OMP_", "OPENBLAS_", "MKL_")  # environment that changes speed or rounding


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A prompt ready to run: its id and category in the set, and its token ids, template included."""

    id: str
    category: str
    tokens: tuple[int, ...]


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
        "argv": list(argv),
        "config": config,
        "provenance": manifest.provenance(argv) | {"environment": environment()},
        "target": target.identity(),
        "drafter": drafter,
    }


def run(header, target, arms, prompts, plan, progress, save=lambda result: None, earlier=None):
    """Measure the arms on encoded prompts. Returns the whole result.

    arms: the baseline first, `plain` among them. progress: wraps an iterable to show how far it is, as tqdm does;
    called as progress(iterable, total=…, desc=…). save: called with the result so far after every prompt's round, so
    that a killed run leaves what it measured. earlier: such a result, to be gone on with.
    """
    result = header | opening(earlier, arms, plan)
    rows, states = result["rows"], result["health"]
    save(result)
    for _ in progress(timing.warm_up(arms, prompts, plan), total=plan.warmup * len(arms), desc="warm-up"):
        pass
    done = {(row["repeat"], row["prompt"]) for row in rows}
    total = plan.repeats * len(prompts) - len(done)
    for found in progress(timing.rounds(arms, prompts, plan, done), total=total, desc="timed"):
        rows += as_rows(*found)
        states["between"].append({"repeat": found[0], "prompt": found[1].id, "ailments": found[3]})
        states["flagged_rows"] = [index for index, row in enumerate(rows) if row["disturbed"]]
        save(result)
    states["after"] = health.snapshot()
    pairs = [(arm, prompt) for prompt in spread(prompts, INSTRUMENTED) for arm in arms if arm.kind != "mlx_lm"]
    result["stages"] = [as_stage(*pair, plan) for pair in progress(pairs, total=len(pairs), desc="stages")]
    save(result)
    cases = diverging(rows, [arm for arm in arms if arm.block_size])
    cases = progress(cases, total=len(cases), desc="divergences")
    result["divergences"] = [examine(target, case, prompts, plan) for case in cases]
    states["drift"] = drift(result)
    result |= {"complete": True, "arms": summarise(result)}
    save(result)
    return result


def opening(earlier, arms, plan):
    """The measured part of a result before its first round, or that of an earlier result to be gone on with."""
    if earlier:
        kept = {key: copy.deepcopy(earlier[key]) for key in MEASURED}
        return kept | {"continued": [*earlier.get("continued", []), earlier["provenance"]["created"]]}
    states = {"before": health.snapshot(), "between": [], "after": None, "rule": health.RULE, "flagged_rows": []}
    return {
        "complete": False,
        "health": states | {"headline": plan.headline},
        "arms": [{"name": arm.name, "kind": arm.kind, "block_size": arm.block_size} for arm in arms],
        "rows": [],
        "stages": [],
        "divergences": [],
    }


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
        "redecided": sum(cycle.redecided for cycle in run.cycles),
        "loop_fraction": statistics.loop_fraction(run.tokens),
        "disturbed": disturbed,
    }


def as_stage(arm, prompt, plan):
    """The stage record of one instrumented run; seconds are sums over its cycles."""
    run = arm.run(prompt.tokens, plan.max_tokens, clock=time.perf_counter)
    timing.settle()
    spent = {stage: sum(cycle.seconds[stage] for cycle in run.cycles) for stage in statistics.STAGES}
    return {"arm": arm.name, "prompt": prompt.id, "cycles": len(run.cycles), "seconds": run.seconds, **spent}


def take_census(result, target, prompts, widths, progress, save):
    """Add the census of decisions over plain's texts to a whole result, saved after every text."""
    asked = {prompt.id: prompt.tokens for prompt in prompts}
    texts = [row for row in result["rows"] if row["arm"] == "plain" and row["repeat"] == 0]
    result["census"] = []
    for row in progress(texts, total=len(texts), desc="census"):
        found = census.count(target, asked[row["prompt"]], row["tokens"], widths)
        result["census"] += [{"prompt": row["prompt"], **counted} for counted in found]
        save(result)


def diverging(rows, arms):
    """(arm, row, plain's tokens) for every distinct outcome of a speculative arm that left plain in its repeat."""
    plain = {(row["prompt"], row["repeat"]): row["tokens"] for row in rows if row["arm"] == "plain"}
    by_name = {arm.name: arm for arm in arms}
    cases = {}
    for row in rows:
        expected = plain[row["prompt"], row["repeat"]]
        if row["arm"] in by_name and row["tokens"] != expected:
            key = row["arm"], row["prompt"], tuple(row["tokens"]), tuple(expected)
            cases.setdefault(key, (by_name[row["arm"]], row, expected))
    return list(cases.values())


def examine(target, case, prompts, plan):
    """Audit one diverging row: replay the arm to see what its verify was given and what logits it got."""
    arm, row, expected = case
    prompt = next(prompt for prompt in prompts if prompt.id == row["prompt"])
    tokens, verifies = arm.replay(prompt.tokens, plan.max_tokens)
    position = ties.first_divergence(expected, row["tokens"])
    replayed = list(tokens[: position + 1]) == row["tokens"][: position + 1]
    verify = locate(verifies, position) if replayed else rebuilt(row, position)
    record = ties.audit(target, prompt.tokens, expected, row["tokens"], verify)
    return {"arm": arm.name, "prompt": row["prompt"], "repeat": row["repeat"], "replayed": replayed, **record}


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
    """A result's figures per arm, from its rows, stages and divergences alone."""
    arms = statistics.summarise(result["rows"], result["arms"], headline(result))
    stages = statistics.group(result["stages"], "arm")
    audited = statistics.group(result["divergences"], "arm")
    for arm in arms:
        arm["ms"] = statistics.stage_ms(stages[arm["name"]]) if arm["name"] in stages else None
        arm["divergences"] = ties.count(audited.get(arm["name"], [])) if arm["block_size"] else None
    return arms


def drift(result):
    """How the plain loop's pace changed over the run, from the rows that headlines count."""
    plain = statistics.group(result["rows"], "arm").get("plain", [])
    return statistics.drift(statistics.counted(plain, headline(result)))


def headline(result):
    """Which rows a result's headlines count; one of before there was a choice counts every row."""
    return result["health"].get("headline", statistics.EVERY)


def loops(result):
    """The prompts whose plain continuation loops."""
    return statistics.looping(statistics.group(result["rows"], "arm").get("plain", []))


def environment():
    """The variables of this process that can change speed or rounding."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}
