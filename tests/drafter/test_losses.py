"""Losses and weights against float64 NumPy, one distribution at a time; gradients against its finite differences."""

import math

import mlx.core as mx
import numpy as np
import pytest

from drafter import losses
from oracles import LOSSES, distribution, dpace_loop, overlap_hybrid

SHAPE, V = (2, 3, 5), 37
FLOAT32 = 2e-6  # nats, for losses of up to 10
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
OF_TARGET = sorted(name for name, loss in losses.LOSSES.items() if loss.of_target)
SMOOTH = sorted(set(OF_TARGET) - {"target_cross_entropy"})  # those of p, not of its argmax


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


@pytest.mark.parametrize("dtype", DTYPES)
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


def test_binary_cross_entropy_and_its_gradient_hold_at_any_score():
    scores = np.array([-800.0, -90.0, -3.0, 0.0, 0.5, 40.0, 800.0])
    for outcome in (0.0, 1.0, 0.3):
        given = mx.array(scores, mx.float32)
        found = np.array(losses.binary_cross_entropy(given, mx.array(outcome)))
        expected = [max(s, 0) + math.log1p(math.exp(-abs(s))) - outcome * s for s in scores]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-30)
        slope = np.array(mx.grad(lambda s, y=outcome: mx.sum(losses.binary_cross_entropy(s, mx.array(y))))(given))
        sigmoid = [1 / (1 + math.exp(-s)) if s > -700 else 0.0 for s in scores]
        np.testing.assert_allclose(slope, np.array(sigmoid) - outcome, atol=2e-7, rtol=0)


# Losses against the target's distribution, and the formulas of the papers in float64, one row at a time.


def oracle(name, logits, target):
    """The loss of every row of float64 logits [..., V]."""
    out = np.zeros(logits.shape[:-1])
    for at in np.ndindex(out.shape):
        out[at] = LOSSES[name](distribution(target[at]), distribution(logits[at]))
    return out


def differences(name, logits, target, step=1e-5):
    """The oracle's gradient by each logit of one row, by central differences; the hybrid's λ stays where it is."""
    p, q = distribution(target), distribution(logits)
    share = math.exp(-3 * np.minimum(p, q).sum())
    value = (lambda p, q: overlap_hybrid(p, q, share)) if name == "overlap_hybrid" else LOSSES[name]
    moved = [value(p, distribution(logits + sign * step * unit)) for unit in np.eye(len(logits)) for sign in (1, -1)]
    return (np.array(moved[::2]) - np.array(moved[1::2])) / (2 * step)


def value_and_slope(name, logits, target):
    """(loss [...], gradient [..., V]) of mx.arrays, as float32 NumPy."""
    loss = losses.LOSSES[name].value
    found = loss(logits, target)
    slope = mx.grad(lambda x: mx.sum(loss(x, target)))(logits)
    assert (found.dtype, slope.dtype) == (mx.float32, logits.dtype)
    return np.array(found), np.array(slope.astype(mx.float32))


@pytest.fixture
def pairs():
    """Logits of a drafter and of a target, (2,3,5,V) each, near each other in some rows and far apart in others."""
    generator = np.random.default_rng(7)
    target = generator.normal(size=(*SHAPE, V)) * 3
    return target + generator.normal(size=(*SHAPE, V)) * np.array([[[0.1], [0.5], [1], [3], [6]]]), target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_TARGET)
def test_a_loss_of_the_target_is_its_formula_whatever_the_dtypes(pairs, name, dtype):
    logits, target = (mx.array(value).astype(dtype) for value in pairs)
    found, _ = value_and_slope(name, logits, target)
    stored = (np.array(value.astype(mx.float32), np.float64) for value in (logits, target))
    np.testing.assert_allclose(found, oracle(name, *stored), atol=4 * FLOAT32, rtol=2e-6)


@pytest.mark.parametrize("name", OF_TARGET)
def test_the_gradient_is_the_formulas_by_finite_differences(pairs, name):
    logits, target = (np.array(value, np.float32).astype(np.float64) for value in pairs)
    _, found = value_and_slope(name, mx.array(logits, mx.float32), mx.array(target, mx.float32))
    for at in np.ndindex(SHAPE):
        expected = differences(name, logits[at], target[at])
        np.testing.assert_allclose(found[at], expected, atol=4 * FLOAT32, rtol=1e-5, err_msg=str(at))


