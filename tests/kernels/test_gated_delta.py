"""Every route of the gated delta rule against a loop in float64, gradients against finite differences of that loop.

R rows, T tokens, Hk key heads, Hv value heads, Dk, Dv head dimensions, N positions; all different.
"""

import time

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD
from mlx_lm.models.gated_delta import gated_delta_ops

from kernels import cpu_delta, fused_delta, gated_delta, plain_delta, verdicts
from kernels.errors import UserError
from oracles import gated_delta_loop

R, T, HK, HV, DK, DV = 2, 37, 3, 6, 5, 7
NAMES = ("q", "k", "v", "g", "beta", "state")
FLOAT32 = 3e-6  # outputs and states of size 3
OF_STATE = 2e-6  # of the largest number in a state, where two forms of one sum are compared
Y_TOLERANCE = {mx.bfloat16: 1.6e-2, mx.float16: 2e-3}  # one rounding of outputs below 4
GRADIENT = 2e-5  # of the largest gradient
CASES = ["scalar", "vector", "masked", "resets", "vector masked resets"]


def drawn(case="scalar", rows=R, tokens=T, heads=(HK, HV), dims=(DK, DV), seed=1):
    """({name: float64 array}, mask or None): unit keys, β up to 2, gates from 0.3 to 1, or 0 where it resets."""
    generator = np.random.default_rng(seed)
    (Hk, Hv), (Dk, Dv) = heads, dims
    k = generator.normal(size=(rows, tokens, Hk, Dk))
    g = generator.uniform(0.3, 1, (rows, tokens, Hv, *[Dk] * ("vector" in case)))
    if "resets" in case:
        g[0, [0, tokens // 3, min(tokens // 3 + 1, tokens - 1)]] = 0
        g[-1, tokens - 1] = 0
    arrays = {
        "q": generator.normal(size=(rows, tokens, Hk, Dk)) / np.sqrt(Dk),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": generator.normal(size=(rows, tokens, Hv, Dv)),
        "g": g,
        "beta": generator.uniform(0, 2, (rows, tokens, Hv)),
        "state": generator.normal(size=(rows, Hv, Dv, Dk)),
    }
    mask = generator.random((rows, tokens)) < 0.7 if "masked" in case else None
    return {name: value.astype(np.float32).astype(float) for name, value in arrays.items()}, mask


def given(arrays, mask, dtype=mx.float32):
    """The arguments of a route: q, k, v in dtype, the others in float32."""
    kept = {name: mx.array(value, dtype if name in "qkv" else mx.float32) for name, value in arrays.items()}
    return [kept[name] for name in NAMES] + [None if mask is None else mx.array(mask)]


def numbers(array):
    return np.array(array.astype(mx.float32))


def on_cpu(q, k, v, g, beta, state=None, mask=None):
    """The chunks of a CPU, for what they serve: no mask, and a gate a head."""
    with mx.stream(mx.cpu):
        if mask is None and g.ndim == 3:
            return cpu_delta.chunked(q, k, v, g, beta, state)[:2]
        return gated_delta.chunked(q, k, v, g, beta, state, mask)


ROUTES = {
    "loop": gated_delta.recur,
    "chunks of 8": lambda *arguments: gated_delta.chunked(*arguments, chunk=8),
    "chunks of 64": gated_delta.chunked,
    "chunks on a CPU": on_cpu,
    "dispatcher": lambda *arguments: gated_delta.gated_delta(*arguments)[:2],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_the_loop(route, case):
    arrays, mask = drawn(case)
    y, state = ROUTES[route](*given(arrays, mask))
    expected, _, states = gated_delta_loop(*arrays.values(), mask)
    np.testing.assert_allclose(numbers(y), expected, atol=FLOAT32, rtol=0)
    np.testing.assert_allclose(numbers(state), states[:, -1], atol=FLOAT32, rtol=0)
    if mask is not None:
        assert not numbers(y)[~mask].any()


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("route", ROUTES)
def test_every_length_is_right_also_from_no_state(route, tokens):
    arrays, _ = drawn(tokens=tokens)
    arguments = given(arrays, None)
    y, state = ROUTES[route](*arguments[:5])
    expected, _, states = gated_delta_loop(*(arrays | {"state": 0 * arrays["state"]}).values())
    np.testing.assert_allclose(numbers(y), expected, atol=FLOAT32, rtol=0)
    np.testing.assert_allclose(numbers(state), states[:, -1], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("dtype", Y_TOLERANCE)
@pytest.mark.parametrize("route", ROUTES)
def test_half_precision_is_read_and_written_and_float32_in_between(route, dtype):
    arrays, _ = drawn()
    arguments = given(arrays, None, dtype)
    y, state = ROUTES[route](*arguments)
    rounded = {name: numbers(value).astype(float) for name, value in zip(NAMES, arguments, strict=False)}
    expected, _, states = gated_delta_loop(*rounded.values())
    assert (y.dtype, state.dtype) == (dtype, mx.float32)
    np.testing.assert_allclose(numbers(y), expected, atol=Y_TOLERANCE[dtype], rtol=0)
    np.testing.assert_allclose(numbers(state), states[:, -1], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("route", ["chunks of 64", "chunks on a CPU"])
@pytest.mark.parametrize("beta", [1, 2])
def test_keys_that_repeat_do_not_cost_digits(beta, route):
    """One key throughout, nothing forgotten: a series Σ(−A)^j would cancel terms of size 1e18, and lose everything."""
    arrays, _ = drawn(tokens=64)
    arrays["k"][:] = arrays["k"][:, :1]
    arrays["beta"][:], arrays["g"][:] = beta, 1
    y, state = ROUTES[route](*given(arrays, None))
    expected, _, states = gated_delta_loop(*arrays.values())
    bound = 1e-5 * np.abs(states).max()  # at β = 2 every token reflects the state, which grows to 35
    np.testing.assert_allclose(numbers(y), expected, atol=bound, rtol=0)
    np.testing.assert_allclose(numbers(state), states[:, -1], atol=bound, rtol=0)


@pytest.mark.parametrize("route", ["chunks of 64", "chunks on a CPU"])
def test_gates_too_small_for_a_logarithm_of_their_quotient_stay_exact(route):
    arrays, _ = drawn()
    arrays["g"] = np.where(np.random.default_rng(2).random(arrays["g"].shape) < 0.3, 1e-30, arrays["g"])
    y, _ = ROUTES[route](*given(arrays, None))
    np.testing.assert_allclose(numbers(y), gated_delta_loop(*arrays.values())[0], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("route", ROUTES)
def test_a_reset_begins_a_document_as_if_it_stood_alone(route):
    arrays, _ = drawn(rows=1)
    arrays["g"][:, 21] = 0
    y, state = ROUTES[route](*given(arrays, None))
    alone, last = ROUTES[route](*[value[:, 21:] for value in given(arrays, None)[:5]])
    np.testing.assert_allclose(numbers(y[:, 21:]), numbers(alone), atol=FLOAT32, rtol=0)
    np.testing.assert_allclose(numbers(state), numbers(last), atol=FLOAT32, rtol=0)


def gradients(route, arrays, mask, weights):
    """d Σ(weights · (y, state)) / d each input, by mlx."""

    def loss(*arguments):
        outputs = route(*arguments, None if mask is None else mx.array(mask))
        return sum(mx.sum(mx.array(w, mx.float32) * out) for w, out in zip(weights, outputs, strict=True))

    found = mx.grad(loss, argnums=list(range(len(NAMES))))(*given(arrays, mask)[:-1])
    return {name: np.array(value) for name, value in zip(NAMES, found, strict=True)}


def drawn_weights():
    generator = np.random.default_rng(9)
    return generator.normal(size=(R, T, HV, DV)), generator.normal(size=(R, HV, DV, DK))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_chunks_are_those_through_the_loop(case):
    arrays, mask = drawn(case)
    expected = gradients(gated_delta.recur, arrays, mask, drawn_weights())
    for route in ("chunks of 8", "chunks of 64"):
        found = gradients(ROUTES[route], arrays, mask, drawn_weights())
        for name in NAMES:
            bound = GRADIENT * np.abs(expected[name]).max()
            np.testing.assert_allclose(found[name], expected[name], atol=bound, rtol=0, err_msg=f"{route}: {name}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_loops_finite_differences(case, name):
    """At the steepest entry, at three others, and at a gate of exactly 0 where there is one."""
    arrays, mask = drawn(case)
    weights = drawn_weights()
    gradient = gradients(gated_delta.chunked, arrays, mask, weights)[name]
    picked = [np.abs(gradient).argmax(), *np.random.default_rng(8).choice(gradient.size, 3, replace=False)]
    picked += list(np.flatnonzero(arrays[name] == 0)[:1]) if name == "g" else []
    for flat in picked:
        at, step, ends = np.unravel_index(flat, gradient.shape), 1e-5, []
        for sign in (1, -1):
            moved = arrays | {name: arrays[name].copy()}
            moved[name][at] += sign * step
            y, _, states = gated_delta_loop(*moved.values(), mask)
            ends.append((weights[0] * y).sum() + (weights[1] * states[:, -1]).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradient[at] == pytest.approx(slope, abs=GRADIENT * float(np.abs(gradient).max()))


@pytest.mark.parametrize("case", CASES)
def test_states_at_positions_are_the_loops_before_those_tokens(case):
    arrays, mask = drawn(case)
    _, k, v, g, beta, state, seen = given(arrays, mask)
    positions = np.array([list(range(T + 1)), list(range(T, -1, -1))])
    found = gated_delta.states_at(k, v, g, beta, mx.array(positions), state, seen, chunk=8)
    states = gated_delta_loop(*arrays.values(), mask)[2]
    np.testing.assert_allclose(numbers(found), states[np.arange(R)[:, None], positions], atol=FLOAT32, rtol=0)


def test_the_state_at_the_end_of_whole_chunks_is_the_last():
    arrays, _ = drawn(tokens=16)
    _, k, v, g, beta, _, _ = given(arrays, None)
    found = gated_delta.states_at(k, v, g, beta, mx.array([[16], [16]]), chunk=8)
    expected = gated_delta_loop(*(arrays | {"state": 0 * arrays["state"]}).values())[2][:, 16:]
    np.testing.assert_allclose(numbers(found), expected, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("case", ["scalar", "vector"])
def test_blocks_started_at_positions_have_the_gradients_of_one_pass_through_the_loop(case):
    """N blocks of B tokens, each from the state before its position, as one batch: the row goes on N times."""
    arrays, _ = drawn(case)
    positions, B = np.array([[4, 30, 11], [0, 8, 29]]), 5
    weights = np.random.default_rng(3).normal(size=(positions.size, B, HV, DV))

    def blocks(value):
        """[R,T,...] as [R·N,B,...]."""
        return mx.concatenate([value[r, p : p + B][None] for r in range(R) for p in positions[r].tolist()])

    def batched(q, k, v, g, beta, state):
        states = gated_delta.states_at(k, v, g, beta, mx.array(positions), state, chunk=8)
        y, _ = gated_delta.chunked(*map(blocks, (q, k, v, g, beta)), states.flatten(0, 1))
        return mx.sum(y * mx.array(weights, mx.float32))

    def through_loop(*inputs):
        y = gated_delta.recur(*inputs)[0]
        return mx.sum(blocks(y) * mx.array(weights, mx.float32))

    arguments = given(arrays, None)[:-1]
    found, expected = (mx.grad(each, argnums=list(range(6)))(*arguments) for each in (batched, through_loop))
    for name, one, other in zip(NAMES, found, expected, strict=True):
        bound = GRADIENT * np.abs(np.array(other)).max()
        np.testing.assert_allclose(np.array(one), np.array(other), atol=bound, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_tape_replayed_to_n_is_the_loop_stopped_after_n_to_the_bit(case):
    arrays, mask = drawn(case, tokens=16)
    arguments = given(arrays, mask)
    _, last, delta = plain_delta.recur_with_deltas(*arguments)
    tape = plain_delta.make_tape(delta, arguments[1], arguments[3], arguments[6])
    for n in range(17):
        short = [value[:, :n] for value in arguments[:5]]
        seen = None if mask is None else arguments[6][:, :n]
        expected = numbers(gated_delta.recur(*short, arguments[5], seen)[1] if n else arguments[5])
        np.testing.assert_array_equal(numbers(gated_delta.replay(arguments[5], tape, n)), expected)
        np.testing.assert_array_equal(numbers(gated_delta.replay(arguments[5], tape, mx.array(n))), expected)
    np.testing.assert_array_equal(numbers(gated_delta.replay(arguments[5], tape, 16)), numbers(last))


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("case", ["scalar", "masked"])
def test_every_route_records_the_same_tape(differentiable, case):
    for tokens in (5, T):
        arrays, mask = drawn(case, tokens=tokens)
        state = mx.array(arrays["state"], mx.float32)
        _, _, tape = gated_delta.gated_delta(*given(arrays, mask), record=True, differentiable=differentiable)
        _, delta, states = gated_delta_loop(*arrays.values(), mask)
        np.testing.assert_allclose(numbers(tape.delta), delta, atol=FLOAT32, rtol=0)
        for n in range(tokens + 1):
            bound = OF_STATE * np.abs(states).max()
            found = gated_delta.replay(state, tape, n)
            np.testing.assert_allclose(numbers(found), states[:, n], atol=bound, rtol=0)


def test_each_row_of_a_batch_may_stop_elsewhere():
    arrays, _ = drawn(tokens=9)
    arguments = given(arrays, None)
    _, _, tape = gated_delta.gated_delta(*arguments, record=True)
    found = gated_delta.replay(arguments[5], tape, mx.array([3, 8]))
    for r, n in enumerate((3, 8)):
        expected = gated_delta.replay(arguments[5], tape, n)[r]
        np.testing.assert_array_equal(numbers(found[r]), numbers(expected))


def test_a_tape_replays_from_no_state():
    arrays, _ = drawn(tokens=4)
    arguments = given(arrays, None)
    _, _, tape = gated_delta.gated_delta(*arguments[:5], record=True)
    expected = gated_delta.recur(*[value[:, :3] for value in arguments[:5]])[1]
    np.testing.assert_array_equal(numbers(gated_delta.replay(None, tape, 3)), numbers(expected))


def test_a_tape_is_bounded_by_its_rows():
    """Its bytes follow from the rows fed since it was armed, whatever state they started from."""
    arrays, _ = drawn(tokens=9)
    tape = gated_delta.gated_delta(*given(arrays, None), record=True)[2]
    assert [tape.delta.shape, tape.k.shape, tape.g.shape] == [(R, 9, HV, DV), (R, 9, HK, DK), (R, 9, HV)]


@pytest.mark.slow
def test_a_prompt_in_chunks_is_five_times_faster_than_mlx_lms_loop():
    """512 tokens at the size of a small hybrid; the least of five times each, taken in turns."""
    arrays, _ = drawn(rows=1, tokens=512, heads=(2, 4), dims=(64, 64))
    arguments, seconds = given(arrays, None)[:6], {gated_delta_ops: [], gated_delta.chunked: []}
    for _ in range(5):
        for route, found in seconds.items():
            start = time.perf_counter()
            mx.eval(route(*arguments))
            found.append(time.perf_counter() - start)
    assert min(seconds[gated_delta_ops]) >= 5 * min(seconds[gated_delta.chunked])


def test_no_tape_is_kept_unless_asked_for():
    arrays, _ = drawn()
    assert gated_delta.gated_delta(*given(arrays, None))[2] is None


KERNEL_CASES = {  # case -> key dimension and layout: each is compiled once, for any number of tokens
    "scalar": (32, (4, 1, 1)),
    "vector": (96, (8, 2, 3)),
    "masked": (64, (16, 3, 2)),
    "resets": (256, fused_delta.LONG_KEYS),
    "vector masked resets": (32, (8, 2, 1)),
}


def kernel_arguments(case, tokens, dtype=mx.float32):
    """(arguments of a route, mask, layout) with 2 key heads, 6 value heads, and 13 value rows: no multiple of any."""
    Dk, layout = KERNEL_CASES[case]
    arrays, mask = drawn(case, tokens=tokens, heads=(2, 6), dims=(Dk, 13))
    return given(arrays, mask, dtype), arrays, mask, fused_delta.Layout(*layout)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_kernel_is_the_loop(case):
    for tokens in (1, 2, 17):
        arguments, arrays, mask, layout = kernel_arguments(case, tokens)
        y, state, tape = fused_delta.step(*arguments, record=True, build=BUILD, layout=layout)
        expected, delta, states = gated_delta_loop(*arrays.values(), mask)
        np.testing.assert_allclose(numbers(y), expected, atol=FLOAT32, rtol=0)
        np.testing.assert_allclose(numbers(state), states[:, -1], atol=FLOAT32, rtol=0)
        np.testing.assert_allclose(numbers(tape.delta), delta, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("dtype", Y_TOLERANCE)
def test_the_kernel_reads_half_precision_from_no_state_without_a_tape(dtype):
    arguments, _, _, layout = kernel_arguments("scalar", 5, dtype)
    y, state, tape = fused_delta.step(*arguments[:5], build=BUILD, layout=layout)
    expected, last = gated_delta.recur(*arguments[:5])
    assert (y.dtype, state.dtype, tape) == (dtype, mx.float32, None)
    np.testing.assert_allclose(numbers(y), numbers(expected), atol=Y_TOLERANCE[dtype], rtol=0)
    np.testing.assert_allclose(numbers(state), numbers(last), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_a_replay_by_the_kernel_ends_in_the_bits_of_its_step(case):
    """Every n from 0 to the rows of a tape, for 1 row, some, and the widest verify."""
    for tokens in (1, 5, 17):
        arguments, _, mask, layout = kernel_arguments(case, tokens)
        state = arguments[5]
        tape = fused_delta.step(*arguments, record=True, build=BUILD, layout=layout)[2]
        for n in range(tokens + 1):
            short = [value[:, :n] for value in arguments[:5]]
            seen = None if mask is None else arguments[6][:, :n]
            step = fused_delta.step(*short, state, seen, record=True, build=BUILD, layout=layout)[1] if n else state
            found = gated_delta.replay(state, tape, n, build=BUILD)
            np.testing.assert_array_equal(numbers(found), numbers(step))
            bound = OF_STATE * np.abs(numbers(step)).max()
            plain = gated_delta.replay_reference(state, tape, n)
            np.testing.assert_allclose(numbers(found), numbers(plain), atol=bound, rtol=0)


def test_the_kernel_replays_each_row_of_a_batch_to_its_own_end():
    arguments, _, _, layout = kernel_arguments("vector", 5)
    tape = fused_delta.step(*arguments, record=True, build=BUILD, layout=layout)[2]
    found = gated_delta.replay(arguments[5], tape, mx.array([4, 2]), build=BUILD)
    for r, n in enumerate((4, 2)):
        alone = gated_delta.replay(arguments[5], tape, n, build=BUILD)[r]
        np.testing.assert_array_equal(numbers(found[r]), numbers(alone))


def test_the_kernel_is_not_measured_or_asked_where_keys_are_too_odd_or_too_long():
    for Dk in (48, 288):
        assert not fused_delta.serves(mx.zeros((1, 1, 1, Dk)))
        assert not fused_delta.checks({"dtype": "float32", "delta": [[1, 2, Dk, 5, 4]]})
    assert fused_delta.serves(mx.zeros((1, 1, 1, 224)))


def test_kernels_are_measured_at_the_cases_that_ask_for_them():
    """What the dispatcher asks verdicts for is what `checks` measures; kernel and plain agree within its tolerance."""
    found = fused_delta.checks({"dtype": "bfloat16", "delta": [[1, 2, 32, 5, 4]]})
    asked = {(check.kernel, check.case) for check in found}
    for T, check in zip((1, 17, 17, 512), found, strict=True):
        q, k, v, g, beta, state = check.inputs_fn()
        assert (check.case, k.shape[1]) == (fused_delta.case(k, v, g), T)
    k, v, g = (mx.zeros((1, 9, *rest), mx.bfloat16) for rest in ((1, 32), (2, 5), (2,)))
    assert ("fused_delta.step", fused_delta.case(k, v, g)) in asked
    assert ("fused_delta.replay", fused_delta.case(k, v.astype(mx.float32), g)) in asked


def test_the_dispatcher_takes_kernels_only_where_allowed_and_never_for_gradients(monkeypatch):
    taken = []
    monkeypatch.setattr(gated_delta, "step", lambda *arguments: taken.append("step") or (None, None, None))
    monkeypatch.setattr(fused_delta, "replay", lambda *arguments: taken.append("replay"))
    monkeypatch.setattr(verdicts, "allowed", lambda kernel, case: case == "float32 2/6 heads 32x13 few tokens")
    arguments, *_ = kernel_arguments("scalar", 5)
    gated_delta.gated_delta(*arguments)
    gated_delta.replay(arguments[5], gated_delta.Tape(arguments[2], arguments[1], arguments[3]), 3)
    assert taken == ["step", "replay"]
    gated_delta.gated_delta(*arguments, differentiable=True)
    gated_delta.gated_delta(*kernel_arguments("scalar", 18)[0])
    gated_delta.gated_delta(*given(*drawn(tokens=5)))
    assert taken == ["step", "replay"]


def test_shapes_that_do_not_fit_are_named():
    arrays, _ = drawn()
    q, k, v, g, beta, state, _ = given(arrays, None)
    with pytest.raises(UserError, match=r"g is \(2, 37, 5\), expected \(2, 37, 6\) or \(2, 37, 6, 5\)"):
        gated_delta.gated_delta(q, k, v, g[..., :5], beta)
    with pytest.raises(UserError, match="5 value heads over 3 key heads"):
        gated_delta.gated_delta(q, k, v[:, :, :5], g[..., :5], beta[..., :5])
    with pytest.raises(UserError, match="chunk 48: expected a power of two"):
        gated_delta.chunked(q, k, v, g, beta, chunk=48)
