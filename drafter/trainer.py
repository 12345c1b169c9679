"""The training loop; objective, batches, evaluators and saving are its arguments.

Master weights and AdamW's moments are float32; the forward and backward run in the target's dtype. A step depends on
the weights, the moments, its number and its batch alone, so a run that is split resumes to the same weights.
"""

import dataclasses
import math
import time

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from drafter import ranks
from kernels.errors import UserError


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step: its 1-based number, loss (nats, weighted mean over supervised slots) and what else is logged of it."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float


class NonFinite(UserError):
    """A loss or gradient that is not finite; training stopped before it reached a checkpoint."""


def learning_rate(step, steps, options):
    """Linear warm-up, then half a cosine to zero: the rate of 0-based `step` of `steps`."""
    warm = math.ceil(options.warmup_fraction * steps)
    if step < warm:
        return options.learning_rate * (step + 1) / warm
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Trainer:
    """A drafter, its optimizer and its objective: `step` moves the weights once, on all `ranks` alike."""

    def __init__(self, drafter, objective, options, steps, dtype, ranks=ranks.ALONE):
        self.drafter = drafter
        self.objective = objective
        self.options = options
        self.steps = steps
        self.dtype = getattr(mx, dtype)
        self.ranks = ranks
        self.parameters = tree_map(lambda value: value.astype(mx.float32), drafter.trainable_parameters())
        self.optimizer = optim.AdamW(
            learning_rate=options.learning_rate,
            betas=[options.beta1, options.beta2],
            weight_decay=options.weight_decay,
            bias_correction=True,
        )
        self.optimizer.init(self.parameters)
        self.show()

    def show(self):
        """Put the master weights into the drafter, in the dtype it computes in."""
        self.drafter.update(tree_map(lambda value: value.astype(self.dtype), self.parameters))

    def step(self, number, batch):
        """Take 0-based step `number` on a batch. Returns StepRecord; raises NonFinite."""
        return self.finish(self.launch(number, batch))

    def launch(self, number, batch):
        """Start step `number` on the device and return what `finish` needs; the host is free meanwhile."""
        start = time.perf_counter()
        prepared = self.objective.prepare(self.drafter, batch)

        def total(parameters):
            self.drafter.update(tree_map(lambda value: value.astype(self.dtype), parameters))
            return self.objective(self.drafter, prepared)

        (loss, weight), gradients = mx.value_and_grad(total)(self.parameters)
        loss, weight, gradients = self.ranks.total((loss, weight, gradients))
        weight = mx.maximum(weight, 1.0)  # a block weighs at least 1 (its slot 1); without any, not 0/0
        gradients = tree_map(lambda gradient: gradient / weight, gradients)
        gradients, norm = optim.clip_grad_norm(gradients, self.options.max_gradient_norm)
        rate = learning_rate(number, self.steps, self.options)
        self.optimizer.learning_rate = rate
        self.parameters = self.optimizer.apply_gradients(gradients, self.parameters)
        loss = loss / weight
        mx.async_eval(loss, norm, self.parameters, self.optimizer.state)
        self.show()
        return number, loss, norm, rate, start

    def finish(self, launched):
        """Wait for a launched step. Returns StepRecord; raises NonFinite."""
        number, loss, norm, rate, start = launched
        loss, norm = loss.item(), norm.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFinite(f"step {number + 1}: loss {loss}, gradient norm {norm}")
        return StepRecord(number + 1, loss, norm, rate, time.perf_counter() - start)

    def state(self):
        """Everything a later `restore` needs, as {name: array}: master weights and optimizer state, float32."""
        kept = {"parameters": self.parameters, "optimizer": self.optimizer.state}
        return dict(tree_flatten(kept))

    def restore(self, arrays):
        """Continue from the arrays that `state` gave."""
        # Into the trees as they are: a file's order of names would sum the gradient norm in another order.
        own = {"parameters": self.parameters, "optimizer": self.optimizer.state}
        kept = tree_map_with_path(lambda name, _: arrays[name], own)
        self.parameters, self.optimizer.state = kept["parameters"], kept["optimizer"]
        mx.eval(self.parameters, self.optimizer.state)
        self.show()


def fit(trainer, batches, *, start, options, evaluators, save, log, stopping):
    """Run steps start..trainer.steps; returns the number of steps done.

    batches(step) -> Batch; options: a `config.TrainerConfig`. evaluators: callables that map the drafter to {name:
    figure}, run every `validate_every` steps and at the end. save(step, figures): called every `save_every` steps,
    after every evaluation (with its figures), and when stopping. log({...}): one line of metrics. stopping() -> bool:
    asked after every step.
    """
    batch = batches(start) if start < trainer.steps else None
    for number in range(start, trainer.steps):
        launched = trainer.launch(number, batch)
        batch = batches(number + 1)  # while the device works
        record = trainer.finish(launched)
        log(dataclasses.asdict(record))
        done, last = number + 1, number + 1 == trainer.steps
        figures = None
        if done % options.validate_every == 0 or last:
            figures = evaluate(trainer.drafter, evaluators)
            log({"step": done, **figures})
        stop = stopping()
        if figures or stop or done % options.save_every == 0:
            save(done, figures)
        if stop and not last:
            return done
    return trainer.steps


def evaluate(drafter, evaluators):
    """All evaluators' figures of a drafter, in one dict."""
    figures = {}
    for evaluator in evaluators:
        figures |= evaluator(drafter)
    return figures