def test_a_bf16_gradient_is_the_float32_one_rounded(pairs):
    logits, target = (mx.array(value).astype(mx.bfloat16) for value in pairs)
    for name in OF_TARGET:
        wide = value_and_slope(name, logits.astype(mx.float32), target)[1]
        np.testing.assert_allclose(value_and_slope(name, logits, target)[1], wide, rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize("name", OF_TARGET)
def test_no_gradient_reaches_the_target(pairs, name):
    logits, target = (mx.array(value, mx.float32) for value in pairs)
    assert mx.all(mx.grad(lambda t: mx.sum(losses.LOSSES[name].value(logits, t)))(target) == 0).item()


@pytest.mark.parametrize("name", SMOOTH)
def test_where_the_drafter_is_the_target_loss_and_gradient_vanish(pairs, name):
    logits = mx.array(pairs[0], mx.float32)
    found, slope = value_and_slope(name, logits, logits)
    np.testing.assert_allclose(found, 0, atol=FLOAT32)
    np.testing.assert_allclose(slope, 0, atol=FLOAT32)


@pytest.mark.parametrize("name", ["target_cross_entropy", "forward_kl", "overlap"])
def test_for_a_certain_target_the_loss_is_cross_entropy_with_its_gradient(pairs, name):
    """A one-hot p: the other losses are 2(1−q), and reverse KL is infinite in exact arithmetic."""
    logits, label = pairs[0][0], 11
    target = np.where(np.arange(V) == label, 0.0, -np.inf) + np.zeros((*SHAPE[1:], 1))
    found, slope = value_and_slope(name, mx.array(logits, mx.float32), mx.array(target, mx.float32))
    q = np.apply_along_axis(distribution, -1, logits)
    np.testing.assert_allclose(found, -np.log(q[..., label]), rtol=2e-6, atol=FLOAT32)
    np.testing.assert_allclose(slope, q - (np.arange(V) == label), atol=FLOAT32)


def test_distance_and_hybrid_of_a_certain_target(pairs):
    logits, label = pairs[0][0], 11
    onehot = np.arange(V) == label
    target = mx.array(np.where(onehot, 0.0, -np.inf) + np.zeros((*SHAPE[1:], 1)), mx.float32)
    q = np.apply_along_axis(distribution, -1, logits)
    own = q[..., [label]]
    found, slope = value_and_slope("total_variation", mx.array(logits, mx.float32), target)
    np.testing.assert_allclose(found, 2 * (1 - own[..., 0]), atol=FLOAT32)
    np.testing.assert_allclose(slope, 2 * own * (q - onehot), atol=FLOAT32)
    found, slope = value_and_slope("overlap_hybrid", mx.array(logits, mx.float32), target)
    share = np.exp(-3 * own)
    np.testing.assert_allclose(slope, (share + (1 - share) * own) * (q - onehot), atol=FLOAT32)


HIDDEN = [-1e30, -3e38, -np.inf]  # how logit processors and padded vocabularies mark what never comes


@pytest.mark.parametrize("never", HIDDEN)
@pytest.mark.parametrize("name", OF_TARGET)
def test_what_neither_can_say_changes_nothing(pairs, name, never):
    logits, target = pairs[0][0], pairs[1][0]
    shut = np.where(np.arange(V) % 3 == 1, never, 0)
    found, slope = value_and_slope(name, *(mx.array(value + shut, mx.float32) for value in (logits, target)))
    kept = np.arange(V) % 3 != 1
    expected, by_z = value_and_slope(name, *(mx.array(value[..., kept], mx.float32) for value in (logits, target)))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=FLOAT32)
    np.testing.assert_allclose(slope[..., kept], by_z, atol=FLOAT32)
    assert (slope[..., ~kept] == 0).all()


def test_disjoint_supports_still_say_where_to_go():
    """q underflows wherever p lives: only what is computed from logarithms still pulls towards p."""
    logits, target = mx.array([[300.0, -300, 290]]), mx.array([[-300.0, 300, -310]])
    found, slope = value_and_slope("overlap", logits, target)
    np.testing.assert_allclose(found, [600 - math.log(2)], rtol=1e-6)  # half from each side: min is e^−600 twice
    np.testing.assert_allclose(slope[0, 1], -0.5, atol=1e-4)
    for name, pull in (("target_cross_entropy", -1), ("forward_kl", -1), ("overlap_hybrid", -1)):
        assert value_and_slope(name, logits, target)[1][0, 1] == pytest.approx(pull, abs=1e-6)
    assert value_and_slope("total_variation", logits, target)[0] == pytest.approx(2)
    assert value_and_slope("reverse_kl", logits, target)[0] == pytest.approx(100, abs=0.01)  # log p ends at −100


