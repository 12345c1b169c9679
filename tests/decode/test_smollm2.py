"""On real weights and real prompts, in float32: what is written is `plain`, whatever is proposed.

The oracle is mlx-lm's own generator. CI takes a sample; the slow cases take all 27 of the suite at 64 tokens and every
slot, and 20 of them at 128 tokens and three slots.
"""

import functools

import pytest
from identity import check, few

from decode.lab import prompts

SUITE = range(27)
BLOCKS = (2, 4, 8, 16)


@functools.cache
def suite():
    return prompts.load("suite").prompts


def encoded(target, index):
    """Token ids of a prompt of the suite."""
    return target.encode(suite()[index].text)


@pytest.mark.parametrize("index", [4, 20])
def test_any_proposals_leave_the_text_as_it_is(smollm2, index):
    check(smollm2, encoded(smollm2, index), (2, 8), few, 20)


def test_any_proposals_leave_the_text_of_4_bit_weights_as_it_is(smollm2_4bit):
    tokens = smollm2_4bit.encode("The three rivers are", raw=True)  # short: quantised products are slow on a CPU
    check(smollm2_4bit, tokens, (4,), lambda block_size: {0, 2}, 10)


@pytest.mark.slow
@pytest.mark.parametrize("index", SUITE)
def test_proposals_right_until_any_slot_leave_every_text_as_it_is(smollm2, index):
    check(smollm2, encoded(smollm2, index), BLOCKS, range, 64)


@pytest.mark.slow
@pytest.mark.parametrize("index", SUITE[:20])
def test_proposals_right_until_any_of_three_slots_leave_longer_texts_as_they_are(smollm2, index):
    check(smollm2, encoded(smollm2, index), BLOCKS, few, 128)


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 19])
def test_proposals_right_until_a_slot_leave_texts_of_4_bit_weights_as_they_are(smollm2_4bit, index):
    """Fewer slots and tokens than above: quantised products do without a BLAS, and all of it would take hours."""
    check(smollm2_4bit, encoded(smollm2_4bit, index), BLOCKS, few, 24)
