"""One drafter, several targets: what it keeps on checkpoints it was not trained for, and what to do about it.

The first part of the result is the stock target, the one the drafter was made for; every other part is a variant. All
is paired over prompts. Each target's speedup is over its own baseline, and nothing here compares the speed of the
weights themselves: `decompose` does.

RULE is what the verdict follows; its thresholds are assumed, and stand in every result.
"""

from decode.lab import experiment, shown, statistics
from decode.lab.arms import DRAFTERS

KEEP = 0.9  # share of the accepted tokens a cycle below which adapting is worth its minutes (assumed)
RETRAIN = 0.5  # share below which too little is left to start from (assumed)
RULE = (
    f"keep: at least {KEEP:.0%} of the stock target's accepted tokens a cycle, and the speedup's low end (below ten "
    f"prompts, the speedup) above 1; retrain: less than {RETRAIN:.0%}; adapt: anything else"
)
UNLIKE = "targets differ in weights: each speedup is over its own baseline, and decompose compares the weights' speed"
HEADER = (
    "target", "speedup", "[95 %]", "τ", "accepted kept", "[95 %]", "speedup kept", "[95 %]", "top-1 agreement",
    "KL, nats", "verdict",
)  # fmt: skip


def findings(result):
    """What the rows say of each target, the stock one first: {"rule", "arm", "targets": [one a part]}."""
    arms = experiment.summarise(result)
    stock, *others = experiment.parts_of(arms)
    arm = fastest(experiment.in_part(arms, stock))
    found = {one["part"]: one for one in arms if one["name"] == arm}
    targets = [{"part": stock, **figures(found[stock])}]
    for part in others:
        kept = paired(result["rows"], stock, part, accepted, arm, accepted_kept)
        speed = paired(experiment.counted(result), stock, part, times, arm, speedup_kept)
        agreed = agreement(experiment.in_part(result["agreement"], part))
        decided = {"agreement": agreed, "verdict": verdict(kept, found[part]["speedup"])}
        targets.append({"part": part, **figures(found[part]), "accepted_kept": kept, "speedup_kept": speed, **decided})
    return {"rule": RULE, "arm": arm, "targets": targets}


def fastest(arms):
    """The name of the drafter's fastest arm; chosen on the stock target, so that the choice favours no variant."""
    drafting = [arm for arm in arms if arm["kind"] in DRAFTERS]
    return max(drafting, key=lambda arm: arm["speedup"]["ratio"] if arm["speedup"] else 0.0)["name"]


def figures(arm):
    """What is kept of an arm's figures."""
    return {name: arm[name] for name in ("speedup", "tau", "acceptance_rate", "identical", "prompts")}


def paired(rows, stock, part, counts, arm, figure):
    """statistics.estimate of a figure of two targets over the prompts that both decoded; None where it has no value.

    counts(rows, arm) gives {prompt: numbers} of one target; a sum of 0 over the prompts has no value.
    """
    ours, theirs = (counts(experiment.in_part(rows, one), arm) for one in (stock, part))
    units = [(ours[id], theirs[id]) for id in ours if id in theirs]
    return statistics.estimate(units, figure) if units and all(total(units, 0)) else None


def accepted(rows, arm):
    """{prompt: (accepted proposals, cycles)} of the prompts with a cycle."""
    cycles = {
        id: [count for row in some for count in row["accepted_per_cycle"]]
        for id, some in statistics.group([row for row in rows if row["arm"] == arm], "prompt").items()
    }
    return {id: (sum(counts), len(counts)) for id, counts in cycles.items() if counts}


def times(rows, arm):
    """{prompt: (baseline's seconds and tokens, the arm's seconds and tokens)}, both of the same rounds."""
    by_arm = statistics.group(rows, "arm")
    pair = statistics.paired(*(by_arm.get(name, []) for name in ("mlx_lm", arm)))
    base, own = map(statistics.timings, pair)
    return {id: (*base[id], *own[id]) for id in own if base[id][1] and own[id][1]}


def total(units, place):
    """Sums over prompts of the numbers of one target of each pair."""
    return [sum(column) for column in zip(*(unit[place] for unit in units), strict=True)]


def accepted_kept(units):
    """Accepted tokens a cycle on the variant over those on the stock target."""
    stock, variant = total(units, 0), total(units, 1)
    return (variant[0] / variant[1]) / (stock[0] / stock[1])


def speedup_kept(units):
    """Speedup on the variant, over its own baseline, over that on the stock target."""
    stock, variant = total(units, 0), total(units, 1)
    speedup = lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3])
    return speedup(variant) / speedup(stock)


def agreement(rows):
    """Top-1 agreement and KL in nats a position, pooled; the first with its interval over prompts."""
    units = [(row["agree"], row["tokens"], row["kl"]) for row in rows]
    share = lambda units: sum(unit[0] for unit in units) / sum(unit[1] for unit in units)
    return {"top1": statistics.estimate(units, share), "kl": sum(row["kl"] for row in rows) / sum(u[1] for u in units)}


def verdict(kept, speedup):
    """keep, adapt or retrain, by RULE; None where the stock target accepts nothing, so that nothing can be kept."""
    if kept is None or speedup is None:
        return None
    if kept["value"] < RETRAIN:
        return "retrain"
    faster = (speedup["ratio"] if speedup["low"] is None else speedup["low"]) > 1
    return "keep" if kept["value"] >= KEEP and faster else "adapt"


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)]."""
    rows = []
    for one in found["targets"]:
        agreed = one.get("agreement")
        rows.append([
            one["part"], *shown.ratio(one["speedup"]), shown.fixed(one["tau"] and one["tau"]["pooled"], 2),
            *shown.estimate(one.get("accepted_kept")), *shown.estimate(one.get("speedup_kept")),
            *shown.estimate(agreed and agreed["top1"])[:1], shown.fixed(agreed and agreed["kl"], 3),
            one.get("verdict") or "–",
        ])  # fmt: skip
    return [(f"one drafter, several targets ({found['arm']})", HEADER, rows, [f"verdict: {found['rule']}", UNLIKE])]
