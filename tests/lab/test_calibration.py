"""Calibration: which proposals were judged, the map against a grid search, and the error by hand."""

import math

import numpy as np
import pytest

from decode.lab import calibration


def row(*cycles):
    """A row of (said, accepted, committed) cycles."""
    names = ("confidence_per_cycle", "accepted_per_cycle", "committed_per_cycle")
    return dict(zip(names, map(list, zip(*cycles)), strict=True))


def test_only_what_the_target_answered_is_judged():
    rows = [
        row(([0.9, 0.8, 0.7], 1, 2), ([0.6, 0.5], 2, 3)),  # the third of the first cycle was never reached
        row(([0.4, 0.3], 1, 1), ([0.2], 0, 1), ([], 0, 1)),  # the text ended after the 0.4, before the 0.3 was refused
    ]
    assert calibration.judged(rows) == [
        *((0.9, True), (0.8, False), (0.6, True), (0.5, True)),
        *((0.4, True), (0.2, False)),
    ]


def drawn(slope, offset, n=600):
    """Confidences and outcomes of a drafter whose chance is σ(slope·logit p + offset)."""
    generator = np.random.default_rng(4)
    said = generator.uniform(0.02, 0.98, n)
    chance = 1 / (1 + np.exp(-(slope * np.log(said / (1 - said)) + offset)))
    return list(zip(said.tolist(), (generator.uniform(size=n) < chance).tolist(), strict=True))


def test_the_map_is_the_likeliest_one():
    pairs = drawn(0.6, -0.8)
    x = np.array([math.log(p / (1 - p)) for p, _ in pairs])
    y = np.array([accepted for _, accepted in pairs])
    grid = [(a, b) for a in np.arange(0.2, 1.2, 0.02) for b in np.arange(-1.6, 0.2, 0.02)]
    loss = lambda a, b: np.log1p(np.exp(-np.where(y, 1, -1) * (a * x + b))).sum() + 0.005 * ((a - 1) ** 2 + b**2)
    best = min(grid, key=lambda line: loss(*line))
    found = calibration.fit(pairs)
    assert loss(*found) <= loss(*best) and found == pytest.approx(best, abs=0.02)


def test_calibrated_confidence_has_a_smaller_error():
    pairs = drawn(0.5, -1.0)
    line = calibration.fit(pairs[::2])
    held_out = pairs[1::2]
    moved = [(calibration.apply(line, p), accepted) for p, accepted in held_out]
    assert calibration.error(moved) < 0.5 * calibration.error(held_out)


@pytest.mark.parametrize("outcome", [True, False])
def test_outcomes_all_alike_give_a_finite_map(outcome):
    line = calibration.fit([(p, outcome) for p in (0.1, 0.5, 0.9)])
    assert all(map(math.isfinite, line))
    assert (calibration.apply(line, 0.5) > 0.9) == outcome


def test_no_pairs_leave_confidence_as_it_is():
    line = calibration.fit([])
    assert line == (1.0, 0.0) and calibration.apply(line, 0.3) == pytest.approx(0.3)


def test_the_error_is_the_weighted_gap_of_the_bins():
    pairs = [(0.12, False), (0.18, True), (0.95, True), (0.97, True)]  # gaps .35 and .04, half of the pairs each
    assert calibration.error(pairs) == pytest.approx(0.5 * 0.35 + 0.5 * 0.04)
    assert [one["count"] for one in calibration.bins(pairs, (1.0, 0.0))] == [2, 2]
    assert calibration.bins([(1.0, True)], (1.0, 0.0))[0]["high"] == 1.0


def test_the_table_has_a_row_a_bin():
    found = calibration.findings([row(([0.9, 0.2], 1, 2))], (1.0, 0.0))
    title, header, rows, notes = calibration.table("confidence", found)
    assert [one[1] for one in rows] == ["1", "1"] and {len(one) for one in rows} == {len(header)}
    assert "2 proposals" in notes[0] and "confidence" in title
