"""Block attention against a loop over single queries in float64; gradients against finite differences of that loop.

R rows, T context rows, N blocks, B block, H query heads, G key/value heads, d head dimension; all different.
"""

import math

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD

from kernels import block_attention

R, T, N, B, H, G, D = 2, 11, 3, 5, 6, 2, 7
SCALE = 0.43  # not 1/sqrt(d), so that a hard-wired scale shows
TOLERANCE = {mx.float32: 3e-6, mx.bfloat16: 3e-2, mx.float16: 4e-3}  # outputs of size 1; bf16 carries 8 bits
SHAPES = {
    "queries": (R, H, N, B, D),
    "context_keys": (R, G, T, D),
    "context_values": (R, G, T, D),
    "block_keys": (R, G, N, B, D),
    "block_values": (R, G, N, B, D),
}


@pytest.fixture
def arrays():
    generator = np.random.default_rng(5)
    return {name: generator.normal(size=shape) for name, shape in SHAPES.items()}


@pytest.fixture
def masks():
    """context_seen [R,1,N,B,T], some queries seeing no context at all; block_seen [1,1,1,B,B], causal."""
    context = np.random.default_rng(6).random((R, 1, N, B, T)) < 0.4
    context[0, 0, 1] = False
    return context, np.tril(np.ones((B, B), bool))[None, None, None]


def by_loop(arrays, context_seen, block_seen):
    """One query at a time: the keys it sees, the exponentials of its scores, the weighted mean of the values."""
    context_seen = np.broadcast_to(context_seen, (R, 1, N, B, T))
    block_seen = np.broadcast_to(block_seen, (R, 1, N, B, B))
    out = np.zeros(SHAPES["queries"])
    for r, h, n, b in np.ndindex(R, H, N, B):
        g, query = h * G // H, arrays["queries"][r, h, n, b]
        pairs = []
        for t in range(T):
            if context_seen[r, 0, n, b, t]:
                pairs.append((arrays["context_keys"][r, g, t], arrays["context_values"][r, g, t]))
        for i in range(B):
            if block_seen[r, 0, n, b, i]:
                pairs.append((arrays["block_keys"][r, g, n, i], arrays["block_values"][r, g, n, i]))
        exponentials = [math.exp(SCALE * sum(query * key)) for key, _ in pairs]
        for weight, (_, value) in zip(exponentials, pairs, strict=True):
            out[r, h, n, b] += weight / sum(exponentials) * value
    return out


def attend(arrays, masks, dtype=mx.float32):
    given = [mx.array(arrays[name]).astype(dtype) for name in SHAPES]
    return block_attention.attend(*given, *map(mx.array, masks), SCALE)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_query_averages_the_values_it_sees(arrays, masks, dtype):
    found = attend(arrays, masks, dtype)
    assert found.dtype == dtype
    rounded = {name: np.array(mx.array(value).astype(dtype).astype(mx.float32)) for name, value in arrays.items()}
    expected = by_loop(rounded, *masks)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=TOLERANCE[dtype], rtol=0)


