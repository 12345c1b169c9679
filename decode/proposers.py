"""What proposes tokens: a full drafter, the target itself with a gated LoRA, an n-gram copied from the text, a script.

K proposals, B block size, n committed rows, D hidden, V vocabulary. A proposer follows the text by the rows that enter
the target's caches: `begin` with the prompt's first rows, `observe` with every later piece of the prompt and with the
rows that a cycle committed. The pending token is not among them; it comes with `propose`.
"""

import dataclasses

import mlx.core as mx

from drafter import drafting, heads, rng
from drafter.dflash import DFlash
from drafter.gated_lora import GatedLora
from kernels.errors import UserError


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What is offered to the target.

    tokens      K ids: a tuple of ints, or an mx.array [K] that may not have been evaluated yet
    confidence  float32 [K], not evaluated yet: how likely the drafter thinks each proposal to be accepted, those before
                it given; None where it has no such head
    logits      [K,V] that the tokens were chosen from, not evaluated yet; None where there are none
    decided     the target's own logits [1,V] of the pending row, where drafting has left that row in the caches: the
                first token is then the target's decision, and a verify sends the proposals alone
    forwards    of the target that drafting took
    """

    tokens: tuple | mx.array
    confidence: mx.array | None = None
    logits: mx.array | None = None
    decided: mx.array | None = None
    forwards: int = 0

    def __len__(self):
        return len(self.tokens)


class Proposer:
    """The protocol, and a proposer that proposes nothing."""

    name = "none"
    taps = ()  # 0-based target layers whose outputs `begin` and `observe` are given
    least_block = 2  # smallest block size that makes sense
    block_size = None  # what it drafts where nothing is asked, if it has one
    most_block = None  # the largest block size that it can draft, where there is one
    keep = False  # whether `propose` leaves the pending row in the caches
    extra = 0  # proposals of a block of B rows beyond B − 1: 1 where the pending row's own answer is one

    def share(self, cache, transaction):
        """Take the target's caches and the transaction over them; for a proposer that runs the target itself."""

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
        self.target, self.drafter, self.route = target, drafter, drafting.fastest(target, drafter)
        self.block_size = self.most_block = drafter.config.block_size
        self.rows = block_size or self.block_size
        self.name = f"dflash-{self.rows}"
        self.taps = tuple(drafter.config.target_layer_ids)
        self.cache = self.route.make_cache()

    def begin(self, tokens, taps):
        """Start an empty context with the prompt's first rows."""
        self.cache = self.route.make_cache()
        self.observe(tokens, taps)

    def observe(self, tokens, taps):
        """Append the rows, by their taps, to the context; nothing is evaluated."""
        self.route.extend(self.cache, taps)

    def propose(self, pending, count):
        """Draft one block of B rows and take the likeliest tokens of slots 1..count, left on the device."""
        pending = mx.array(pending, mx.uint32)
        hidden = self.route.draft(self.cache, pending[None, None], max(self.rows, count + 1))[0, 1 : count + 1]  # [K,D]
        drawn = self.drafter.propose(self.target, hidden, pending)
        if self.drafter.confidence_head is None:
            return Proposal(drawn.tokens, logits=drawn.logits)
        scores = self.drafter.confidence(hidden, heads.preceding(pending, drawn.tokens))
        return Proposal(drawn.tokens, mx.sigmoid(scores), drawn.logits)

    def state(self):
        """The context's keys and values."""
        return self.route.state(self.cache)


