"""Block sizes."""

import dataclasses
import math

import mlx.core as mx
import pytest

from decode import schedule
from decode.cycle import Cycle
from decode.proposers import Proposal
from decode.schedule import (
    AutoOff,
    Cut,
    ExpectedValue,
    Fixed,
    Survival,
    Survivals,
    inverse_perplexity,
    top_probability,
)
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


def block(probabilities):
    """A Proposal whose logits give each proposed token this probability, over a vocabulary of five."""
    logits = [[math.log(p), *[math.log((1 - p) / 4)] * 4] for p in probabilities]
    return Proposal((0,) * len(probabilities), logits=mx.array(logits))


def outcome(proposed, accepted, ended=False):
    """A cycle that offered and accepted so many; ended: its text stopped before the refusal."""
    return Cycle(proposed + 1, proposed, accepted, accepted + (not ended))


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.0, 4), (0.9, 1), (0.70, 2), (0.45, 3), (0.28, 3), (0.27, 4), (0.96, 0)],
)
def test_a_cut_falls_where_the_chance_of_the_whole_chain_is_too_small(threshold, expected):
    policy = Cut(5, "confidence", threshold)
    assert policy.keep(block([0.95, 0.8, 0.6, 0.6])) == expected  # chain .95, .76, .456, .2736
    assert policy.read == pytest.approx((0.95, 0.8, 0.6, 0.6)[:expected], abs=1e-6)


def test_nothing_past_the_cut_is_looked_at():
    for later in (0.3, 0.99):
        policy = Cut(5, "confidence", 0.5)
        assert policy.keep(block([0.9, 0.4, later, later])) == 1
        assert policy.read == pytest.approx((0.9,))


def test_a_calibrated_cut_uses_the_calibrated_chance():
    assert Cut(4, "confidence", 0.5, lambda p: p / 2).keep(block([0.9, 0.9, 0.9])) == 0
    assert Cut(4, "confidence", 0.5, lambda p: 1.0).keep(block([0.3, 0.3, 0.3])) == 3


def test_what_the_target_itself_decided_is_always_offered():
    decided = dataclasses.replace(block([0.01, 0.8, 0.6]), decided=mx.zeros((1, 5)))
    assert Cut(4, "confidence", 0.99).keep(decided) == 1
    assert Cut(4, "confidence", 0.7).keep(decided) == 2


def test_entropy_is_that_of_the_whole_distribution():
    said = inverse_perplexity(block([0.6, 0.2])).tolist()
    entropies = [-(0.6 * math.log(0.6) + 0.4 * math.log(0.1)), math.log(5)]
    assert said == pytest.approx([math.exp(-value) for value in entropies], rel=1e-5)


def test_a_confidence_head_comes_before_the_softmax():
    proposal = Proposal((0, 0), confidence=mx.array([0.25, 0.75]), logits=block([0.9, 0.9]).logits)
    assert top_probability(proposal).tolist() == [0.25, 0.75]


def test_proposals_without_logits_are_refused_by_a_cut():
    with pytest.raises(UserError, match="without logits"):
        Cut(4, "confidence", 0.5).keep(Proposal((1, 2)))


def test_survival_is_not_biased_by_short_blocks():
    whole, cut = Survivals(3), Survivals(3)
    for _ in range(40):
        whole.observe(outcome(3, 3))
        cut.observe(outcome(3, 3))
        cut.observe(outcome(1, 1))  # says nothing of slots 2 and 3
    assert cut.shares()[0] == pytest.approx(whole.shares()[0], abs=0.01)
    assert cut.shares()[1:] == pytest.approx(whole.shares()[1:], abs=0.02)


def test_survival_converges_to_the_product_of_what_each_slot_showed():
    found = Survivals(2)
    for _ in range(200):  # slot 1 fails once in four, slot 2 once in the three that reach it
        for accepted in (0, 1, 2, 2):
            found.observe(outcome(2, accepted))
    assert found.shares() == pytest.approx([3 / 4, 3 / 4 * 2 / 3], abs=0.06)


def test_a_text_that_ends_inside_a_block_refuses_nothing():
    found, before = Survivals(3), Survivals(3).shares()
    found.observe(outcome(3, 0, ended=True))
    assert found.shares() == before


def test_the_survival_policy_drafts_as_deep_as_slots_survive():
    policy = Survival(6, 0.5)
    assert policy.block_size(math.inf) > 2  # hopeful at first
    for _ in range(60):
        policy.observe(outcome(5, 2))
    sizes = [policy.block_size(math.inf) for _ in range(schedule.PROBE)]
    assert sorted(set(sizes)) == [3, 6] and sizes.count(6) == 1  # slots 1 and 2 survive; one look at the rest
    assert policy.block_size(2) == 2


@pytest.mark.parametrize(
    ("costs", "accepted", "expected"),
    [
        ({1: 10, 2: 11, 3: 12, 4: 13}, 3, 4),  # rows nearly free, all accepted
        ({1: 10, 2: 11, 3: 12, 4: 40}, 3, 3),  # the last row costs more than its token is worth
        ({1: 10, 2: 25, 3: 40, 4: 60}, 3, 1),  # a row costs more than a step: off
        ({1: 10, 2: 15, 3: 16, 4: 17}, 0, 1),  # nothing is accepted: off
        ({1: 10, 2: 15, 3: 16, 4: 17}, 1, 2),
    ],
)
def test_expected_value_weighs_tokens_against_milliseconds(costs, accepted, expected):
    policy = ExpectedValue(4, costs)
    for _ in range(80):
        policy.observe(outcome(3, accepted))
    assert policy.block_size(math.inf) == expected


def test_costs_must_cover_every_block_size():
    with pytest.raises(UserError, match="no milliseconds for block size 3; measure 1 to 4"):
        ExpectedValue(4, {1: 1.0, 2: 2.0, 4: 4.0})


def test_drafting_that_loses_is_turned_off_and_tried_again():
    policy = AutoOff(4, {1: 10, 2: 15, 3: 20, 4: 25})
    sizes = []
    for _ in range(3 * schedule.PATIENCE):
        sizes.append(policy.block_size(math.inf))
        policy.observe(outcome(sizes[-1] - 1, min(1, sizes[-1] - 1)))  # two tokens for 25 ms: a step is 10
    on, off = [4] * schedule.PATIENCE, [1] * schedule.PATIENCE
    assert sizes == on + off + on


def test_drafting_that_wins_stays_on():
    policy = AutoOff(4, {1: 10, 2: 15, 3: 20, 4: 25})
    for _ in range(3 * schedule.PATIENCE):
        assert policy.block_size(math.inf) == 4
        policy.observe(outcome(3, 2))
