"""Per-slot losses and position weights, each with its formula and source.

M blocks, B block, V vocabulary. q is the drafter's distribution, p the target's; z are the drafter's logits. Losses are
computed in float32 from logits of any dtype. Those against p have their gradient in closed form: it stays finite where
p or q underflows, and no gradient reaches the target.
"""

import dataclasses
import functools
from collections.abc import Callable

import mlx.core as mx

from kernels import fused_loss

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # cited: DFlash, arXiv 2602.06036, appendix A.1
ETA = 3.0  # cited: the hybrid of LK losses, arXiv 2602.23881
NEVER = -1e30  # the least log-probability: stands for −inf, whose differences would be NaN
UNDERFLOW = -100.0  # log p below which reverse KL counts no further: exp(−100) is at the end of float32 (assumed)


# Losses against labels.


def cross_entropy(logits, labels):
    """−log q(label) in nats: logits [..., V], labels [...] int; returns float32 [...].

    The slope, q less 1 at the label, is made with the value: V is so wide that each pass over the logits counts.
    """

    @mx.custom_function
    def run(logits):
        rows = logits.reshape(-1, logits.shape[-1])
        made = fused_loss.cross_entropy(rows, labels.reshape(-1))
        return tuple(each.reshape(shape) for each, shape in zip(made, (labels.shape, logits.shape)))

    @run.vjp
    def back(logits, cotangents, outputs):
        return cotangents[0][..., None].astype(logits.dtype) * outputs[1]

    return run(logits)[0]


def binary_cross_entropy(scores, outcomes):
    """−y log σ(s) − (1−y) log(1−σ(s)) = log(1 + eˢ) − y·s in nats: scores s [...], outcomes y [...] in 0..1."""
    scores = scores.astype(mx.float32)
    return mx.logaddexp(scores, 0.0) - outcomes * scores


# Losses against the target's logits.


def log_softmax(logits):
    """log softmax in float32, at least NEVER."""
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)  # first: a difference of large numbers would be rounded
    return mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), NEVER)


def with_slope(slope):
    """Make a value of (log q, log p) [..., V] a loss of (drafter's, target's) logits whose gradient by z is `slope`."""

    def made(value):
        @mx.custom_function
        def differentiable(logits, target):
            return value(log_softmax(logits), log_softmax(target))

        @differentiable.vjp
        def pull_back(primals, cotangent, _):
            logits, target = primals
            gradient = cotangent[..., None] * slope(log_softmax(logits), log_softmax(target))
            return gradient.astype(logits.dtype), mx.zeros_like(target)

        @functools.wraps(value)
        def loss(logits, target):
            return differentiable(logits, target)

        return loss

    return made


def through_softmax(q, by_q):
    """The gradient by z of a function whose gradient by q is `by_q`: q∘(g − Σ q g)."""
    return q * (by_q - mx.sum(q * by_q, axis=-1, keepdims=True))


def target_cross_entropy(logits, target):
    """−log q(argmax p), the target's own greedy token as label. (speculators' DFlash; ties to the lowest id)"""
    return cross_entropy(logits, mx.stop_gradient(mx.argmax(target, axis=-1)))


@with_slope(lambda log_q, log_p: mx.exp(log_q) - mx.exp(log_p))
def forward_kl(log_q, log_p):
    """KL(p‖q) = Σ p (log p − log q); gradient q − p. (Distillation: Hinton et al., arXiv 1503.02531)"""
    return mx.sum(mx.exp(log_p) * (log_p - log_q), axis=-1)


def _reverse_slope(log_q, log_p):
    return through_softmax(mx.exp(log_q), log_q - mx.maximum(log_p, UNDERFLOW))


@with_slope(_reverse_slope)
def reverse_kl(log_q, log_p):
    """KL(q‖p) = Σ q (log q − log p), log p at least −100; gradient q∘(log q − log p − KL).

    (MiniLLM, arXiv 2306.08543; the bound is ours: without it a gradient grows with the target's least logit.)
    """
    return mx.sum(mx.exp(log_q) * (log_q - mx.maximum(log_p, UNDERFLOW)), axis=-1)


def _distance_slope(log_q, log_p):
    return through_softmax(mx.exp(log_q), mx.sign(log_q - log_p))


@with_slope(_distance_slope)
def total_variation(log_q, log_p):
    """Σ|p − q|, from 0 to 2: twice the total variation distance, as DSpark weighs it. (arXiv 2607.05147)

    Gradient q∘(s − Σ q s) with s = sign(q − p), 0 where they are equal.
    """
    return mx.sum(mx.abs(mx.exp(log_p) - mx.exp(log_q)), axis=-1)


def log_overlap(log_q, log_p):
    """log α, α = Σ min(p, q): what exact rejection sampling accepts. No underflow: the sum is of exponents."""
    return mx.logsumexp(mx.minimum(log_p, log_q), axis=-1)


