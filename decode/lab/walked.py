"""Walked tau of drafters over prompt sets: what each would serve, by block size, over the same texts of the target's.

A walk is one text, one drafter and one block size: the tokens that each cycle would commit (see `walk`). The prompt is
the unit of every interval, and drafters are compared over the prompts they share.
"""

import dataclasses

from decode.lab import arms, shown, statistics, walk

EVERY = "all"
HEADER = (
    "set", "drafter", "B", "τ pooled", "[95 %]", "τ mean", "loop-free", "[95 %]", "τ mean", "prompts", "looping",
    "over the first", "[95 %]",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt to walk after: its set, its id there, its token ids."""

    set: str
    id: str
    tokens: tuple


def texts(target, asked, max_tokens, batch_size, progress, temperature=0.0):
    """[(Asked, walk.Text)] of the target's own answers; one that ends at once leaves nothing to walk."""
    found = []
    for part in progress(batches(asked, batch_size), total=-(-len(asked) // batch_size), desc="answers"):
        written = walk.texts_at(temperature, target, [one.tokens for one in part], max_tokens, batch_size)
        by_prompt = {text.prompt: text for text in written}
        found += [(one, by_prompt[one.tokens]) for one in part if one.tokens in by_prompt]
    return found


def measure(target, drafters, sizes, known, batch_size, progress):
    """The walks of drafters {name: drafter} at block sizes, each as far as it was trained, over `texts`' answers."""
    plan = [(name, B) for name, drafter in drafters.items() for B in arms.fitting(drafter, sizes)]
    parts, found = batches(known, batch_size), []
    for name, B in progress(plan, total=len(plan), desc="walks"):
        for part in parts:
            accepted = walk.accepted_everywhere(target, drafters[name], [text for _, text in part], B)
            found += [as_walk(name, B, *one, lengths) for one, lengths in zip(part, accepted, strict=True)]
    return found


def batches(items, size):
    """Items in lists of `size`."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def as_walk(name, B, asked, text, accepted):
    """What a result keeps of a walk."""
    return {
        "set": asked.set,
        "prompt": asked.id,
        "drafter": name,
        "block_size": B,
        "committed_per_cycle": walk.walk(text, accepted),
        "answer_tokens": len(text.answer),
        "loop_fraction": statistics.loop_fraction(text.answer),
    }


# Figures, from walks alone.


def findings(result):
    """The figures of every set, and of all together, by drafter and block size."""
    walks = result["walks"]
    sets = list(dict.fromkeys(one["set"] for one in walks))
    arms = list(dict.fromkeys((one["drafter"], one["block_size"]) for one in walks))
    first, found = result["drafters"][0]["name"], []
    for name in sets + ([EVERY] if len(sets) > 1 else []):
        own = [one for one in walks if name in (EVERY, one["set"])]
        for drafter, B in arms:
            mine = [one for one in own if (one["drafter"], one["block_size"]) == (drafter, B)]
            other = [one for one in own if (one["drafter"], one["block_size"]) == (first, B)]
            found.append({"set": name, "drafter": drafter, "block_size": B} | figures(mine))
            found[-1]["over_first"] = ratio(other, mine) if drafter != first else None
    return found


def figures(walks):
    """τ pooled over cycles, with its interval over prompts, and the mean of prompts' own; of all, and of texts that do
    not loop."""
    quiet = [one for one in walks if one["loop_fraction"] < statistics.LOOP_SHARE]
    return {"tau": tau(walks), "loop_free": tau(quiet) if quiet else None, "looping": len(walks) - len(quiet)}


def tau(walks):
    """`statistics.estimate` of pooled τ, and `per_prompt`."""
    units = [unit(one) for one in walks]
    return statistics.estimate(units, pooled) | {
        "per_prompt": sum(tokens / cycles for tokens, cycles in units) / len(units)
    }


def ratio(theirs, mine):
    """`statistics.estimate` of pooled τ over another drafter's, paired over prompts; None where none is shared."""
    first, second = ({(one["set"], one["prompt"]): unit(one) for one in some} for some in (theirs, mine))
    return statistics.estimate_means(first, second)


def unit(one):
    """(tokens committed, cycles) of a walk."""
    return sum(one["committed_per_cycle"]), len(one["committed_per_cycle"])


def pooled(units):
    """Σ tokens ÷ Σ cycles."""
    return sum(tokens for tokens, _ in units) / sum(cycles for _, cycles in units)


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)]."""
    notes = [
        "τ is tokens a cycle over the target's own texts, walked without decoding: pooled over cycles, and the mean of "
        "prompts' own; a gated LoRA's cycle is two forwards",
        f"a text loops where {statistics.LOOP_SHARE:.0%} of its {statistics.LOOP_NGRAM}-grams have stood before; over "
        "the first: this drafter's pooled τ ÷ the first one's at the same block size, paired over prompts",
    ]
    return [("walked τ", HEADER, [cells(one) for one in found], notes)]


def cells(one):
    """One row."""
    tau, quiet = one["tau"], one["loop_free"]
    return [
        one["set"], one["drafter"], str(one["block_size"]),
        *shown.estimate(tau, 2), shown.fixed(tau["per_prompt"], 2),
        *shown.estimate(quiet, 2), shown.fixed(quiet and quiet["per_prompt"], 2),
        str(tau["prompts"]), str(one["looping"]),
        *shown.estimate(one["over_first"], 3),
    ]  # fmt: skip
