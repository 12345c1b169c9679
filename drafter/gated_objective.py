"""Training a gated LoRA: blocks of noise rows, and the objective in two layouts.

R rows, T tokens, N blocks, B block (the pending row and n = B − 1 noise rows), D hidden.
Row i of a block whose pending token stands at position a is judged by what the target says at a + i of the clean text.
Row 0 is the target itself, so its loss is 0; it is not supervised, and no mean counts it.

- PrefixObjective: the target reads each row once, which gives the labels of every position and what N blocks start
  from; the blocks' noise rows run as one batch.
- SuffixObjective: one block ends each row, and the student is a whole forward of its own. The baseline.
"""

import dataclasses

import mlx.core as mx
import numpy as np

from drafter import anchors, corpus, objective, packed, ranks, rng, shared_prefix
from drafter.gated_lora import GatedLoraConfig
from drafter.objective import Objective

CORRUPTIONS = ("all", "rate", "none")
LAYOUTS = ("prefix", "suffix")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows with their blocks: tokens and documents [R,T] int32, noise rows [R,N,n] uint32.

    anchors: `anchors.Anchors` of B slots, one further on: slot i is row i, whose label is the token after it.
    """

    tokens: mx.array
    documents: mx.array
    anchors: anchors.Anchors
    noise: mx.array

    def part(self, own):
        """The Batch of some rows, a slice of R."""
        return Batch(self.tokens[own], self.documents[own], self.anchors.rows(own), self.noise[own])


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How blocks are drawn from packed rows.

    config  a `gated_lora.GatedLoraConfig`     widest  rows of the largest block; draws are made for it, and cut
    layout  one of LAYOUTS                     corruption  one of CORRUPTIONS
    per_row blocks drawn of a row of the prefix layout
    A draw is keyed by (seed, stream, step) alone, so runs of other block sizes see the same anchors and noise.
    """

    config: GatedLoraConfig
    widest: int
    per_row: int
    corruption: str
    layout: str
    seed: int

    def __call__(self, rows, size, stream, step):
        """The Batch of a `corpus.Batch`, with blocks of `size` rows."""
        fields = rows.tokens, rows.loss_mask, rows.documents
        if self.layout == "suffix":
            drawn = suffix_blocks(*fields, size)
        else:
            generator = rng.numpy_rng(self.seed, f"{stream} anchors", step)
            drawn = anchors.sample(*fields, block_size=size + 1, per_row=self.per_row, rng=generator)
        drawn = shifted(drawn)
        noise = corrupt(
            drawn, self.widest, self.config, self.corruption, rng.numpy_rng(self.seed, f"{stream} noise", step)
        )
        return Batch(mx.array(rows.tokens), mx.array(rows.documents), drawn, mx.array(noise))


