"""Anchors, labels and visibility against loops over single positions."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from drafter import anchors

B = 5
T = 23
# Two packed rows of 23 tokens: (document id, prompt tokens, answer tokens), then padding.
ROWS = [[(3, 2, 7), (8, 0, 5), (1, 4, 3)], [(2, 1, 12), (6, 3, 2), (7, 2, 1)]]


@pytest.fixture
def packed():
    """(tokens, loss_mask, documents) [2,23]: one document without a prompt, one of one answer token."""
    loss_mask, documents = np.zeros((2, T), bool), np.zeros((2, T), np.int32)
    for row, pieces in enumerate(ROWS):
        at = 0
        for document, prompt, answer in pieces:
            documents[row, at : at + prompt + answer] = document
            loss_mask[row, at + prompt : at + prompt + answer] = True
            at += prompt + answer
    return np.random.default_rng(1).integers(10, 99, (2, T)).astype(np.int32), loss_mask, documents


def spans():
    """(row, document, first answer position, end of the document) of every document."""
    for row, pieces in enumerate(ROWS):
        at = 0
        for document, prompt, answer in pieces:
            yield row, document, at + prompt, at + prompt + answer
            at += prompt + answer


def test_an_anchor_is_an_answer_token_that_an_answer_token_follows(packed):
    valid = anchors.valid_positions(*packed[1:])
    expected = {(row, at) for row, _, first, end in spans() for at in range(first, end - 1)}
    assert set(zip(*map(list, np.nonzero(valid)), strict=True)) == expected


def test_the_first_answer_token_may_be_an_anchor_and_the_last_prompt_token_never(packed):
    valid = anchors.valid_positions(*packed[1:])
    for row, document, first, end in spans():
        assert valid[row, first] == (end - first > 1)
        if first > 0 and packed[2][row, first - 1] == document:
            assert not valid[row, first - 1]


def test_supervision_in_padding_does_not_make_an_anchor(packed):
    tokens, loss_mask, documents = packed
    careless = loss_mask | (documents == 0)
    np.testing.assert_array_equal(anchors.valid_positions(careless, documents)[documents == 0], False)


@pytest.mark.parametrize("per_row", [1, 3, 4, 6, 50])
def test_a_rows_blocks_are_shared_out_evenly_as_far_as_its_documents_have_room(packed, per_row):
    drawn = anchors.sample(*packed, block_size=B, per_row=per_row, rng=np.random.default_rng(2))
    assert drawn.positions.shape == (2, per_row)
    for row in range(2):
        room = {doc: end - first - 1 for place, doc, first, end in spans() if place == row and end - first > 1}
        found = dict.fromkeys(room, 0)
        for position in drawn.positions[row][drawn.used[row]]:
            found[packed[2][row, position]] += 1
        assert sum(found.values()) == min(per_row, sum(room.values()))
        for one, other in itertools.permutations(room, 2):  # who has less than another by two has no more to give
            assert found[one] >= found[other] - 1 or found[one] == room[one]


def test_a_short_document_keeps_its_share_beside_a_long_one():
    """Beside 200 tokens, 6 would get about one anchor of a row's 37; drawn by document they keep all five of theirs."""
    documents = np.repeat([[1, 2]], [200, 6], axis=1).astype(np.int32)
    tokens, loss_mask = np.arange(206, dtype=np.int32)[None], np.ones((1, 206), bool)
    long = set()
    for step in range(12):
        drawn = anchors.sample(tokens, loss_mask, documents, block_size=B, per_row=37, rng=np.random.default_rng(step))
        picked = drawn.positions[drawn.used]
        assert sorted(picked[picked >= 200]) == [200, 201, 202, 203, 204]
        assert len(set(picked[picked < 200])) == 32
        long |= set(picked[picked < 200].tolist())
    assert len(long) > 150  # redrawn: twelve draws of 32 cover most of 199


