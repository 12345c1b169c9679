"""Staged arms on a small target: the target's own text, and fewer draft passes where the target agrees."""

import pytest

import tiny
from decode.lab import arms as lab_arms
from decode.lab import staging
from decode.proposers import DFlashProposer, Proposal, StagedProposer
from drafter import target as targets

PROMPT = [7, 31, 100, 55, 20, 42]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.mktemp("target"))), dtype="float32")


def test_a_perfect_drafter_is_asked_once_a_block(target, monkeypatch):
    drafter = lab_arms.untrained(target, block_size=7, seed=0)[0]
    plain = lab_arms.Arm("plain", "plain", None, target).run(PROMPT, 24).tokens
    passes = []

    def perfect(self, pending, count):
        at = len(self.seen) - len(PROMPT)  # emitted tokens in the caches; the pending one is the next
        passes.append(at)
        return Proposal(lab_arms.mx.array(plain[at + 1 : at + 1 + count], lab_arms.mx.uint32))

    def observe(self, tokens, taps):
        self.seen = getattr(self, "seen", []) + list(tokens)

    monkeypatch.setattr(DFlashProposer, "begin", lambda self, tokens, taps: self.observe(tokens, taps))
    monkeypatch.setattr(DFlashProposer, "observe", observe)
    monkeypatch.setattr(DFlashProposer, "propose", perfect)
    found = lab_arms.Arm("staged", "staged", 3, target, StagedProposer(target, drafter, 7)).run(PROMPT, 24)
    assert found.tokens == plain
    assert all(cycle.accepted == cycle.proposed for cycle in found.cycles)
    assert [cycle.committed for cycle in found.cycles[:4]] == [3, 3, 3, 3]
    assert passes[:3] == [0, 6, 12]  # two cycles of three tokens for each block of six proposals


def test_the_arms_pair_every_width_with_its_reference(target):
    drafter = lab_arms.untrained(target, block_size=6, seed=0)[0]
    built = {arm.name: arm for arm in staging.arms(target, drafter, 6, (2, 4))}
    assert list(built)[3:] == [
        *("dflash-2", "dflash-4", "dflash-6", "truncated-6-2", "staged-6-2", "truncated-6-4", "staged-6-4"),
    ]
    assert built["truncated-6-4"].block_size == 4 and built["truncated-6-4"].proposer.rows == 6
