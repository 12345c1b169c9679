"""Block sizes."""

import math

import pytest

from decode.schedule import Fixed
from kernels.errors import UserError


def test_a_cycle_never_commits_more_than_remains():
    assert [Fixed(4).block_size(remaining) for remaining in (1, 2, 3, 4, 5, math.inf)] == [1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("size", "limits", "message"),
    [
        (0, {}, "block size 0: .*give 2 or more"),
        (1, {}, "block size 1: .*give 2 or more"),
        (0, {"least": 1}, "block size 0: .*give 1 or more"),
        (9, {"most": 8}, "block size 9: the drafter was trained at block size 8"),
        (2.5, {}, "block size 2.5: expected a whole number"),
        (True, {}, "block size True: expected a whole number"),
    ],
)
def test_a_block_size_that_cannot_be_drafted_is_refused(size, limits, message):
    with pytest.raises(UserError, match=message):
        Fixed(size, **limits)


def test_the_limits_themselves_are_allowed():
    assert Fixed(8, most=8).size == 8
    assert Fixed(1, least=1).size == 1
