"""A cost model fitted to measured forwards, and what it foretells: break-even survival, and the best block size.

W rows of a verify, B block size, T context tokens, S_j the probability that the first j proposals are accepted. Costs
are fitted by least squares to

    ms(W, T) = a + b·W + c·T + d·W·T

separately for verifies and for draft passes; a cycle at B costs verify(B) + draft(B) + commit, and a plain step is
verify(1). With C(B) these costs,

    slot j breaks even against plain decoding where    S_j = (C(j+1) − C(j)) ÷ C(1)
    a block does where its τ is                         C(B) ÷ C(1)
    and B is best where                                 (1 + Σ_{j<B} S_j) ÷ C(B) is largest
"""

import functools
import statistics as middle

import mlx.core as mx
import numpy as np

from decode.lab import cost, experiment, shown
from decode.proposers import DFlashProposer

TERMS = ("a", "b", "c", "d")
MODEL_HEADER = ("model", "points", "a ms", "b ms a row", "c µs a token", "d µs a row and token", "R²", "worst")
EVEN_HEADER = ("B", "cycle ms", "over plain", "slot's break-even survival", "block's break-even τ")
FORECAST_HEADER = ("B", "τ foretold", "τ", "over plain foretold", "over plain", "off by")


def fit(points):
    """Least squares over (W, T, ms) points: {"a", "b", "c", "d", "r2", "worst", "points"}.

    worst is the largest |relative error|. Terms that the points cannot tell apart (one context, or one width) are 0.
    """
    W, T, ms = (np.array(column, np.float64) for column in zip(*points, strict=True))
    columns = {"a": np.ones_like(W), "b": W, "c": T, "d": W * T}
    told = ["a"] + ["b"] * (len(set(W)) > 1) + ["c"] * (len(set(T)) > 1)
    told += ["d"] * (len(set(W)) > 1 and len(set(T)) > 1 and len(points) > 3)
    scale = {name: np.abs(columns[name]).max() for name in told}  # W·T is a million times larger than 1
    design = np.stack([columns[name] / scale[name] for name in told], axis=1)
    found = np.linalg.lstsq(design, ms, rcond=None)[0]
    error = design @ found - ms
    spread = ((ms - ms.mean()) ** 2).sum()
    terms = {name: float(value / scale[name]) for name, value in zip(told, found, strict=True)}
    quality = {"r2": float(1 - (error**2).sum() / spread) if spread else None, "worst": float(np.abs(error / ms).max())}
    return dict.fromkeys(TERMS, 0.0) | terms | quality | {"points": len(points)}


def evaluate(model, W, T):
    """Milliseconds by a fitted model."""
    return model["a"] + model["b"] * W + model["c"] * T + model["d"] * W * T


def verify_points(found):
    """(W, T, ms) of a cost measurement's tables of widths and of contexts."""
    here = [(W, found["context"], row["ms"]) for W, row in found["widths"]["foredraft"].items()]
    return here + [(W, T, row["ms"]) for T, rows in found["contexts"].items() for W, row in rows.items()]


def drafting(target, drafter, sizes, contexts, rounds):
    """Milliseconds of a draft pass of B rows after T rows of context, and of taking in what a cycle commits; medians.

    Returns {"draft": [[B, T, ms]], "commit_ms": ms of fusing and storing cost.KEPT rows}.
    """
    points, commits = [], []
    for T in contexts:
        proposer = DFlashProposer(target, drafter)
        tokens = cost.tokens(target, T)
        taps = target.forward(tokens, target.make_cache(), proposer.taps).taps
        proposer.begin(tokens[0].tolist(), taps)
        mx.eval(proposer.state())
        for B in sizes:
            points.append([B, T, middle.median(repeated(functools.partial(draft, proposer, B), rounds))])
        few = tuple(tap[:, : cost.KEPT] for tap in taps)
        commits += repeated(functools.partial(take_in, proposer, few), rounds)
    return {"draft": points, "commit_ms": middle.median(commits)}


def draft(proposer, B):
    """A draft pass of B rows."""
    proposer.rows = B
    return proposer.propose(5, B - 1).tokens


def take_in(proposer, taps):
    """Let a proposer observe committed rows; returns what must be there when it ends."""
    proposer.observe([5] * taps[0].shape[1], taps)
    return proposer.state()


def repeated(call, rounds):
    """Milliseconds until the result of a call is there, `rounds` times, after two that compile and fill caches."""
    return [cost.timed(call)[0] for _ in range(rounds + 2)][2:]


