"""How many rows the next block has, and how many of its proposals are worth sending to the target.

B block size: the pending token and B−1 slots; K proposals; S_j the probability that the first j are all accepted. A
schedule answers `block_size(remaining)` before each cycle, `keep(proposal)` once the block is drafted, and is told each
cycle's outcome by `observe`. No policy reads a clock: costs are measured beforehand, so that a text is decoded the same
way every time.
"""

import mlx.core as mx

from kernels.errors import UserError

FORGET = 0.95  # weight of what a slot showed, at its next trial: a memory of twenty trials (assumed)
PRIOR = 2.0, 0.9  # trials and acceptance that a slot starts from: hopeful, so that deep slots are tried (assumed)
PROBE = (
    16  # every so many cycles the largest block is drafted, or slots given up on would never be seen again (assumed)
)
PATIENCE = 8  # cycles over which drafting must lose before it is turned off, and cycles it then stays off (assumed)


class Fixed:
    """The same block size in every cycle, cut so that no cycle drafts past the last token wanted.

    block_size  B
    least       the smallest B the proposer can draft: 2 where slot 0 holds the pending token and predicts nothing
    most        the block size the drafter was trained at, or None where any will do
    Raises UserError for a B outside these.
    """

    read = ()  # what `keep` read of the last block's proposals, as probabilities of acceptance

    def __init__(self, block_size, *, least=2, most=None):
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise UserError(f"block size {block_size!r}: expected a whole number, at least {least}")
        if block_size < least:
            raise UserError(
                f"block size {block_size}: a block holds the pending token and at least one proposal; "
                f"give {least} or more"
            )
        if most is not None and block_size > most:
            raise UserError(
                f"block size {block_size}: the drafter was trained at block size {most}; give {most} or less, "
                f"or train one at {block_size}"
            )
        self.size = block_size

    def block_size(self, remaining):
        """B of the next cycle when `remaining` ≥ 1 tokens can still be committed: a cycle commits at most B of them."""
        return min(self.size, remaining)

    def keep(self, proposal):
        """How many of a block's proposals the target is asked about: all."""
        return len(proposal)

    def observe(self, cycle):
        """A fixed schedule learns nothing."""


# What the drafter says of its own proposals.


def top_probability(proposal):
    """The probability that the drafter gave each proposal [K] float32: its confidence head's, else its softmax's."""
    if proposal.confidence is not None:
        return proposal.confidence
    logits = scored(proposal)
    return mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))


def inverse_perplexity(proposal):
    """e^−H [K] float32 of each slot's distribution, H its entropy in nats: 1 where the drafter has no doubt."""
    logits = scored(proposal)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.exp(mx.sum(mx.exp(logs) * logs, axis=-1))


def scored(proposal):
    """The logits [K,V] that the proposals were chosen from, in float32. Raises UserError where there are none."""
    if proposal.logits is None:
        raise UserError("these proposals come without logits, so nothing says how sure they are; fix the block size")
    return proposal.logits.astype(mx.float32)


MEASURES = {"confidence": top_probability, "entropy": inverse_perplexity}


class Cut(Fixed):
    """Ask about proposals only as far as they are likely to be accepted: while Π_{i≤j} p_i ≥ threshold.

    p_i is what `measure` (a name in MEASURES) says of slot i, made a probability of acceptance by `calibrate`. The cut
    falls before the first slot that fails; what is said of later slots is never looked at. threshold 0 keeps all, and
    so only records. What the target itself decided is certain.
    """

    def __init__(self, block_size, measure, threshold, calibrate=lambda value: value, **limits):
        super().__init__(block_size, **limits)
        self.measure, self.threshold, self.calibrate = MEASURES[measure], threshold, calibrate

    def keep(self, proposal):
        """Proposals before the cut; waits for the drafter."""
        self.read = ()
        if not len(proposal):
            return 0
        chain, said = 1.0, self.measure(proposal).tolist()
        for count, value in enumerate(said):
            if count or proposal.decided is None:
                chain *= self.calibrate(value)
            if chain < self.threshold:
                return self._noted(said, count)
        return self._noted(said, len(said))

    def _noted(self, said, count):
        self.read = tuple(said[:count])
        return count


