"""From a packed batch to the training objective: Σ w·loss and Σ w over supervised slots.

R rows, T tokens, N blocks, B block, D hidden, V vocabulary, M supervised slots of a batch.
Only supervised slots reach the target's head, in chunks whose logits are not kept for the backward pass (`turns`), so
memory grows with rows_per_chunk × V and not with anchors × V.
"""

import dataclasses

import mlx.core as mx
import numpy as np

from drafter import anchors, corpus, features, losses, ranks, rng, turns


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

    def __init__(self, rows, *, rows_per_step, block_size, per_row, seed, store=None, ranks=ranks.ALONE):
        self.rows, self.rows_per_step, self.seed = rows, rows_per_step, seed
        self.block_size, self.per_row = block_size, per_row
        self.store, self.ranks = store, ranks
        self.steps_per_epoch = corpus.batch_count(rows, rows_per_step)

    def __call__(self, step):
        """This rank's part of the Batch of 0-based `step`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        _, rows = next(corpus.batches(self.rows, self.rows_per_step, self.seed, epoch, start=index))
        drawn = draw(rows, self.block_size, self.per_row, rng.numpy_rng(self.seed, "anchors", step))
        own = self.ranks.part(len(rows.tokens))  # after the draw, which the number of ranks must not change
        stored = self.store.read(rows.indices[own]) if self.store else None
        return Batch(mx.array(rows.tokens[own]), mx.array(rows.documents[own]), drawn.rows(own), stored)


def blocked(rows, block_size, per_row, generator):
    """A `corpus.Batch` with blocks drawn by a NumPy generator. Returns Batch."""
    drawn = draw(rows, block_size, per_row, generator)
    return Batch(mx.array(rows.tokens), mx.array(rows.documents), drawn)


def draw(rows, block_size, per_row, generator):
    """The Anchors of a `corpus.Batch`."""
    fields = (rows.tokens, rows.loss_mask, rows.documents)
    return anchors.sample(*fields, block_size=block_size, per_row=per_row, rng=generator)


@dataclasses.dataclass(frozen=True)
class SlotSums:
    """Sums over supervised slots, by slot k of the block: float64/int64 [B] each; slot 0 stays 0."""

    loss: np.ndarray
    matches: np.ndarray  # the drafter's argmax is the label
    doubt: np.ndarray  # the confidence head's binary cross-entropy on those matches; 0 without one
    counts: np.ndarray
    weighted: np.ndarray  # w·loss
    measure: float  # of the whole batch: what the weighted losses of all slots are divided by

    def __add__(self, other):
        mine, theirs = ([getattr(sums, field.name) for field in dataclasses.fields(sums)] for sums in (self, other))
        return SlotSums(*(one + two for one, two in zip(mine, theirs)))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Supervised slots that are scored together, int32 [chunk] each; what pads it points at a slot 0."""

    slots: mx.array  # flat indices into R·N·B
    labels: mx.array
    previous: mx.array  # the tokens before the labels
    origins: mx.array  # flat indices into R·T: the row in which the target predicts the slot's token


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a batch asks of the drafter once the frozen target has done its part."""

    taps: tuple  # n of [R,T,D]
    rows: mx.array  # [R,N,B,D] embedded blocks
    positions: mx.array  # [R,N] int32
    documents: mx.array  # [R,T] int32
    supervised: mx.array  # [R·N,B] bool
    chunks: tuple  # of Chunk
    target_hidden: mx.array | None  # [R·T,D], where the loss judges by the target's distribution

    def arrays(self):
        """The same as a tree of plain containers, as `mx.compile` takes it."""
        return vars(self) | {"chunks": [vars(chunk) for chunk in self.chunks]}

    @staticmethod
    def of(arrays):
        """What `arrays` gave, made whole again."""
        return Prepared(**arrays | {"chunks": tuple(Chunk(**chunk) for chunk in arrays["chunks"])})


class Objective:
    """The weighted loss of a drafter on a batch, for one target, loss, kind of weights and block size."""

    def __init__(
        self, target, loss, block_size, *, weights="exponential", gamma=None, dpace_alpha=0.5, rows_per_chunk=1024
    ):
        self.target = target
        self.loss = losses.LOSSES[loss]
        self.weights = losses.WEIGHTS[weights](block_size, gamma, dpace_alpha)
        self.rows_per_chunk = rows_per_chunk

    def prepare(self, drafter, batch):
        """Taps, embedded blocks and supervised slots of a batch; nothing here has a gradient. Returns Prepared."""
        drawn = batch.anchors
        R, N, B = drawn.labels.shape
        layers = drafter.config.target_layer_ids
        seen = features.complete(self.target, batch.tokens, batch.documents, layers, batch.stored)
        pending = mx.array(drawn.labels[:, :, 0].reshape(R * N, 1))
        rows = drafter.noise(self.target, pending, B).reshape(R, N, B, -1)
        return Prepared(
            taps=tuple(mx.stop_gradient(tap) for tap in seen.taps),
            rows=mx.stop_gradient(rows),
            positions=mx.array(drawn.positions),
            documents=batch.documents,
            supervised=mx.array(drawn.supervised.reshape(R * N, B)),
            chunks=chunks(drawn, batch.tokens.shape[1], self.rows_per_chunk),
            target_hidden=mx.stop_gradient(seen.hidden.flatten(0, 1)) if self.loss.of_target else None,
        )

    def hidden(self, drafter, prepared):
        """The drafter's hidden state of every block row: [R·N·B, D]."""
        context = drafter.fuse(prepared.taps)
        hidden = drafter.blocks(context, prepared.rows, prepared.positions, prepared.documents)
        return hidden.reshape(-1, hidden.shape[-1])

    def __call__(self, drafter, prepared):
        """(Σ w·loss, what that is divided by), float32 scalars: each can be summed over ranks before the division.

        With a confidence head its binary cross-entropy is part of the loss.
        """
        judged = self.judged(drafter, prepared, differentiable=True)
        weights, measure = self.weigh(prepared, judged.get("surprise"))
        return mx.sum(weights * (judged["loss"] + judged["doubt"])), measure

    def judged(self, drafter, prepared, *, differentiable=False):
        """What `judge` says of all chunks' slots, in order and one chunk at a time in memory; and their `doubt`."""
        rows = self.hidden(drafter, prepared)[mx.stack([chunk.slots for chunk in prepared.chunks])]
        markov, confidence = drafter.markov_head, drafter.confidence_head

        def judge(index, rows, parameters):
            if markov:  # the arrays that the gradient is taken by
                markov.update(parameters)
            return self.judge(drafter, prepared, prepared.chunks[index], rows, differentiable)

        shared = markov.parameters() if markov else {}
        found = turns.in_turn(judge, rows, shared, differentiable=differentiable)
        if not confidence:
            return found | {"doubt": mx.zeros_like(found["loss"])}
        scores = drafter.confidence(rows, mx.stack([chunk.previous for chunk in prepared.chunks]))
        return found | {"doubt": losses.binary_cross_entropy(scores.flatten(), found["matches"])}

    def judge(self, drafter, prepared, chunk, rows, differentiable):
        """What a chunk's hidden rows [chunk,D] come to, {name: float32 [chunk]}: `loss`, and without gradient
        `surprise`, −log q(label), and `matches`, 1 where the argmax is the label, where one is asked for."""
        logits = drafter.score(self.target, rows, chunk.previous, differentiable)
        found = {"loss": self.loss.value(logits, self.evidence(prepared, chunk, rows))}
        logits = mx.stop_gradient(logits)
        if self.weights.of_surprise:
            judged_by_label = self.loss.value is losses.cross_entropy
            loss = found["loss"] if judged_by_label else losses.cross_entropy(logits, chunk.labels)
            found["surprise"] = mx.stop_gradient(loss)
        if drafter.confidence_head or not differentiable:
            found["matches"] = (mx.argmax(logits, axis=-1) == chunk.labels).astype(mx.float32)
        return found

    def evidence(self, prepared, chunk, rows):
        """What a chunk's slots are judged by: labels, or the target's logits, made once `rows` are there."""
        if not self.loss.of_target:
            return chunk.labels
        return self.target.score(turns.after(prepared.target_hidden[chunk.origins], rows))

    def weigh(self, prepared, surprise):
        """(weights of all chunks' slots, what their weighted sum is divided by); surprise: −log q(label) or None."""
        slots = mx.concatenate([chunk.slots for chunk in prepared.chunks])
        shape = prepared.supervised.shape
        if surprise is not None:
            surprise = mx.zeros(prepared.supervised.size).at[slots].add(surprise).reshape(shape)
        weights, measure = self.weights(surprise, prepared.supervised)
        return weights.reshape(-1)[slots], measure  # padding is a slot 0, which weighs nothing

    def evaluate(self, drafter, batch):
        """Loss and argmax agreement by slot, without gradient. Returns SlotSums."""
        prepared = self.prepare(drafter, batch)
        judged = self.judged(drafter, prepared)
        weights, measure = self.weigh(prepared, judged.get("surprise"))
        return sums_by_slot(batch.anchors.supervised, judged, weights, measure)

    def summary(self, sums):
        """The validation figures of SlotSums: the weighted loss, and the agreement of slots 1..B−1."""
        doubt = {"confidence_loss": float(sums.doubt.sum() / sums.counts.sum())} if sums.doubt.any() else {}
        agreement = sums.matches[1:] / np.maximum(sums.counts[1:], 1)
        return {
            "validation_loss": float(sums.weighted.sum() / max(sums.measure, 1.0)),
            "agreement": [round(float(value), 4) for value in agreement],
        } | doubt