def model(found, drafted=None):
    """The fitted models of a cost measurement, cycles at every B and where they break even, at its first context.

    drafted: what `drafting` measured, or None for proposals that cost nothing (prompt lookup).
    """
    verify = fit(verify_points(found))
    draft = fit(drafted["draft"]) if drafted else None
    commit = drafted["commit_ms"] if drafted else 0.0
    widest = max(found["widths"]["foredraft"])
    costs = cycle_costs(verify, draft, commit, widest, found["context"])
    whole = {"verify": verify, "draft": draft, "commit_ms": commit, "context": found["context"]}
    return whole | {"costs": costs, "even": break_even(costs)}


def cycle_costs(verify, draft, commit_ms, widest, context):
    """{B: milliseconds of a cycle} for B from 1, a plain step, to the widest measured."""
    costs = {1: evaluate(verify, 1, context)}
    for B in range(2, widest + 1):
        costs[B] = evaluate(verify, B, context) + (evaluate(draft, B, context) if draft else 0.0) + commit_ms
    return costs


def break_even(costs):
    """[{"B", "ms", "cost": over a plain step, "slot": S at which the last slot pays, "tau": the block's}]."""
    return [
        {"B": B, "ms": ms, "cost": ms / costs[1], "slot": (ms - costs[B - 1]) / costs[1], "tau": ms / costs[1]}
        for B, ms in costs.items()
        if B > 1
    ]


def best(survival, costs):
    """(B, speed over plain) where the costs make most of a survival [S_1, S_2, …]; (1, 1.0) where no block pays."""
    tokens, found = 1.0, (1.0, 1)
    for B, share in enumerate(survival, 2):
        tokens += share
        if B in costs:
            found = max(found, (tokens * costs[1] / costs[B], B))
    return found[1], found[0]


# What a sweep foretells and then finds.


def findings(result):
    """Whether the widest arm's survival and the stage pass's costs foretell a sweep: {"from", "best", "sizes": [...]}.

    τ at B is foretold as 1 + Σ_{j<B} S_j with the widest arm's S, speed over plain as that times plain's step over the
    cycle; both beside what the timed pass found. None where no arm of a drafter was instrumented.
    """
    arms = experiment.summarise(result)
    drafted = sorted((arm for arm in arms if arm["kind"] == "dflash" and arm["ms"]), key=lambda arm: arm["block_size"])
    plain = next(arm for arm in arms if arm["name"] == "plain")
    if not drafted or not plain["ms"] or not drafted[-1]["survival"]:
        return None
    widest = drafted[-1]
    sizes = [foretold(result, arm, widest["survival"], plain) for arm in drafted]
    choose = lambda key: max(sizes, key=lambda one: one[key] or 0.0)["B"]
    return {
        "from": widest["name"],
        "best": {"foretold": choose("speed_foretold"), "found": choose("speed")},
        "sizes": sizes,
    }


def foretold(result, arm, survival, plain):
    """One block size: what was foretold of it, and what came."""
    B = arm["block_size"]
    tau = 1 + sum(survival[: B - 1])
    measured = experiment.compare(result, "plain", arm["name"])
    return {
        "B": B,
        "tau_foretold": tau,
        "tau": arm["tau"] and arm["tau"]["pooled"],
        "speed_foretold": tau * plain["ms"]["cycle"] / arm["ms"]["cycle"],
        "speed": measured and measured["ratio"],
    }


def tables(found):
    """What a report shows of a sweep: [(title, header, rows of text, notes)]."""
    rows = [
        [
            str(one["B"]),
            *(shown.fixed(one[key], 2) for key in ("tau_foretold", "tau", "speed_foretold", "speed")),
            "–" if one["speed"] is None else f"{one['speed_foretold'] / one['speed'] - 1:+.0%}",
        ]
        for one in found["sizes"]
    ]
    best = found["best"]
    notes = [
        f"foretold from the survival of {found['from']} and the stage pass: B = {best['foretold']} is best; measured: "
        f"B = {best['found']}"
    ]
    return [("what survival and costs foretell", FORECAST_HEADER, rows, notes)]


def cost_tables(found):
    """What a report shows of `model`: [(title, header, rows of text, notes)]."""
    rows = []
    for name in ("verify", "draft"):
        one = found[name]
        if one:
            terms = (one["a"], one["b"], 1e3 * one["c"], 1e3 * one["d"])
            fitted = [shown.fixed(value, 3) for value in (*terms, one["r2"])]
            rows.append([name, str(one["points"]), *fitted, f"{one['worst']:.0%}"])
    even = [
        [str(one["B"]), *(shown.fixed(one[key], 2) for key in ("ms", "cost", "slot", "tau"))] for one in found["even"]
    ]
    drafted = f"a commit takes {found['commit_ms']:.2f} ms" if found["draft"] else "drafting is taken to cost nothing"
    notes = [f"at {found['context']} tokens of context; {drafted}; a slot pays where it survives more often than this"]
    return [("fitted costs", MODEL_HEADER, rows, []), ("break-even against plain decoding", EVEN_HEADER, even, notes)]
