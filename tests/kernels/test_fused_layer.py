"""A layer's few rows in one kernel against the same by parts, and the parts against mlx-lm's own layer.

R rows, T tokens, Hk key heads, Hv value heads, Dk, Dv head dimensions, K width, C channels; all different.
"""

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache

from kernels import fused_layer, verdicts
from kernels.fused_delta import Layout
from kernels.gated_delta import replay

R, HK, HV, DK, DV, K = 2, 1, 3, 64, 13, 4
C = 2 * HK * DK + HV * DV
HEADS = HK, HV, DK, DV
TOLERANCE = {mx.float32: 3e-6, mx.bfloat16: 3e-2}  # of the largest; a last bit of a bf16 gate acts on every later token
OUTPUTS = "y", "state", "window", "delta", "k", "g", "settled"


def arguments(T, dtype=mx.float32):
    """The arguments of a layer for T tokens, with states."""
    keys = mx.random.split(mx.random.key(1), 8)
    shapes = (R, T, C), (R, T, HV), (R, T, HV), (C, K, 1), (HV,), (HV,), (R, K - 1, C)
    *arrays, before = [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=False)]
    return *arrays, HEADS, before, mx.random.normal((R, HV, DV, DK), key=keys[-1])


def flat(result):
    y, state, window, tape, settled = result
    found = [y, state, window, *([] if tape is None else [tape.delta, tape.k, tape.g])]
    return found if settled is None else [*found, settled]


def assert_alike(found, expected, tolerance):
    for name, one, other in zip(OUTPUTS, flat(found), flat(expected), strict=False):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        one, other = (np.array(value.astype(mx.float32)) for value in (one, other))
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", [(8, 2, 1), (16, 1, 2)])
def test_one_kernel_is_its_parts(dtype, layout):
    for T in (1, 5, 17):
        given = arguments(T, dtype)
        found = fused_layer.layer_step(*given, record=True, build=BUILD, layout=Layout(*layout))
        assert_alike(found, fused_layer.by_parts(*given, record=True), TOLERANCE[dtype])


def test_without_states_or_tape_it_starts_from_zeros():
    given = arguments(5)[:7]
    found = fused_layer.layer_step(*given, build=BUILD, layout=Layout(8, 2, 1))
    assert found[3] is None
    assert_alike(found, fused_layer.by_parts(*given), TOLERANCE[mx.float32])


def test_its_tape_replays_to_the_bits_of_fewer_rows():
    qkv, a, b, *rest = arguments(5)
    layout, state = Layout(8, 2, 1), rest[-1]
    tape = fused_layer.layer_step(qkv, a, b, *rest, record=True, build=BUILD, layout=layout)[3]
    for n in range(1, 6):
        short = [value[:, :n] for value in (qkv, a, b)]
        expected = fused_layer.layer_step(*short, *rest, record=True, build=BUILD, layout=layout)[1]
        np.testing.assert_array_equal(np.array(replay(state, tape, n, build=BUILD)), np.array(expected))


def test_rows_that_only_pad_leave_no_mark():
    qkv, a, b, *rest = arguments(5)
    options = {"record": True, "build": BUILD, "layout": Layout(8, 2, 1)}
    for n in (1, 3, 5):
        y, state, _, tape, _ = fused_layer.layer_step(qkv, a, b, *rest, kept=mx.array(n), **options)
        parts = fused_layer.by_parts(qkv, a, b, *rest, record=True, kept=mx.array(n))
        alone = fused_layer.layer_step(*(value[:, :n] for value in (qkv, a, b)), *rest, **options)
        np.testing.assert_array_equal(np.array(state), np.array(alone[1]))
        np.testing.assert_array_equal(np.array(y[:, :n]), np.array(alone[0]))
        np.testing.assert_array_equal(np.array(tape.delta[:, :n]), np.array(alone[3].delta))
        assert np.isfinite(np.array(y)).all()
        np.testing.assert_allclose(np.array(parts[1]), np.array(state), atol=3e-6, rtol=0)


