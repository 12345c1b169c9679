"""The short convolution against a loop over taps in float64; its gradient against finite differences of that loop.

R rows, T tokens, C channels, K width, all different.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from builds import BUILD

from kernels import causal_conv, verdicts
from oracles import causal_conv_loop

R, T, C, K = 2, 11, 7, 4
TOLERANCE = {mx.float32: 1e-6, mx.bfloat16: 1.6e-2, mx.float16: 2e-3}  # two roundings at outputs below 4
DOCUMENTS = np.array([[4, 4, 4, 9, 9, 2, 2, 2, 2, 2, 5], [1, 3, 3, 3, 3, 3, 3, 3, 6, 6, 6]])


def drawn(width=K, seed=3):
    """x, weight and state, as float64 numbers that bf16 holds exactly."""
    generator = np.random.default_rng(seed)
    shapes = {"x": (R, T, C), "weight": (C, width), "state": (R, width - 1, C)}
    return {name: np.round(16 * generator.uniform(-1, 1, shape)) / 16 for name, shape in shapes.items()}


def run(arrays, documents=None, dtype=mx.float32, zero=False, **chosen):
    x, weight, state = (mx.array(arrays[name]).astype(dtype) for name in ("x", "weight", "state"))
    given = None if documents is None else mx.array(documents)
    return causal_conv.causal_conv(x, weight[..., None], None if zero else state, given, **chosen)


def numbers(array):
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("build", [None, "host"])
def test_each_token_reads_the_taps_before_it(dtype, width, documents, build):
    arrays = drawn(width)
    y, window = run(arrays, documents, dtype, build=build)
    assert (y.dtype, window.dtype) == (dtype, dtype)
    np.testing.assert_array_equal(numbers(window), np.concatenate([arrays["state"], arrays["x"]], axis=1))
    expected = causal_conv_loop(arrays["x"], arrays["weight"], arrays["state"], documents)[1]
    np.testing.assert_allclose(numbers(y), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("tokens", [1, 5, causal_conv.FEW, causal_conv.FEW + 1, 3 * causal_conv.LONG])
def test_the_kernel_serves_any_number_of_tokens_and_channels(tokens):
    generator = np.random.default_rng(tokens)
    C = causal_conv.THREADS + 3
    x, weight, state = (mx.array(generator.normal(size=shape)) for shape in ((R, tokens, C), (C, K, 1), (R, K - 1, C)))
    x, weight, state = (value.astype(mx.float32) for value in (x, weight, state))
    found, expected = causal_conv.fused(x, weight, state, build=BUILD), causal_conv.plain(x, weight, state)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(other), atol=3e-6, rtol=0)


@pytest.mark.parametrize(("rows", "tokens", "channels", "width"), [(2, 64, 7, 4), (1, 71, 9, 3), (3, 97, 1, 2)])
def test_a_prompt_on_a_cpu_reads_the_same_taps(rows, tokens, channels, width):
    generator = np.random.default_rng(tokens)
    shapes = (rows, tokens, channels), (channels, width), (rows, width - 1, channels)
    x, weight, state = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
    y, window = causal_conv.compiled(mx.array(x), mx.array(weight[..., None]), mx.array(state))
    np.testing.assert_array_equal(numbers(window), np.concatenate([state, x], axis=1))
    _, expected = causal_conv_loop(*(array.astype(float) for array in (x, weight, state)))
    np.testing.assert_allclose(numbers(y), expected, atol=3e-6, rtol=0)


def test_documents_of_a_packed_prompt_stay_apart():
    """The passes of a prompt on a CPU know no documents."""
    generator, documents = np.random.default_rng(5), np.repeat([[3, 1, 2], [4, 4, 7]], 30, axis=1)
    shapes = (R, documents.shape[1], C), (C, K), (R, K - 1, C)
    arrays = {name: generator.normal(size=shape) for name, shape in zip(("x", "weight", "state"), shapes)}
    _, expected = causal_conv_loop(*arrays.values(), documents)
    np.testing.assert_allclose(numbers(run(arrays, documents)[0]), expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_sum_is_rounded_before_silu_as_mlx_does(dtype):
    """To the bit on a CPU; without that rounding two outputs of five differ."""
    keys = mx.random.split(mx.random.key(3), 3)
    x, weight, state = (
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key in zip(((2, 40, 16), (16, K, 1), (2, 3, 16)), keys)
    )
    stock = nn.silu(mx.conv1d(mx.concatenate([state, x], axis=1), weight, groups=16))
    assert mx.mean(causal_conv.plain(x, weight, state)[0] != stock).item() < 0.02


def test_gradients_of_a_prompt_are_those_of_plain_operations():
    """The passes of a prompt on a CPU have none, so whoever wants them must not get those."""
    x, weight = mx.random.normal((1, 70, 5)), mx.random.normal((5, K, 1))
    found = mx.grad(lambda x: mx.sum(mx.sin(causal_conv.causal_conv(x, weight, differentiable=True)[0])))(x)
    state = mx.zeros((1, K - 1, 5))
    expected = mx.grad(lambda x: mx.sum(mx.sin(causal_conv.plain(x, weight, state)[0])))(x)
    np.testing.assert_array_equal(numbers(found), numbers(expected))


def test_no_state_is_a_state_of_zeros():
    arrays = drawn()
    empty = arrays | {"state": np.zeros_like(arrays["state"])}
    for one, other in zip(run(arrays, zero=True), run(empty), strict=True):
        np.testing.assert_array_equal(numbers(one), numbers(other))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_feeding_in_pieces_is_feeding_at_once_to_the_bit(dtype):
    arrays = drawn()
    whole, _ = run(arrays, dtype=dtype)
    x, weight, state = (mx.array(arrays[name]).astype(dtype) for name in ("x", "weight", "state"))
    pieces, at = [], 0
    for size in (1, 5, 2, 3):
        y, window = causal_conv.causal_conv(x[:, at : at + size], weight[..., None], state)
        state, at = causal_conv.state_after(window, size, K), at + size
        pieces.append(y)
    np.testing.assert_array_equal(numbers(mx.concatenate(pieces, axis=1)), numbers(whole))


def test_the_state_after_n_tokens_is_the_last_inputs():
    arrays = drawn()
    _, window = run(arrays)
    inputs = np.concatenate([arrays["state"], arrays["x"]], axis=1)
    for n in range(T + 1):
        np.testing.assert_array_equal(numbers(causal_conv.state_after(window, n, K)), inputs[:, n : n + K - 1])
        single = causal_conv.state_after(window, mx.array(n), K)
        np.testing.assert_array_equal(numbers(single), inputs[:, n : n + K - 1])
    lengths = [3, 10]
    found = numbers(causal_conv.state_after(window, mx.array(lengths), K))
    expected = [inputs[r, n : n + K - 1] for r, n in enumerate(lengths)]
    np.testing.assert_array_equal(found, expected)


def test_the_state_at_any_position_goes_on_as_the_packed_row_does():
    arrays = drawn()
    whole, window = run(arrays, DOCUMENTS)
    positions = mx.array([[0, 3, 4, 8], [1, 2, 9, 10]])
    states = causal_conv.state_after(window, positions, K, mx.array(DOCUMENTS))  # [R,N,K−1,C]
    weight = mx.array(arrays["weight"], mx.float32)[..., None]
    for r, i in np.ndindex(*positions.shape):
        at = positions[r, i].item()
        stays = np.flatnonzero(DOCUMENTS[r, at:] == DOCUMENTS[r, at])[-1] + 1
        x = mx.array(arrays["x"][r, at : at + stays], mx.float32)[None]
        y, _ = causal_conv.causal_conv(x, weight, states[r, i][None])
        np.testing.assert_array_equal(numbers(y)[0], numbers(whole)[r, at : at + stays])


def test_the_state_after_the_last_token_is_of_its_document():
    documents = mx.array([[4] * (T - 1) + [5], [4] * T])
    _, window = run(drawn(), documents)
    found = numbers(causal_conv.state_after(window, mx.array([[T], [T]]), K, documents))[:, 0]
    expected = numbers(window)[:, -(K - 1) :]
    expected[0, :-1] = 0  # of the other document
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["x", "weight", "state"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
def test_gradients_are_the_loops_finite_differences(name, documents):
    arrays = drawn()
    cotangent = np.random.default_rng(4).normal(size=(R, T, C))

    def through(value):
        return mx.sum(run(arrays | {name: value}, documents)[0] * mx.array(cotangent, mx.float32))

    gradient = np.array(mx.grad(through)(mx.array(arrays[name], mx.float32)))
    picked = [*np.random.default_rng(5).choice(gradient.size, 6, replace=False), np.abs(gradient).argmax()]
    for flat in picked:
        at, step, ends = np.unravel_index(flat, gradient.shape), 1e-5, []
        for sign in (1, -1):
            moved = {other: value.copy() for other, value in arrays.items()}
            moved[name][at] += sign * step
            ends.append((causal_conv_loop(moved["x"], moved["weight"], moved["state"], documents)[1] * cotangent).sum())
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=5e-6)


def test_the_kernel_is_measured_at_the_cases_that_ask_for_it():
    """What `causal_conv` asks verdicts for is what `checks` measures, and the two agree within the stated tolerance."""
    dims = {"dtype": "bfloat16", "delta": [[1, 2, 3, 5, 4]]}
    found = causal_conv.checks(dims)
    for T, check in zip((1, 17, 512), found, strict=True):
        x, weight = mx.zeros((1, T, 2 * 1 * 3 + 2 * 5), mx.bfloat16), mx.zeros((16, 4, 1))
        assert (check.kernel, check.case) == ("causal_conv.fused", causal_conv.case(x, weight))
        arrays = check.inputs_fn()
        for one, other in zip(check.kernel_fn(*arrays, build=BUILD), check.stock_fn(*arrays), strict=True):
            error = mx.max(mx.abs(one - other)) / mx.max(mx.abs(other))
            assert error.item() <= check.tolerance


def test_the_dispatcher_takes_the_kernel_only_where_allowed_and_never_for_gradients(monkeypatch):
    taken = []
    monkeypatch.setattr(causal_conv, "fused", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(verdicts, "allowed", lambda kernel, case: case == "float32 7 channels width 4 few tokens")
    run(drawn())
    assert len(taken) == 1
    run(drawn(), dtype=mx.bfloat16)
    run(drawn(), differentiable=True)
    assert len(taken) == 1