def chunks(drawn, T, size):
    """The supervised slots of `anchors.Anchors` over rows of T tokens, `size` at a time: at least one Chunk.

    Slot k of a block at position a holds the token a + k, which the target predicts in row a + k − 1.
    """
    R, N, B = drawn.labels.shape
    flat = np.flatnonzero(drawn.supervised)
    padded = np.zeros(-(-max(1, len(flat)) // size) * size, np.int32)
    padded[: len(flat)] = flat
    rows, slots, labels = padded // (N * B), padded % B, drawn.labels.reshape(-1)
    origins = np.maximum(rows * T + drawn.positions.reshape(-1)[padded // B] + slots - 1, 0)
    parts = (
        mx.array(part.astype(np.int32).reshape(-1, size))
        for part in (padded, labels[padded], labels[np.maximum(padded - 1, 0)], origins)
    )
    return tuple(Chunk(*part) for part in zip(*parts))


def sums_by_slot(supervised, judged, weights, measure):
    """SlotSums of what `Objective.judged` says, whose arrays are in the order of the supervised slots [R,N,B]."""
    B = supervised.shape[-1]
    slot = np.flatnonzero(supervised) % B

    def sums(values):
        return np.bincount(slot, np.array(values)[: len(slot)], B)

    return SlotSums(
        loss=sums(judged["loss"]),
        matches=sums(judged["matches"]).astype(np.int64),
        doubt=sums(judged["doubt"]),
        counts=np.bincount(slot, minlength=B),
        weighted=sums(weights * judged["loss"]),
        measure=measure.item(),
    )