def _overlap_slope(log_q, log_p):
    # q∘m / α with m = 1 where q < p, ½ where equal. A share of the overlap at most: finite even where α underflows.
    share = mx.softmax(mx.minimum(log_p, log_q), axis=-1) * (0.5 - 0.5 * mx.sign(log_q - log_p))
    return mx.exp(log_q) * mx.sum(share, axis=-1, keepdims=True) - share


@with_slope(_overlap_slope)
def overlap(log_q, log_p):
    """−log α, α = Σ min(p, q). (LK losses, arXiv 2602.23881) For a one-hot p it is the cross-entropy."""
    return -log_overlap(log_q, log_p)


def _hybrid_slope(log_q, log_p):
    q, share = mx.exp(log_q), mx.exp(-ETA * mx.exp(log_overlap(log_q, log_p)))[..., None]
    return share * (q - mx.exp(log_p)) + (1 - share) * _distance_slope(log_q, log_p) / 2


@with_slope(_hybrid_slope)
def overlap_hybrid(log_q, log_p):
    """λ KL(p‖q) + (1−λ)(1−α), α = Σ min(p, q), λ = exp(−3α) without gradient. (LK losses, arXiv 2602.23881)"""
    alpha = mx.exp(log_overlap(log_q, log_p))
    share = mx.exp(-ETA * alpha)
    return share * mx.sum(mx.exp(log_p) * (log_p - log_q), axis=-1) + (1 - share) * (1 - alpha)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of logits [..., V] and what they are judged by: labels [...], or, `of_target`, the target's logits."""

    value: Callable
    of_target: bool = True


LOSSES = {
    "cross_entropy": Loss(cross_entropy, of_target=False),
    "target_cross_entropy": Loss(target_cross_entropy),
    "forward_kl": Loss(forward_kl),
    "reverse_kl": Loss(reverse_kl),
    "total_variation": Loss(total_variation),
    "overlap": Loss(overlap),
    "overlap_hybrid": Loss(overlap_hybrid),
}


# Position weights.


def gamma_for(block_size):
    """The decay length of a block size: the paper's where it gives one, else max(1, 7B/16)."""
    return GAMMA.get(block_size, max(1.0, 7 * block_size / 16))


def exponential_weights(block_size, gamma=None):
    """Weights [B] of the slots: 0 for the anchor (slot 0), exp(−(k−1)/γ) for slot k. (DFlash §4.2)"""
    slots = mx.arange(block_size).astype(mx.float32)
    return mx.where(slots > 0, mx.exp(-(slots - 1) / (gamma or gamma_for(block_size))), 0.0)


def uniform_weights(block_size):
    """Weights [B] of the slots: 0 for the anchor (slot 0), 1 for every other."""
    return (mx.arange(block_size) > 0).astype(mx.float32)


def dpace_weights(surprise, supervised, alpha):
    """Weights [M,B] by what each slot adds to the expected accepted length. (D-PACE, arXiv 2605.18810)

    surprise [M,B]: −log q(label), float32; supervised [M,B] bool; alpha: smoothing, 0..1. With q̃ = (1−α)q + α, and 1
    where a slot is not supervised, w_j = Σ_{m≥j} Π_{i≤m} q̃_i over supervised m; 0 where j is not. No gradient.
    """
    smooth = mx.where(supervised, (1 - alpha) * mx.exp(-surprise) + alpha, 1.0)
    reached = mx.where(supervised, mx.cumprod(smooth, axis=-1), 0.0)
    return mx.stop_gradient(mx.where(supervised, mx.cumsum(reached, axis=-1, reverse=True), 0.0))


@dataclasses.dataclass(frozen=True)
class FixedWeights:
    """The same weight for a slot in every block; the mean is over their sum."""

    slots: mx.array  # [B]
    of_surprise = False

    def __call__(self, surprise, supervised):
        """(weights [M,B], what the weighted sum is divided by) of supervised [M,B]; surprise is not looked at."""
        weights = self.slots * supervised
        return weights, mx.sum(weights)


@dataclasses.dataclass(frozen=True)
class DPACE:
    """`dpace_weights`; the mean is over the number of slots, so that weights grow as the drafter does. (speculators)"""

    alpha: float
    of_surprise = True

    def __call__(self, surprise, supervised):
        """(weights [M,B], what the weighted sum is divided by) of surprise and supervised [M,B]."""
        return dpace_weights(surprise, supervised, self.alpha), mx.sum(supervised.astype(mx.float32))


# Kinds of weights, each made of (block size, gamma, alpha).
WEIGHTS = {
    "uniform": lambda block_size, gamma, alpha: FixedWeights(uniform_weights(block_size)),
    "exponential": lambda block_size, gamma, alpha: FixedWeights(exponential_weights(block_size, gamma)),
    "dpace": lambda block_size, gamma, alpha: DPACE(alpha),
}