def test_without_context_rows_the_block_attends_to_itself(arrays, masks):
    empty = arrays | {name: arrays[name][:, :, :0] for name in ("context_keys", "context_values")}
    found = attend(empty, (masks[0][..., :0], masks[1]))
    expected = by_loop(arrays, np.zeros((R, 1, N, B, T), bool), masks[1])
    np.testing.assert_allclose(np.array(found), expected, atol=TOLERANCE[mx.float32], rtol=0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_is_unseen_may_be_anything(arrays, masks, dtype):
    row, last = 4, B - 1  # nobody sees context row 4; under the causal mask only the last query sees the last slot
    context = masks[0] & (np.arange(T) != row)
    clean = np.array(attend(arrays, (context, masks[1]), dtype).astype(mx.float32))
    poisoned = {name: value.copy() for name, value in arrays.items()}
    for half, at in (("context", (..., row, slice(None))), ("block", (..., last, slice(None)))):
        poisoned[f"{half}_keys"][at] = 1e30
        poisoned[f"{half}_values"][at] = -1e30
    found = np.array(attend(poisoned, (context, masks[1]), dtype).astype(mx.float32))
    np.testing.assert_array_equal(found[..., :last, :], clean[..., :last, :])
    assert not np.array_equal(found[..., last, :], clean[..., last, :])  # the poison is strong enough to be seen


def test_scores_far_apart_stay_finite(arrays, masks):
    large = arrays | {"queries": 300 * arrays["queries"]}
    found = attend(large, masks, mx.bfloat16)
    assert mx.all(mx.isfinite(found)).item()


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_the_loops_finite_differences(arrays, masks, name):
    cotangent = np.random.default_rng(7).normal(size=SHAPES["queries"])

    def through(value):
        given = [mx.array(value if other == name else arrays[other], mx.float32) for other in SHAPES]
        given[list(SHAPES).index(name)] = value
        return mx.sum(block_attention.attend(*given, *map(mx.array, masks), SCALE) * mx.array(cotangent, mx.float32))

    gradient = np.array(mx.grad(through)(mx.array(arrays[name], mx.float32)))
    picked = np.random.default_rng(8).choice(gradient.size, 4, replace=False)
    picked = [*picked, np.abs(gradient).argmax()]
    for flat in picked:
        at, step = np.unravel_index(flat, gradient.shape), 1e-4
        ends = []
        for sign in (1, -1):
            moved = arrays | {name: arrays[name].copy()}
            moved[name][at] += sign * step
            ends.append((by_loop(moved, *masks) * cotangent).sum())
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-5)


ROWS = [(6, 2, 5, 64, 80, 70), (4, 1, 1, 128, 40, 0), (4, 2, 17, 64, 1200, 1111), (4, 1, 9, 256, 48, 33)]


def drawn_rows(H, G, W, d, L, dtype):
    keys = mx.random.split(mx.random.key(5), 6)
    shapes = [(1, H, W, d), (1, G, L, d), (1, G, L, d), (1, G, W, d), (1, G, W, d), (1, W, H, 2, d)]
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]


def attended(q, k, v, length, own_k, own_v, scale, gate, whole=None):
    """The same by a float64 loop over heads and rows, the gate a sigmoid."""
    q, k, v, own_k, own_v, gate = (np.array(x.astype(mx.float32), np.float64) for x in (q, k, v, own_k, own_v, gate))
    _, H, W, d = q.shape
    out = np.zeros((1, W, H * d))
    for h in range(H):
        group = h // (H // k.shape[1])
        for w in range(W):
            rows = np.concatenate([k[0, group, :length], own_k[0, group, : whole or w + 1]])
            values = np.concatenate([v[0, group, :length], own_v[0, group, : whole or w + 1]])
            weights = np.exp(scale * rows @ q[0, h, w])
            answer = weights @ values / weights.sum()
            out[0, w, h * d : (h + 1) * d] = answer / (1 + np.exp(-gate[0, w, h, 1]))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "keys_heads", "W"), [(6, 2, 1), (6, 2, 4), (3, 3, 1), (5, 1, 2)])
def test_rows_of_many_sequences_average_what_each_of_them_sees(heads, keys_heads, W, dtype):
    sequences, L = 4, 13
    generator = np.random.default_rng(11)
    queries = generator.normal(size=(sequences, heads, W, D))
    keys, values = generator.normal(size=(2, sequences, keys_heads, L, D))
    seen = generator.random((sequences, 1, W, L)) < 0.5
    seen[..., 3] = True
    expected = np.zeros_like(queries)
    for sequence, head, row in np.ndindex(sequences, heads, W):
        shared = head // (heads // keys_heads)
        there = np.flatnonzero(seen[sequence, 0, row])
        scores = [SCALE * float(queries[sequence, head, row] @ keys[sequence, shared, key]) for key in there]
        weights = [math.exp(score - max(scores)) for score in scores]
        parts = [weight * values[sequence, shared, key] for weight, key in zip(weights, there)]
        expected[sequence, head, row] = sum(parts) / sum(weights)
    given = [mx.array(array).astype(dtype) for array in (queries, keys, values)]
    found = block_attention.attend_sequences(*given, mx.array(seen), SCALE)
    assert found.dtype == dtype
    assert np.abs(np.array(found.astype(mx.float32)) - expected).max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("H", "G", "W", "d", "L", "length"), ROWS)
