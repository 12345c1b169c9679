"""The objective against a slow computation that drafts every block alone, in decoding form.

R rows, T tokens, N blocks, B block, V vocabulary.
"""

import dataclasses
import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import corpus, losses, objective
from drafter.documents import Document
from oracles import LOSSES, distribution, dpace_loop

B, T, PER_DOCUMENT = 5, 29, 4
RELATIVE = 2e-5  # float32: sums of about a hundred losses of 5 nats, and hidden states good to 5e-5


@pytest.fixture(scope="module")
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture
def drafter(llama, tiny_config, random_drafter):
    return random_drafter(tiny_config(llama, num_hidden_layers=2, layer_types=("full_attention", "sliding_attention"),
                                      sliding_window=9, block_size=B))  # fmt: skip


@pytest.fixture
def headed(llama, tiny_config, random_drafter):
    """A drafter with a Markov and a confidence head."""
    layers = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "block_size": B}
    return random_drafter(tiny_config(llama, **layers, markov_rank=7, confidence_head=True))


@pytest.fixture(scope="module")
def rows():
    """Seven packed rows of 29 tokens: documents of 4 to 29 tokens, each with a prompt."""
    generator = np.random.default_rng(4)
    numbered = []
    for number, size in enumerate([29, 17, 9, 6, 4, 23, 5, 11, 15, 8, 19, 7, 12, 10], 1):
        tokens = generator.integers(5, tiny.VOCABULARY, size).astype(np.int32)
        numbered.append((number, Document(str(number), tokens, np.arange(size) >= 2)))
    return corpus.pack(numbered, "train", T, 0, ())


@pytest.fixture(scope="module")
def batch(rows):
    return objective.blocked(corpus.select(rows, np.arange(3)), B, PER_DOCUMENT, np.random.default_rng(5))


def slot_rows(target, drafter, batch):
    """(block, slot, label, logits [V], target's logits [V]) of each supervised slot, float64 NumPy.

    Each block is drafted alone after its document; the target reads that document alone, token by token.
    """
    drawn, found = batch.anchors, []
    for row, n in zip(*np.nonzero(drawn.used), strict=True):
        anchor = int(drawn.positions[row, n])
        tokens, documents = np.array(batch.tokens[row]), np.array(batch.documents[row])
        start = int(np.flatnonzero(documents == documents[anchor])[0])
        cache = drafter.make_cache()
        if anchor > start:
            text = mx.array(tokens[start:anchor])[None]
            drafter.extend(cache, drafter.fuse(target.forward(text, taps=drafter.config.target_layer_ids).taps))
        hidden = drafter.draft(cache, drafter.noise(target, mx.array([[int(tokens[anchor])]]), B))
        logits = np.array(target.score(hidden)[0], np.float64)
        if drafter.markov_head:
            w1, w2 = (np.array(drafter.markov_head[name].weight, np.float64) for name in ("markov_w1", "markov_w2"))
            before = tokens[np.minimum(anchor + np.arange(B) - 1, T - 1)]  # the true token before each slot's
            logits = logits + w1[before] @ w2.T
        judges = np.array(target.model(mx.array(tokens[start:])[None])[0], np.float64)
        for slot in range(1, B):
            at = anchor + slot
            if at < T and documents[at] == documents[anchor]:
                found.append(((row, n), slot, tokens[at], logits[slot], judges[at - 1 - start]))
    return found


def slot_losses(target, drafter, batch):
    """(slot, −log p(label), argmax is label) of each supervised slot."""
    rows = slot_rows(target, drafter, batch)
    return [
        (slot, -math.log(distribution(logits)[label]), logits.argmax() == label) for _, slot, label, logits, _ in rows
    ]


def goal(target, loss="cross_entropy", **options):
    return objective.Objective(target, loss, B, **options)


def test_the_loss_is_the_weighted_sum_over_blocks_drafted_alone(llama, drafter, batch):
    expected = slot_losses(llama, drafter, batch)
    gamma = max(1.0, 7 * B / 16)
    weights = [math.exp(-(slot - 1) / gamma) for slot, *_ in expected]
    made = goal(llama, rows_per_chunk=7)
    total, weight = made(drafter, made.prepare(drafter, batch))
    assert len(expected) == batch.anchors.supervised.sum() > 40
    assert weight.item() == pytest.approx(sum(weights), rel=1e-6)
    losses = [loss for _, loss, _ in expected]
    assert total.item() == pytest.approx(np.dot(weights, losses), rel=RELATIVE)


def test_a_decay_length_reaches_the_weights(llama, drafter, batch):
    made = goal(llama, gamma=0.5)
    slots = [slot for slot, *_ in slot_losses(llama, drafter, batch)]
    weight = made(drafter, made.prepare(drafter, batch))[1].item()
    assert weight == pytest.approx(sum(math.exp(-(slot - 1) / 0.5) for slot in slots), rel=1e-6)


