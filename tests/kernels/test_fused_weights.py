"""Attention weights of blocks in one kernel, on the host, against a loop in NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD

from kernels import fused_weights

ROUNDING = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}  # half an ulp, relative
ROUNDED = 2e-6  # of weights up to 1: float32 exponentials and their sum
R, G, H, N, B = 2, 3, 2, 4, 5


def given(T, dtype, causal=False):
    """Scores and masks; the first block of the first row sees no context at all."""
    shapes = (R, G, H * N * B, T), (R, G, H, N, B, B)
    context, block = ((4 * mx.random.normal(shape, key=mx.random.key(T))).astype(dtype) for shape in shapes)
    seen = np.random.default_rng(T).random((R, 1, N, B, T)) < 0.4
    seen[0, 0, 0] = False
    own = np.tril(np.ones((B, B), bool)) if causal else np.ones((B, B), bool)
    return context, block, mx.array(seen), mx.array(own[None, None, None])


def oracle(context, block, seen, own):
    """The weights, one row at a time."""
    context, block = (np.array(part.astype(mx.float32)).astype(np.float64) for part in (context, block))
    seen, own = np.array(seen)[:, 0], np.array(own)[0, 0, 0]
    of_context, of_block = np.zeros(context.shape), np.zeros(block.shape)
    for r, g, h, n, b in np.ndindex(R, G, H, N, B):
        row = (h * N + n) * B + b
        z = np.concatenate([context[r, g, row][seen[r, n, b]], block[r, g, h, n, b][own[b]]])
        weights = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        count = seen[r, n, b].sum()
        of_context[r, g, row][seen[r, n, b]], of_block[r, g, h, n, b][own[b]] = weights[:count], weights[count:]
    return of_context, of_block


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("T", "causal"), [(7, False), (1, True), (24, True), (264, False), (301, False)])
@pytest.mark.parametrize("run", [lambda *given: fused_weights.fused(*given, build=BUILD), fused_weights.plain])
def test_weights_are_the_softmax_of_what_is_seen(run, T, causal, dtype):
    arrays = given(T, dtype, causal)
    for found, expected in zip(run(*arrays), oracle(*arrays), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, rtol=ROUNDING[dtype], atol=ROUNDED)


def test_masks_that_are_broadcast_are_read_as_they_are_meant():
    context, block, seen, own = given(16, mx.float32)
    thin = mx.broadcast_to(seen[:, :, :, :1], seen.shape)
    for found, expected in zip(
        fused_weights.fused(context, block, thin, own, build=BUILD), oracle(context, block, thin, own), strict=True
    ):
        np.testing.assert_allclose(np.array(found), expected, atol=ROUNDED)


def test_it_is_measured_where_blocks_are_trained():
    assert not fused_weights.checks({"dtype": "float32"})
    (check,) = fused_weights.checks({"dtype": "float32", "blocks": [[24, 3]]})
    arrays = check.inputs_fn()
    assert check.case == fused_weights.case(arrays[0].dtype, 3)
    for one, other in zip(check.kernel_fn(*arrays, build=BUILD), check.stock_fn(*arrays), strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=check.tolerance)


def test_unmeasured_the_plain_operations_serve():
    arrays = given(9, mx.float32)
    for one, other in zip(fused_weights.weigh(*arrays), fused_weights.plain(*arrays), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