def test_verify_rows_see_the_cache_and_their_block_up_to_themselves(H, G, W, d, L, length):
    q, k, v, own_k, own_v, gate = drawn_rows(H, G, W, d, L, mx.bfloat16)
    k[:, :, length:] = v[:, :, length:] = mx.nan  # what lies in the buffer past its length must not count
    scale = d**-0.5
    expected = attended(q, k, v, length, own_k, own_v, scale, gate)
    part = mx.array(block_attention.keys_of_a_part(length))
    arguments = (q, k, v, mx.array(length), part, own_k, own_v, scale, gate)
    found = block_attention.attend_rows(*arguments, build=BUILD)
    # weights and answers round to bfloat16: 2^-9 of the largest value each, and their errors add up over the keys
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), expected, atol=2.0**-8 * np.abs(expected).max(), rtol=2.0**-7
    )


@pytest.mark.parametrize("whole", [1, 4, 5])
@pytest.mark.parametrize(("H", "G", "W", "d", "L", "length"), [ROWS[0], (4, 1, 5, 128, 40, 0), (4, 2, 5, 64, 160, 127)])
def test_a_drafts_rows_see_the_cache_and_the_whole_block_but_no_padding(H, G, W, d, L, length, whole):
    q, k, v, own_k, own_v, gate = drawn_rows(H, G, W, d, L, mx.bfloat16)
    k[:, :, length:] = v[:, :, length:] = mx.nan
    own_k[:, :, whole:] = 100.0  # a padding row that was seen would take all weight
    expected = attended(q, k, v, length, own_k, own_v, 0.1, gate, whole)
    part = mx.array(block_attention.keys_of_a_part(length))
    options = {"gate": gate, "whole": whole, "build": BUILD}
    found = block_attention.attend_rows(q, k, v, mx.array(length), part, own_k, own_v, 0.1, **options)
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), expected, atol=2.0**-8 * np.abs(expected).max(), rtol=2.0**-7
    )


@pytest.mark.parametrize("whole", [None, 3])
def test_the_plain_route_gives_the_same_in_float32(whole):
    H, G, W, d, L, length = ROWS[0]
    q, k, v, own_k, own_v, gate = drawn_rows(H, G, W, d, L, mx.float32)
    found = block_attention.attend_rows_reference(q, k, v, mx.array(length), None, own_k, own_v, 0.2, gate, whole)
    np.testing.assert_allclose(found, attended(q, k, v, length, own_k, own_v, 0.2, gate, whole), atol=2e-6)


@pytest.mark.parametrize("w", [0, 3, 8])
def test_a_verify_rows_answer_is_that_of_the_same_row_alone_bit_for_bit(w):
    H, G, W, d, L, length = 4, 2, 9, 64, 160, 100
    q, k, v, own_k, own_v, gate = drawn_rows(H, G, W, d, L, mx.bfloat16)
    part = mx.array(32)
    wide = block_attention.attend_rows(q, k, v, mx.array(length), part, own_k, own_v, 0.1, gate, build=BUILD)
    end = length + w
    k[:, :, length:end], v[:, :, length:end] = own_k[:, :, :w], own_v[:, :, :w]
    row = (q[:, :, w : w + 1], k, v, mx.array(end), part, own_k[:, :, w : w + 1], own_v[:, :, w : w + 1], 0.1)
    alone = block_attention.attend_rows(*row, gate[:, w : w + 1], build=BUILD)
    assert mx.array_equal(wide[:, w], alone[:, 0])


@pytest.mark.parametrize("length", [0, 1, 2015, 2016, 5000, 40000, 131072])
def test_a_context_of_any_length_has_parts_enough(length):
    part = block_attention.keys_of_a_part(length)
    assert part * block_attention.MOST_PARTS >= length + 32
    assert part % 16 == 0
