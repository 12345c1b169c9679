"""Figures from rows: the prompt is the unit, and nothing here has seen the model.

A row is the dict that `experiment` records: one arm, prompt and repeat, with `tokens` (ids emitted), `seconds` (first
emitted token to last), and per cycle `proposed_per_cycle`, `accepted_per_cycle`, `committed_per_cycle`.

Letters: n prompts, k repeats. Repeats of a prompt are averaged before anything else, so that k repeats of one prompt
never count as k prompts. The first emitted token comes from prefill: it is in no count and in no clock.
"""

import collections
import math

from decode.lab import intervals

LOOP_NGRAM = 8  # tokens; cited: the length at which a prior lab on gated LoRA drafting called a continuation looping
LOOP_SHARE = 0.05  # of 8-gram starts; cited: same
STAGES = ("draft", "verify", "commit")
GUARD = "-guard"  # and ULPs end the name of an arm under a tie guard
TWIN = "-twin"  # ends the name of an arm that repeats another: their ratio is the noise floor
QUIET, EVERY = "undisturbed rows", "every row"  # what headlines are computed from
FEWEST_PROMPTS = 10  # assumed: below it a t interval's tails rest on too few prompts, so only the range is given


def loop_fraction(tokens, n=LOOP_NGRAM):
    """Share of n-gram starts in `tokens` whose n-gram stood at an earlier start; 0 where there is no n-gram."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def pooled_ratio(baseline, arm):
    """Baseline's pooled seconds per token over the arm's; each is a list of (seconds, tokens), a pair per prompt."""
    return per_token(baseline) / per_token(arm)


def per_token(pairs):
    """Σ seconds ÷ Σ tokens."""
    return sum(seconds for seconds, _ in pairs) / sum(tokens for _, tokens in pairs)


def log_ratio(pairs):
    """Log of the pooled ratio; pairs: ((baseline's seconds, tokens), (the arm's)), one a prompt."""
    return math.log(pooled_ratio(*zip(*pairs, strict=True)))


def ratio_interval(baseline, arm, confidence=intervals.CONFIDENCE):
    """Jackknife t interval over prompts for the pooled ratio, by its log; returns (low, high).

    Baseline and arm stay paired within each prompt. Measured coverage of a 95 % interval at 12 prompts, over six
    distributions of lengths and speedups (20,000 draws each): .939 to .953, where resampling the prompts (the
    percentile bootstrap) gave .895 to .912, for it knows nothing of small samples.
    """
    ends = intervals.jackknife(list(zip(baseline, arm, strict=True)), log_ratio, confidence)
    return tuple(map(math.exp, ends))


def estimate(units, figure):
    """{"value", "low", "high", "prompts"} of a figure of units, one a prompt; low and high are None below ten."""
    low, high = intervals.jackknife(units, figure) if len(units) >= FEWEST_PROMPTS else (None, None)
    return {"value": figure(units), "low": low, "high": high, "prompts": len(units)}


def commitments(rows, arm):
    """{prompt: (tokens committed, cycles)} of an arm, repeats together."""
    counts = {}
    for row in rows:
        if row["arm"] == arm:
            tokens, cycles = counts.get(row["prompt"], (0, 0))
            counts[row["prompt"]] = tokens + sum(row["committed_per_cycle"]), cycles + len(row["committed_per_cycle"])
    return counts


def estimate_means(first, second):
    """`estimate` of second's pooled mean over first's; both {prompt: (sum, count)}. None where no prompt has both."""
    units = [(first[id], second[id]) for id in second if first.get(id, (0, 0))[1] and second[id][1]]
    mean = lambda units, place: sum(unit[place][0] for unit in units) / sum(unit[place][1] for unit in units)
    return estimate(units, lambda units: mean(units, 1) / mean(units, 0)) if units else None


def speedup(baseline, arm, compared=1):
    """Speedup of an arm, paired over prompts; both map prompt id to (seconds, tokens), repeats averaged.

    ratio         of summed times, with `low` and `high` of its 95 % interval
    family        [low, high] that hold for all `compared` arms at once with 95 % (Bonferroni; measured for six arms
                  of skewed effects: .88 at 15 prompts, .93 at 27, .94 at 80, where single intervals gave .7)
    mean_log      {ratio, low, high}: e to the mean log-ratio, where every prompt weighs the same
    detectable    the least ratio above 1 that this many prompts of this spread would have shown with 80 % power
    range         the least and greatest ratio of one prompt
    All but ratio, range and mean_log's ratio are None below ten prompts. Prompts on which either emitted no token
    after the first have no ratio and are left out; None when none is left.
    """
    ids = [id for id in arm if id in baseline and arm[id][1] and baseline[id][1]]
    if not ids:
        return None
    ours, theirs = [arm[id] for id in ids], [baseline[id] for id in ids]
    logs = [log_ratio([pair]) for pair in zip(theirs, ours, strict=True)]
    found = {
        "ratio": pooled_ratio(theirs, ours),
        "low": None,
        "high": None,
        "range": [math.exp(min(logs)), math.exp(max(logs))],
        "prompts": len(ids),
        "mean_log": {"ratio": math.exp(sum(logs) / len(logs)), "low": None, "high": None},
        "family": None,
        "compared": compared,
        "detectable": None,
    }
    return found | uncertainty(theirs, ours, logs, compared) if len(ids) >= FEWEST_PROMPTS else found


def uncertainty(theirs, ours, logs, compared):
    """The keys of `speedup` that need ten prompts."""
    low, high = ratio_interval(theirs, ours)
    sample = intervals.pseudo_values(list(zip(theirs, ours, strict=True)), log_ratio)
    return {
        "low": low,
        "high": high,
        "family": list(ratio_interval(theirs, ours, 1 - (1 - intervals.CONFIDENCE) / compared)),
        "mean_log": dict(zip(("ratio", "low", "high"), map(math.exp, intervals.mean_interval(logs)), strict=True)),
        "detectable": math.exp(intervals.detectable(sample)),
    }


def drift(rows):
    """How the pace of one arm's rows changed over a run: {ratio, low, high, paired}, None where it cannot be told.

    ratio is seconds per token at the end ÷ at the start: the last repeat over the first, paired by prompt; with one
    repeat the second half of the prompts over the first, which also differ in themselves (paired is False).
    """
    repeats = sorted({row["repeat"] for row in rows})
    if len(repeats) > 1:
        first, last = (timings([row for row in rows if row["repeat"] == end]) for end in (repeats[0], repeats[-1]))
        found = speedup(last, first)
        return found and {key: found[key] for key in ("ratio", "low", "high")} | {"paired": True}
    halves = [list(timings(part).values()) for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :])]
    if not all(sum(tokens for _, tokens in half) for half in halves):
        return None
    return {"ratio": per_token(halves[1]) / per_token(halves[0]), "low": None, "high": None, "paired": False}


def twin_floor(arms, part=None, baseline="mlx_lm"):
    """The speedup of the baseline's twin over the baseline, in one part of a result: what nothing at all looks like."""
    twins = (arm["speedup"] for arm in arms if arm["name"] == baseline + TWIN and arm.get("part") == part)
    return next(twins, None)


