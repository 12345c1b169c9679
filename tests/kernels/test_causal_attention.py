"""Attention in blocks of queries, against a softmax in float64 of one query at a time.

R rows, H query heads, G key/value heads, T queries, L keys, d head dimension; all different.
"""

import mlx.core as mx
import numpy as np
import pytest

from kernels.causal_attention import BLOCK, attend_causal
from oracles import distribution

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="it serves a CPU, whose bounds these are")

R, H, G, D = 2, 6, 3, 5
BOUND = 1e-6  # of the largest value


def drawn(T, L, seed=4):
    generator = np.random.default_rng(seed)
    shapes = (R, H, T, D), (R, G, L, D), (R, G, L, D)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def attended(queries, keys, values, scale):
    """Each query over the keys up to its own, which of the last one is the last."""
    T, L = queries.shape[2], keys.shape[2]
    answer = np.zeros(queries.shape)
    for r, h, t in np.ndindex(R, H, T):
        key, value = (rows[r, h // (H // G), : L - T + t + 1].astype(float) for rows in (keys, values))
        answer[r, h, t] = distribution(scale * key @ queries[r, h, t].astype(float)) @ value
    return answer


@pytest.mark.parametrize(("T", "L"), [(1, 1), (7, 19), (BLOCK, BLOCK), (BLOCK + 1, BLOCK + 1), (2 * BLOCK + 9, 301)])
def test_every_query_sees_the_keys_up_to_its_own(T, L):
    arrays = drawn(T, L)
    answer = np.array(attend_causal(*map(mx.array, arrays), 0.7))
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, attended(*arrays, 0.7), atol=BOUND * np.abs(arrays[2]).max(), rtol=0)


def test_scores_far_apart_are_no_trouble():
    """A hidden key that scores far above all others must not decide how the seen ones are scaled."""
    queries, keys, values = drawn(BLOCK + 3, BLOCK + 3)
    keys[:, :, -1] = 40 * np.abs(keys[:, :, -1])
    queries = np.abs(queries)
    answer = np.array(attend_causal(*map(mx.array, (queries, keys, values)), 3.0))
    np.testing.assert_allclose(answer, attended(queries, keys, values, 3.0), atol=6e-6, rtol=0)


def test_what_comes_later_leaves_no_trace():
    queries, keys, values = drawn(BLOCK + 3, BLOCK + 3)
    first = np.array(attend_causal(*map(mx.array, (queries, keys, values)), 0.7))
    keys[:, :, 70:], values[:, :, 70:] = 9.0, 1e20
    second = np.array(attend_causal(*map(mx.array, (queries, keys, values)), 0.7))
    np.testing.assert_array_equal(first[:, :, :70], second[:, :, :70])
