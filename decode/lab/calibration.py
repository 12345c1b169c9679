"""Whether a drafter's confidence is a probability: what it said of its proposals against what the target did.

K proposals, p what was said of one, n judged proposals. A proposal is judged only where every one before it in its
block was accepted: the target never answered the question about the others. Confidence is made a probability by
Platt's map, σ(a·logit p + b), fitted on other prompts than those it is judged on.
"""

import math

from decode.lab import shown

BINS = 10
NEWTON_STEPS = 50
RIDGE = 1e-2  # pull towards a = 1, b = 0, the confidence as it is: a few proposals must not outweigh that (assumed)
EDGE = 1e-4  # probabilities are kept this far from 0 and 1, where a logit has no value
HEADER = ("said", "judged", "mean said", "accepted", "calibrated")


def judged(rows):
    """[(p, whether it was accepted)] of every judged proposal, from rows with `confidence_per_cycle`."""
    pairs = []
    for row in rows:
        columns = (row[f"{name}_per_cycle"] for name in ("confidence", "accepted", "committed"))
        for said, accepted, committed in zip(*columns, strict=True):
            pairs += [(p, True) for p in said[:accepted]]
            if accepted < len(said) and committed == accepted + 1:  # else the text ended before the refusal
                pairs.append((said[accepted], False))
    return pairs


def logit(p):
    """ln p/(1−p), with p kept off 0 and 1."""
    p = min(max(p, EDGE), 1 - EDGE)
    return math.log(p / (1 - p))


def apply(line, p):
    """The calibrated probability of a confidence, by the (a, b) of `fit`."""
    return 1 / (1 + math.exp(-(line[0] * logit(p) + line[1])))


def fit(pairs):
    """(a, b) of Platt's map (Platt 1999), by Newton's method on the log-likelihood with a ridge; (1, 0) of no pairs."""
    points = [(logit(p), float(accepted)) for p, accepted in pairs]
    a, b = 1.0, 0.0
    for _ in range(NEWTON_STEPS):
        ga, gb = RIDGE * (a - 1), RIDGE * b
        haa, hab, hbb = RIDGE, 0.0, RIDGE
        for x, y in points:
            q = 1 / (1 + math.exp(-(a * x + b)))
            ga, gb, w = ga + (q - y) * x, gb + (q - y), q * (1 - q)
            haa, hab, hbb = haa + w * x * x, hab + w * x, hbb + w
        whole = haa * hbb - hab * hab
        step = (hbb * ga - hab * gb) / whole, (haa * gb - hab * ga) / whole
        longest = max(map(abs, step))
        scale = min(1.0, 1.0 / longest) if longest else 0.0  # a long first step would overshoot
        a, b = a - scale * step[0], b - scale * step[1]
    return a, b


def bins(pairs, line):
    """BINS equal bins of what was said, empty ones left out: [{low, high, count, said, accepted, calibrated}]."""
    found = []
    for index in range(BINS):
        inside = [pair for pair in pairs if min(int(pair[0] * BINS), BINS - 1) == index]
        if inside:
            n = len(inside)
            found.append({
                "low": index / BINS, "high": (index + 1) / BINS, "count": n,
                "said": sum(p for p, _ in inside) / n,
                "accepted": sum(accepted for _, accepted in inside) / n,
                "calibrated": sum(apply(line, p) for p, _ in inside) / n,
            })  # fmt: skip
    return found


def error(pairs):
    """Expected calibration error: Σ over bins of (n_bin ÷ n)·|mean said − share accepted|; None without pairs."""
    if not pairs:
        return None
    found = bins(pairs, (1.0, 0.0))
    return sum(one["count"] * abs(one["said"] - one["accepted"]) for one in found) / len(pairs)


def findings(rows, line):
    """The calibration of rows under a map fitted elsewhere: {"line", "judged", "ece", "ece_calibrated", "bins"}."""
    pairs = judged(rows)
    moved = [(apply(line, p), accepted) for p, accepted in pairs]
    sizes = {"line": list(line), "judged": len(pairs)}
    return sizes | {"ece": error(pairs), "ece_calibrated": error(moved), "bins": bins(pairs, line)}


def table(name, found):
    """(title, header, rows of text, notes) of one measure's calibration."""
    rows = [
        [
            f"{one['low']:.1f}–{one['high']:.1f}",
            str(one["count"]),
            *(shown.fixed(one[key], 3) for key in ("said", "accepted", "calibrated")),
        ]
        for one in found["bins"]
    ]
    ece, calibrated = (shown.fixed(found[key], 3) for key in ("ece", "ece_calibrated"))
    notes = [
        f"expected calibration error {ece} as said, {calibrated} calibrated (map fitted on other prompts), over "
        f"{found['judged']} proposals that the target judged"
    ]
    return f"calibration of {name}", HEADER, rows, notes
