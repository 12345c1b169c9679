"""Setting policies up: costs between measured ones, and what one more row is worth."""

import pytest

from decode.lab import policies


def test_costs_between_measured_ones_lie_on_the_line():
    found = policies.interpolated({1: 10.0, 2: 20.0, 8: 50.0})
    assert found == {1: 10.0, 2: 20.0, **{B: pytest.approx(20 + 5 * (B - 2)) for B in range(3, 8)}, 8: 50.0}


def test_a_row_is_worth_what_it_costs_over_what_a_token_takes():
    found = {2: {"verify_ms": 10.0}, 6: {"verify_ms": 14.0}}
    assert policies.worthwhile(found, (2, 6), token_ms=5.0) == pytest.approx(0.2)
    assert policies.worthwhile(found, (2,), token_ms=5.0) == policies.THRESHOLD
    assert policies.worthwhile(found, (2, 6), token_ms=1e6) == policies.BOUNDS[0]
    assert policies.worthwhile(found, (2, 6), token_ms=1e-6) == policies.BOUNDS[1]
