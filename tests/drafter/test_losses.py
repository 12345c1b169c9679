"""Losses against float64 NumPy, one distribution at a time."""

import math

import mlx.core as mx
import numpy as np
import pytest

from drafter import losses

SHAPE, V = (2, 3, 5), 37
FLOAT32 = 2e-6  # nats, for losses of up to 10


@pytest.fixture
def scores():
    generator = np.random.default_rng(3)
    return generator.normal(size=(*SHAPE, V)) * 4, generator.integers(0, V, SHAPE)


def by_loop(logits, labels):
    """−log softmax, label by label, in Python floats."""
    out = np.zeros(labels.shape)
    for at in np.ndindex(labels.shape):
        row = [float(value) for value in logits[at]]
        top = max(row)
        out[at] = math.log(math.fsum(math.exp(value - top) for value in row)) + top - row[labels[at]]
    return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_cross_entropy_is_minus_the_log_probability_whatever_the_dtype(scores, dtype):
    logits = mx.array(scores[0]).astype(dtype)
    found = losses.cross_entropy(logits, mx.array(scores[1]))
    assert (found.dtype, found.shape) == (mx.float32, SHAPE)
    stored = np.array(logits.astype(mx.float32))  # what the loss was given, exactly
    np.testing.assert_allclose(np.array(found), by_loop(stored, scores[1]), atol=4 * FLOAT32, rtol=1e-6)


def test_extreme_bf16_logits_give_finite_losses():
    logits = mx.array([[29952.0, -29952.0, 0.0], [-88.0] * 3, [88.0] * 3, [3e38, 0, 0]]).astype(mx.bfloat16)
    found = np.array(losses.cross_entropy(logits, mx.array([1, 2, 0, 0])))
    np.testing.assert_allclose(found, [59904, math.log(3), math.log(3), 0], atol=1e-5, rtol=0)  # 88 has ULP 8e-6


def test_the_gradient_is_softmax_minus_onehot(scores):
    logits, labels = scores
    found = mx.grad(lambda x: mx.sum(losses.cross_entropy(x, mx.array(labels))))(mx.array(logits, mx.float32))
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    expected = exponentials / exponentials.sum(-1, keepdims=True) - (np.arange(V) == labels[..., None])
    np.testing.assert_allclose(np.array(found), expected, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (32, 14), (12, 5.25), (4, 1.75), (2, 1)])
def test_weights_decay_from_one_with_the_papers_length(block_size, gamma):
    weights = np.array(losses.exponential_weights(block_size))
    expected = [0.0, *(math.exp(-(k - 1) / gamma) for k in range(1, block_size))]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert (weights[0], weights[1]) == (0, 1)


def test_a_decay_length_of_ones_own_is_taken():
    np.testing.assert_allclose(np.array(losses.exponential_weights(4, 2.0)), [0, 1, 0.60653066, 0.36787944], rtol=1e-6)
