"""Fused small steps: the bodies on the host against mlx's own operations, and against formulas written out in NumPy.

W rows, H query heads, G key/value heads, d head dimension. The kernels take bfloat16 and are held against the plain
operations on the same values in float32: each rounding on a value's way moves it, or its partner in a rotation, by half
an ULP of the largest at most.
"""

import math

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD

from kernels import fused_rows

ULP = 2.0**-8  # of bfloat16, relative


def draw(*shape, seed, dtype=mx.bfloat16):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def close(found, expected, roundings):
    found, expected = (np.array(value.astype(mx.float32)) for value in (found, expected))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=roundings * ULP / 2 * np.abs(expected).max())


def widened(values):
    return [v.astype(mx.float32) if isinstance(v, mx.array) and v.dtype == mx.bfloat16 else v for v in values]


@pytest.mark.parametrize(
    ("H", "G", "W", "d", "m", "gated", "normed"),
    [(4, 2, 3, 64, 16, True, True), (3, 1, 5, 64, 32, False, False), (2, 1, 1, 128, 24, False, True)],
)
def test_heads_are_normed_and_rotated_as_mlx_does_it(H, G, W, d, m, gated, normed):
    q = draw(1, W, H, 2 * d, seed=1) if gated else draw(1, W, H * d, seed=1)
    k, v = draw(1, W, G * d, seed=2), draw(1, W, G * d, seed=3)
    norms = (draw(d, seed=4), draw(d, seed=5)) if normed else None
    frequencies = mx.exp(-mx.arange(m) / m * math.log(1e4))
    arguments = (q, k, v, norms, frequencies, mx.array(41))
    options = {"heads": (H, G), "gated": gated, "eps": 1e-5}
    found = fused_rows.rotate_heads(*arguments, **options, build=BUILD)
    arguments = (*widened((q, k, v)), normed and widened(norms), frequencies, mx.array(41))
    for one, other in zip(found, fused_rows.rotate_heads_reference(*arguments, **options), strict=True):
        close(one, other, 4)  # normed, weighted, rotated from both of a pair
    assert mx.array_equal(found[2], v.reshape(1, W, G, d).swapaxes(1, 2))


def test_a_rotation_turns_pairs_by_position_times_frequency():
    frequencies = mx.array([0.5, 0.02])
    row = mx.zeros((1, 2, 64)).at[:, :, 0].add(2.0).at[:, :, 5].add(3.0).astype(mx.bfloat16)
    turned, _, _ = fused_rows.rotate_heads_reference(row, row, row, None, frequencies, mx.array(7), heads=(1, 1))
    host, _, _ = fused_rows.rotate_heads(row, row, row, None, frequencies, mx.array(7), heads=(1, 1), build=BUILD)
    for found in (turned, host):
        for w in range(2):
            angle = (7 + w) * 0.5
            expected = np.zeros(64)
            expected[[0, 2, 5]] = 2 * np.cos(angle), 2 * np.sin(angle), 3
            np.testing.assert_allclose(np.array(found[0, 0, w].astype(mx.float32)), expected, rtol=ULP, atol=1e-6)


@pytest.mark.parametrize(("W", "Hv", "Dv"), [(3, 5, 64), (1, 2, 128)])
def test_the_gated_norm_is_mlx_lms(W, Hv, Dv):
    from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

    y, z = draw(1, W, Hv, Dv, seed=1), draw(1, W, Hv, Dv, seed=2)
    layer = Qwen3NextRMSNormGated(Dv, eps=1e-4)
    layer.weight = draw(Dv, seed=3)
    found = fused_rows.gated_norm(y, z, layer.weight, 1e-4, build=BUILD)
    wide = widened((y, z, layer.weight))
    layer.weight = wide[2]
    expected = layer(*wide[:2]).reshape(1, W, Hv * Dv)
    np.testing.assert_allclose(fused_rows.gated_norm_reference(*wide, 1e-4), expected, rtol=1e-6, atol=1e-7)
    close(found, expected, 3)