# What the target's answers say of the next block.


class Survivals:
    """Running estimate of S_j, from cycles of any block size.

    Each slot keeps its own acceptance among the cycles that *reached* it: those that offered it and accepted every slot
    before. S_j is the product (Kaplan and Meier's estimator), so a cycle that offered less says nothing of the slots it
    left out, and a short block cannot make a long one look bad.
    """

    def __init__(self, slots):
        self.trials = [PRIOR[0]] * slots
        self.accepted = [PRIOR[0] * PRIOR[1]] * slots

    def observe(self, cycle):
        """Take a cycle in: a success for each accepted slot, a failure for the one that was refused, if any."""
        refused = cycle.accepted < cycle.proposed and cycle.committed == cycle.accepted + 1  # else the text ended there
        for slot in range(cycle.accepted + refused):
            self.trials[slot] = FORGET * self.trials[slot] + 1
            self.accepted[slot] = FORGET * self.accepted[slot] + (slot < cycle.accepted)

    def shares(self):
        """[S_1, S_2, …]."""
        found, chain = [], 1.0
        for accepted, trials in zip(self.accepted, self.trials, strict=True):
            chain *= accepted / trials
            found.append(chain)
        return found


class Learning(Fixed):
    """A block size chosen anew in every cycle from what was accepted so far; now and then the largest, to look."""

    def __init__(self, block_size, **limits):
        super().__init__(block_size, **limits)
        self.survivals, self.cycles = Survivals(block_size - 1), 0

    def block_size(self, remaining):
        """The chosen B, or the largest where it is time to look."""
        self.cycles += 1
        return min(self.size if self.cycles % PROBE == 0 else self.choose(self.survivals.shares()), remaining)

    def observe(self, cycle):
        """Learn from a cycle."""
        self.survivals.observe(cycle)


class Survival(Learning):
    """Slots as deep as S_j ≥ threshold, and at least one."""

    def __init__(self, block_size, threshold, **limits):
        super().__init__(block_size, **limits)
        self.threshold = threshold

    def choose(self, shares):
        """B whose last slot is the deepest that is likely enough."""
        return 2 + sum(share >= self.threshold for share in shares[1:])


class ExpectedValue(Learning):
    """The B that yields most tokens a millisecond: (1 + Σ_{j<B} S_j) ÷ costs[B].

    costs: {B: milliseconds of a whole cycle} for every B from 1, a plain step, to the largest. B = 1 wins where
    drafting loses, so this policy turns drafting off by itself.
    """

    def __init__(self, block_size, costs, **limits):
        super().__init__(block_size, **limits)
        self.costs = covering(costs, block_size)

    def choose(self, shares):
        """The best B by the costs."""
        tokens, best = 1.0, (1 / self.costs[1], 1)
        for B, share in enumerate(shares, 2):
            tokens += share
            best = max(best, (tokens / self.costs[B], B))
        return best[1]


class AutoOff(Fixed):
    """A fixed block that is turned off where it loses: PATIENCE cycles that took longer than plain steps would have.

    costs: as ExpectedValue's. Off means B = 1 for PATIENCE cycles, after which drafting is tried again.
    """

    def __init__(self, block_size, costs, **limits):
        super().__init__(block_size, **limits)
        self.costs, self.off, self.recent = covering(costs, block_size), 0, []

    def block_size(self, remaining):
        """B, or 1 while drafting is off."""
        return 1 if self.off else super().block_size(remaining)

    def observe(self, cycle):
        """Count a cycle towards turning drafting off, or on again."""
        if self.off:
            self.off -= 1
            return
        gain = cycle.committed * self.costs[1] - self.costs[1 + cycle.proposed]  # milliseconds saved over plain steps
        self.recent = [*self.recent, gain][-PATIENCE:]
        if len(self.recent) == PATIENCE and sum(self.recent) < 0:
            self.off, self.recent = PATIENCE, []


def covering(costs, block_size):
    """The costs, if they cover every block size that may be drafted. Raises UserError for a gap."""
    missing = [B for B in range(1, block_size + 1) if B not in costs]
    if missing:
        raise UserError(f"costs: no milliseconds for block size {missing[0]}; measure 1 to {block_size}")
    return costs
