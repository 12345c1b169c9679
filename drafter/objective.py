"""From a packed batch to the training objective: Σ w·loss and Σ w over supervised slots.

R rows, T tokens, N blocks, B block, D hidden, V vocabulary, M supervised slots of a batch.
Only supervised slots reach the target's head, in chunks that are computed again in the backward pass, so memory grows
with rows_per_chunk × V and not with anchors × V.
"""

import dataclasses

import mlx.core as mx
import numpy as np

from drafter import anchors, corpus, features, losses, ranks, rng


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows with their blocks: tokens and documents [R,T] int32.

    stored: what a store held of the rows' features; the target computes the others, or all where it is None.
    """

    tokens: mx.array
    documents: mx.array
    anchors: anchors.Anchors
    stored: features.Stored | None = None


class Feed:
    """The training batch of any step: rows in an order redrawn each epoch, anchors redrawn each step.

    A step's batch depends on (rows, seed, step) alone, so a resumed run sees what the unsplit one would have, and the
    ranks of a job together what one process would. store: a `features.Store` to read from, or None.
    """

    def __init__(self, rows, *, rows_per_step, block_size, per_document, seed, store=None, ranks=ranks.ALONE):
        self.rows, self.rows_per_step, self.seed = rows, rows_per_step, seed
        self.block_size, self.per_document = block_size, per_document
        self.store, self.ranks = store, ranks
        self.steps_per_epoch = corpus.batch_count(rows, rows_per_step)

    def __call__(self, step):
        """This rank's part of the Batch of 0-based `step`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        _, rows = next(corpus.batches(self.rows, self.rows_per_step, self.seed, epoch, start=index))
        drawn = draw(rows, self.block_size, self.per_document, rng.numpy_rng(self.seed, "anchors", step))
        own = self.ranks.part(len(rows.tokens))  # after the draw, which the number of ranks must not change
        stored = self.store.read(rows.indices[own]) if self.store else None
        return Batch(mx.array(rows.tokens[own]), mx.array(rows.documents[own]), drawn.rows(own), stored)


def blocked(rows, block_size, per_document, generator):
    """A `corpus.Batch` with blocks drawn by a NumPy generator. Returns Batch."""
    drawn = draw(rows, block_size, per_document, generator)
    return Batch(mx.array(rows.tokens), mx.array(rows.documents), drawn)


def draw(rows, block_size, per_document, generator):
    """The Anchors of a `corpus.Batch`."""
    fields = (rows.tokens, rows.loss_mask, rows.documents)
    return anchors.sample(*fields, block_size=block_size, per_document=per_document, rng=generator)


