"""Work in turn: the values and gradients of the same work at once, in the memory of one part.

C parts, n rows of a part, D features, V columns.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from drafter.turns import in_turn

C, N, D, V = 5, 3, 7, 11


@pytest.fixture
def arrays():
    """(parts [C,n,D], shared) of a loss whose parts all read the same two arrays."""
    keys = mx.random.split(mx.random.key(0), 3)
    parts, table = mx.random.normal((C, N, D), key=keys[0]), mx.random.normal((D, V), key=keys[1])
    return parts, {"table": table, "inner": {"bias": mx.random.normal((V,), key=keys[2])}}


def judge(i, part, shared):
    """A loss of a part and of which part it is; and its sign, which has no gradient."""
    loss = mx.logsumexp(part @ shared["table"] * (i + 1) + shared["inner"]["bias"], axis=-1)
    return {"loss": loss, "sign": mx.sign(mx.stop_gradient(loss) - 3)}


def at_once(parts, shared):
    found = [judge(i, parts[i], shared) for i in range(C)]
    return {name: mx.concatenate([one[name] for one in found]) for name in ("loss", "sign")}


def total(work):
    """A scalar in which every slot of the loss has a cotangent of its own, some of them from `sign`."""

    def call(parts, shared):
        found = work(parts, shared)
        return mx.sum(found["loss"] * (mx.arange(C * N) + mx.stop_gradient(found["sign"])))

    return call


def test_values_and_gradients_are_those_of_the_work_at_once(arrays):
    found, expected = in_turn(judge, *arrays), at_once(*arrays)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.array(found[name]), np.array(value))
    slopes = mx.grad(total(lambda *given: in_turn(judge, *given)), (0, 1))(*arrays)
    wanted = mx.grad(total(at_once), (0, 1))(*arrays)
    for (name, slope), (_, value) in zip(tree_flatten(slopes), tree_flatten(wanted), strict=True):
        np.testing.assert_allclose(np.array(slope), np.array(value), rtol=2e-6, atol=1e-5, err_msg=name)


def test_with_nothing_shared_each_part_is_judged_once(arrays):
    parts, shared = arrays
    judged = []

    def alone(i, part, _):
        judged.append(i)
        return judge(i, part, shared)

    slope = mx.grad(total(lambda parts, _: in_turn(alone, parts, {})))(parts, shared)
    wanted = mx.grad(total(at_once))(parts, shared)
    np.testing.assert_allclose(np.array(slope), np.array(wanted), rtol=2e-6, atol=1e-5)
    assert judged == list(range(C))


def test_values_without_a_gradient_are_the_same(arrays):
    parts, shared = arrays
    expected = at_once(parts, shared)
    for differentiable in (True, False):
        found = in_turn(lambda i, part, _: judge(i, part, shared), parts, {}, differentiable=differentiable)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(np.array(found[name]), np.array(value))


def peak(count, work):
    """Most bytes held while `count` parts' gradients are made, each part making rows of 40,000 columns."""
    wide = mx.random.normal((D, 40000))
    parts, shared = mx.random.normal((count, N, D)), {"table": wide, "inner": {"bias": mx.zeros(40000)}}
    slope = mx.grad(lambda parts, shared: mx.sum(work(parts, shared)["loss"]), (0, 1))
    mx.eval(parts, shared)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(slope(parts, shared))
    mx.synchronize()
    return mx.get_peak_memory() - before


def test_memory_does_not_grow_with_the_parts():
    """Forty parts hold about what six do; `mx.checkpoint` alone holds as many as MLX begins at once."""
    row = N * 40000 * 4

    def chunked(parts, shared):
        once = mx.checkpoint(lambda part, shared: judge(0, part, shared)["loss"])
        return {"loss": mx.concatenate([once(part, shared) for part in parts])}

    def in_turn_of_all(parts, shared):
        return in_turn(judge, parts, shared)

    def unshared(parts, shared):
        return in_turn(lambda i, part, _: judge(i, part, shared), parts, {})

    for work in (in_turn_of_all, unshared):
        few, many = (peak(count, work) for count in (6, 40))
        assert many < few + 4 * row  # how far the host runs ahead of the device varies
    assert peak(40, chunked) > many + 6 * row
