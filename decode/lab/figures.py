"""The plots of what an evaluation found: calibration, transfer, decomposition, and context apart and together.

T context tokens, τ committed tokens a cycle. Each takes the `findings` of a result file; a painter takes matplotlib's
axes, as in `plots`, and names both with their unit.
"""

import math

from decode.lab.plots import MARKS, STAGES, below, beside, ends, ticks, whiskers


def of(command, found):
    """[(name, title, painter)] of the plots of a command's findings; none where there are none."""
    drawn = {
        "adaptive": calibrations,
        "confidence": calibrations,
        "transfer": transfer,
        "decompose": decomposition,
        "context": context,
    }
    return drawn[command](found) if found and command in drawn else []


def calibrations(found):
    """What a drafter's confidence said against what the target did, a plot for every measure."""
    return [calibration(name, one) for name, one in found["calibration"].items() if one["bins"]]


def calibration(name, one):
    """One measure's plot: as it was said, and as it was calibrated on other prompts."""
    most = max(part["count"] for part in one["bins"])

    def paint(axes):
        for key, said, mark in (("said", "as said", "o"), ("calibrated", "calibrated", "s")):
            points = [(part[key], part["accepted"], part["count"]) for part in one["bins"]]
            x, y, counts = zip(*points, strict=True)
            line = axes.plot(x, y, linewidth=1.2, label=said)[0]
            axes.scatter(x, y, [20 + 120 * n / most for n in counts], marker=mark, color=line.get_color())
        axes.plot([0, 1], [0, 1], linestyle=":", color=axes.yaxis.label.get_color(), label="a probability")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel(f"{name} of a proposal (probability, mean of a bin)")
        axes.set_ylabel("accepted (share of those judged)")
        beside(axes)

    ece = f"expected error {one['ece']:.3f} as said, {one['ece_calibrated']:.3f} calibrated"
    return f"calibration-{name}", f"Is {name} a probability? ({ece})", paint


def transfer(found):
    """What every variant keeps of the stock target's acceptance and speed."""
    variants = [one for one in found["targets"] if one.get("accepted_kept")]
    if not variants:
        return []

    def paint(axes):
        series = (("accepted_kept", "accepted tokens a cycle", -0.12), ("speedup_kept", "speedup", 0.12))
        for index, (key, said, shift) in enumerate(series):
            points = [(place + shift, one[key]) for place, one in enumerate(variants) if one.get(key)]
            if points:
                sideways(axes, points, said, MARKS[index])
        axes.axvline(1.0, color=axes.yaxis.label.get_color(), linewidth=1, label="the stock target")
        names = [f"{one['part']} ({one['verdict'] or 'no verdict'})" for one in variants]
        axes.set_yticks(range(len(variants)), names)
        axes.set_ylim(len(variants) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel("kept of the stock target's (ratio; bars 95 % over prompts)")
        axes.set_ylabel("variant (verdict)")
        below(axes)

    return [("transfer", f"One drafter on several targets ({found['arm']})", paint)]


def decomposition(found):
    """What of a speedup is the weights' and what is drafting's."""
    effects = list((found["effects"] or {}).items())
    if not effects:
        return []

    def paint(axes):
        powers = [(place, times(one)) for place, (_, one) in enumerate(effects)]
        sideways(axes, powers, "effect", "o")
        axes.axvline(1.0, color=axes.yaxis.label.get_color(), linewidth=1, label="none")
        axes.set_yticks(range(len(effects)), [name for name, _ in effects])
        axes.set_ylim(len(effects) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel("speed (×; drafting · weights · interaction = both)")
        axes.set_ylabel("factor (effect)")
        below(axes)

    return [("decomposition", f"Weights {' → '.join(found['weights'])}, drafting off → on", paint)]


def times(effect):
    """An effect's logarithms as factors."""
    return {key: None if effect[key] is None else math.exp(effect[key]) for key in ("value", "low", "high")}


def context(found):
    """Cost against length, acceptance against length, and their product beside the speedup that was measured."""
    by_arm = {}
    for one in found["lengths"]:
        by_arm.setdefault(one["arm"], []).append(one)
    trained = found["trained_length"]
    said = f", drafter trained at {trained:,} tokens" if trained else ""
    costs = [(f"context-cost-{arm}", f"{arm}: cost against context", cost(ones)) for arm, ones in by_arm.items()]
    return [
        *costs,
        ("context-tau", f"Acceptance against context{said}", lengthwise(by_arm, "τ (committed tokens a cycle)", taus)),
        ("context-speed", "Cost and acceptance together", lengthwise(by_arm, "speedup (×)", speeds)),
    ]


def cost(ones):
    """A painter of one arm's stage times, and a plain step's, against length."""

    def paint(axes):
        priced = [one for one in ones if one["ms"]]
        lengths = [one["length"] for one in priced]
        for index, stage in enumerate(STAGES):
            axes.plot(lengths, [one["ms"][stage] for one in priced], marker=MARKS[index], label=stage)
        steps = [one["plain_ms"] for one in priced]
        axes.plot(lengths, steps, linestyle=":", color=axes.yaxis.label.get_color(), label="a plain step")
        axes.set_ylim(bottom=0)
        along(axes, lengths, "time of a cycle's stage, synchronised (ms)")

    return paint


def lengthwise(by_arm, name, points_of):
    """A painter of series of every arm against length; points_of(ones) gives {what: points}."""

    def paint(axes):
        for arm, ones in by_arm.items():
            for said, points in points_of(ones).items():
                mark = MARKS[len(axes.get_lines()) % len(MARKS)]
                whiskers(axes, points, f"{arm} {said}".strip(), mark)
        along(axes, [one["length"] for ones in by_arm.values() for one in ones], name)

    return paint


def taus(ones):
    """Points of τ."""
    return {"": [(one["length"], one["tau"]["pooled"], (one["tau"]["pooled"],) * 2) for one in ones if one["tau"]]}


def speeds(ones):
    """Points of the speedup measured over mlx_lm, and of the one that cost and acceptance give over plain."""
    measured = [(one["length"], one["speedup"]["ratio"], ends(one["speedup"])) for one in ones if one["speedup"]]
    given = [(one["length"], one["predicted"], (one["predicted"],) * 2) for one in ones if one["predicted"]]
    return {said: points for said, points in (("measured", measured), ("τ × plain ÷ cycle", given)) if points}


def along(axes, lengths, name):
    """Label an axis of context lengths, and the other."""
    axes.set_xscale("log", base=2)
    ticks(axes, sorted(set(lengths)))
    axes.set_xlabel("context T (tokens)")
    axes.set_ylabel(name)
    beside(axes)


def sideways(axes, points, name, mark):
    """Points (place, {value, low, high}) with their intervals, lying."""
    places, values = zip(*[(place, one["value"]) for place, one in points], strict=True)
    spans = [(one["value"], one["value"]) if one["low"] is None else (one["low"], one["high"]) for _, one in points]
    below = [max(value - low, 0.0) for value, (low, _) in zip(values, spans, strict=True)]
    above = [max(high - value, 0.0) for value, (_, high) in zip(values, spans, strict=True)]
    axes.errorbar(values, places, xerr=(below, above), label=name, marker=mark, linestyle="none", capsize=3)
