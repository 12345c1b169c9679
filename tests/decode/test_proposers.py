"""Proposers: lookup against a scan of the text, the drafter against a fresh context, the script as written."""

import mlx.core as mx
import numpy as np
import pytest

from decode.proposers import (
    DFlashProposer,
    PromptLookup,
    Proposal,
    Proposer,
    Scripted,
    StagedProposer,
    as_proposer,
)
from kernels.errors import UserError

FLOAT32 = 2e-5


def scanned(text, longest, shortest, count):
    """What lookup should propose, by scanning the text (pending token included) from its end for each suffix length."""
    for length in range(min(longest, len(text)), shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                grown = list(text)
                for offset in range(count):
                    grown.append(grown[start + length + offset])
                return tuple(grown[len(text) :])
    return ()


@pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (3, 1), (1, 1), (2, 2)])
def test_lookup_equals_a_scan_for_the_latest_longest_match(longest, shortest):
    draws = np.random.default_rng(longest)
    found = 0
    for _ in range(40):
        text = draws.integers(0, 6, int(draws.integers(2, 40))).tolist()
        proposer, split = PromptLookup(longest, shortest), int(draws.integers(1, len(text)))
        proposer.begin(text[:split], ())
        proposer.observe(text[split:-1], ())
        expected = scanned(text, longest, shortest, 5)
        assert proposer.propose(text[-1], 5).tokens == expected
        found += bool(expected)
    assert found > 10


def test_lookup_prefers_the_longer_match_and_then_the_later_one():
    proposer = PromptLookup(3)
    proposer.begin([1, 2, 3, 10, 9, 2, 3, 11, 1, 2, 3, 12, 7, 2, 3, 13, 1, 2], ())
    assert proposer.propose(3, 1).tokens == (12,)


def test_lookup_goes_on_copying_a_loop_past_the_end():
    proposer = PromptLookup(2)
    proposer.begin([7, 8, 9, 7, 8], ())
    assert proposer.propose(9, 7).tokens == (7, 8, 9, 7, 8, 9, 7)


def test_lookup_forgets_the_text_before():
    proposer = PromptLookup(2)
    proposer.begin([1, 2, 3, 1], ())
    assert proposer.propose(2, 2).tokens == (3, 1)
    proposer.begin([5, 6, 1], ())
    assert proposer.propose(2, 2).tokens == ()


def test_lookup_does_not_propose_on_one_common_token_unless_asked():
    text = [1, 2, 3]
    for ngram, expected in ((3, ()), (1, (2, 3))):
        proposer = PromptLookup(ngram)
        proposer.begin(text, ())
        assert proposer.propose(1, 2).tokens == expected


@pytest.mark.parametrize(("ngram", "shortest"), [(0, None), (2, 3), (2, 0)])
def test_lookup_refuses_lengths_that_make_no_sense(ngram, shortest):
    with pytest.raises(UserError, match="expected 1 ≤ shortest"):
        PromptLookup(ngram, shortest)


def test_a_script_is_read_from_the_token_after_the_pending_one():
    text = list(range(100, 120))
    proposer = Scripted(text)
    proposer.begin(text[:4], ())
    proposer.observe(text[4:6], ())
    assert proposer.propose(text[6], 3).tokens == (107, 108, 109)
    asked = Scripted(lambda position, count: [position, count, 0, 0])
    asked.begin(text[:5], ())
    assert asked.propose(0, 2).tokens == (6, 2)