class Feed:
    """The training batch of any step, as `objective.Feed`; blocks grow through `sizes`, each for an equal share."""

    def __init__(self, rows, blocks, *, sizes, steps, rows_per_step, ranks=ranks.ALONE):
        self.rows, self.blocks, self.sizes, self.steps = rows, blocks, tuple(sizes), steps
        self.rows_per_step, self.ranks = rows_per_step, ranks
        self.steps_per_epoch = corpus.batch_count(rows, rows_per_step)

    def __call__(self, step):
        """This rank's part of the Batch of 0-based `step`: all of it is drawn, whatever the number of ranks."""
        epoch, index = divmod(step, self.steps_per_epoch)
        _, rows = next(corpus.batches(self.rows, self.rows_per_step, self.blocks.seed, epoch, start=index))
        size = self.sizes[min(step * len(self.sizes) // self.steps, len(self.sizes) - 1)]
        return self.blocks(rows, size, "training", step).part(self.ranks.part(len(rows.tokens)))


def suffix_blocks(tokens, loss_mask, documents, size):
    """One block that ends each row: `anchors.Anchors` of size + 1 slots, [R,1]."""
    R, T = tokens.shape
    positions = np.full((R, 1), T - size - 1, np.int32)
    used = anchors.valid_positions(loss_mask, documents)[:, positions[0]]
    return anchors.blocks_at(tokens, loss_mask, documents, positions, used, size + 1)


def shifted(drawn):
    """Anchors of B + 1 slots as B rows: row i's label is slot i + 1's, and row 0 is not supervised."""
    supervised = drawn.supervised[:, :, 1:].copy()
    supervised[:, :, 0] = False
    return anchors.Anchors(drawn.positions + 1, drawn.labels[:, :, 1:], supervised, drawn.used)


def corrupt(drawn, widest, config, corruption, generator):
    """The tokens of the noise rows [R,N,n] uint32 of `shifted` blocks, drawn for blocks of `widest` rows and cut.

    all: every row is noise. rate: each block draws a rate from [0, 1), and each of its rows is noise that often, else
    the text's own token. none: the text's own, which trains an adapter for next-token prediction.
    """
    R, N, B = drawn.labels.shape
    shape = R, N, widest - 1
    noise = generator.integers(1, config.noise_limit, shape)
    rate, draw = generator.random((R, N, 1)), generator.random(shape)
    if config.noise == "mask":
        noise[:] = config.mask_token_id
    clean = {"all": np.zeros(shape, bool), "rate": draw >= rate, "none": np.ones(shape, bool)}[corruption]
    return np.where(clean[..., : B - 1], drawn.labels[:, :, : B - 1], noise[..., : B - 1]).astype(np.uint32)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a batch asks of the drafter once the target has read it."""

    batch: Batch
    prefix: shared_prefix.Prefix | None  # of PrefixObjective
    supervised: mx.array  # [R·N,B] bool
    chunks: tuple  # of objective.Chunk
    target_hidden: mx.array  # [R·T,D]


class GatedObjective(Objective):
    """The weighted loss of a gated LoRA on a batch; the layouts are its subclasses.

    shuffled: judge every row by the labels of another row of its rank, the control that shows what noise alone teaches.
    """

    def __init__(self, target, loss, block_size, *, shuffled=False, **options):
        super().__init__(target, loss, block_size, **options)
        self.shuffled = shuffled

    def prepare(self, drafter, batch):
        """The target's own part: nothing here has a gradient. Returns Prepared."""
        prefix, hidden = self.read(batch)
        drawn, T = batch.anchors, batch.tokens.shape[1]
        B = drawn.labels.shape[2]
        chunks = objective.chunks(drawn, T, self.rows_per_chunk)
        chunks = exchanged(chunks, int(drawn.supervised.sum())) if self.shuffled else chunks
        return Prepared(batch, prefix, mx.array(drawn.supervised.reshape(-1, B)), chunks, hidden.flatten(0, 1))


class PrefixObjective(GatedObjective):
    """Many blocks behind one reading of each row."""

    def read(self, batch):
        """(Prefix, hidden [R,T,D])."""
        prefix = shared_prefix.read(self.target, batch.tokens, batch.documents)
        return prefix, prefix.hidden

    def hidden(self, drafter, prepared):
        """The hidden state of every block row [R·N·B, D]; the pending rows' are the target's own."""
        batch, text = prepared.batch, prepared.prefix.hidden
        positions = mx.array(batch.anchors.positions)
        pending = text[mx.arange(len(text))[:, None], positions - 1]  # [R,N,D]
        noise = drafter.blocks(prepared.prefix, positions, batch.noise)
        return mx.concatenate([pending[:, :, None], noise], axis=2).reshape(-1, text.shape[-1])


class SuffixObjective(GatedObjective):
    """One block that ends each row, behind a prefix that the student reads itself."""

    def read(self, batch):
        """(None, hidden [R,T,D])."""
        return None, self.target.forward_packed(batch.tokens, batch.documents).hidden

    def hidden(self, drafter, prepared):
        """The hidden state of every block row [R·B, D]."""
        batch = prepared.batch
        end, n = int(batch.anchors.positions[0, 0]), batch.noise.shape[-1]
        tokens = mx.concatenate([batch.tokens[:, :end].astype(mx.uint32), batch.noise[:, 0]], axis=1)
        caches = packed.caches(self.target.make_cache(), batch.documents[:, : end + n])
        gate = (False,) * end + (True,) * n
        hidden = drafter.forward(tokens, gate, caches, differentiable=True)
        return hidden[:, end - 1 :].flatten(0, 1)


OBJECTIVES = {"prefix": PrefixObjective, "suffix": SuffixObjective}


def exchanged(chunks, count):
    """The chunks with the labels and origins of their `count` supervised rows moved on by half of them."""
    order = np.arange(sum(chunk.slots.size for chunk in chunks))
    order[:count] = np.roll(order[:count], max(1, count // 2))
    labels, origins = (
        mx.concatenate([getattr(chunk, name) for chunk in chunks])[mx.array(order)].reshape(len(chunks), -1)
        for name in ("labels", "origins")
    )
    return tuple(dataclasses.replace(chunk, labels=labels[i], origins=origins[i]) for i, chunk in enumerate(chunks))


class Stages:
    """The objectives of a curriculum: each batch goes to that of its own block size; evaluation is the last one's."""

    def __init__(self, made, sizes):
        self.of_size = {size: made(size) for size in sizes}
        self.last = self.of_size[max(sizes)]

    def prepare(self, drafter, batch):
        """As the block size's objective."""
        return self.of_size[batch.anchors.labels.shape[2]].prepare(drafter, batch)

    def __call__(self, drafter, prepared):
        """As the block size's objective."""
        return self.of_size[prepared.supervised.shape[1]](drafter, prepared)

    def evaluate(self, drafter, batch):
        """As the largest block's objective."""
        return self.last.evaluate(drafter, batch)

    def summary(self, sums):
        """As the largest block's objective."""
        return self.last.summary(sums)
