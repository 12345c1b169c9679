"""What proposes tokens: a full drafter, an n-gram copied from the text, a script.

K proposals, B block size, n committed rows, D hidden. A proposer follows the text by the rows that enter the target's
caches: `begin` with the prompt's first rows, `observe` with every later piece of the prompt and with the rows that a
cycle committed. The pending token is not among them; it comes with `propose`.
"""

import dataclasses

import mlx.core as mx

from drafter import heads
from drafter.dflash import DFlash
from kernels.errors import UserError


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What is offered to the target.

    tokens      K ids: a tuple of ints, or an mx.array [K] that may not have been evaluated yet
    confidence  float32 [K], not evaluated yet: how likely the drafter thinks each proposal to be accepted, those before
                it given; None where it has no such head
    """

    tokens: tuple | mx.array
    confidence: mx.array | None = None

    def __len__(self):
        return len(self.tokens)


class Proposer:
    """The protocol, and a proposer that proposes nothing."""

    name = "none"
    taps = ()  # 0-based target layers whose outputs `begin` and `observe` are given
    least_block = 2  # smallest block size that makes sense
    block_size = None  # the largest it can draft, where there is one

    def begin(self, tokens, taps):
        """Forget the text before; take the prompt's first rows: token ids (list of n), taps of [1,n,D] each."""
        self.observe(tokens, taps)

    def observe(self, tokens, taps):
        """Take the next n committed rows."""

    def propose(self, pending, count):
        """At most `count` tokens to follow the pending token (an int). Returns Proposal."""
        return Proposal(())

    def state(self):
        """Arrays that hold what was observed; evaluated after each piece of the prompt so that memory stays bounded."""
        return []


class DFlashProposer(Proposer):
    """A DFlash drafter over the committed rows' context, one draft pass per cycle.

    It knows the rows it was shown: after a prompt cache that already held text, its context begins with the new prompt,
    at position 0, which rotary positions allow; proposals are then poorer, the text the same.
    block_size  rows of a draft pass, at most the trained block size, which is the default
    """

    def __init__(self, target, drafter, block_size=None):
        self.target, self.drafter = target, drafter
        self.block_size = drafter.config.block_size
        self.rows = block_size or self.block_size
        self.name = f"dflash-{self.rows}"
        self.taps = tuple(drafter.config.target_layer_ids)
        self.cache = drafter.make_cache()

    def begin(self, tokens, taps):
        """Start an empty context with the prompt's first rows."""
        self.cache = self.drafter.make_cache()
        self.observe(tokens, taps)

    def observe(self, tokens, taps):
        """Fuse the rows' taps and append them to the context; nothing is evaluated."""
        self.drafter.extend(self.cache, self.drafter.fuse(taps))

    def propose(self, pending, count):
        """Draft one block of B rows and take the likeliest tokens of slots 1..count, left on the device."""
        block = self.drafter.noise(self.target, mx.array([[pending]], mx.uint32), max(self.rows, count + 1))
        hidden = self.drafter.draft(self.cache, block)[0, 1 : count + 1]  # [K,D]
        pending = mx.array(pending, mx.uint32)
        tokens = self.drafter.propose(self.target, hidden, pending).tokens
        if self.drafter.confidence_head is None:
            return Proposal(tokens)
        scores = self.drafter.confidence(hidden, heads.preceding(pending, tokens))
        return Proposal(tokens, mx.sigmoid(scores))

    def state(self):
        """The context's keys and values."""
        return [layer.state for layer in self.cache.layers]


class PromptLookup(Proposer):
    """Copies what followed the most recent earlier occurrence of the text's last n tokens, longest n first.

    ngram     longest suffix looked up
    shortest  shortest one; below 2 a single common token would set off a block
    A match so late that the copy would run past the end goes on copying itself: a loop is proposed as a loop.
    """

    def __init__(self, ngram, shortest=None):
        shortest = min(2, ngram) if shortest is None else shortest
        if not 1 <= shortest <= ngram:
            raise UserError(f"n-gram {ngram}, shortest {shortest}: expected 1 ≤ shortest ≤ n-gram")
        self.name = f"ngram-{ngram}"
        self.lengths = range(ngram, shortest - 1, -1)
        self._forget()

    def _forget(self):
        self.text, self.last = [], {}

    def begin(self, tokens, taps):
        """Start a new text."""
        self._forget()
        self.observe(tokens, taps)

    def observe(self, tokens, taps):
        """Index every n-gram that ends at a new token: n-gram -> position after its last occurrence."""
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for length in self.lengths:
                if length <= end:
                    self.last[tuple(self.text[end - length :])] = end

    def propose(self, pending, count):
        """The `count` tokens that followed the longest match, or none."""
        end = len(self.text)
        for length in self.lengths:
            if length > end + 1:
                continue
            start = self.last.get((*self.text[end + 1 - length : end], pending))
            if start is not None:
                return Proposal(tuple(self._copy(start, pending, count)))
        return Proposal(())

    def _copy(self, start, pending, count):
        """`count` tokens from position `start` on, where the text ends with the pending token and then repeats."""
        end = len(self.text)
        for i in range(count):
            position = start + i % (end + 1 - start)
            yield self.text[position] if position < end else pending


class Scripted(Proposer):
    """Proposes what a script says, for tests of what a bad drafter could do.

    script  the whole text, prompt included, as token ids; or a function (position, count) -> token ids, where position
            is the index in that text of the first token asked for
    """

    name = "scripted"

    def __init__(self, script):
        self.script = script if callable(script) else lambda position, count: script[position : position + count]
        self.seen = 0

    def begin(self, tokens, taps):
        """Start at the text's beginning."""
        self.seen = 0
        self.observe(tokens, taps)

    def observe(self, tokens, taps):
        """Count the committed rows."""
        self.seen += len(tokens)

    def propose(self, pending, count):
        """The script's tokens for the positions after the pending token's."""
        return Proposal(tuple(self.script(self.seen + 1, count))[:count])


def as_proposer(target, drafter, block_size=None):
    """The proposer for what a caller handed in: a Proposer as it is, a DFlash wrapped, None for plain decoding."""
    if drafter is None or isinstance(drafter, Proposer):
        return drafter
    if isinstance(drafter, DFlash):
        return DFlashProposer(target, drafter, block_size)
    raise UserError(
        f"drafter: expected a DFlash drafter, a Proposer or None, found {type(drafter).__name__}; "
        "drafter.checkpoint.load_drafter reads one"
    )
