"""Acceptance: how many proposals the target itself would have written, and what it writes next.

W verify rows = 1 + K, K proposals, V vocabulary. Row i of a verify forward predicts the token after row i: rows 0..K−1
judge the K proposals, and the row that follows the accepted ones yields the correction or bonus token.
"""

import dataclasses
import math

import mlx.core as mx

FRACTION_BITS = {mx.float32: 23, mx.bfloat16: 7, mx.float16: 10}  # stored bits of the significand


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the target makes of K proposals.

    accepted    proposals kept, 0..K
    next_token  the target's own token after them
    margins     top-1 minus top-2 logit at the row of each of `tokens`, in logits
    """

    accepted: int
    next_token: int
    margins: tuple
    tokens: tuple

    def cut(self, n):
        """The verdict's first n ≥ 1 tokens, the last of which then stands in for the target's own."""
        accepted = min(self.accepted, n)
        return Verdict(accepted, self.tokens[n - 1], self.margins[:n], self.tokens[:n])


def accept(logits, proposals):
    """Greedy acceptance: a proposal is kept while it equals the argmax of the target's raw logits.

    logits     [W,V] of the verify forward, any float dtype
    proposals  K = W−1 token ids: an mx.array [K], evaluated here or not yet, or any sequence of ints
    Everything pending (draft, verify, judgement) is evaluated together, the only wait of a cycle. Returns Verdict;
    raises ValueError when W ≠ 1 + K.
    """
    proposals = as_array(proposals)
    rows, count = logits.shape[0], proposals.shape[0]
    if rows != 1 + count:
        raise ValueError(f"{rows} verify rows for {count} proposals; expected {1 + count}")
    choice = mx.argmax(logits, axis=-1)
    accepted = mx.cumprod((choice[:count] == proposals).astype(mx.int32)).sum()
    gaps = margins(logits, choice)
    mx.eval(choice, accepted, gaps)
    tokens = tuple(choice.tolist()[: accepted.item() + 1])
    return Verdict(len(tokens) - 1, tokens[-1], tuple(gaps.tolist()[: len(tokens)]), tokens)


def margins(logits, choice):
    """Top-1 minus top-2 logit of every row as float32 [W], given the argmax [W] of logits [W,V].

    The runner-up is the largest logit once the argmax is put out of the way: a third of the time of a top-k.
    """
    index = choice[:, None]
    best = mx.take_along_axis(logits, index, axis=-1)[:, 0]
    second = mx.put_along_axis(logits, index, mx.array(-mx.inf, logits.dtype), axis=-1).max(axis=-1)
    return best.astype(mx.float32) - second.astype(mx.float32)


def certain(logits, margins, guard):
    """How many tokens stand before the first whose top two logits are within `guard` ULPs of each other.

    logits [n,V] and margins (n numbers, in logits) of the rows that yield the tokens; ULPs are of the logits' dtype at
    the greatest logit of the row.
    """
    peaks = mx.max(logits, axis=-1).tolist()
    near = [margin <= guard * ulp(abs(peak), logits.dtype) for margin, peak in zip(margins, peaks, strict=True)]
    return near.index(True) if True in near else len(near)


def ulp(magnitude, dtype):
    """Unit in the last place at a magnitude ≥ 0: the distance between neighbouring values of that dtype there."""
    bits = FRACTION_BITS[dtype]
    smallest = -14 if dtype == mx.float16 else -126  # exponent of the smallest normal number
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else smallest
    return 2.0 ** (max(exponent, smallest) - bits)


def as_array(tokens):
    """Token ids as an mx.array [K] of a type that a forward takes."""
    if isinstance(tokens, mx.array):
        return tokens.astype(mx.uint32)
    return mx.array(list(tokens), mx.uint32)