def test_the_draw_is_uniform_over_a_documents_positions():
    documents, loss_mask = np.ones((1, 41), np.int32), np.ones((1, 41), bool)
    rng, counts = np.random.default_rng(3), np.zeros(41, int)
    for _ in range(2000):
        drawn = anchors.sample(documents, loss_mask, documents, block_size=B, per_row=10, rng=rng)
        counts[drawn.positions[drawn.used]] += 1
    assert counts[40] == 0  # nothing follows it
    assert np.abs(counts[:40] - 500).max() < 6 * np.sqrt(500 * 0.75)  # six deviations of a binomial of mean 500


def test_equal_generators_draw_equal_anchors_and_others_do_not(packed):
    def positions(seed):
        drawn = anchors.sample(*packed, block_size=B, per_row=5, rng=np.random.default_rng(seed))
        return drawn.positions.tolist()

    assert positions(4) == positions(4)
    assert len({str(positions(seed)) for seed in range(6)}) > 1


def test_labels_and_supervision_stop_at_the_documents_end(packed):
    tokens, loss_mask, documents = packed
    drawn = anchors.sample(*packed, block_size=B, per_row=50, rng=np.random.default_rng(5))
    assert (drawn.labels.shape, drawn.supervised.shape) == ((2, drawn.positions.shape[1], B),) * 2
    for row, n in np.ndindex(drawn.positions.shape):
        anchor = drawn.positions[row, n]
        for slot in range(B):
            at = anchor + slot
            inside = at < T and documents[row, at] == documents[row, anchor]
            expected = bool(drawn.used[row, n] and slot > 0 and inside and loss_mask[row, at])
            assert drawn.supervised[row, n, slot] == expected
            if expected or (slot == 0 and drawn.used[row, n]):
                assert drawn.labels[row, n, slot] == tokens[row, at]
    assert not drawn.supervised[~drawn.used].any()
    assert not drawn.used.all()  # the batch was padded, or the line above says nothing


def test_a_block_at_the_rows_end_supervises_only_what_exists():
    tokens, whole = np.arange(50, 59, dtype=np.int32)[None], np.ones((1, 9), bool)
    positions, used = np.array([[7, 0]], np.int32), np.array([[True, True]])
    found = anchors.blocks_at(tokens, whole, whole.astype(np.int32), positions, used, 4)
    assert found.supervised.tolist() == [[[False, True, False, False], [False, True, True, True]]]
    assert found.labels[0, 0, :2].tolist() == [57, 58]
    assert found.labels[0, 1].tolist() == [50, 51, 52, 53]


def test_a_batch_without_a_valid_position_has_no_block():
    documents = np.array([[1, 2, 3, 0]], np.int32)  # documents of one token each
    drawn = anchors.sample(documents, documents > 0, documents, block_size=B, per_row=4, rng=None)
    assert not drawn.used.any()
    assert not drawn.supervised.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_visibility_is_the_rule_said_slot_by_slot(packed, window, causal):
    documents = packed[2]
    starts = [int(np.flatnonzero(documents[0] == document)[0]) for document in (3, 8, 1)]
    positions = np.array([[*starts, 8, 13, 20, 15], [0, 5, 12, 13, 15, 18, 2]], np.int32)
    context, block = anchors.visibility(mx.array(positions), mx.array(documents), B, window=window, causal=causal)
    N = positions.shape[1]
    assert context.shape == (2, 1, N, B, T)
    context, block = np.array(context), np.broadcast_to(np.array(block), (2, 1, N, B, B))
    for row, n, slot in np.ndindex(2, N, B):
        anchor = positions[row, n]
        for t in range(T):
            near = window is None or (anchor + slot) - t < window
            expected = documents[row, t] == documents[row, anchor] and t < anchor and near
            assert context[row, 0, n, slot, t] == expected, (row, n, slot, t)
        for other in range(B):
            assert block[row, 0, n, slot, other] == (not causal or other <= slot)


def test_an_anchor_at_a_documents_start_sees_no_context(packed):
    documents = packed[2]
    start = int(np.flatnonzero(documents[0] == 8)[0])
    context, _ = anchors.visibility(mx.array([[start], [0]]), mx.array(documents), B)
    assert not mx.any(context).item()
