"""What training needs of each kind of drafter: the drafter, its objective, its batches, and a guess at its memory.

R rows, T tokens, N blocks, B block, D hidden, r rank.
"""

import mlx.core as mx
from mlx.utils import tree_flatten

from drafter import dflash, features, gated_lora, gated_objective, losses, objective, pieces, rng


class DFlashRecipe:
    """A full drafter with layers of its own. config: a `config.Config`."""

    def __init__(self, target, config):
        self.target, self.config = target, config

    def drafter(self):
        """A new drafter of the configured shape."""
        made = dflash.DFlash(dflash.config_for(self.target, self.config.drafter))
        return dflash.initialise(made, self.target, self.config.trainer.seed)

    def describe(self, drafter):
        """One line for an opening card."""
        return dflash.describe(drafter.config)

    def size(self, drafter):
        """How many numbers are trained."""
        return dflash.parameter_count(drafter)

    def objective(self):
        """The weighted loss of a batch."""
        return objective.Objective(*self.goal(self.config.drafter.block_size), **self.weighing())

    def goal(self, block_size):
        """An objective's positional arguments."""
        return self.target, self.config.loss.name, block_size

    def weighing(self):
        """An objective's options."""
        loss = self.config.loss
        options = {"weights": loss.weights, "gamma": loss.gamma, "dpace_alpha": loss.dpace_alpha}
        return options | {"rows_per_chunk": loss.rows_per_chunk}

    def layout(self, drafter, rows):
        """What a store of the rows' features holds for a drafter: `features.Layout`."""
        hidden = losses.LOSSES[self.config.loss.name].of_target
        return features.layout_of(self.target, rows, drafter.config.target_layer_ids, hidden)

    def feed(self, rows, store, ranks):
        """Batches by step: this rank's part of each. store: a `features.Store` to read from, or None."""
        settings = self.config.trainer
        return objective.Feed(
            rows,
            rows_per_step=settings.rows_per_step,
            block_size=self.config.drafter.block_size,
            per_row=settings.anchors_per_row,
            seed=settings.seed,
            store=store,
            ranks=ranks,
        )

    def pieces(self, loop, batch):
        """The `trainer.PIECES` of a step on such batches that are faster compiled here."""
        return pieces.chosen(loop, batch)

    def held_out(self, rows):
        """The batch of held-out rows, whose blocks never change."""
        settings = self.config.trainer
        generator = rng.numpy_rng(settings.seed, "validation anchors", 0)
        return objective.blocked(rows, self.config.drafter.block_size, settings.anchors_per_row, generator)

    def memory(self, drafter):
        """Bytes by part: what stays, and what one step adds."""
        shape, config, width = drafter.config, self.config, getattr(mx, self.target.dtype).size
        rows, T, B = config.trainer.rows_per_step, config.data.row_tokens, shape.block_size
        blocks = rows * config.trainer.anchors_per_row * B
        scores = rows * shape.num_attention_heads * (blocks // rows) * (T + B) * shape.num_hidden_layers
        inner = (4 * shape.hidden_size + 3 * shape.intermediate_size) * shape.num_hidden_layers
        return self.kept(drafter, width) | {
            "taps": rows * T * shape.hidden_size * len(shape.target_layer_ids) * width,
            "block rows": blocks * inner * width,
            "attention scores": 3 * scores * width,
            "logits": self.logits(),
        }

    def kept(self, drafter, width):
        """Bytes that stay from step to step."""
        target = sum(value.nbytes for _, value in tree_flatten(self.target.model.parameters()))
        return {"target": target, "drafter with optimizer": self.size(drafter) * (16 + width)}

    def logits(self):
        """Bytes of one chunk's logits; the copies were measured on a CPU in float32."""
        copies = 18 if losses.LOSSES[self.config.loss.name].of_target else 8
        return copies * self.config.loss.rows_per_chunk * self.target.vocab_size * 4


class GatedLoraRecipe(DFlashRecipe):
    """An adapter on the target itself."""

    def drafter(self):
        """A new adapter of the configured rank, on the configured projections."""
        options = self.config.drafter
        shape = gated_lora.config_for(self.target, self.config.adapter, options.block_size, options.mask_token_id)
        return gated_lora.initialise(gated_lora.GatedLora(self.target, shape), self.config.trainer.seed)

    def describe(self, drafter):
        """One line for an opening card."""
        return gated_lora.describe(drafter.config)

    def sizes(self):
        """The block sizes of the run."""
        return self.config.adapter.curriculum or [self.config.drafter.block_size]

    def objective(self):
        """The weighted loss of a batch, in the configured layout."""
        adapter = self.config.adapter
        made = gated_objective.OBJECTIVES[adapter.layout]
        options = self.weighing() | {"shuffled": adapter.shuffled}
        return gated_objective.Stages(lambda size: made(*self.goal(size), **options), self.sizes())

    def blocks(self, corruption):
        """How blocks are drawn."""
        adapter, options = self.config.adapter, self.config.drafter
        return gated_objective.Blocks(
            gated_lora.config_for(self.target, adapter, options.block_size, options.mask_token_id),
            options.block_size,
            self.config.trainer.anchors_per_row,
            corruption,
            adapter.layout,
            self.config.trainer.seed,
        )

    def layout(self, drafter, rows):
        """None: blocks start from the target's states at their anchors, which no store keeps (`limits` refuses one)."""

    def feed(self, rows, store, ranks):
        """Batches by step: this rank's part of each; store is None."""
        settings, blocks = self.config.trainer, self.blocks(self.config.adapter.corruption)
        sizes = {"sizes": self.sizes(), "steps": settings.steps}
        return gated_objective.Feed(rows, blocks, **sizes, rows_per_step=settings.rows_per_step, ranks=ranks)

    def pieces(self, loop, batch):
        """None: its batches are no plain trees of arrays, and caches are made in its step."""
        return ()

    def held_out(self, rows):
        """The batch of held-out rows, whose blocks never change and hold noise alone, as in decoding."""
        return self.blocks("all")(rows, self.config.drafter.block_size, "validation", 0)

    def memory(self, drafter):
        """Bytes by part: what stays, and what one step adds."""
        config, settings, width = self.config, self.target.settings, getattr(mx, self.target.dtype).size
        rows, T = config.trainer.rows_per_step, config.data.row_tokens
        if config.adapter.layout == "prefix":
            trained = rows * config.trainer.anchors_per_row * (config.drafter.block_size - 1)
        else:
            trained = rows * T
        inner = (8 * self.target.hidden_size + 4 * settings.get("intermediate_size", 0)) * self.target.num_layers
        return self.kept(drafter, width) | {"trained rows": trained * inner * width, "logits": self.logits()}


RECIPES = {"dflash": DFlashRecipe, "gated_lora": GatedLoraRecipe}
