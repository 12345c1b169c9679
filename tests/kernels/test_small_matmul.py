"""Few-row products: the kernel's body on the host against a float64 product, at odd shapes, for every epilogue.

W rows, K inputs, N outputs. Tolerances are one rounding of the dtype above the exact sum of the rounded inputs, plus
what float32 sums of K terms may lose.
"""

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD

from kernels import small_matmul
from kernels.small_matmul import Quantised, Tiling

ULP = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
SUM = 3e-6  # float32 sums of up to 200 terms, relative to the sum of magnitudes


def draw(*shape, dtype=mx.bfloat16, seed=0):
    return (mx.random.normal(shape, key=mx.random.key(seed)) * 0.5).astype(dtype)


def exact(x, weight):
    """(x Wᵀ, |x||W|ᵀ) in float64."""
    x, weight = (np.array(value.astype(mx.float32), np.float64) for value in (x, weight))
    return x @ weight.T, np.abs(x) @ np.abs(weight).T


def assert_rounded(found, x, weight, residual=0.0, roundings=1):
    value, magnitude = exact(x, weight)
    bound = roundings * ULP[found.dtype] * (np.abs(value) + np.abs(residual)) + SUM * magnitude
    error = np.abs(np.array(found.astype(mx.float32), np.float64) - value - residual)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize(("rows", "dtype"), [(1, mx.bfloat16), (7, mx.bfloat16), (17, mx.bfloat16), (9, mx.float16)])
def test_a_product_is_the_rounded_exact_sum(rows, dtype):
    x, weight = draw(rows, 192, dtype=dtype), draw(37, 192, dtype=dtype, seed=1)
    assert small_matmul.serves(x, weight)
    assert_rounded(small_matmul.product(x, weight, build=BUILD), x, weight)


@pytest.mark.parametrize("tiling", [Tiling(4, 2, 2), Tiling(3, 2, 1), Tiling(8, 1, 2)])
def test_every_tiling_is_right_and_the_same_for_every_number_of_rows(tiling):
    x, weight = draw(17, 192), draw(37, 192, seed=1)
    together = small_matmul.product(x, weight, build=BUILD, tiling=tiling)
    assert_rounded(together, x, weight)
    for rows in (1, 7):
        part = small_matmul.product(x[:rows], weight, build=BUILD, tiling=tiling)
        assert mx.array_equal(part, together[:rows])


def test_wide_weights_take_other_tilings_than_narrow_ones(monkeypatch):
    monkeypatch.setattr(small_matmul, "TILINGS", {33: Tiling(2, 2, 1), 0: Tiling(1, 1, 1)})
    monkeypatch.setattr(small_matmul, "kernel", lambda *_: lambda arrays, **call: [call])
    found = [small_matmul.product(draw(2, 64), draw(N, 64))["threads"] for N in (33, 32)]
    assert found == [(64, 1, 1), (32, 1, 1)]


def test_joined_weights_equal_each_alone():
    x, sizes = draw(6, 128), (48, 16, 33, 8)
    whole = draw(sum(sizes), 128, seed=1)
    weights = [whole[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    found = mx.concatenate(small_matmul.product(x, *weights, build=BUILD), axis=-1)
    assert mx.array_equal(found, small_matmul.product(x, whole, build=BUILD))


def test_leading_axes_are_kept():
    x, weight = draw(1, 7, 192), draw(37, 192, seed=1)
    found = small_matmul.product(x, weight, build=BUILD)
    assert found.shape == (1, 7, 37)
    assert mx.array_equal(found[0], small_matmul.product(x[0], weight, build=BUILD))


def test_a_residual_is_added_to_the_rounded_product():
    x, weight, residual = draw(7, 192), draw(37, 192, seed=1), draw(7, 37, seed=2)
    found = small_matmul.product(x, weight, residual=residual, build=BUILD)
    assert mx.array_equal(found, small_matmul.product(x, weight, build=BUILD) + residual)


def test_a_gated_product_rounds_as_its_parts_do():
    x, gate, up = draw(5, 128), draw(29, 128, seed=1), draw(29, 128, seed=2)
    found = small_matmul.gated_product(x, gate, up, build=BUILD).astype(mx.float32)
    expected = small_matmul.gated_reference(x, gate, up).astype(mx.float32)
    assert mx.abs(found - expected).max() <= 2 * ULP[mx.bfloat16] * mx.abs(expected).max()
    parts = [small_matmul.product(x, weight, build=BUILD) for weight in (gate, up)]
    assert mx.abs(found - (parts[0] * mx.sigmoid(parts[0]) * parts[1])).max() <= ULP[mx.bfloat16] * mx.abs(found).max()


def quantise(weight, **layout):
    return Quantised(*mx.quantize(weight, **layout), **layout)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 64)])
def test_a_quantised_product_is_that_of_the_weight_rounded_once(bits, group_size):
    x, weight = draw(9, 384), quantise(draw(27, 384, seed=1), bits=bits, group_size=group_size)
    assert small_matmul.serves(x, weight)
    words, *affine = weight.parts
    values = mx.dequantize(words, *(part.astype(mx.float32) for part in affine), bits=bits, group_size=group_size)
    assert_rounded(small_matmul.product(x, weight, build=BUILD), x, values.astype(mx.bfloat16))


def test_quantised_weights_join_gate_and_take_a_residual():
    x, layout = draw(3, 128), {"bits": 4, "group_size": 64}
    first, second = (quantise(draw(24, 128, seed=seed), **layout) for seed in (1, 2))
    residual = draw(3, 24, seed=3)
    apart = [small_matmul.product(x, weight, build=BUILD) for weight in (first, second)]
    for found, alone in zip(small_matmul.product(x, first, second, build=BUILD), apart, strict=True):
        assert mx.array_equal(found, alone)
    assert mx.array_equal(small_matmul.product(x, first, residual=residual, build=BUILD), apart[0] + residual)
    found = small_matmul.gated_product(x, first, second, build=BUILD)
    expected = apart[0] * mx.sigmoid(apart[0]) * apart[1]
    assert mx.abs(found - expected).max() <= ULP[mx.bfloat16] * mx.abs(expected).max()


@pytest.mark.parametrize(
    ("x", "weights"),
    [
        (draw(25, 64), [draw(16, 64)]),
        (draw(3, 64, dtype=mx.float32), [draw(16, 64, dtype=mx.float32)]),
        (draw(3, 64), [draw(16, 64, dtype=mx.float16)]),
        (draw(3, 72), [draw(16, 72)]),
        (draw(3, 64), [draw(16, 64)] * 5),
        (draw(3, 192), [quantise(draw(16, 192), bits=6, group_size=64)]),
        (draw(3, 128), [quantise(draw(16, 128), bits=bits, group_size=64) for bits in (4, 8)]),
    ],
)  # fmt: skip
def test_what_the_kernel_cannot_take_is_not_served(x, weights):
    assert not small_matmul.serves(x, *weights)