@dataclasses.dataclass(frozen=True)
class SlotSums:
    """Sums over supervised slots, by slot k of the block: float64/int64 [B] each; slot 0 stays 0."""

    loss: np.ndarray
    matches: np.ndarray  # the drafter's argmax is the label
    counts: np.ndarray

    def __add__(self, other):
        return SlotSums(self.loss + other.loss, self.matches + other.matches, self.counts + other.counts)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a batch asks of the drafter once the frozen target has done its part."""

    taps: tuple  # n of [R,T,D]
    rows: mx.array  # [R,N,B,D] embedded blocks
    positions: mx.array  # [R,N] int32
    documents: mx.array  # [R,T] int32
    slots: mx.array  # [C,chunk] int32: supervised slots as flat indices into R·N·B, padded with 0: a slot 0
    labels: mx.array  # [C,chunk] int32
    weights: mx.array  # [C,chunk] float32, 0 where padded


class Objective:
    """The weighted loss of a drafter on a batch, for one target, loss and block size."""

    def __init__(self, target, loss, block_size, *, gamma=None, rows_per_chunk=1024):
        self.target = target
        self.loss = losses.LOSSES[loss]
        self.slot_weights = np.array(losses.exponential_weights(block_size, gamma))
        self.rows_per_chunk = rows_per_chunk

    def prepare(self, drafter, batch):
        """Taps, embedded blocks and padded indices of a batch; nothing here has a gradient. Returns Prepared."""
        drawn = batch.anchors
        R, N, B = drawn.labels.shape
        layers = drafter.config.target_layer_ids
        seen = features.complete(self.target, batch.tokens, batch.documents, layers, batch.stored)
        pending = mx.array(drawn.labels[:, :, 0].reshape(R * N, 1))
        rows = drafter.noise(self.target, pending, B).reshape(R, N, B, -1)
        flat = np.flatnonzero(drawn.supervised)
        padded = np.zeros(-(-max(1, len(flat)) // self.rows_per_chunk) * self.rows_per_chunk, np.int32)
        padded[: len(flat)] = flat
        weights = self.slot_weights[padded % B]  # padding points at an anchor's slot, which weighs 0
        chunked = (-1, self.rows_per_chunk)
        return Prepared(
            taps=tuple(mx.stop_gradient(tap) for tap in seen.taps),
            rows=mx.stop_gradient(rows),
            positions=mx.array(drawn.positions),
            documents=batch.documents,
            slots=mx.array(padded.reshape(chunked)),
            labels=mx.array(drawn.labels.reshape(-1)[padded].reshape(chunked)),
            weights=mx.array(weights.astype(np.float32).reshape(chunked)),
        )

    def hidden(self, drafter, prepared):
        """The drafter's hidden state of every block row: [R·N·B, D]."""
        context = drafter.fuse(prepared.taps)
        hidden = drafter.blocks(context, prepared.rows, prepared.positions, prepared.documents)
        return hidden.reshape(-1, hidden.shape[-1])

    def __call__(self, drafter, prepared):
        """(Σ w·loss, Σ w), float32 scalars; their quotient is the loss, and each can be summed over ranks first."""
        hidden = self.hidden(drafter, prepared)
        total = mx.array(0.0)
        for slots, labels, weights in zip(prepared.slots, prepared.labels, prepared.weights):
            total = total + self.chunk_loss(hidden[slots], labels, weights)
        return total, mx.sum(prepared.weights)

    def chunk_loss(self, rows, labels, weights):
        """Σ w·loss of hidden rows [chunk,D]; their logits are not kept for the backward pass."""
        return mx.checkpoint(
            lambda rows: mx.sum(self.loss(self.target.score(rows, differentiable=True), labels) * weights)
        )(rows)

    def evaluate(self, drafter, batch):
        """Loss and argmax agreement by slot, without gradient. Returns SlotSums."""
        prepared = self.prepare(drafter, batch)
        hidden = self.hidden(drafter, prepared)
        B = batch.anchors.labels.shape[2]
        sums = SlotSums(np.zeros(B), np.zeros(B, np.int64), np.zeros(B, np.int64))
        for slots, labels, weights in zip(prepared.slots, prepared.labels, prepared.weights):
            logits = self.target.score(hidden[slots])
            loss, matches = self.loss(logits, labels), mx.argmax(logits, axis=-1) == labels
            mx.eval(loss, matches)
            real, slot = np.array(weights) > 0, np.array(slots) % B
            kept = slot[real]
            sums = sums + SlotSums(
                np.bincount(kept, np.array(loss)[real], B),
                np.bincount(kept, np.array(matches)[real], B).astype(np.int64),
                np.bincount(kept, minlength=B),
            )
        return sums

    def summary(self, sums):
        """The validation figures of SlotSums: the weighted loss, and the agreement of slots 1..B−1."""
        mean = sums.loss / np.maximum(sums.counts, 1)
        weights = self.slot_weights * sums.counts
        agreement = sums.matches[1:] / np.maximum(sums.counts[1:], 1)
        return {
            "validation_loss": float((weights * mean).sum() / weights.sum()),
            "agreement": [round(float(value), 4) for value in agreement],
        }
