"""Two layouts, one loss: many blocks behind one reading of a text are what each would be as a text's own end.

R rows, T tokens, N blocks, B block, V vocabulary. The oracle reads every block alone, token by token up to its end, and
computes total variation in float64.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import corpus, gated_lora, gated_objective, ranks, rng, shared_prefix
from drafter.documents import Document
from drafter.gated_objective import Blocks, Feed
from kernels.errors import UserError
from oracles import distribution

B, R, T = 5, 3, 31
LOSS, GRADIENT = 2e-6, 5e-5  # float32: relative to the loss, and to the largest gradient of a tensor
KINDS = {"llama": ("attention", "mlp"), "qwen3_5": ("attention", "mlp", "delta", "delta_gates"),
         "qwen3_next": ("attention", "delta"), "gemma3_text": ("attention", "mlp")}  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tiny_target):
    """make(kind, **changes): an adapter with random factors that move the loss without saturating it."""

    def make(kind, **changes):
        options = {"rank": 3, "alpha": 7.0, "block_size": B, "targets": KINDS[kind], "mask_token_id": 4}
        config = gated_lora.GatedLoraConfig(**options | {"noise_limit": tiny.VOCABULARY} | changes)
        drafter = gated_lora.GatedLora(tiny_target(kind), config)
        for number, name in enumerate(drafter):
            keys = mx.random.split(mx.random.key(number), 2)
            for factor, key in zip(("lora_a", "lora_b"), keys):
                drafter[name][factor] = 0.1 * mx.random.normal(drafter[name][factor].shape, key=key)
        return drafter

    return make


@pytest.fixture(scope="module")
def packed_rows():
    """Rows of T tokens: documents of 8 to 31 tokens, each with a prompt of two."""
    generator, numbered = np.random.default_rng(4), []
    for number, size in enumerate([31, 19, 12, 8, 23, 11, 20, 14, 9], 1):
        tokens = generator.integers(5, tiny.VOCABULARY, size).astype(np.int32)
        numbered.append((number, Document(str(number), tokens, np.arange(size) >= 2)))
    return corpus.pack(numbered, "train", T, 0, ())


@pytest.fixture(scope="module")
def rows(packed_rows):
    """A batch of R of them."""
    return corpus.select(packed_rows, np.arange(R))


def blocks_of(drafter, layout="prefix", corruption="rate", per_row=4, widest=B):
    return Blocks(drafter.config, widest, per_row, corruption, layout, 11)


def loss_and_gradient(objective, drafter, batch):
    """(loss, measure, {tensor: gradient})."""
    prepared = objective.prepare(drafter, batch)
    parameters = drafter.trainable_parameters()

    def total(parameters):
        drafter.update(parameters)
        return objective(drafter, prepared)

    (loss, measure), gradient = mx.value_and_grad(total)(parameters)
    drafter.update(parameters)
    return loss.item(), measure.item(), {name: np.array(value) for name, value in tree_flatten(gradient)}


@pytest.mark.parametrize("loss", ["total_variation", "cross_entropy", "overlap"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_give_one_loss_and_one_gradient_on_the_same_anchors(adapter, rows, kind, loss):
    drafter = adapter(kind)
    batch = blocks_of(drafter, "suffix")(rows, B, "training", 0)
    assert batch.anchors.supervised.any(axis=(1, 2)).sum() >= 2
    found = [
        loss_and_gradient(made(drafter.target, loss, B, weights="uniform", rows_per_chunk=5), drafter, batch)
        for made in (gated_objective.SuffixObjective, gated_objective.PrefixObjective)
    ]
    (one, measure, slopes), (other, same, others) = found
    assert measure == same == batch.anchors.supervised.sum() > 0
    assert abs(one - other) <= LOSS * abs(one)
    assert slopes.keys() == others.keys()
    for name, slope in slopes.items():
        assert np.abs(slope).max() > 0, name
        np.testing.assert_allclose(others[name], slope, atol=GRADIENT * np.abs(slope).max(), rtol=0, err_msg=name)


def alone(drafter, batch):
    """Σ total variation over supervised rows: each block read by itself, its own document before it, in order."""
    target, total = drafter.target, 0.0
    drawn = batch.anchors
    for r, n in zip(*np.nonzero(drawn.used), strict=True):
        after = int(drawn.positions[r, n])  # of the pending token
        tokens, documents = np.array(batch.tokens[r]), np.array(batch.documents[r])
        start = int(np.flatnonzero(documents == documents[after])[0])
        teacher = np.array(target.model(mx.array(tokens[start:])[None])[0], np.float64)
        block = np.concatenate([tokens[start:after], np.array(batch.noise[r, n])])
        gate = np.arange(len(block)) >= after - start
        student = np.array(target.score(drafter.forward(mx.array(block)[None], gate))[0], np.float64)
        for row in np.flatnonzero(drawn.supervised[r, n]):
            at = after - 1 + row - start
            total += np.abs(distribution(student[at]) - distribution(teacher[at])).sum()
    return total


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma3_text"])
def test_many_blocks_behind_one_reading_are_each_what_it_is_alone(adapter, rows, kind):
    drafter = adapter(kind)
    batch = blocks_of(drafter)(rows, B, "training", 0)
    objective = gated_objective.PrefixObjective(drafter.target, "total_variation", B, weights="uniform")
    total, measure = objective(drafter, objective.prepare(drafter, batch))
    assert measure.item() > 30
    assert abs(total.item() / alone(drafter, batch) - 1) < 1e-5


def test_every_supervised_row_is_noise_and_judged_at_its_own_place(adapter, rows):
    """Row i of a block behind position a is judged by the token a + i + 1; the pending row is not judged."""
    batch = blocks_of(adapter("llama"))(rows, B, "training", 0)
    drawn = batch.anchors
    assert not drawn.supervised[:, :, 0].any()
    assert batch.noise.shape == (*drawn.positions.shape, B - 1)
    for r, n, i in zip(*np.nonzero(drawn.supervised), strict=True):
        place = int(drawn.positions[r, n]) + i
        assert drawn.labels[r, n, i] == rows.tokens[r, place]
        assert rows.loss_mask[r, place]
        assert rows.documents[r, place] == rows.documents[r, drawn.positions[r, n] - 1]


def test_the_pending_row_of_a_shared_reading_is_the_targets_own(adapter, rows):
    drafter = adapter("qwen3_5")
    batch = blocks_of(drafter)(rows, B, "training", 0)
    objective = gated_objective.PrefixObjective(drafter.target, "total_variation", B)
    prepared = objective.prepare(drafter, batch)
    hidden = objective.hidden(drafter, prepared).reshape(*batch.anchors.labels.shape, -1)
    plain = drafter.target.forward_packed(batch.tokens, batch.documents).hidden
    expected = np.take_along_axis(np.array(plain), batch.anchors.positions[:, :, None] - 1, axis=1)
    assert np.abs(np.array(hidden[:, :, 0]) - expected).max() == 0


def test_corruption_draws_noise_and_never_the_anchors(adapter, rows):
    drafter = adapter("llama")
    every, some, none = (blocks_of(drafter, corruption=c)(rows, B, "training", 3) for c in ("all", "rate", "none"))
    for batch in (some, none):
        assert np.array_equal(batch.anchors.positions, every.anchors.positions)
    clean = every.anchors.labels[:, :, : B - 1]
    assert np.array_equal(np.array(none.noise), clean)
    noise = np.array(every.noise)
    assert ((np.array(some.noise) == noise) | (np.array(some.noise) == clean)).all()
    share = (np.array(some.noise) == clean).mean()
    assert 0.3 < share < 0.7
    assert (noise == clean).mean() < 0.1


def test_runs_of_other_block_sizes_see_the_same_draws(adapter, rows):
    drafter = adapter("llama")
    small, large = (blocks_of(drafter)(rows, size, "training", 2) for size in (3, B))
    assert np.array_equal(small.anchors.positions, large.anchors.positions)
    assert np.array_equal(np.array(small.noise), np.array(large.noise)[..., :2])


def test_evaluation_draws_from_streams_of_its_own(adapter, packed_rows, rows):
    drafter = adapter("llama")
    blocks = blocks_of(drafter)
    feed = Feed(packed_rows, blocks, sizes=(B,), steps=9, rows_per_step=2)
    before = [feed(step) for step in range(3)]
    held = blocks(rows, B, "validation", 0)
    after = [feed(step) for step in range(3)]
    for one, other in zip(before, after):
        assert np.array_equal(np.array(one.noise), np.array(other.noise))
    assert not np.array_equal(np.array(held.noise)[:2], np.array(before[0].noise))


def test_a_curriculum_gives_each_size_an_equal_share(adapter, packed_rows):
    drafter = adapter("llama")
    feed = Feed(packed_rows, blocks_of(drafter), sizes=(2, 3, B), steps=9, rows_per_step=2)
    assert [feed(step).noise.shape[-1] + 1 for step in range(9)] == [2] * 3 + [3] * 3 + [B] * 3
    goal = gated_objective.Stages(
        lambda size: gated_objective.PrefixObjective(drafter.target, "total_variation", size), (2, 3, B)
    )
    for step in (0, 4, 8):
        total, measure = goal(drafter, goal.prepare(drafter, feed(step)))
        assert total.item() > 0 < measure.item()


def test_shuffled_labels_belong_to_other_rows_of_the_batch(adapter, rows):
    drafter = adapter("llama")
    batch = blocks_of(drafter)(rows, B, "training", 0)
    own, other = (
        gated_objective.PrefixObjective(drafter.target, "total_variation", B, shuffled=shuffled).prepare(drafter, batch)
        for shuffled in (False, True)
    )
    count = int(batch.anchors.supervised.sum())
    places = [np.concatenate([np.array(chunk.origins) for chunk in one.chunks])[:count] for one in (own, other)]
    assert sorted(places[0]) == sorted(places[1])
    assert (places[0] != places[1]).mean() > 0.9
    assert np.array_equal(np.array(own.chunks[0].slots), np.array(other.chunks[0].slots))


def test_bidirectional_blocks_are_trained_as_they_are_drafted(adapter, rows):
    drafter = adapter("llama", causal=False)
    batch = blocks_of(drafter)(rows, B, "training", 0)
    prefix = shared_prefix.read(drafter.target, batch.tokens, batch.documents)
    hidden = drafter.blocks(prefix, mx.array(batch.anchors.positions), batch.noise)
    r, n = 0, int(np.flatnonzero(batch.anchors.used[0])[0])
    after, documents = int(batch.anchors.positions[r, n]), rows.documents[r]
    start = int(np.flatnonzero(documents == documents[after])[0])
    cache = drafter.target.make_cache()
    if after - 1 > start:
        drafter.target.forward(mx.array(rows.tokens[r, start : after - 1])[None], cache)
    pending = mx.array(rows.tokens[r, after - 1 : after]).astype(mx.uint32)
    drafted = drafter.draft(mx.concatenate([pending, batch.noise[r, n]])[None], cache)
    assert mx.abs(drafted[0, 1:] - hidden[r, n]).max() < 1e-4


def test_a_target_that_attends_by_itself_is_sent_to_the_other_layout(tiny_target):
    target = tiny_target("gemma2")
    config = gated_lora.GatedLoraConfig(2, 4.0, B, ("mlp",), 4, tiny.VOCABULARY)
    with pytest.raises(UserError, match="adapter.layout=suffix"):
        gated_lora.GatedLora(target, config).sharing()


def test_no_class_of_mlx_lm_is_changed_by_sharing(adapter, tiny_target):
    from mlx_lm.models import llama

    before = llama.Attention.__call__, llama.scaled_dot_product_attention
    drafter = adapter("llama")
    drafter.sharing()
    assert (llama.Attention.__call__, llama.scaled_dot_product_attention) == before
    assert all(type(layer.self_attn) is llama.Attention for layer in tiny_target("llama").model.layers)


def test_a_block_at_the_start_of_a_document_sees_nothing_of_the_one_before(adapter, rows):
    """Of two texts that differ in the first document alone, blocks in the second are the same."""
    drafter = adapter("qwen3_5")
    documents = np.array([[1] * 13 + [2] * 18], np.int32)
    tokens = rng.numpy_rng(0, "texts", 0).integers(5, tiny.VOCABULARY, (1, T))
    changed = np.where(documents == 1, tokens + 1, tokens)
    positions, noise = mx.array([[13, 14, 20]]), mx.array(tokens[:, None, :4].repeat(3, 1))
    found = []
    for text in (tokens, changed):
        prefix = shared_prefix.read(drafter.target, mx.array(text), mx.array(documents))
        found.append(drafter.blocks(prefix, positions, noise))
    assert mx.abs(found[0] - found[1]).max() < 1e-6


def test_suffix_blocks_end_their_rows(rows):
    drawn = gated_objective.suffix_blocks(rows.tokens, rows.loss_mask, rows.documents, B)
    assert drawn.labels.shape == (R, 1, B + 1)
    assert (drawn.positions == T - B - 1).all()


@pytest.mark.parametrize("layout", ["prefix", "suffix"])
def test_ranks_together_take_the_step_of_one_process(adapter, packed_rows, layout):
    drafter = adapter("llama")
    made = gated_objective.OBJECTIVES[layout](drafter.target, "total_variation", B, weights="uniform", rows_per_chunk=7)

    def feed(**options):
        return Feed(packed_rows, blocks_of(drafter, layout), sizes=[B], steps=4, rows_per_step=5, **options)

    whole, parts = feed()(1), [feed(ranks=ranks.Ranks(rank, 3))(1) for rank in range(3)]
    assert [len(part.tokens) for part in parts] == [1, 2, 2]
    loss, measure, slopes = loss_and_gradient(made, drafter, whole)
    found = [loss_and_gradient(made, drafter, part) for part in parts]
    assert sum(one[1] for one in found) == measure
    assert sum(one[0] for one in found) == pytest.approx(loss, rel=LOSS)
    for name, slope in slopes.items():
        together = sum(one[2][name] for one in found)
        np.testing.assert_allclose(together, slope, rtol=0, atol=GRADIENT * np.abs(slope).max(), err_msg=name)
