"""Cross-entropy and its slope in one kernel, on the host, against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest
from builds import BUILD

from kernels import fused_loss

ROUNDING = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}  # half an ulp, relative
ROUNDED = 4e-6  # sums of some thousand float32 exponentials, and their logarithm


def oracle(logits, labels):
    """(loss, slope) in float64."""
    z = np.array(logits.astype(mx.float32)).astype(np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    q = np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)
    loss = np.log(np.exp(z).sum(axis=-1)) - np.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
    q[np.arange(len(q)), labels] -= 1
    return loss, q


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("n", "V"), [(3, 5), (1, 600), (2, 4104), (2, 1001)])
@pytest.mark.parametrize("run", [lambda *given: fused_loss.fused(*given, build=BUILD), fused_loss.plain])
def test_value_and_slope_are_the_formulas(run, n, V, dtype):
    logits = (5 * mx.random.normal((n, V), key=mx.random.key(V))).astype(dtype)
    labels = np.random.default_rng(n).integers(0, V, n)
    loss, slope = run(logits, mx.array(labels))
    expected, slopes = oracle(logits, labels)
    assert (loss.dtype, slope.dtype) == (mx.float32, dtype)
    np.testing.assert_allclose(np.array(loss), expected, rtol=ROUNDED, atol=ROUNDED)
    np.testing.assert_allclose(np.array(slope.astype(mx.float32)), slopes, rtol=ROUNDING[dtype], atol=ROUNDED)


def test_logits_far_apart_and_hidden_ones_stay_finite():
    logits = mx.array([[3e4, -3e4, -mx.inf, 0.0], [-mx.inf, -mx.inf, 1.0, -mx.inf], [-300.0, -301.0, -900.0, -300.0]])
    labels = np.array([1, 2, 0])
    for loss, slope in (
        fused_loss.fused(logits, mx.array(labels), build=BUILD),
        fused_loss.plain(logits, mx.array(labels)),
    ):
        np.testing.assert_allclose(np.array(loss), [6e4, 0, np.log(2 + np.exp(-1))], rtol=ROUNDED, atol=ROUNDED)
        q = 1 / (2 + np.exp(-1))
        expected = [[1, -1, 0, 0], [0, 0, 0, 0], [q - 1, q * np.exp(-1), 0, q]]
        np.testing.assert_allclose(np.array(slope), expected, atol=ROUNDED)


def test_it_is_measured_where_a_drafter_is_trained_over_a_vocabulary():
    assert not fused_loss.checks({"dtype": "bfloat16"})
    (check,) = fused_loss.checks({"dtype": "bfloat16", "logits": [40]})
    logits, labels = check.inputs_fn()
    assert (check.kernel, check.case) == ("fused_loss.fused", fused_loss.case(logits.dtype, 40))
    for one, other in zip(check.kernel_fn(logits[:2], labels[:2], build=BUILD), check.stock_fn(logits[:2], labels[:2])):
        np.testing.assert_allclose(
            np.array(one.astype(mx.float32)), np.array(other.astype(mx.float32)), atol=check.tolerance
        )
