"""Sequential heads on a block: a Markov bias from the token before, and a confidence. (DSpark, arXiv 2607.05147)

K slots of a block, D hidden, V vocabulary, r rank; `...` is any leading shape. Slot k's token follows that of slot k−1;
the first follows the pending token. Tensor names are DSpark's, so that its loaders would find them under their names.
"""

import dataclasses

import mlx.core as mx
import mlx.nn as nn

NAMES = ("markov_head", "confidence_head")  # attributes of a drafter, and what its heads' tensors begin with


class MarkovHead(nn.Module):
    """A low-rank bias: logits_k + W2 W1[x_{k−1}], W1 [V,r], W2 [V,r]. (DSpark, equation 5)"""

    def __init__(self, vocab_size, rank):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def __call__(self, logits, previous):
        """Logits [..., V] of slots whose preceding tokens are `previous` [...]: the same, biased."""
        return logits + self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """How sure the drafter is that a slot's argmax is the target's token, given those before: w·[h; W1[x_{k−1}]] + b.

    It reads the drafter and does not teach it: nothing before it gets a gradient, so that a drafter with this head
    drafts what it would without. Its outcome is greedy acceptance; DSpark's is the overlap 1 − ½Σ|p−q|.
    """

    def __init__(self, features):
        super().__init__()
        self.proj = nn.Linear(features, 1)

    def __call__(self, hidden, markov, previous):
        """Scores [...] float32, before the sigmoid: hidden [..., D], a MarkovHead or None, previous tokens [...]."""
        parts = [hidden] if markov is None else [hidden, markov.markov_w1(previous)]
        return self.proj(mx.stop_gradient(mx.concatenate(parts, axis=-1)))[..., 0].astype(mx.float32)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Tokens [..., K] of a block, and the logits [..., K, V] that each was chosen from: their softmax is q."""

    tokens: mx.array
    logits: mx.array


def greedy(logits):
    """The likeliest token of logits [..., V]."""
    return mx.argmax(logits, axis=-1)


def left_to_right(markov, logits, pending, choose=greedy):
    """Choose a block's tokens from base logits [..., K, V] after pending tokens [...]. Returns Drawn.

    With a MarkovHead each slot's logits are biased by the token chosen before it, so slots come one by one, all on the
    device; with None all slots at once. choose: logits [..., V] -> token ids [...], an argmax or a draw.
    """
    if markov is None:
        return Drawn(choose(logits), logits)
    tokens, biased = [], []
    for k in range(logits.shape[-2]):
        biased.append(markov(logits[..., k, :], tokens[-1] if tokens else pending))
        tokens.append(choose(biased[-1]))
    return Drawn(mx.stack(tokens, axis=-1), mx.stack(biased, axis=-2))


def preceding(pending, tokens):
    """The token before each of tokens [..., K], the first of which follows pending [...]."""
    return mx.concatenate([pending[..., None].astype(tokens.dtype), tokens[..., :-1]], axis=-1)