AWKWARD = {
    "huge": [[3e38, -3e38, 0.0, 1e30], [-3e38, 3e38, 3e38, 0.0]],
    "huge and equal": [[3e38] * 4, [-3e38] * 4],
    "one left": [[-np.inf, -np.inf, 0.0, -np.inf], [0.0, -np.inf, -np.inf, -np.inf]],
    "far": [[29952.0, -29952.0, 0.0, 88.0], [-29952.0, 29952.0, 5.0, 0.0]],
    "flat against sharp": [[0.0] * 4, [3e4, 0.0, 0.0, 0.0]],
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("name", OF_TARGET)
def test_no_logits_give_a_loss_or_gradient_that_is_not_finite(name, kind, dtype):
    rows = [mx.array([row]).astype(dtype) for row in AWKWARD[kind]]
    for logits, target in (rows, rows[::-1], rows[:1] * 2):
        found, slope = value_and_slope(name, logits, target)
        if name == "target_cross_entropy" and kind in ("one left", "huge") and logits is not target:
            assert np.isfinite(slope).all()  # −log 0 is infinite, and is not hidden
            continue
        assert np.isfinite(found).all() and np.isfinite(slope).all()
        assert np.abs(slope).max() <= 200  # of reverse KL; the others are shares of 1 or 2


# Weights.


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (32, 14), (12, 5.25), (4, 1.75), (2, 1)])
def test_weights_decay_from_one_with_the_papers_length(block_size, gamma):
    weights = np.array(losses.exponential_weights(block_size))
    expected = [0.0, *(math.exp(-(k - 1) / gamma) for k in range(1, block_size))]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert (weights[0], weights[1]) == (0, 1)


def test_a_decay_length_of_ones_own_is_taken():
    np.testing.assert_allclose(np.array(losses.exponential_weights(4, 2.0)), [0, 1, 0.60653066, 0.36787944], rtol=1e-6)


def test_uniform_weights_leave_out_the_anchor():
    assert losses.uniform_weights(5).tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_what_each_slot_adds_to_the_expected_length(alpha):
    generator = np.random.default_rng(5)
    surprise = generator.exponential(2, (7, 6))
    supervised = np.arange(6) < generator.integers(1, 8, (7, 1))
    supervised[:, 0] = False
    supervised[2] = [False, True, False, True, True, False]  # a gap counts as certain
    found = np.array(losses.dpace_weights(mx.array(surprise, mx.float32), mx.array(supervised), alpha))
    np.testing.assert_allclose(found, dpace_loop(surprise, supervised, alpha), rtol=1e-6, atol=1e-7)


def test_dpace_by_hand():
    """q = ½, ¼, 1 with α = ½: q̃ = ¾, ⅝, 1; products ¾, 15/32, 15/32."""
    surprise = mx.array([[9.0, math.log(2), math.log(4), 0.0]])
    found = losses.dpace_weights(surprise, mx.array([[False, True, True, True]]), 0.5)
    np.testing.assert_allclose(np.array(found)[0], [0, 27 / 16, 15 / 16, 15 / 32], rtol=1e-6)


def test_dpace_weights_have_no_gradient():
    supervised = mx.array([[False, True, True]])
    slope = mx.grad(lambda s: mx.sum(losses.dpace_weights(s, supervised, 0.5)))(mx.array([[0.0, 1.0, 2.0]]))
    assert mx.all(slope == 0).item()


def test_weights_say_what_their_sum_is_divided_by():
    supervised = mx.array([[False, True, True, False], [False, True, False, False]])
    surprise = mx.full((2, 4), math.log(2))
    made = {name: make(4, 2.0, 0.5)(surprise, supervised) for name, make in losses.WEIGHTS.items()}
    assert {name: weights.shape for name, (weights, _) in made.items()} == dict.fromkeys(losses.WEIGHTS, (2, 4))
    assert made["uniform"][1].item() == 3
    assert made["exponential"][1].item() == pytest.approx(2 + math.exp(-0.5))
    assert made["dpace"][1].item() == 3  # the slots, not their weights
    assert made["dpace"][0].tolist()[1] == [0, 0.75, 0, 0]