def taps_of(target, drafter, text):
    return target.forward(mx.array([text]), taps=drafter.config.target_layer_ids).taps


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_drafter_proposes_what_a_fresh_context_over_the_same_rows_gives(tiny_target, tiny_drafter, prompt, count):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=6)
    proposer = DFlashProposer(target, drafter)
    taps = taps_of(target, drafter, prompt)
    proposer.begin([1, 2, 3], [tap[:, :3] * 2 for tap in taps])  # another text, to be forgotten
    bounds = [0, 10, 11, 25, len(prompt)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        take = proposer.begin if start == 0 else proposer.observe
        take(prompt[start:end], [tap[:, start:end] for tap in taps])
    tokens = proposer.propose(9, count).tokens
    assert isinstance(tokens, mx.array)
    assert tokens.shape == (count,)

    cache, mask = drafter.make_cache(), drafter.config.mask_token_id
    drafter.extend(cache, drafter.fuse(taps))
    block = target.embed(mx.array([[9, mask, mask, mask, mask, mask]]))
    logits = target.score(drafter.draft(cache, block))[0]
    assert tokens.tolist() == mx.argmax(logits[1 : count + 1], axis=-1).tolist()
    for held, fresh in zip(proposer.cache.layers, cache.layers, strict=True):
        np.testing.assert_allclose(*(np.array(layer.keys_and_values()[0]) for layer in (held, fresh)), atol=FLOAT32)


def test_what_can_be_handed_in_as_a_drafter(tiny_target, tiny_drafter):
    target = tiny_target("llama")
    lookup = PromptLookup(2)
    assert as_proposer(target, None) is None
    assert as_proposer(target, lookup) is lookup
    wrapped = as_proposer(target, tiny_drafter(target, block_size=6), 4)
    assert (wrapped.name, wrapped.block_size, wrapped.taps) == ("dflash-4", 6, (0, 2))
    with pytest.raises(UserError, match="found Model; drafter.checkpoint.load_drafter"):
        as_proposer(target, target.model)


def test_the_bare_protocol_proposes_nothing():
    proposer = Proposer()
    proposer.begin([1], ())
    assert (len(proposer.propose(1, 4)), proposer.state()) == (0, [])


class Blocks(StagedProposer):
    """A staged proposer whose draft passes yield the given blocks, one after another."""

    def __init__(self, blocks):
        self.rows, self.blocks, self.passes = 1 + len(blocks[0]), iter(blocks), 0
        self.begin([], ())

    def _draft(self, pending, count):
        self.passes += 1
        return mx.array(next(self.blocks), mx.uint32)


@pytest.fixture
def blocks(monkeypatch):
    """make(blocks): see Blocks; what the drafter itself would do is left out."""
    monkeypatch.setattr(DFlashProposer, "begin", lambda self, tokens, taps: None)
    monkeypatch.setattr(DFlashProposer, "observe", lambda self, tokens, taps: None)
    monkeypatch.setattr(DFlashProposer, "propose", lambda self, pending, n: Proposal(self._draft(pending, n)))
    return Blocks


def test_a_block_goes_on_where_the_target_agrees_with_the_whole_stage(blocks):
    staged = blocks([[11, 12, 13, 14, 15, 16], [91, 92, 93, 94, 95, 96]])
    assert staged.propose(10, 2).tokens == (11, 12)
    staged.observe([10, 11, 12], ())
    assert staged.propose(13, 2).tokens == (14, 15) and staged.passes == 1  # the bonus token is what was drafted
    staged.observe([13, 14, 15], ())
    assert staged.propose(16, 2).tokens == (91, 92) and staged.passes == 2  # nothing is left after the 16


@pytest.mark.parametrize(
    ("committed", "pending"),
    [([10, 11], 40), ([10, 11, 12], 40), ([10], 13), ([10, 11], 13)],
    ids=["a refusal", "another bonus", "a refusal of all", "a refusal that ends in the token that was kept"],
)
def test_a_block_that_left_the_text_is_drafted_anew(blocks, committed, pending):
    staged = blocks([[11, 12, 13, 14], [91, 92, 93, 94]])
    staged.propose(10, 2)
    staged.observe(committed, ())
    assert staged.propose(pending, 2).tokens == (91, 92) and staged.passes == 2


def test_a_new_text_begins_with_nothing_kept(blocks):
    staged = blocks([[11, 12, 13, 14], [91, 92, 93, 94]])
    staged.propose(10, 2)
    staged.observe([10, 11, 12], ())
    staged.begin([5, 6], ())
    assert staged.propose(13, 2).tokens == (91, 92)