def test_evaluation_sums_the_same_slots_by_slot(llama, drafter, batch):
    expected = slot_losses(llama, drafter, batch)
    sums = goal(llama, rows_per_chunk=7).evaluate(drafter, batch)
    for slot in range(B):
        own = [(loss, match) for at, loss, match in expected if at == slot]
        assert sums.counts[slot] == len(own)
        assert sums.matches[slot] == sum(match for _, match in own)
        assert sums.loss[slot] == pytest.approx(sum(loss for loss, _ in own), rel=RELATIVE, abs=1e-9)


def test_the_summary_is_the_objectives_own_quotient_and_each_slots_share(llama, drafter, batch):
    made = goal(llama)
    sums = made.evaluate(drafter, batch)
    total, weight = made(drafter, made.prepare(drafter, batch))
    summary = made.summary(sums + sums)
    assert summary["validation_loss"] == pytest.approx((total / weight).item(), rel=RELATIVE)
    assert summary["agreement"] == pytest.approx(list(sums.matches[1:] / sums.counts[1:]), abs=1e-4)


def test_a_drafter_learns_from_a_hybrid(tiny_target, tiny_config, random_drafter, batch):
    """Packed rows through recurrent layers: the loss is that of blocks drafted alone, and it falls."""
    target = tiny_target("qwen3_5")
    drafter = random_drafter(
        tiny_config(target, num_hidden_layers=2, layer_types=("full_attention",) * 2, block_size=B)
    )
    made, digest = goal(target), target.live_digest()
    prepared = made.prepare(drafter, batch)
    weighted = [math.exp(-(slot - 1) / 2.1875) * loss for slot, loss, _ in slot_losses(target, drafter, batch)]
    assert made(drafter, prepared)[0].item() == pytest.approx(sum(weighted), rel=RELATIVE)  # γ is 7B/16
    optimizer, step = optim.Adam(3e-3), nn.value_and_grad(drafter, lambda drafter: made(drafter, prepared)[0])
    totals = []
    for _ in range(12):
        total, gradient = step(drafter)
        optimizer.update(drafter, gradient)
        mx.eval(drafter.parameters(), optimizer.state)
        totals.append(total.item())
    assert totals[-1] < 0.7 * totals[0]
    assert target.live_digest() == digest


OF_TARGET = sorted(name for name, loss in losses.LOSSES.items() if loss.of_target)


@pytest.mark.parametrize(("name", "kind"), [*((name, "llama") for name in OF_TARGET), ("forward_kl", "qwen3_5")])
def test_a_loss_judges_each_slot_by_the_targets_own_prediction_of_its_token(
    name, kind, tiny_target, tiny_config, random_drafter, batch
):
    """Slot k of a block at a is judged by what the target says after a + k − 1, the document read alone."""
    target = tiny_target(kind)
    drafter = random_drafter(tiny_config(target, num_hidden_layers=1, layer_types=("full_attention",), block_size=B))
    rows = slot_rows(target, drafter, batch)
    expected = [LOSSES[name](distribution(judges), distribution(logits)) for *_, logits, judges in rows]
    made = goal(target, name, weights="uniform", rows_per_chunk=7)
    total, measure = made(drafter, made.prepare(drafter, batch))
    assert measure.item() == len(rows)
    assert total.item() == pytest.approx(sum(expected), rel=RELATIVE)
    sums = made.evaluate(drafter, batch)
    for slot in range(1, B):
        own = sum(loss for loss, (_, at, *_) in zip(expected, rows) if at == slot)
        assert sums.loss[slot] == pytest.approx(own, rel=RELATIVE)


def doubts(target, drafter, batch):
    """The confidence head's −log of what it gave the outcome, of each supervised slot, from `slot_rows`' own pieces."""
    made = goal(target, rows_per_chunk=1000)
    hidden = np.array(made.hidden(drafter, made.prepare(drafter, batch)), np.float64).reshape(-1, B, 96)
    w1 = np.array(drafter.markov_head.markov_w1.weight, np.float64)
    weight, bias = (np.array(value, np.float64) for value in drafter.confidence_head.proj.parameters().values())
    out = []
    N = batch.anchors.labels.shape[1]
    for (row, n), slot, label, logits, _ in slot_rows(target, drafter, batch):
        before = int(batch.tokens[row, int(batch.anchors.positions[row, n]) + slot - 1])
        features = np.concatenate([hidden[row * N + n, slot], w1[before]])
        chance = 1 / (1 + math.exp(-(features @ weight.reshape(-1) + bias.item())))
        out.append(-math.log(chance if logits.argmax() == label else 1 - chance))
    return out


