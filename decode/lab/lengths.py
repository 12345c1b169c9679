"""Documents cut at several context lengths, and what length does to cost and to acceptance, apart and together.

T context tokens. Every document is cut so that the last of its T tokens is the same one at every length: what is
continued stays the same text at the same place, and only how much of it is in view changes. A prompt's difficulty and
its length are so not confounded, as they are where short prompts and long ones are different prompts.
"""

from decode.lab import experiment, prompts, shown, statistics
from drafter import corpus, library
from kernels.errors import UserError

LIBRARY = "library"  # the name of the documents that every machine has: Python's standard library
STAGED = 2  # documents of the stage pass (assumed enough: a hundred cycles at each length)
FEWEST = 8  # documents below which a result says that it has few (assumed)
HEADER = (
    "context", "plain ms", "draft", "verify", "commit", "cycle ms", "cycle ÷ plain", "τ", "[95 %] of τ ÷ shortest's",
    "τ × plain ÷ cycle", "speedup", "[95 %]",
)  # fmt: skip


def documents(source, target, longest, count):
    """(token ids by document, what a result records of the set): `count` documents of at least `longest` tokens.

    source: LIBRARY, or a prompt set's name or JSON Lines file, each prompt a document. Which ones are taken is drawn by
    a hash of their names; the library's held-out side comes first, for targets that were trained on the other.
    Raises UserError where too few are long enough.
    """
    if source == LIBRARY:
        read = library.read()
        texts = [pair for side in (read.held_out, read.train) for pair in drawn((one.name, one.text) for one in side)]
        name, digest = f"Python {read.version} library", library.digest([*read.held_out, *read.train])
    else:
        found = prompts.load(source)
        texts = drawn((one.id, one.text) for one in found.prompts)
        name, digest = found.name, found.sha256
    chosen = long_enough(target, texts, longest, count)
    if len(chosen) < count:
        raise UserError(
            f"{name}: {len(chosen)} of its {len(texts)} documents have {longest} tokens or more, {count} were asked "
            "for; lower --limit or --lengths, or give --prompts longer ones"
        )
    turns = "documents, continued raw"
    return chosen, {"name": name, "sha256": digest, "total": len(texts), "used": list(chosen), "turns": turns}


def drawn(texts):
    """(name, text) pairs in an order drawn by the hash of their names."""
    return sorted(texts, key=lambda pair: corpus.position("context", pair[0]))


def long_enough(target, texts, longest, count):
    """{name: token ids} of the first `count` texts with at least `longest` tokens."""
    found = {}
    for name, text in texts:
        if len(found) < count and len(text) >= longest:  # a token is a character or more
            tokens = tuple(target.tokenizer.encode(text))
            found |= {name: tokens} if len(tokens) >= longest else {}
    return found


def cut(chosen, lengths, target, max_tokens):
    """`experiment.Encoded` for every document at every length, a document's lengths after one another.

    Raises UserError where a length and the answer exceed the target's context.
    """
    longest = max(lengths)
    if target.max_length and longest + max_tokens > target.max_length:
        raise UserError(
            f"--lengths {longest} with --max-tokens {max_tokens} exceeds the context of {target.max_length} of "
            f"{target.source}; lower one of them"
        )
    return [
        experiment.Encoded(name, "document", tokens[longest - length : longest], part=str(length))
        for name, tokens in chosen.items()
        for length in lengths
    ]


def few(encoded, count):
    """Every length of `count` documents spread over the set: what the stage pass runs on."""
    kept = set(prompts.spread(list(dict.fromkeys(prompt.id for prompt in encoded)), count))
    return [prompt for prompt in encoded if prompt.id in kept]


def findings(result):
    """Cost and acceptance of each drafting arm at each length: {"trained_length", "lengths": [one an arm and length]}.

    `predicted` is τ × plain's milliseconds ÷ the cycle's, both of the stage pass: what the speedup over plain would be
    were both exact. `tau_kept` is τ over that at the shortest length, paired over documents.
    """
    arms = experiment.summarise(result)
    parts = experiment.parts_of(arms)
    found = [
        at_length(result, arm, experiment.in_part(arms, arm["part"]), parts[0])
        for arm in sorted(arms, key=lambda arm: arm["name"])
        if arm["block_size"]
    ]
    return {"trained_length": (result["drafter"] or {}).get("trained_length"), "lengths": found}


def at_length(result, arm, beside, shortest):
    """The figures of one arm at one length; beside: all arms of that length."""
    plain = next(one for one in beside if one["name"] == "plain")
    ms, step = arm["ms"], plain["ms"] and plain["ms"]["cycle"]
    priced = ms and step and arm["tau"]
    return {
        "arm": arm["name"],
        "length": int(arm["part"]),
        "plain_ms": step,
        "ms": ms,
        "cost": ms["cycle"] / step if priced else None,
        "tau": arm["tau"],
        "tau_kept": tau_kept(result, arm, shortest),
        "predicted": arm["tau"]["pooled"] * step / ms["cycle"] if priced else None,
        "speedup": arm["speedup"],
    }


def tau_kept(result, arm, shortest):
    """τ of an arm at a length over its τ at the shortest, paired over documents; None at the shortest itself."""
    if arm["part"] == shortest:
        return None
    rows = (experiment.in_part(result["rows"], part) for part in (shortest, arm["part"]))
    return statistics.estimate_means(*(statistics.commitments(some, arm["name"]) for some in rows))


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)], one table an arm."""
    trained = found["trained_length"]
    length = f"{trained} tokens" if trained else "a length that its checkpoint does not record"
    notes = [
        f"the drafter was trained on rows of {length}",
        "the same documents at every length, continued at the same place; τ × plain ÷ cycle is cost and acceptance "
        "together, from the stage pass, over plain; the speedup is measured, over mlx_lm",
    ]
    return [
        (f"context length, {arm}", HEADER, [cells(one) for one in found["lengths"] if one["arm"] == arm], notes)
        for arm in dict.fromkeys(one["arm"] for one in found["lengths"])
    ]


def cells(one):
    """One length's row."""
    ms = one["ms"] or {}
    kept = one["tau_kept"]
    return [
        str(one["length"]),
        shown.fixed(one["plain_ms"], 2),
        *(shown.fixed(ms.get(stage), 2) for stage in ("draft", "verify", "commit", "cycle")),
        shown.fixed(one["cost"], 2),
        shown.fixed(one["tau"] and one["tau"]["pooled"], 2),
        " ".join(shown.estimate(kept, 2)) if kept else "–",
        shown.fixed(one["predicted"], 2),
        *shown.ratio(one["speedup"]),
    ]
