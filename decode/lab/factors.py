"""Two factors, four cells: what of a speedup is the weights' and what is drafting's.

The factors are weights (the target as it is, and a variant of it, for example in 4 bits) and drafting (off: mlx_lm; on:
the drafter), all four cells interleaved in one process. With t the seconds per token of a cell and t₀₀ neither factor,

    drafting = ln t₀₀/t₀₁     weights = ln t₀₀/t₁₀     both = ln t₀₀/t₁₁     interaction = both − drafting − weights

and each factor's share is its own effect and half the interaction, over both (Shapley's value for two players).
Drafting is lossless where every text is the plain loop's on the same weights; other weights write other text.
"""

import math

from decode.lab import arms as lab_arms
from decode.lab import experiment, shown, statistics

EFFECTS = ("drafting", "weights", "interaction", "both")
HEADER = ("effect", "× speed", "[95 %]", "ln", "share", "lossless")


def arms(target, variant, drafter, carried, block_size, names):
    """The arms of all four cells, with the plain loops that identity is judged by; `names` are the two parts."""
    pairs = zip(names, (target, variant), (drafter, carried), strict=True)
    return [
        arm
        for part, one, mine in pairs
        for arm in lab_arms.within(part, lab_arms.ksweep(one, mine, (block_size,), (), None))
    ]


def findings(result):
    """{"weights": the two parts, "cells": seconds per token, "effects", "shares", "lossless"}.

    Cells, effects and shares are None where no prompt has a time in every cell.
    """
    arms = experiment.summarise(result)
    base, other = experiment.parts_of(arms)
    on = next(arm["name"] for arm in arms if arm["kind"] in lab_arms.DRAFTERS)
    rows = undisturbed(experiment.counted(result), [arm for arm in arms if arm["name"] in ("mlx_lm", on)])
    cells = [cell(rows, part, name) for part in (base, other) for name in ("mlx_lm", on)]
    ids = [id for id in cells[0] if all(found.get(id, (0, 0))[1] for found in cells)]
    units = [tuple(found[id] for found in cells) for id in ids]
    found = {"weights": [base, other], "lossless": lossless(result["rows"], arms, on)}
    if not units:
        return found | {"cells": None, "effects": None, "shares": None}
    seconds = [statistics.per_token([unit[i] for unit in units]) for i in range(4)]
    effects = {name: statistics.estimate(units, lambda units, name=name: effect(units)[name]) for name in EFFECTS}
    return found | {
        "cells": dict(zip(("00", "01", "10", "11"), seconds, strict=True)),
        "effects": effects,
        "shares": shares({name: found["value"] for name, found in effects.items()}),
    }


def undisturbed(rows, arms):
    """The rows of the rounds that have a row of each of these arms, so that all cells rest on the same rounds."""
    cells = {(arm["part"], arm["name"]) for arm in arms}
    rounds = {}
    for row in rows:
        rounds.setdefault((row["prompt"], row["repeat"]), set()).add((row["part"], row["arm"]))
    return [row for row in rows if cells <= rounds[row["prompt"], row["repeat"]]]


def cell(rows, part, arm):
    """{prompt: (seconds, tokens)} of one cell."""
    return statistics.timings([row for row in experiment.in_part(rows, part) if row["arm"] == arm])


def effect(units):
    """The four effects of units of (seconds, tokens) for cells 00, 01, 10, 11, as logarithms."""
    base, drafted, other, both = (math.log(statistics.per_token([unit[i] for unit in units])) for i in range(4))
    found = {"drafting": base - drafted, "weights": base - other, "both": base - both}
    return found | {"interaction": found["both"] - found["drafting"] - found["weights"]}


def shares(effects):
    """Each factor's share of the whole; None where the two pull apart, or change nothing: no whole to share."""
    half, both = effects["interaction"] / 2, effects["both"]
    found = {name: (effects[name] + half) / both if both else -1.0 for name in ("drafting", "weights")}
    return found if min(found.values()) >= 0 else None


def lossless(rows, arms, on):
    """Prompts that keep their text: {"drafting": on both weights, "weights": from one to the other, "prompts": all}."""
    base, other = experiment.parts_of(arms)
    plain = [[row for row in experiment.in_part(rows, part) if row["arm"] == "plain"] for part in (base, other)]
    drafted = [arm["identical"] for arm in arms if arm["name"] == on]
    return {
        "drafting": min(drafted),
        "weights": statistics.identical(plain[1], plain[0]),
        "prompts": len({row["prompt"] for row in plain[0]}),
    }


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)]."""
    kept, rows = found["lossless"], []
    for name in found["effects"] or ():
        one = found["effects"][name]
        ratio = {key: None if one[key] is None else math.exp(one[key]) for key in ("value", "low", "high")}
        share = found["shares"] and found["shares"].get(name)
        same = f"{kept[name]}/{kept['prompts']} texts" if name in kept else ""
        rows.append([
            name, *shown.estimate(one | ratio), shown.fixed(one["value"], 3),
            "" if share is None else f"{share:.0%}", same,
        ])  # fmt: skip
    title = f"weights {found['weights'][0]} → {found['weights'][1]}, drafting off → on"
    notes = [
        "all four cells interleaved; × speed multiplies: drafting · weights · interaction = both; a share is a "
        "factor's own effect and half the interaction",
        "lossless: texts that the factor leaves as they were; other weights are another model, whatever the speed",
    ]
    return [(title, HEADER, rows, notes)]
