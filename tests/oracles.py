"""Plain loops that share no code with what they check. They know mlx-lm's models and caches and nothing of ours.

R rows, T tokens, L held rows, H heads, d head dimension, V vocabulary.
"""

import math

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, QuantizedKVCache, RotatingKVCache


def greedy_uncached(model, prompt, count):
    """`count` greedy token ids after a prompt (list of ids), the whole text run anew for each. No cache at all."""
    text = list(prompt)
    for _ in range(count):
        text.append(mx.argmax(model(mx.array([text]))[0, -1]).item())
    return text[len(prompt) :]


def greedy_stepwise(model, prompt, count, cache):
    """`count` greedy token ids, every token of prompt and answer fed alone into mlx-lm's own cache.

    Afterwards the cache holds the prompt and all but the last of the answer.
    """
    answer, logits = [], None
    for token in prompt:
        logits = model(mx.array([[token]]), cache=cache)
    while True:
        answer.append(mx.argmax(logits[0, -1]).item())
        if len(answer) == count:
            return answer
        logits = model(mx.array([answer[-1:]]), cache=cache)


def cache_rows(cache):
    """A cache's (keys, values) in temporal order as float arrays [R,H,L,d], by reading its fields; () when empty.

    Of a recurrent layer: its (convolution state, state).
    """
    if isinstance(cache, ArraysCache):
        return tuple(value for value in cache.cache if value is not None)
    if cache.keys is None or not cache.offset:
        return ()
    if isinstance(cache, QuantizedKVCache):
        shape = {"group_size": cache.group_size, "bits": cache.bits}
        return tuple(mx.dequantize(*value, **shape)[:, :, : cache.offset] for value in (cache.keys, cache.values))
    if isinstance(cache, ConcatenateKVCache):
        assert cache.keys.shape[2] == cache.offset
    rotating = isinstance(cache, RotatingKVCache)
    pick = mx.array(rotating_order(cache) if rotating else list(range(cache.offset)), mx.int32)
    return cache.keys[:, :, pick], cache.values[:, :, pick]


def rotating_order(cache):
    """Slots of a rotating cache, oldest first: pinned ones, then the last max_size − pinned of the others."""
    pinned, at, size = min(cache.keep, cache.offset), cache._idx, cache.keys.shape[2]
    wrapped = cache.offset > at
    others = [*range(at, size), *range(pinned, at)] if wrapped else list(range(pinned, at))
    wanted = min(cache.offset, cache.max_size) - pinned
    return [*range(pinned), *others[len(others) - wanted :]]


def assert_same_caches(found, expected, tolerance):
    """Two lists of caches hold the same rows at the same offsets, values within an absolute tolerance."""
    for one, other in zip(found, expected, strict=True):
        assert getattr(one, "offset", None) == getattr(other, "offset", None)
        for mine, theirs in zip(cache_rows(one), cache_rows(other), strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=tolerance, rtol=0)


def gated_delta_loop(q, k, v, g, beta, state, mask=None):
    """The gated delta rule in float64, one token and one head at a time.

    q, k [R,T,Hk,Dk], v [R,T,Hv,Dv], g [R,T,Hv] or [R,T,Hv,Dk], beta [R,T,Hv], state [R,Hv,Dv,Dk], mask [R,T] or None.
    Returns y [R,T,Hv,Dv], δ [R,T,Hv,Dv], and the states before every token and after the last [R,T+1,Hv,Dv,Dk].
    """
    (R, T, Hv, Dv), (Hk, Dk) = v.shape, k.shape[2:]
    y, delta, states = np.zeros((R, T, Hv, Dv)), np.zeros((R, T, Hv, Dv)), np.zeros((R, T + 1, Hv, Dv, Dk))
    states[:, 0] = state
    for r, h, t in np.ndindex(R, Hv, T):
        own = h * Hk // Hv
        before = states[r, t, h]
        states[r, t + 1, h] = before
        if mask is None or mask[r, t]:
            decayed = before * g[r, t, h]
            delta[r, t, h] = beta[r, t, h] * (v[r, t, h] - decayed @ k[r, t, own])
            states[r, t + 1, h] = decayed + np.outer(delta[r, t, h], k[r, t, own])
            y[r, t, h] = states[r, t + 1, h] @ q[r, t, own]
    return y, delta, states


def causal_conv_loop(x, weight, state, documents=None):
    """silu of the depthwise convolution in float64, one token and one tap at a time, before silu and after it.

    x [R,T,C], weight [C,K], state [R,K−1,C] (of the first token's document), documents [R,T] or None.
    """
    (R, T, C), K = x.shape, weight.shape[1]
    total = np.zeros((R, T, C))
    for r, t, back in np.ndindex(R, T, K):
        if t - back < 0:
            same, source = documents is None or documents[r, t] == documents[r, 0], state[r, K - 1 + t - back]
        else:
            same, source = documents is None or documents[r, t] == documents[r, t - back], x[r, t - back]
        if same:
            total[r, t] += weight[:, K - 1 - back] * source
    return total, total / (1 + np.exp(-total))


def distribution(row):
    """Softmax of a row in float64."""
    exponentials = np.exp(row - row.max())
    return exponentials / exponentials.sum()


def logarithm(p):
    """log p, and 0 where p is 0: what multiplies it there is 0 too."""
    return np.log(p, out=np.zeros_like(p), where=p > 0)


def kl(p, q):
    """KL(p‖q) in nats."""
    return float((p * (logarithm(p) - logarithm(q))).sum())


def overlap_hybrid(p, q, share=None):
    """λ KL(p‖q) + (1−λ)(1−α) with α = Σ min(p, q); λ is `share`, or exp(−3α)."""
    alpha = np.minimum(p, q).sum()
    share = math.exp(-3 * alpha) if share is None else share
    return share * kl(p, q) + (1 - share) * (1 - alpha)


# Of distributions p (the target's) and q (the drafter's), [V] each.
LOSSES = {
    "target_cross_entropy": lambda p, q: -math.log(q[p.argmax()]),
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "total_variation": lambda p, q: np.abs(p - q).sum(),
    "overlap": lambda p, q: -math.log(np.minimum(p, q).sum()),
    "overlap_hybrid": overlap_hybrid,
}


def dpace_loop(surprise, supervised, alpha):
    """w_j = Σ_{m≥j} Π_{i≤m} ((1−α) q_i + α) over a block's supervised slots, term by term."""
    out = np.zeros(surprise.shape)
    for block in range(len(surprise)):
        slots = np.flatnonzero(supervised[block])
        smooth = {i: (1 - alpha) * math.exp(-surprise[block, i]) + alpha for i in slots}
        for j in slots:
            out[block, j] = sum(math.prod(smooth[i] for i in slots if i <= m) for m in slots if m >= j)
    return out
