"""Controls: what the shuffled drafter is given, and where an arm stands against the twin's floor."""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode.lab import arms as lab_arms
from decode.lab import controls
from decode.proposers import DFlashProposer
from drafter import target as targets

SIZE = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.mktemp("target"))), dtype="float32")


@pytest.fixture(scope="module")
def drafter(target):
    return lab_arms.untrained(target, block_size=SIZE, seed=3)[0]


def test_the_shuffled_control_sees_the_same_values_in_another_order(target, drafter, monkeypatch):
    seen = []
    monkeypatch.setattr(DFlashProposer, "observe", lambda self, tokens, taps: seen.append(taps))
    tap = mx.arange(3 * 96, dtype=mx.float32).reshape(1, 3, 96)
    one, same, other = (controls.ShuffledTaps(target, drafter, SIZE, seed) for seed in (1, 1, 2))
    for proposer in (one, same, other):
        proposer.observe([5, 6, 7], (tap, tap + 1))
    first, again, different = (np.array(taps[0]) for taps in seen)
    np.testing.assert_array_equal(np.sort(first, -1), np.array(tap))
    assert not np.array_equal(first, np.array(tap)) and not np.array_equal(first, different)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(np.array(seen[0][1]), first + 1)  # every tap in the same order


def test_every_control_costs_what_the_drafter_costs_and_none_shares_its_weights(target, drafter):
    built = {arm.name: arm for arm in controls.arms(target, drafter, SIZE, (2, 3), seed=0)}
    names = ["mlx_lm", "mlx_lm-twin", "plain", "ngram-2", "ngram-3", "untrained-4", "shuffled-4", "dflash-4"]
    assert list(built) == names
    ours, random = built["dflash-4"].proposer.drafter, built["untrained-4"].proposer.drafter
    assert ours.config == random.config and ours is drafter and built["shuffled-4"].proposer.drafter is drafter
    assert not mx.array_equal(ours.fc.weight, random.fc.weight).item()