def test_heads_are_taught_by_the_true_tokens_and_by_what_the_argmax_got_right(llama, headed, batch):
    losses_of, doubt = slot_losses(llama, headed, batch), doubts(llama, headed, batch)
    made = goal(llama, weights="uniform", rows_per_chunk=7)
    total, _ = made(headed, made.prepare(headed, batch))
    assert total.item() == pytest.approx(sum(loss for _, loss, _ in losses_of) + sum(doubt), rel=RELATIVE)
    sums = made.evaluate(headed, batch)
    assert sums.loss.sum() == pytest.approx(sum(loss for _, loss, _ in losses_of), rel=RELATIVE)
    assert sums.matches.sum() == sum(match for *_, match in losses_of)
    assert made.summary(sums)["confidence_loss"] == pytest.approx(np.mean(doubt), rel=RELATIVE)


def test_a_confidence_head_leaves_every_other_gradient_as_it_is(llama, headed, batch):
    found = gradients(llama, headed, batch, 64)[1]
    assert mx.abs(found["confidence_head.proj.weight"]).max().item() > 0
    headed.confidence_head = None
    for name, gradient in gradients(llama, headed, batch, 64)[1].items():
        np.testing.assert_array_equal(np.array(found[name]), np.array(gradient), err_msg=name)


def dpace_grid(rows):
    """({(block, slot): weight}) of D-PACE with α = 0.3 for what `slot_rows` gives."""
    names = sorted({block for block, *_ in rows})
    surprise, supervised = np.zeros((len(names), B)), np.zeros((len(names), B), bool)
    for block, slot, label, logits, _ in rows:
        at = names.index(block), slot
        surprise[at], supervised[at] = -math.log(distribution(logits)[label]), True
    weights = dpace_loop(surprise, supervised, 0.3)
    return {(block, slot): weights[names.index(block), slot] for block, slot, *_ in rows}


@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl"])
def test_dpace_weighs_a_slot_by_its_own_blocks_label_probabilities(name, llama, drafter, batch):
    rows = slot_rows(llama, drafter, batch)
    weights = dpace_grid(rows)
    made = goal(llama, name, weights="dpace", dpace_alpha=0.3, rows_per_chunk=7)  # chunks end inside blocks
    total, measure = made(drafter, made.prepare(drafter, batch))
    expected = 0.0
    for block, slot, label, logits, judges in rows:
        p = np.eye(len(logits))[label] if name == "cross_entropy" else distribution(judges)
        expected += weights[block, slot] * LOSSES["forward_kl"](p, distribution(logits))
    assert measure.item() == len(rows)
    assert total.item() == pytest.approx(expected, rel=RELATIVE)
    assert made.summary(made.evaluate(drafter, batch))["validation_loss"] == pytest.approx(
        expected / len(rows), rel=RELATIVE
    )


def test_the_gradient_of_dpace_is_that_of_the_loss_alone(llama, drafter, batch):
    """Were the weights differentiated too, raising a slot's loss would pay where it lowers its weight."""
    made = goal(llama, weights="dpace", rows_per_chunk=1000)
    prepared = made.prepare(drafter, batch)
    (chunk,) = prepared.chunks
    fixed = made.weigh(prepared, made.judged(drafter, prepared)["surprise"])[0]
    found = nn.value_and_grad(drafter, lambda drafter: made(drafter, prepared)[0])(drafter)[1]

    def plain(drafter):
        logits = llama.score(made.hidden(drafter, prepared)[chunk.slots], differentiable=True)
        return mx.sum(fixed * losses.cross_entropy(logits, chunk.labels))

    for (name, gradient), (_, expected) in zip(
        tree_flatten(found), tree_flatten(nn.value_and_grad(drafter, plain)(drafter)[1]), strict=True
    ):
        bound = 1e-4 * mx.abs(expected).max().item()
        np.testing.assert_allclose(np.array(gradient), np.array(expected), atol=bound, rtol=0, err_msg=name)


class Spy:
    """A target that notes how many rows each call of `score` was given."""

    def __init__(self, target):
        self.target, self.scored = target, []

    def __getattr__(self, name):
        return getattr(self.target, name)

    def score(self, hidden, **options):
        self.scored.append(hidden.reshape(-1, hidden.shape[-1]).shape[0])
        return self.target.score(hidden, **options)


