"""The small hybrid on text that it never saw, in float32: what is written is `plain`, whatever is proposed.

The oracle is mlx-lm's own generator over mlx-lm's own layers. CI takes a sample; the slow cases take 20 passages of
128 tokens each.
"""

import functools

import pytest
from identity import check, few

from decode.lab import prompts
from drafter import target as targets

BLOCKS = (2, 4, 8, 16)


@pytest.fixture(scope="module")
def reference():
    """The shipped hybrid target."""
    return targets.load("reference_hybrid", dtype="float32")


@functools.cache
def passages():
    return prompts.load("python_heldout", 20).prompts


@pytest.mark.parametrize("index", [3, 12])
def test_any_proposals_leave_the_text_as_it_is(reference, index):
    check(reference, reference.encode(passages()[index].text), (2, 8), few, 24)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(20))
def test_proposals_right_until_any_of_three_slots_leave_every_text_as_it_is(reference, index):
    check(reference, reference.encode(passages()[index].text), BLOCKS, few, 128)
