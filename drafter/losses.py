"""Per-slot losses and position weights, each with its formula and source.

R rows, N blocks, B block, V vocabulary. Losses are computed in float32 from logits of any dtype.
"""

import mlx.core as mx

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # cited: DFlash, arXiv 2602.06036, appendix A.1


def gamma_for(block_size):
    """The decay length of a block size: the paper's where it gives one, else max(1, 7B/16)."""
    return GAMMA.get(block_size, max(1.0, 7 * block_size / 16))


def exponential_weights(block_size, gamma=None):
    """Weights [B] of the slots: 0 for the anchor (slot 0), exp(−(k−1)/γ) for slot k. (DFlash §4.2)"""
    slots = mx.arange(block_size).astype(mx.float32)
    return mx.where(slots > 0, mx.exp(-(slots - 1) / (gamma or gamma_for(block_size))), 0.0)


def cross_entropy(logits, labels):
    """−log softmax(logits)[label] in nats: logits [..., V], labels [...] int; returns float32 [...]."""
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return mx.logsumexp(logits, axis=-1) - picked


LOSSES = {"cross_entropy": cross_entropy}