@pytest.mark.parametrize("n", [0, 1, 4])
def test_rows_that_are_owed_count_as_if_they_had_been_replayed(n):
    options, given = {"record": True, "build": BUILD, "layout": Layout(8, 2, 1)}, arguments(5)
    _, _, window, tape, _ = fused_layer.layer_step(*arguments(4), **options)
    owed, state = fused_layer.Owed(tape, n), replay(given[-1], tape, n, build=BUILD)
    expected = fused_layer.layer_step(*given[:-2], window[:, n : n + K - 1], state, **options)
    given = [*given[:-2], window, given[-1]]
    found = fused_layer.layer_step(*given, owed=owed, **options)
    np.testing.assert_array_equal(np.array(found.settled), np.array(state))
    for one, other in zip(flat(found), flat(expected), strict=False):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    assert_alike(found, fused_layer.by_parts(*given, record=True, owed=owed), TOLERANCE[mx.float32])


def test_a_state_that_is_owed_the_rows_comes_to_the_bits_of_one_that_is_written():
    options, given = {"record": True, "build": BUILD, "layout": Layout(8, 2, 1)}, arguments(5)
    written, owed = (fused_layer.layer_step(*given, **options, owe=owe) for owe in (False, True))
    assert owed.state is None
    for one, other in zip((owed.y, owed.window, *vars(owed.tape).values()), flat(written)[:1] + flat(written)[2:]):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    np.testing.assert_array_equal(np.array(replay(given[-1], owed.tape, 5, build=BUILD)), np.array(written.state))
    assert fused_layer.by_parts(*given, record=True, owe=True).state is None


def test_the_parts_are_mlx_lms_layer():
    """By mlx-lm's layer with an output projection and a norm that let y through; its loop sums in another order."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{name}": size for name, size in zip(names, HEADS, strict=True)}
    layer = qwen3_5.GatedDeltaNet(qwen3_5.TextModelArgs(hidden_size=96, linear_conv_kernel_dim=K, **sizes))
    layer.A_log = mx.random.normal((HV,), key=mx.random.key(2))
    seen = []
    layer.norm = lambda y, z: seen.append(y) or y
    x, cache = mx.random.normal((R, 9, 96), key=mx.random.key(3)), ArraysCache(2)
    layer(x[:, :4], cache=cache)
    before, state = cache.cache
    layer(x[:, 4:], cache=cache)
    rows = [project(x[:, 4:]) for project in (layer.in_proj_qkv, layer.in_proj_a, layer.in_proj_b)]
    weights = layer.conv1d.weight, layer.A_log, layer.dt_bias
    y, after, window, _, _ = fused_layer.by_parts(*rows, *weights, HEADS, before, state)
    for one, other in ((y, seen[-1]), (after, cache[1]), (window[:, -(K - 1) :], cache[0])):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=3e-6, rtol=0)


def test_it_is_measured_at_the_cases_that_ask_for_it():
    found = fused_layer.checks({"dtype": "float32", "delta": [[*HEADS, K], [1, 2, 48, 5, 4], [1, 2, 256, 5, 4]]})
    assert len(found) == 2  # a key dimension of 48 is no multiple of 32, and 256 do not fit in float32
    for T, check in zip((1, 17), found, strict=True):
        qkv, _, _, weight, *_ = arguments(T)
        assert check.case == fused_layer.case(qkv, weight, HEADS)
        y, state, window = check.stock_fn(*check.inputs_fn())
        assert (y.shape, state.shape, window.shape) == ((1, T, HV, DV), (1, HV, DV, DK), (1, K - 1 + T, C))


def test_the_kernel_is_taken_only_where_allowed(monkeypatch):
    taken = []
    monkeypatch.setattr(fused_layer, "layer_step", lambda *given: taken.append(given))
    monkeypatch.setattr(verdicts, "allowed", lambda kernel, case: kernel == "fused_layer.layer_step")
    fused_layer.layer(*arguments(fused_layer.MOST))
    assert len(taken) == 1
    fused_layer.layer(*arguments(fused_layer.MOST + 1))
    assert len(taken) == 1
