"""User turns that the target writes itself, for checkpoints that nobody has prompts for.

A chat model that is given its template up to the beginning of a user's turn goes on as the user (Magpie,
arXiv 2406.08464). A target without a template begins a document after its beginning-of-sequence token, and the first
words of that document are the prompt.
"""

import dataclasses
import hashlib

from drafter import sanity
from drafter.answers import Job
from kernels.errors import UserError

MARK = "FOREDRAFTUSERTURN"  # stands for a user's text in a template, to find what comes before and after
BEGINNING = (8, 65)  # tokens of a document's beginning, drawn evenly from this range (assumed)


@dataclasses.dataclass(frozen=True)
class Asking:
    """How user turns are written: temperature, the longest in tokens, the only script wanted (or None), first words.

    beginnings: first words, shared out evenly over the first turns of conversations; the target goes on from them.
    """

    temperature: float = 1.0
    max_tokens: int = 128
    script: str | None = None
    beginnings: tuple = ("",)


@dataclasses.dataclass(frozen=True)
class Opening:
    """The ids that a user's turn goes on from, the sequences of ids that end it, what follows it, its first words."""

    tokens: list
    ends: tuple
    closing: str
    begun: str = ""


def opening(target, messages, options, begun=""):
    """The Opening of a user's turn after `messages`, its first words given or none.

    Raises UserError where the target has no way to begin one.
    """
    if target.raw_reason():
        tokens = [first_id(target), *target.tokenizer.encode(begun, add_special_tokens=False)]
        return Opening(tokens, tuple((token,) for token in sorted(target.eos_ids)), "", begun)
    text = target.render([*messages, {"role": "user", "content": MARK}], options, generation=False)
    before, mark, after = text.partition(MARK)
    if not mark:
        raise UserError(f"target {target.source}: its chat template hides the user's text; give prompts of your own")
    ends = {(token,) for token in target.eos_ids}
    closing = list(target.tokenizer.encode(after, add_special_tokens=False))
    if closing:
        ends.add(tuple(closing[:1] if closing[0] in special_ids(target) else closing))
    tokens = list(target.tokenizer.encode(before.rstrip(" ") + begun, add_special_tokens=False))
    return Opening(tokens, tuple(sorted(ends)), after.strip(), begun)


def first_id(target):
    """What a document begins with: the beginning-of-sequence token, else the end of the document before it."""
    for token in (target.tokenizer.bos_token_id, target.tokenizer.eos_token_id):
        if token is not None:
            return token
    raise UserError(f"target {target.source}: it has neither chat template nor first token; give prompts of your own")


def special_ids(target):
    """The ids that stand for no text."""
    added = target.tokenizer.added_tokens_decoder
    return target.eos_ids | {token for token, content in added.items() if content.special}


def question_job(target, name, subject, opened, asking, seed):
    """The Job that writes a user's turn; a document's beginning has a length of its own, by seed and name."""
    longest = asking.max_tokens
    if target.raw_reason():
        least, end = BEGINNING
        longest = min(longest, least + drawn(f"{seed}:length:{name}", end - least))
    return Job(name, subject, opened.tokens, asking.temperature, longest, opened.ends)


def beginning(asking, name, seed):
    """Which of the first words a conversation begins with, by seed and name."""
    return asking.beginnings[drawn(f"{seed}:beginning:{name}", len(asking.beginnings))]


def drawn(key, count):
    """A number below `count`, by a digest of the key."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % count


def read_question(target, opened, tokens, finish, asking):
    """(text, None) of a user's turn as it was written, or (text, why it is none)."""
    special = special_ids(target)
    body = tokens[:-1] if tokens and tokens[-1] in special else tokens
    text = target.tokenizer.decode(body)
    if opened.closing and finish == "stop":
        text = text.partition(opened.closing)[0]
    raw = target.raw_reason()
    if raw and finish == "length":
        text = text[: max(0, *map(text.rfind, (" ", "\n", "\t")))]  # the last word may be half of one
    text = (opened.begun + text).strip()
    if special.intersection(body):
        return text, "special token"
    if not raw and finish == "length":
        return text, "longer than a prompt may be"
    return text, sanity.fault(text, asking.script)