class StagedProposer(DFlashProposer):
    """A DFlash drafter whose block is offered in stages: a draft pass of `block_size` rows serves several cycles.

    What a cycle did not offer is kept. Where the target accepted all that was offered, and its own next token is the
    first that was kept, the proposals after it still follow the text, and are offered in the next cycle without a draft
    pass; else a block is drafted anew. Waits for each draft pass, since what follows must be known here.
    """

    def begin(self, tokens, taps):
        """Start a new text, with nothing kept."""
        self.kept, self.expected = [], None
        super().begin(tokens, taps)

    def observe(self, tokens, taps):
        """Keep the rest of a block only where these are the pending token and everything that was offered."""
        if list(tokens) != self.expected:
            self.kept = []
        super().observe(tokens, taps)

    def propose(self, pending, count):
        """What was kept for this place, `count` at most; else a new block."""
        follows = len(self.kept) > 1 and self.kept[0] == pending
        offered = self.kept[1:] if follows else super().propose(pending, max(count, self.rows - 1)).tokens.tolist()
        self.kept, offered = offered[count:], offered[:count]
        self.expected = [pending, *offered]
        return Proposal(tuple(offered))


class GatedLoraProposer(Proposer):
    """The target itself drafts: one pass over [pending, noise…], adapted in the noise rows, as a transaction.

    Row i proposes token i + 1. Row 0 runs with the adapter off: its proposal is the target's own.
    keep         leave the pending row in the caches (begin(B), commit(1)); else send it again (commit(0))
    refinements  further passes, each over the proposals of the one before in place of noise
    seed         of the noise, which is keyed by (seed, cycle)
    always_on    adapt the pending row too: a control, which `keep` cannot go with
    Raises UserError for a combination that would not stay the target's own text.
    """

    least_block, extra = 1, 1

    def __init__(self, target, drafter, block_size=None, *, keep=False, refinements=0, seed=0, always_on=False):
        if keep and always_on:
            raise UserError("always_on adapts the pending row, which keep would leave in the caches; choose one")
        self.target, self.drafter, self.keep = target, drafter, keep
        self.refinements, self.seed, self.always_on = refinements, seed, always_on
        self.block_size = drafter.config.block_size
        self.name = f"gated_lora-{block_size or self.block_size}"
        self.cache = self.transaction = None
        self.cycles = 0

    def share(self, cache, transaction):
        """Draft in the loop's own caches."""
        self.cache, self.transaction = cache, transaction

    def begin(self, tokens, taps):
        """Start a text: its noise is that of its cycles, whatever was decoded before."""
        self.cycles = 0

    def propose(self, pending, count):
        """Draft a block of `count` rows; nothing is waited for."""
        drawn = self.drafter.noise((count - 1,), rng.key(self.seed, "noise", self.cycles))
        self.cycles += 1
        tokens = mx.concatenate([mx.array([pending], mx.uint32), drawn])
        for _ in range(self.refinements):
            tokens = mx.concatenate([tokens[:1], mx.argmax(self._pass(tokens, 0), axis=-1)[:-1].astype(mx.uint32)])
        logits = self._pass(tokens, int(self.keep))
        decided = logits[:1] if self.keep else None
        return Proposal(mx.argmax(logits, axis=-1), None, logits, decided, 1 + self.refinements)

    def _pass(self, tokens, kept):
        """Feed [pending, noise…] [B] and take all rows but the first `kept` back: logits [B,V]."""
        gate = (True,) * len(tokens) if self.always_on else None
        self.transaction.begin(len(tokens), tokens)
        try:
            logits = self.target.score(mx.squeeze(self.drafter.draft(tokens[None], self.cache, gate), 0))
            self.transaction.commit(kept)
        except BaseException:
            self.transaction.abort()
            raise
        return logits


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
    """The proposer for what a caller handed in: a Proposer as it is, a drafter wrapped, None for plain decoding."""
    if drafter is None or isinstance(drafter, Proposer):
        return drafter
    for kind, wrapper in ((DFlash, DFlashProposer), (GatedLora, GatedLoraProposer)):
        if isinstance(drafter, kind):
            return wrapper(target, drafter, block_size)
    raise UserError(
        f"drafter: expected a DFlash drafter, a gated LoRA, a Proposer or None, found {type(drafter).__name__}; "
        "drafter.checkpoint.load_drafter reads one"
    )