def guards(rows, arms, headline=EVERY):
    """What a tie guard costs and buys, for every guarded arm whose unguarded one was measured beside it.

    Returns [{arm, guard, speed: `speedup` of the guarded over the unguarded arm (below 1 is a cost), redecided: share
    of tokens that one row decided, identical: (unguarded, guarded), prompts}].
    """
    by_arm, figures = group(rows, "arm"), {arm["name"]: arm for arm in arms}
    found = []
    for name in figures:
        arm, guard = name.rpartition(GUARD)[::2]
        if arm not in figures or not {arm, name} <= by_arm.keys():
            continue
        tokens = sum(max(len(row["tokens"]) - 1, 0) for row in by_arm[name])
        found.append({
            "arm": arm,
            "guard": guard,
            "speed": compare(*(counted(by_arm[one], headline) for one in (arm, name))),
            "redecided": sum(row.get("redecided") or 0 for row in by_arm[name]) / tokens if tokens else None,
            "identical": (figures[arm]["identical"], figures[name]["identical"]),
            "prompts": figures[name]["prompts"],
        })  # fmt: skip
    return found


def compare(baseline, rows):
    """`speedup` of an arm's rows over another's, each round beside its own."""
    return speedup(*map(timings, paired(baseline, rows)))


def beyond(speedup, floor):
    """Whether a speedup's interval lies wholly outside the twin's; None where either has no interval."""
    if not speedup or not floor or speedup["low"] is None or floor["low"] is None:
        return None
    return speedup["low"] > floor["high"] or speedup["high"] < floor["low"]


def tau(rows):
    """Mean committed tokens per cycle: pooled over cycles, and the mean of per-prompt means; None without cycles."""
    by_prompt = group(rows, "prompt")
    counts = {id: [count for row in some for count in row["committed_per_cycle"]] for id, some in by_prompt.items()}
    means = [sum(some) / len(some) for some in counts.values() if some]
    if not means:
        return None
    every = [count for some in counts.values() for count in some]
    return {"pooled": sum(every) / len(every), "per_prompt": sum(means) / len(means)}


def tokens_per_forward(rows):
    """Emitted tokens ÷ forwards of the target: prefill, draft passes that run it, and verifies; None without cycles."""
    cycles = [row["forwards_per_cycle"] for row in rows]
    return sum(len(row["tokens"]) for row in rows) / (len(rows) + sum(map(sum, cycles))) if any(cycles) else None


def acceptance_rate(rows):
    """Accepted ÷ proposals offered, over all cycles; None where nothing was offered."""
    offered = sum(sum(row["proposed_per_cycle"]) for row in rows)
    return sum(sum(row["accepted_per_cycle"]) for row in rows) / offered if offered else None


