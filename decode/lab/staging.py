"""Drafting more than is verified at once: a block of D rows, of which V−1 proposals go to the target.

dflash-V         D = V: what is drafted is verified, the reference
truncated-D-V    the rest of the block is thrown away: what a longer block does to its first slots
staged-D-V       the rest is offered in later cycles, without a draft pass, as long as the target agrees with it
"""

from decode.lab import arms as lab_arms
from decode.lab import experiment, shown
from decode.proposers import DFlashProposer, StagedProposer

HEADER = ("arm", "speedup", "[95 %]", "over dflash-V", "[95 %]", "τ", "draft ms", "verify ms", "cycle ms", "identical")


def arms(target, drafter, drafted, verified):
    """The arms for one D and every V below it, the baseline first."""
    fixed = lab_arms.ksweep(target, drafter, (*verified, drafted), (), None)
    more = []
    for V in verified:
        pair = {
            "truncated": DFlashProposer(target, drafter, drafted),
            "staged": StagedProposer(target, drafter, drafted),
        }
        more += [lab_arms.Arm(f"{kind}-{drafted}-{V}", kind, V, target, one) for kind, one in pair.items()]
    return [*fixed, *more]


def findings(result):
    """[each drafting arm, with its speed over the arm that drafts and verifies as many rows as it verifies]."""
    return [beside(result, arm) for arm in experiment.summarise(result) if arm["block_size"]]


def beside(result, arm):
    """One arm's figures."""
    reference = f"dflash-{arm['block_size']}"
    kept = {name: arm[name] for name in ("speedup", "tau", "ms", "identical", "prompts")}
    own = arm["name"] == reference
    return {"arm": arm["name"], "over": None if own else experiment.compare(result, reference, arm["name"])} | kept


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)]."""
    rows = [
        [
            one["arm"],
            *shown.ratio(one["speedup"]),
            *shown.ratio(one["over"]),
            shown.fixed(one["tau"] and one["tau"]["pooled"], 2),
            *(shown.fixed((one["ms"] or {}).get(stage), 2) for stage in ("draft", "verify", "cycle")),
            f"{one['identical']}/{one['prompts']}",
        ]
        for one in found
    ]
    notes = [
        "truncated-D-V drafts D rows and verifies V of them; staged-D-V offers the rest later, without drafting again"
    ]
    return [("draft D, verify V", HEADER, rows, notes)]
