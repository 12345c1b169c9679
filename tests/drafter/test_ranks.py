"""Ranks: parts of a batch, and what one process can show of the sums. tests/scripts/test_ranks.py runs two for real."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

import tiny
from drafter import corpus, objective, ranks
from drafter.documents import Document
from kernels.errors import UserError


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [5, 7, 16])
def test_parts_are_every_row_once_in_order_and_of_like_size(size, count):
    parts = [list(range(count))[ranks.Ranks(rank, size).part(count)] for rank in range(size)]
    assert sum(parts, []) == list(range(count))
    assert {len(part) for part in parts} <= {count // size, -(-count // size)}


@pytest.fixture(scope="module")
def rows():
    """Seven rows of 23 tokens, their documents of 6 to 23."""
    generator, numbered = np.random.default_rng(3), []
    for number, size in enumerate([23, 17, 6, 14, 9, 20, 11, 12, 8, 15, 19], 1):
        tokens = generator.integers(5, tiny.VOCABULARY, size).astype(np.int32)
        numbered.append((number, Document(str(number), tokens, np.arange(size) >= 2)))
    return corpus.pack(numbered, "train", 23, 0, ())


def test_the_ranks_batches_are_the_parts_of_one_process_batch(rows):
    """Same rows, same anchors, whatever the number of ranks; and the ranks' supervised weights differ."""
    assert len(rows) >= 7

    def feed(**options):
        return objective.Feed(rows, rows_per_step=5, block_size=4, per_row=3, seed=2, **options)

    for step in range(3):
        whole = feed()(step)
        parts = [feed(ranks=ranks.Ranks(rank, 3))(step) for rank in range(3)]
        for name in ("tokens", "documents"):
            together = np.concatenate([np.array(getattr(part, name)) for part in parts])
            np.testing.assert_array_equal(together, np.array(getattr(whole, name)))
        for field in dataclasses.fields(whole.anchors):
            together = np.concatenate([getattr(part.anchors, field.name) for part in parts])
            np.testing.assert_array_equal(together, getattr(whole.anchors, field.name))
        assert len({int(part.anchors.supervised.sum()) for part in parts}) > 1


def test_a_store_is_read_for_the_ranks_own_rows_alone(rows):
    asked = []

    class Store:
        def read(self, indices):
            asked.append(indices.tolist())

    for rank in (ranks.ALONE, ranks.Ranks(0, 2), ranks.Ranks(1, 2)):
        objective.Feed(rows, rows_per_step=5, block_size=4, per_row=3, seed=2, store=Store(), ranks=rank)(1)
    assert asked[0] == asked[1] + asked[2]
    assert (len(asked[1]), len(asked[2])) == (2, 3)


def test_a_total_has_the_trees_own_shapes_and_a_text_its_own_letters():
    """As the first of two whose other one adds nothing: the packing and its undoing."""
    first = ranks.Ranks(0, 2)
    tree = (mx.array(2.0), {"a": [mx.arange(6.0).reshape(2, 3), mx.ones((1, 4))], "b": mx.array([5.0])})
    loss, gradients = first.total(tree)
    assert loss.shape == () and loss.item() == 2.0
    np.testing.assert_array_equal(np.array(gradients["a"][0]), np.arange(6.0).reshape(2, 3))
    assert (gradients["a"][1].shape, gradients["b"].tolist()) == ((1, 4), [5.0])
    assert first.told("runs/näme/τ") == "runs/näme/τ"
    assert ranks.ALONE.total(tree) is tree


def test_another_value_than_rank_0s_is_refused(monkeypatch):
    monkeypatch.setattr(ranks.Ranks, "told", lambda self, text: "of rank 0")
    ranks.Ranks(1, 2).check_same("the target", "of rank 0")
    with pytest.raises(UserError, match="rank 1 has the target mine, rank 0 of rank 0; give every rank the same"):
        ranks.Ranks(1, 2).check_same("the target", "mine")


def test_a_lost_rank_is_told_from_other_failures():
    assert ranks.lost(RuntimeError("[ring] connection to a peer was lost"))
    assert not ranks.lost(RuntimeError("[malloc] Unable to allocate 9 bytes; [ring] is fine"))
