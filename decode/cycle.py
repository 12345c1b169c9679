"""Propose, verify, commit: the loop that advances a target by whole blocks.

T prompt tokens, K proposals, W verify rows = 1 + K, or K where drafting left the pending row in the caches, V
vocabulary, n tokens of a step.

The prompt is fed as mlx-lm feeds it: pieces of `prefill_step_size` rows, the last row alone, so that a plain loop here
and mlx-lm's own loop see the same products. What the caches hold between steps:

- with a proposer: the prompt and every emitted token except the last, the pending token;
- without one (`plain`): also the last, because the next forward is launched before a token is read, as mlx-lm does;
- after `settle`: the prompt and every emitted token, with or without a proposer, which is what mlx-lm leaves.
"""

import dataclasses

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache

from decode.proposers import Proposal
from decode.transaction import Transaction
from decode.verify import accept, as_array, certain
from kernels.errors import UserError

CLEAR_EVERY = 256  # tokens between returns of MLX's spare buffers to the system; mlx-lm's figure


@dataclasses.dataclass(frozen=True)
class Cycle:
    """What one cycle did.

    block_size  B asked of the schedule
    proposed    K, proposals offered
    accepted    proposals among the committed tokens
    committed   tokens emitted: accepted + 1, or fewer where the text ended inside the block
    redecided   tokens decided anew by a width-1 forward, because the block left them in doubt (0 or 1)
    margins     top-1 minus top-2 logit of each committed token, in logits; empty in a plain loop
    seconds     {draft, verify, commit} of an instrumented pass, else None
    confidence  what a schedule that cuts by it read of each proposal offered; else empty
    forwards    of the target: the verify, and the draft passes that run it
    """

    block_size: int
    proposed: int
    accepted: int
    committed: int
    margins: tuple = ()
    seconds: dict | None = None
    redecided: int = 0
    confidence: tuple = ()
    forwards: int = 1

    def cut(self, n):
        """The record of the same cycle had the text ended after its n-th token."""
        return dataclasses.replace(self, accepted=min(self.accepted, n), committed=n, margins=self.margins[:n])


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens emitted together: n ids, the logits [n,V] they were read from (lazy), the cycle (None after prefill)."""

    tokens: tuple
    logits: mx.array
    cycle: Cycle | None


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Key/value caches are stored in `bits` with groups of `group_size` once they hold `start` rows, as in mlx-lm."""

    bits: int
    group_size: int
    start: int

    def check(self):
        """Raise UserError for bits or a group size that MLX does not know, before anything runs."""
        rows = KVCache()
        rows.update_and_fetch(*[mx.zeros((1, 1, 1, self.group_size))] * 2)
        Quantization(self.bits, self.group_size, 0).apply([rows])

    def apply(self, cache):
        """Replace the entries of the list that have come so far; only ever between transactions.

        Raises UserError where MLX cannot quantise rows of this width so.
        """
        try:
            maybe_quantize_kv_cache(cache, self.start, self.group_size, self.bits)
        except ValueError as error:
            raise UserError(f"kv_bits {self.bits}, kv_group_size {self.group_size}: {error}; choose others") from error

    def rows_left(self, cache):
        """Rows that may be fed at once so that each still sees the cache it would see one at a time; None: any."""
        return min((self.start - entry.offset for entry in cache if type(entry) is KVCache), default=None)


class Laps:
    """Stage times of one cycle: waits for the device at each stage, or does nothing where there is no clock."""

    def __init__(self, clock):
        self.clock, self.seconds = clock, {} if clock else None
        self.last = clock() if clock else None

    def end(self, stage, *arrays):
        """Wait for the arrays and note the time since the stage before."""
        if self.clock:
            mx.eval(arrays)
            now = self.clock()
            self.seconds[stage], self.last = now - self.last, now


def refuse_kept(tie_guard, proposer):
    """Raise UserError for a tie guard over a proposer that has the pending row decided before the verify."""
    if tie_guard is not None and proposer and proposer.keep:
        raise UserError(
            f"tie_guard {tie_guard}: this drafter keeps the pending row in the caches, so no single row can decide "
            "after it; draft without keep"
        )


