"""The exponential and what is made of it, against float64; which arrays it takes."""

import mlx.core as mx
import numpy as np
import pytest

from kernels import cpu_delta, exponential

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="it serves a CPU, whose bounds these are")

ULP = 2.0**-23  # of float32 relative to a number, at most
EXP, SIGMOID = 1.5 * ULP, 3 * ULP  # relative: an ulp of e^r and half of the product; a sum and a quotient more
TINY = 1.2e-38  # the least normal number of float32
FLUSHED = -87.6  # below it e^x is written as 0


def drawn(low, high, seed=5, shape=(3, 1009, 7)):
    """Numbers of every size between low and high, and both ends."""
    x = np.random.default_rng(seed).uniform(low, high, shape)
    x.flat[:2], x.flat[2:4] = (low, high), (0.0, 1e-30)
    return x.astype(np.float32)


def found(function, *arrays):
    return np.array(function(*map(mx.array, arrays))).astype(float)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(float)))


@pytest.mark.parametrize(("low", "high"), [(FLUSHED, 88), (-1, 1), (-0.01, 0.01), (80, 88)])
def test_the_exponential_is_right_to_an_ulp_and_a_half(low, high):
    x = drawn(low, high)
    np.testing.assert_allclose(found(exponential.exp, x), np.exp(x.astype(float)), rtol=EXP, atol=0)


def test_a_zero_gives_one_and_what_is_too_small_gives_nothing():
    small = np.array([-87.7, -88, -1e4, -3e38, -np.inf], np.float32)
    assert found(exponential.exp, np.array([0.0, -0.0], np.float32)).tolist() == [1, 1]
    assert not found(exponential.exp, small).any()


def test_numbers_that_are_none_stay_so():
    x = np.array([np.nan, 1], np.float32)
    for function, arguments in ((exponential.exp, [x]), (exponential.silu, [x]), (exponential.swiglu, [x, x])):
        assert np.isnan(found(function, *arguments)).tolist() == [True, False]


@pytest.mark.parametrize(("low", "high"), [(-80, 80), (-3, 3), (100, 1e6)])
def test_gates_are_right_to_three_ulp(low, high):
    x, other = drawn(low, high), drawn(-2, 2, seed=6)
    for function, arrays, expected in (
        (exponential.silu, [x], x * sigmoid(x)),
        (exponential.swiglu, [x, other], x * sigmoid(x) * other),
        (exponential.gated, [x, other], sigmoid(x) * other),
    ):
        np.testing.assert_allclose(found(function, *arrays), expected, rtol=SIGMOID, atol=TINY)


def test_far_below_a_gate_is_shut():
    x = np.array([-89, -1e4, -1e30], np.float32)
    assert np.abs(found(exponential.silu, x)[:2]).max() < 1e-33
    assert np.abs(found(exponential.gated, x, np.ones(3, np.float32))).max() < 1e-37


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 7), (1, 11), (4,)])
def test_one_trace_serves_arrays_of_every_shape(shape):
    """Each function is traced once, whatever comes first."""
    x, other = drawn(-9, 9, shape=shape), drawn(-9, 9, seed=7, shape=shape)
    np.testing.assert_allclose(found(exponential.exp, x), np.exp(x.astype(float)), rtol=EXP, atol=0)
    np.testing.assert_allclose(found(exponential.gated, x, other), sigmoid(x) * other, rtol=SIGMOID, atol=0)


def test_only_many_rows_of_float32_on_a_cpu_are_taken(monkeypatch):
    rows = mx.zeros((2, exponential.LEAST_ROWS, 3))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert exponential.serves(rows)
    assert not exponential.serves(rows[:, 1:]) and not exponential.serves(rows.astype(mx.bfloat16))
    assert not exponential.serves(rows[0])
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert not exponential.serves(rows)


def test_without_a_compiler_nothing_is_compiled(monkeypatch):
    rows, gates = mx.zeros((1, exponential.LEAST_ROWS, 3)), mx.zeros((1, 99, 2))
    assert exponential.serves(rows) and cpu_delta.serves(gates, None)
    monkeypatch.setattr(exponential, "compiler", lambda: None)
    assert not exponential.serves(rows) and not cpu_delta.serves(gates, None)