@pytest.mark.parametrize(("loss", "heads"), [("cross_entropy", 1), ("forward_kl", 2)])
@pytest.mark.parametrize("per_row", [1, 30])
def test_rows_scored_at_once_do_not_grow_with_the_anchors(per_row, loss, heads, llama, drafter, rows):
    batch = objective.blocked(corpus.select(rows, np.arange(3)), B, per_row, np.random.default_rng(5))
    supervised = int(batch.anchors.supervised.sum())
    assert (supervised > 100) == (per_row == 30)
    spy = Spy(llama)
    made = goal(spy, loss, weights="dpace", rows_per_chunk=7)
    mx.eval(nn.value_and_grad(drafter, lambda drafter: made(drafter, made.prepare(drafter, batch))[0])(drafter))
    assert set(spy.scored) == {7}
    once = heads * -(-supervised // 7)
    assert len(spy.scored) == once  # only supervised rows, up to the last chunk's padding


def gradients(target, drafter, batch, rows_per_chunk, **options):
    """(total, {name: gradient}) of an objective with that chunk."""
    made = goal(target, rows_per_chunk=rows_per_chunk, **options)
    prepared = made.prepare(drafter, batch)

    def total(parameters):
        drafter.update(parameters)
        return made(drafter, prepared)[0]

    value, found = mx.value_and_grad(total)(drafter.trainable_parameters())
    return value.item(), dict(tree_flatten(found))


@pytest.mark.parametrize(
    "options",
    [{}, {"loss": "overlap_hybrid", "weights": "uniform"}, {"weights": "dpace"}],
    ids=["labels", "target", "dpace"],
)
@pytest.mark.parametrize("heads", [False, True], ids=["no heads", "heads"])
def test_chunks_change_neither_the_loss_nor_a_gradient(llama, drafter, headed, batch, options, heads):
    drafter = headed if heads else drafter
    expected, whole = gradients(llama, drafter, batch, 1000, **options)
    assert all(mx.abs(value).max().item() > 0 for value in whole.values())  # every weight is reached
    for rows_per_chunk in (7, 64):
        value, found = gradients(llama, drafter, batch, rows_per_chunk, **options)
        assert value == pytest.approx(expected, rel=RELATIVE)
        for name, gradient in whole.items():
            bound = 1e-4 * mx.abs(gradient).max().item()
            np.testing.assert_allclose(np.array(found[name]), np.array(gradient), atol=bound, rtol=0, err_msg=name)


def test_unsupervised_slots_and_unused_blocks_contribute_nothing(llama, drafter, batch):
    made = goal(llama)
    drawn = batch.anchors
    labels = np.where(drawn.supervised, drawn.labels, 7)
    labels[:, :, 0] = drawn.labels[:, :, 0]  # the anchor is an input, not only a label
    other = dataclasses.replace(batch, anchors=dataclasses.replace(drawn, labels=labels))
    one, two = (made(drafter, made.prepare(drafter, given)) for given in (batch, other))
    assert not np.array_equal(labels, drawn.labels)
    assert [value.item() for value in one] == [value.item() for value in two]
    moved = np.where(drawn.used, drawn.positions, 3).astype(np.int32)
    other = dataclasses.replace(batch, anchors=dataclasses.replace(drawn, positions=moved))
    assert made(drafter, made.prepare(drafter, other))[0].item() == pytest.approx(one[0].item(), rel=1e-6)


def test_a_batch_without_a_block_weighs_nothing(llama, drafter, batch):
    drawn = batch.anchors
    none = dataclasses.replace(drawn, used=drawn.used & False, supervised=drawn.supervised & False)
    made = goal(llama)
    total, weight = made(drafter, made.prepare(drafter, dataclasses.replace(batch, anchors=none)))
    assert (total.item(), weight.item()) == (0, 0)


# Feed.


def feed(rows, seed=3, **changes):
    options = {"rows_per_step": 2, "block_size": B, "per_row": 2} | changes
    return objective.Feed(rows, seed=seed, **options)


def content(batch):
    return np.array(batch.tokens).tolist(), batch.anchors.positions.tolist()


def test_a_steps_batch_depends_on_seed_and_step_alone(rows):
    straight, other = feed(rows), feed(rows)
    expected = {step: content(straight(step)) for step in range(9)}
    for step in (8, 2, 5, 2):
        assert content(other(step)) == expected[step]
    assert content(feed(rows, seed=4)(2)) != expected[2]


def test_an_epoch_sees_every_row_once_in_an_order_of_its_own(rows):
    assert len(rows) == 7
    given = feed(rows, rows_per_step=1)
    orders = []
    for epoch in range(2):
        seen = [np.array(given(epoch * 7 + index).tokens)[0].tobytes() for index in range(7)]
        assert sorted(seen) == sorted(row.tobytes() for row in rows.tokens)
        orders.append(seen)
    assert orders[0] != orders[1]


def test_anchors_are_redrawn_when_a_row_comes_again(rows):
    one_row = dataclasses.replace(
        rows, tokens=rows.tokens[:1], loss_mask=rows.loss_mask[:1], documents=rows.documents[:1]
    )
    given = feed(one_row, rows_per_step=1)
    assert len({str(content(given(step))[1]) for step in range(8)}) > 4
