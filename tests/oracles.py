"""Plain loops that share no code with what they check. They know mlx-lm's models and caches and nothing of ours.

R rows, T tokens, L held rows, H heads, d head dimension, V vocabulary.
"""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ConcatenateKVCache, QuantizedKVCache, RotatingKVCache


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
    """A cache's (keys, values) in temporal order as float arrays [R,H,L,d], by reading its fields; () when empty."""
    if cache.keys is None:
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
        assert one.offset == other.offset
        for mine, theirs in zip(cache_rows(one), cache_rows(other), strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=tolerance, rtol=0)