def survival(rows):
    """[P(accepted ≥ j) for j = 1, 2, …], each among the cycles that offered at least j proposals."""
    cycles = [pair for row in rows for pair in zip(row["proposed_per_cycle"], row["accepted_per_cycle"], strict=True)]
    widest = max((proposed for proposed, _ in cycles), default=0)
    shares = []
    for j in range(1, widest + 1):
        reached = [accepted >= j for proposed, accepted in cycles if proposed >= j]
        shares.append(sum(reached) / len(reached))
    return shares


def stage_ms(stages):
    """Mean milliseconds per cycle of each stage, over the instrumented runs of one arm; None without cycles.

    `cycle` is decode time ÷ cycles of that same pass, and `other` what no stage accounts for.
    """
    cycles = sum(stage["cycles"] for stage in stages)
    if not cycles:
        return None
    mean = {name: 1e3 * sum(stage[name] for stage in stages) / cycles for name in (*STAGES, "seconds")}
    cycle = mean.pop("seconds")
    return mean | {"other": cycle - sum(mean.values()), "cycle": cycle}


def timings(rows):
    """{prompt id: (seconds, tokens after the first)}, each the mean over that prompt's repeats."""
    return {
        id: (
            sum(row["seconds"] for row in some) / len(some),
            sum(max(len(row["tokens"]) - 1, 0) for row in some) / len(some),
        )
        for id, some in group(rows, "prompt").items()
    }


def identical(rows, reference):
    """How many prompts had, in every repeat, the tokens that the reference arm emitted in that repeat."""
    return len({row["prompt"] for row in rows} - {row["prompt"] for row in differing(rows, reference)})


def differing(rows, reference):
    """The rows whose tokens are not those of the reference arm in the same round."""
    expected = {(row["prompt"], row["repeat"]): row["tokens"] for row in reference}
    return [row for row in rows if row["tokens"] != expected.get((row["prompt"], row["repeat"]))]


def looping(rows):
    """The prompts whose continuation loops in any repeat of these rows (the plain arm's)."""
    return {row["prompt"] for row in rows if row["loop_fraction"] >= LOOP_SHARE}


def group(rows, key):
    """Rows by the value of a key, in order of first appearance."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return dict(groups)


def summarise(rows, arms, headline=EVERY, baseline="mlx_lm", plain="plain"):
    """One figure dict per arm, from rows alone; `arms` lists the records {name, kind, block_size} in table order.

    Keys are those of a result file's `arms`, save `ms` and `divergences`, which no timed row can give. headline: QUIET
    leaves disturbed rows out of every time (`speedup_every_row` keeps them); counts and texts are of all rows.
    """
    by_arm = group(rows, "arm")
    compared = sum(arm["name"] != baseline and not arm["name"].endswith(TWIN) for arm in arms)
    loops = looping(by_arm.get(plain, []))
    return [figures(arm, by_arm, (baseline, plain), loops, headline, max(compared, 1)) for arm in arms]


def figures(arm, by_arm, references, loops, headline, compared):
    """The figures of one arm against the (baseline, plain) arms named in `references`."""
    rows = by_arm.get(arm["name"], [])
    mlx_lm, plain = (by_arm.get(name, []) for name in references)
    quiet = counted(rows, headline)
    pairs = paired(counted(mlx_lm, headline), quiet)
    calm = [[row for row in some if row["prompt"] not in loops] for some in pairs]
    timed = [pair for pair in timings(quiet).values() if pair[1]]
    told = all("forwards_per_cycle" in row for row in rows)  # results of earlier versions do not say
    return {
        "name": arm["name"],
        "kind": arm["kind"],
        "block_size": arm["block_size"],
        "tok_s": 1 / per_token(timed) if timed else None,
        "speedup": speedup(*map(timings, pairs), compared),
        "speedup_loop_free": speedup(*map(timings, calm), compared),
        "speedup_every_row": speedup(*map(timings, paired(mlx_lm, rows)), compared),
        "tau": tau(rows),
        **({"tokens_per_forward": tokens_per_forward(rows)} if told else {}),
        "acceptance_rate": acceptance_rate(rows),
        "survival": survival(rows),
        "prompts": len({row["prompt"] for row in rows}),
        "rows": {"counted": len(quiet), "of": len(rows)},
        "identical": identical(rows, plain),
        "identical_mlx_lm": identical(rows, mlx_lm),
        "diverged_rows": len(differing(rows, plain)),
    }


def counted(rows, headline):
    """The rows that headlines count: QUIET or EVERY."""
    return [row for row in rows if headline == EVERY or not row["disturbed"]]


def paired(baseline, rows):
    """Both without the rounds (prompt and repeat) that one of them lacks, so that each is compared with its own."""
    keys = [{(row["prompt"], row["repeat"]) for row in some} for some in (baseline, rows)]
    common = keys[0] & keys[1]
    return [[row for row in some if (row["prompt"], row["repeat"]) in common] for some in (baseline, rows)]
