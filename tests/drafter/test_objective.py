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
from drafter import corpus, objective
from drafter.documents import Document

B, T, PER_DOCUMENT = 5, 29, 4
RELATIVE = 2e-5  # float32: sums of about a hundred losses of 5 nats, and hidden states good to 5e-5


@pytest.fixture(scope="module")
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture
def drafter(llama, tiny_config, random_drafter):
    return random_drafter(tiny_config(llama, num_hidden_layers=2, layer_types=("full_attention", "sliding_attention"),
                                      sliding_window=9, block_size=B))  # fmt: skip


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


def slot_losses(target, drafter, batch):
    """(slot, −log p(label), argmax is label) of each supervised slot, each block drafted alone after its document."""
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
        for slot in range(1, B):
            at = anchor + slot
            if at < T and documents[at] == documents[anchor]:
                row_of = logits[slot] - logits[slot].max()
                loss = math.log(np.exp(row_of).sum()) - row_of[tokens[at]]
                found.append((slot, loss, logits[slot].argmax() == tokens[at]))
    return found


def goal(target, **options):
    return objective.Objective(target, "cross_entropy", B, **options)


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


def gradients(target, drafter, batch, rows_per_chunk):
    """(total, {name: gradient}) of an objective with that chunk."""
    made = goal(target, rows_per_chunk=rows_per_chunk)
    prepared = made.prepare(drafter, batch)

    def total(parameters):
        drafter.update(parameters)
        return made(drafter, prepared)[0]

    value, found = mx.value_and_grad(total)(drafter.trainable_parameters())
    return value.item(), dict(tree_flatten(found))


def test_chunks_change_neither_the_loss_nor_a_gradient(llama, drafter, batch):
    expected, whole = gradients(llama, drafter, batch, 1000)
    assert all(mx.abs(value).max().item() > 0 for value in whole.values())  # every weight is reached
    for rows_per_chunk in (7, 64):
        value, found = gradients(llama, drafter, batch, rows_per_chunk)
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
    options = {"rows_per_step": 2, "block_size": B, "per_document": 2} | changes
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
