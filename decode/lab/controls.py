"""Controls: what a drafter's figure has to beat before it means anything.

D hidden. Beside the drafter run, interleaved with it and from the same caches:

    mlx_lm-twin  the baseline a second time: two identical arms differ by noise alone, the floor of every speedup here
    ngram-N      prompt lookup: no model at all
    untrained-B  the drafter's own shape with random weights: the cost of drafting, with nothing gained
    shuffled-B   the trained drafter, given the target's features with their channels in a shuffled order: the same cost
                 and the same values, but what they say of the text is gone
"""

import math

import mlx.core as mx

from decode.lab import experiment, shown, statistics
from decode.lab.arms import Arm
from decode.proposers import DFlashProposer, PromptLookup
from drafter import dflash, rng

TWIN = "mlx_lm-twin"
HEADER = ("arm", "speedup", "[95 %]", "beyond the floor", "τ", "accept", "τ of dflash ÷ its τ", "[95 %]")
KINDS = ("dflash", "untrained", "shuffled", "ngram")


class ShuffledTaps(DFlashProposer):
    """A DFlash drafter whose taps come with their D channels in one fixed random order, drawn by `seed`."""

    def __init__(self, target, drafter, block_size, seed):
        super().__init__(target, drafter, block_size)
        self.order = mx.random.permutation(target.hidden_size, key=rng.key(seed, "shuffled taps", 0))

    def observe(self, tokens, taps):
        """As the drafter, with the channels shuffled."""
        super().observe(tokens, tuple(tap[..., self.order] for tap in taps))


def arms(target, drafter, block_size, ngrams, seed):
    """The drafter at one block size and every control, the baseline first."""
    random = dflash.initialise(dflash.DFlash(drafter.config), target, seed)
    random.set_dtype(getattr(mx, target.dtype))
    mx.eval(random.parameters())
    proposers = {
        "untrained": DFlashProposer(target, random, block_size),
        "shuffled": ShuffledTaps(target, drafter, block_size, seed),
        "dflash": DFlashProposer(target, drafter, block_size),
    }
    return [
        *(Arm(name, "mlx_lm", None, target) for name in ("mlx_lm", TWIN)),
        Arm("plain", "plain", None, target),
        *(Arm(f"ngram-{n}", "ngram", block_size, target, PromptLookup(n)) for n in ngrams),
        *(Arm(f"{kind}-{block_size}", kind, block_size, target, one) for kind, one in proposers.items()),
    ]


def findings(result):
    """{"floor": the twin's, "arms": [each drafting arm against the floor, and its τ against the drafter's]}."""
    arms = experiment.summarise(result)
    twin = next(arm for arm in arms if arm["name"] == TWIN)["speedup"]
    floor = twin and width(twin)
    drafter = next(arm["name"] for arm in arms if arm["kind"] == "dflash")
    drafting = [arm for arm in arms if arm["kind"] in KINDS]
    return {"floor": floor, "twin": twin, "arms": [beside(result, arm, floor, drafter) for arm in drafting]}


def width(speedup):
    """The floor: how far from 1 an arm identical to the baseline may come, as a ratio of at least 1."""
    return math.exp(max(abs(math.log(end)) for end in ends(speedup)))


def ends(speedup):
    """A speedup's interval, or its range over prompts where there are too few for one."""
    return speedup["range"] if speedup["low"] is None else (speedup["low"], speedup["high"])


def beside(result, arm, floor, drafter):
    """One arm's figures and where it stands."""
    return {
        "arm": arm["name"],
        "speedup": arm["speedup"],
        "beyond": None if floor is None or arm["speedup"] is None else beyond(arm["speedup"], floor),
        "tau": arm["tau"],
        "acceptance_rate": arm["acceptance_rate"],
        "drafter_over": None if arm["name"] == drafter else drafter_over(result["rows"], arm["name"], drafter),
    }


def beyond(speedup, floor):
    """faster or slower where the whole interval lies outside the floor, else no."""
    low, high = ends(speedup)
    return "faster" if low > floor else "slower" if high < 1 / floor else "no"


def drafter_over(rows, arm, drafter):
    """The drafter's τ over an arm's, paired over prompts."""
    theirs, ours = (statistics.commitments(rows, name) for name in (arm, drafter))
    return statistics.estimate_means(theirs, ours)


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)]."""
    rows = [
        [
            one["arm"],
            *shown.ratio(one["speedup"]),
            one["beyond"] or "–",
            shown.fixed(one["tau"] and one["tau"]["pooled"], 2),
            shown.fixed(one["acceptance_rate"], 3),
            *shown.estimate(one["drafter_over"]),
        ]
        for one in found["arms"]
    ]
    floor, twin = shown.fixed(found["floor"], 3), " ".join(shown.ratio(found["twin"]))
    notes = [
        f"the floor is {floor}: an identical twin of the baseline came out at {twin}, and an "
        "arm is beyond the floor where its whole interval (below ten prompts, its range) is further from 1",
        "untrained: the drafter's shape with random weights; shuffled: the trained one, the target's features shuffled",
    ]
    return [("controls", HEADER, rows, notes)]