class Loop:
    """The state of one decode: call `prefill` once, then `cycle` until `finished`.

    target, cache      a Target and its caches, which may already hold earlier text
    proposer           a Proposer, or None for the plain width-1 loop
    schedule           block size per cycle; needed with a proposer
    max_tokens         tokens to emit, the prefill's included; math.inf for no cap
    eos_ids            ids that end the text; such a token is emitted, nothing after it
    prefill_step_size  rows of one piece of the prompt
    quantization       a Quantization or None
    progress           called with (prompt tokens done, prompt tokens in all)
    clock              seconds as a function; makes an instrumented pass that waits after each stage
    tie_guard          ULPs or None: a token whose top two logits lie within so many of each other is not taken from a
                       block but decided by a forward of one row, as the plain loop decides
    """

    def __init__(self, target, cache, proposer=None, schedule=None, *, max_tokens, eos_ids=frozenset(),
                 prefill_step_size=2048, quantization=None, progress=None, clock=None, tie_guard=None):  # fmt: skip
        self.target, self.cache, self.proposer, self.schedule = target, cache, proposer, schedule
        self.remaining, self.eos_ids, self.clock = max_tokens, eos_ids, clock
        self.prefill_step_size, self.quantization = prefill_step_size, quantization
        refuse_kept(tie_guard, proposer)
        self.tie_guard, self.redecided = tie_guard, 0  # tokens of the running cycle that one row decided anew
        self.in_doubt = False  # whether one row has to decide the next token
        self.progress = progress or (lambda done, total: None)
        self.transaction = Transaction(cache, lambda tokens: target.forward(tokens[None], cache))
        self.taps = proposer.taps if proposer else ()
        if proposer:
            proposer.share(cache, self.transaction)
        self.tokens = ()  # of the last step
        self.flight = None  # plain: the token [1] and logits [1,V] that the device is working on
        self.fed = True  # whether the last emitted token is in the caches
        self.held = 0  # rows of the running block that drafting left there
        self.emitted, self.finished = 0, False

    def prefill(self, tokens):
        """Feed the prompt (list of T ≥ 1 ids) and emit the first token. Returns Step."""
        total, size = len(tokens), self.prefill_step_size
        self.progress(0, total)
        self._tell = self.proposer.begin if self.proposer else None
        for start in range(0, total - 1, size):
            piece = tokens[start : min(start + size, total - 1)]
            self._observe(piece, self._forward(mx.array(piece, mx.uint32)).taps)
            self._quantize()
            mx.eval(self._states())
            self.progress(start + len(piece), total)
            mx.clear_cache()
        step = self._first(tokens[-1:])
        self.progress(total, total)
        return step

    def _first(self, last):
        """Feed the prompt's last token, alone, and emit the token that it predicts."""
        if not self.proposer:
            self.flight = self._launch(mx.array(last, mx.uint32))
            return Step(*self._land(), None)
        forward = self._forward(mx.array(last, mx.uint32))
        self._observe(last, forward.taps)
        logits = self.target.score(mx.squeeze(forward.hidden, 0))
        return Step(self._emit((mx.argmax(logits[-1]).item(),), fed=False), logits, None)

    def cycle(self):
        """Emit the next tokens: one for a plain loop, else what the target keeps of a block. Returns Step."""
        return self._speculate() if self.proposer else self._plain()

    def _plain(self):
        laps = Laps(self.clock)
        tokens, logits = self._land()
        laps.end("verify", logits)
        seconds = laps.seconds and {"draft": 0.0, **laps.seconds, "commit": 0.0}
        return Step(tokens, logits, Cycle(1, 0, 0, 1, seconds=seconds))

    def _speculate(self):
        laps, size = Laps(self.clock), self._block_size()
        count = 0 if self.in_doubt else self._proposals(size)
        proposal = self.proposer.propose(self.tokens[-1], count) if count else Proposal(())
        sent = self._sent(proposal, min(self.schedule.keep(proposal), count))  # [W]
        laps.end("draft", sent)
        self.transaction.begin(len(sent), sent)
        try:
            logits, taps, verdict = self._guarded(sent, *self._verify(sent, proposal.decided))
            laps.end("verify")
            kept = self._keep(verdict.tokens)
            self.transaction.commit(len(kept) - self.held)
            self._observe([self.tokens[-1], *kept[:-1]], [tap[:, : len(kept)] for tap in taps])
            laps.end("commit", *(self._states() if self.clock else ()))
            proposed, seconds = len(sent) - 1 + self.held, laps.seconds
            whole = Cycle(size, proposed, verdict.accepted, len(verdict.tokens), verdict.margins, seconds)
            told = {"redecided": self.redecided, "confidence": self.schedule.read}
            refed = int(self.redecided and len(sent) > 1)  # the block was taken back and its first row fed again
            cycle = dataclasses.replace(whole.cut(len(kept)), forwards=1 + proposal.forwards + refed, **told)
            self.schedule.observe(cycle)
        except BaseException:  # an interrupt too: the caches must not keep rows whose tokens nobody gets
            self._take_back()
            raise
        return Step(self._emit(kept, fed=False), logits[: len(kept)], cycle)

    def _proposals(self, size):
        """K of a block of `size` rows, cut so that nothing is proposed past the last token wanted."""
        most = self.remaining - 1
        if self.quantization and (limit := self.quantization.rows_left(self.cache)):
            most = min(most, limit - 1)
        return min(size - 1 + self.proposer.extra, most)

    def _sent(self, proposal, count):
        """The rows of the verify: the pending token, unless drafting left it in the caches, and the proposals."""
        self.held = int(proposal.decided is not None)  # of the emitted tokens' rows, those that are no verify's
        self.fed = bool(self.held)
        proposals = as_array(proposal.tokens)[:count]
        return proposals if self.held else mx.concatenate([as_array(self.tokens[-1:]), proposals])

    def _verify(self, sent, decided):
        """Feed the rows of a verify [W]: (logits [1+K,V], taps, Verdict); decided: logits [1,V] of the row before."""
        forward = self._forward(sent)
        logits = self.target.score(mx.squeeze(forward.hidden, 0))
        if decided is None:
            return logits, forward.taps, accept(logits, sent[1:])
        logits = mx.concatenate([decided, logits])
        return logits, forward.taps, accept(logits, sent)

    def _guarded(self, tokens, logits, taps, verdict):
        """The block's verify as the tie guard leaves it: (logits, taps, Verdict), as they came where there is none.

        The verdict ends before the first token in doubt, which the next cycle decides by one row; where that is the
        block's first, the block is taken back and that row is fed here.
        """
        self.redecided, self.in_doubt = int(self.in_doubt), False
        if self.tie_guard is None or len(tokens) == 1:
            return logits, taps, verdict
        count = len(verdict.tokens)
        sure = certain(logits[:count], verdict.margins, self.tie_guard)
        self.in_doubt = 0 < sure < count
        if sure:
            return logits, taps, verdict.cut(sure)
        self.redecided = 1
        self.transaction.abort()
        self.transaction.begin(1, tokens[:1])
        return self._verify(tokens[:1], None)

    def _take_back(self):
        """Leave the caches as they were before the running block, however far it got."""
        if self.transaction.open:
            self.transaction.abort()
        else:
            self.transaction.commit(0)

    def _block_size(self):
        """The schedule's B, cut where the caches are about to be quantised."""
        self._quantize()
        size = 1 if self.in_doubt else self.schedule.block_size(max(1, self.remaining - self.proposer.extra))
        limit = self.quantization and self.quantization.rows_left(self.cache)
        return min(size, limit) if limit else size

    def _launch(self, token):
        """Start the forward of one token [1] and return the next token [1] and its logits [1,V], not waited for."""
        logits = self.target.score(mx.squeeze(self._forward(token).hidden, 0))
        choice = mx.argmax(logits, axis=-1)
        self._quantize()
        mx.async_eval(choice)
        return choice, logits

    def _land(self):
        """Emit the token in flight, after launching the forward that follows it: ((token,), logits [1,V])."""
        choice, logits = self.flight
        self.flight = self._launch(choice) if self.remaining > 1 else None
        return self._emit((choice.item(),), fed=self.flight is not None), logits

    def _keep(self, tokens):
        """The tokens up to the end of the text: the first EOS, included, or the cap."""
        ends = (i + 1 for i, token in enumerate(tokens) if token in self.eos_ids)
        return tokens[: min(next(ends, len(tokens)), self.remaining)]

    def _emit(self, tokens, fed):
        self.tokens, self.fed = tokens, fed
        self.remaining -= len(tokens)
        before, self.emitted = self.emitted, self.emitted + len(tokens)
        self.finished = tokens[-1] in self.eos_ids or self.remaining <= 0
        if self.emitted // CLEAR_EVERY > before // CLEAR_EVERY:
            mx.clear_cache()
        return tokens

    def cut(self, n):
        """End the text after the n-th token of the last step; the caches let go of the rows after it."""
        if n < len(self.tokens):
            self.transaction.commit(n - self.held)
            self.tokens = self.tokens[:n]
        self.finished = True

    def settle(self):
        """Feed the last emitted token if it was not: the caches then hold the prompt and all that was emitted."""
        if not self.fed:
            self._forward(as_array(self.tokens[-1:]))
            self.fed = True
        self._quantize()
        mx.eval(self._states())

    def _forward(self, tokens):
        return self.target.forward(tokens[None], self.cache, self.taps)

    def _observe(self, tokens, taps):
        """Hand committed rows to the proposer: the first piece of a prompt begins its text."""
        if self.proposer:
            self._tell(list(tokens), tuple(taps))
            self._tell = self.proposer.observe

    def _quantize(self):
        if self.quantization:
            self.quantization.apply(self.cache)

    def _states(self):
        """Every array that later steps build on."""
        return [[entry.state for entry in self.cache], self.proposer.state() if self.proposer else []]


def decode(target, tokens, proposer=None, schedule=None, cache=None, **options):
    """Decode from prompt tokens (list of ids): yields a Step for the prefill's token, then one per cycle.

    Options are Loop's; `cache` is the target's own kind where none is handed in. Arrays are waited for once a cycle.
    """
    loop = Loop(target, target.make_cache() if cache is None else cache, proposer, schedule, **options)
    yield loop.prefill(tokens)
    while not loop.finished:
        yield loop.cycle()
