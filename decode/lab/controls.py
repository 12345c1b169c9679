"""Controls: what a drafter's figure has to beat before it means anything.

D hidden. Beside the drafter run, interleaved with it and from the same caches:

    mlx_lm-twin  the baseline a second time: two identical arms differ by noise alone, the floor of every speedup here
    ngram-N      prompt lookup: no model at all
    untrained-B  the drafter's own shape with random weights: the cost of drafting, with nothing gained
    shuffled-B   the trained drafter, given the target's features with their channels in a shuffled order: the same cost
                 and the same values, but what they say of the text is gone
"""

import mlx.core as mx

from decode.lab import experiment, shown, statistics
from decode.lab.arms import Arm, references
from decode.proposers import DFlashProposer, PromptLookup
from drafter import dflash, rng

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
        *references(target),
        *(Arm(f"ngram-{n}", "ngram", block_size, target, PromptLookup(n)) for n in ngrams),
        *(Arm(f"{kind}-{block_size}", kind, block_size, target, one) for kind, one in proposers.items()),
    ]


def findings(result):
    """{"floor": the twin's speedup, "arms": [each drafting arm against it, and its τ against the drafter's]}."""
    arms = experiment.summarise(result)
    floor = statistics.twin_floor(arms)
    drafter = next(arm["name"] for arm in arms if arm["kind"] == "dflash")
    drafting = [arm for arm in arms if arm["kind"] in KINDS]
    return {"floor": floor, "arms": [beside(result, arm, floor, drafter) for arm in drafting]}


def beside(result, arm, floor, drafter):
    """One arm's figures and where it stands."""
    return {
        "arm": arm["name"],
        "speedup": arm["speedup"],
        "beyond": statistics.beyond(arm["speedup"], floor),
        "tau": arm["tau"],
        "acceptance_rate": arm["acceptance_rate"],
        "drafter_over": None if arm["name"] == drafter else drafter_over(result["rows"], arm["name"], drafter),
    }


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
            shown.yes(one["beyond"]),
            shown.fixed(one["tau"] and one["tau"]["pooled"], 2),
            shown.fixed(one["acceptance_rate"], 3),
            *shown.estimate(one["drafter_over"]),
        ]
        for one in found["arms"]
    ]
    notes = [
        f"the floor: an identical twin of the baseline came out at {' '.join(shown.ratio(found['floor']))}, and an arm "
        "is beyond it where the two intervals do not meet; below ten prompts nothing is said",
        "untrained: the drafter's shape with random weights; shuffled: the trained one, the target's features shuffled",
    ]
    return [("controls", HEADER, rows, notes)]
