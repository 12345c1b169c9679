"""How often a forward of W rows decides otherwise than a forward of one, over a given text and by margin.

T positions, W rows of a forward, V vocabulary. Teacher-forced: both routes are fed the same text whatever they would
have written, each into caches that it filled itself, as decoding does. A position counts as disagreement where the two
argmaxes differ; its margin is the narrow route's top-1 minus top-2 logit, in ULPs of the logits' dtype.
"""

import math

import mlx.core as mx

from decode.lab import intervals, ties
from decode.verify import margins, ulp

BOUNDS = (0, 1, 2, 4, 8, 16, math.inf)  # ULPs, each the upper end of a class of margins


def count(target, prompt, answer, widths):
    """Census rows of one text, one per width: {width, by_margin, kinds, largest_difference}.

    prompt, answer: token ids. by_margin: [positions, disagreements] for each of BOUNDS; kinds: {tie, width_sensitive}
    of the disagreements; largest_difference: of any logit between the routes. Only whole forwards of W rows count.
    """
    fed = [*prompt[-1:], *answer[:-1]]
    narrow = routed(target, prompt[:-1], fed, 1)
    choice = mx.argmax(narrow, axis=-1)
    peaks = mx.max(narrow, axis=-1).tolist()
    gaps = [gap / ulp(abs(peak), narrow.dtype) for gap, peak in zip(margins(narrow, choice).tolist(), peaks)]
    wide = {W: routed(target, prompt[:-1], fed, W) for W in widths if len(fed) >= W}
    return [row(narrow, logits, choice.tolist(), gaps, W) for W, logits in wide.items()]


def routed(target, committed, fed, W):
    """Logits [T,V] of `fed` after `committed`, W rows to a forward; T is the last multiple of W."""
    cache = ties.prefilled(target, committed)
    parts = []
    for start in range(0, len(fed) - W + 1, W):
        hidden = target.forward(mx.array([fed[start : start + W]]), cache).hidden
        parts.append(target.score(hidden)[0])
        mx.eval(parts[-1], [entry.state for entry in cache])
    return mx.concatenate(parts)


def row(narrow, wide, choices, gaps, W):
    """The census row of one width."""
    total = wide.shape[0]
    others = mx.argmax(wide, axis=-1).tolist()
    differing = [i for i in range(total) if choices[i] != others[i]]
    classes = [margin_class(gap) for gap in gaps[:total]]
    kinds = [ties.judge(narrow[i], wide[i], choices[i], others[i]).kind for i in differing]
    return {
        "width": W,
        "by_margin": [[classes.count(k), sum(classes[i] == k for i in differing)] for k in range(len(BOUNDS))],
        "kinds": {kind: kinds.count(kind) for kind in ties.CLASSES[:2]},
        "largest_difference": ties.difference(narrow, wide),
    }


def margin_class(gap):
    """The index in BOUNDS of a margin in ULPs."""
    return next(index for index, bound in enumerate(BOUNDS) if gap <= bound)


def names():
    """What the classes of margins are called: "0", "≤ 1", … "> 16"."""
    return ["0", *(f"≤ {bound:g}" for bound in BOUNDS[1:-1]), f"> {BOUNDS[-2]:g}"]


def summarise(rows):
    """{width: {positions, disagree, rate, low, high, by_margin, kinds, largest_difference}} over the census rows.

    The interval takes texts as clusters, see `intervals.rate_interval`.
    """
    return {W: pooled([row for row in rows if row["width"] == W]) for W in sorted({row["width"] for row in rows})}


def pooled(rows):
    """The figures of one width."""
    counts = [[sum(column) for column in zip(*row["by_margin"], strict=True)] for row in rows]
    rate, low, high = intervals.rate_interval([(differing, positions) for positions, differing in counts])
    return {
        "texts": len(rows),
        "positions": sum(positions for positions, _ in counts),
        "disagree": sum(differing for _, differing in counts),
        "rate": rate,
        "low": low,
        "high": high,
        "by_margin": [[sum(row["by_margin"][k][i] for row in rows) for i in (0, 1)] for k in range(len(BOUNDS))],
        "kinds": {kind: sum(row["kinds"][kind] for row in rows) for kind in ties.CLASSES[:2]},
        "largest_difference": max(row["largest_difference"] for row in rows),
    }
