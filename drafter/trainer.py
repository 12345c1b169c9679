"""The training loop; objective, batches, evaluators and saving are its arguments.

Master weights and AdamW's moments are float32; the forward and backward run in the target's dtype. A step depends on
the weights, the moments, its number and its batch alone, so a run that is split resumes to the same weights.
"""

import contextlib
import dataclasses
import math
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from drafter import flat, ranks
from drafter.objective import Prepared
from kernels.errors import UserError

PIECES = ("slopes", "update")  # of a step, each a function of arrays


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step: its 1-based number, loss (nats, weighted mean over supervised slots) and what else is logged of it."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float


class Stopped(UserError):
    """Training that cannot go on; `remedy` says what to change."""


class NonFinite(Stopped):
    """A loss or gradient that is not finite; training stopped before it reached a checkpoint."""

    remedy = "lower optimizer.learning_rate or look at the data, then continue with resume=auto"


class Saturated(Stopped):
    """A gradient that has vanished while the loss is high: the drafter is certain, and wrong, and cannot learn out.

    Where the drafter's distribution underflows, losses that are bounded (total variation) or weighted by it (reverse
    KL) have no slope left.
    """

    remedy = "lower optimizer.learning_rate (or adapter.alpha) and begin a new run"


def learning_rate(step, steps, options):
    """Linear warm-up, then constant, or half a cosine to zero: the rate of 0-based `step` of `steps`."""
    warm = math.ceil(options.warmup_fraction * steps)
    if step < warm:
        return options.learning_rate * (step + 1) / warm
    if options.schedule == "constant":
        return options.learning_rate
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


VANISHED = 1e-3  # gradient norm; a healthy run's is 0.3 to 0.7 (measured: a gated LoRA on SmolLM2, total variation)
HIGH = 0.2  # a loss that leaves something to learn, in nats or of total variation's 2 (assumed)
PATIENCE = 5  # steps in a row, for one batch may happen to hold nothing (assumed)


class Trainer:
    """A drafter, its optimizer and its objective: `step` moves the weights once, on all `ranks` alike.

    master: the weights as float32 vectors (see `flat`). compiled: which of a step's two PIECES go through
    `mx.compile`; "slopes" needs an objective that draws nothing and whose batches are `objective.Prepared`.
    """

    def __init__(self, drafter, objective, options, steps, dtype, ranks=ranks.ALONE, compiled=()):
        self.drafter, self.objective, self.options, self.steps = drafter, objective, options, steps
        self.dtype, self.ranks = getattr(mx, dtype), ranks
        self.vanished = 0  # steps in a row whose gradient was next to nothing under a high loss
        parameters = drafter.trainable_parameters()
        self.flat = flat.Flat(parameters, together=mx.default_device().type == mx.DeviceType.gpu)
        self.master = self.flat.join(parameters)
        self.optimizer = optim.AdamW(
            learning_rate=options.learning_rate,
            betas=[options.beta1, options.beta2],
            weight_decay=options.weight_decay,
            bias_correction=True,
        )
        self.optimizer.init({"master": self.master})
        self.compile(compiled)
        self.finished = 0.0  # when the newest record was made
        self.show(self.cast(self.master))

    def compile(self, pieces):
        """Put the named PIECES through `mx.compile` from here on."""
        if "slopes" in pieces:
            self.slopes = of_arrays(self.slopes)
        if "update" in pieces:
            self.update = mx.compile(self.update)

    @property
    def parameters(self):
        """The master weights as the drafter's tree, float32."""
        return self.flat.split(self.master)

    def cast(self, vectors):
        """Vectors in the dtype that the drafter computes in."""
        return [vector.astype(self.dtype) for vector in vectors]

    def show(self, weights):
        """Put weights, vectors as `cast` gives them, into the drafter; `weights` keeps them."""
        self.weights = weights
        self.drafter.update(self.flat.split(weights))

    def step(self, number, batch):
        """Take 0-based step `number` on a batch. Returns StepRecord; raises NonFinite or Saturated."""
        return self.finish(self.launch(number, batch))

    def launch(self, number, batch):
        """Start step `number` on the device and return what `finish` needs; nothing here waits for the device."""
        start = time.perf_counter()
        prepared = self.objective.prepare(self.drafter, batch)
        loss, weight, slopes = self.ranks.total(self.slopes(self.weights, prepared))
        rate = learning_rate(number, self.steps, self.options)
        state, self.optimizer.state = self.optimizer.state | {"learning_rate": mx.array(rate, mx.float32)}, {}
        updated = self.update(self.master, state, slopes, weight)
        self.master, self.optimizer.state, weights, norm = updated
        loss = loss / mx.maximum(weight, 1.0)
        self.show(weights)
        mx.async_eval(loss, norm, self.master, self.weights, self.optimizer.state)
        return number, loss, norm, rate, start

    def slopes(self, weights, prepared):
        """(Σ w·loss, Σ w, the first one's gradient as float32 vectors) of a prepared batch at such weights."""

        def total(parameters):
            self.drafter.update(parameters)
            return self.objective(self.drafter, prepared)

        (loss, weight), slopes = mx.value_and_grad(total)(self.flat.split(weights))
        return loss, weight, self.flat.join(slopes)

    def update(self, master, state, slopes, weight):
        """AdamW on the mean, clipped gradient: (master, optimizer state, weights to compute with, norm)."""
        weight = mx.maximum(weight, 1.0)  # a block weighs at least 1 (its slot 1); without any, not 0/0
        slopes = [slope / weight for slope in slopes]
        norm = flat.norm(slopes)
        share = mx.minimum(self.options.max_gradient_norm / (norm + 1e-6), 1.0)
        self.optimizer.state = state
        slopes = [slope * share for slope in slopes]
        master = self.optimizer.apply_gradients({"master": slopes}, {"master": master})["master"]
        return master, self.optimizer.state, self.cast(master), norm

    def finish(self, launched):
        """Wait for a launched step. Returns StepRecord; raises NonFinite or Saturated."""
        number, loss, norm, rate, start = launched
        loss, norm = loss.item(), norm.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFinite(f"step {number + 1}: loss {loss}, gradient norm {norm}")
        self.vanished = self.vanished + 1 if norm < VANISHED and loss > HIGH else 0
        if self.vanished >= PATIENCE:
            raise Saturated(
                f"step {number + 1}: loss {loss:.3g}, but gradient norms below {VANISHED} for {PATIENCE} steps in a"
                " row: the loss is saturated"
            )
        before, self.finished = max(start, self.finished), time.perf_counter()
        return StepRecord(number + 1, loss, norm, rate, self.finished - before)

    def state(self):
        """Everything a later `restore` needs, as {name: array}: master weights and optimizer state, float32."""
        state = self.optimizer.state
        kept = {f"parameters.{name}": value for name, value in tree_flatten(self.parameters)}
        for key in ("m", "v"):
            tree = self.flat.split([moments[key] for moments in state["master"]])
            kept |= {f"optimizer.{name}.{key}": value for name, value in tree_flatten(tree)}
        return kept | {f"optimizer.{key}": state[key] for key in ("step", "learning_rate")}

    def restore(self, arrays):
        """Continue from the arrays that `state` gave."""

        def joined(kept):
            return self.flat.join({name: arrays[kept.format(name)] for name in self.flat.shapes})

        self.master = joined("parameters.{}")
        moments = [{"m": m, "v": v} for m, v in zip(joined("optimizer.{}.m"), joined("optimizer.{}.v"))]
        scalars = {key: arrays[f"optimizer.{key}"] for key in ("step", "learning_rate")}
        self.optimizer.state = scalars | {"master": moments}
        mx.eval(self.master, self.optimizer.state)
        self.show(self.cast(self.master))


def of_arrays(slopes):
    """`slopes` compiled: a function of arrays alone, for one objective."""
    compiled = mx.compile(lambda weights, arrays: slopes(weights, Prepared.of(arrays)))
    return lambda weights, prepared: compiled(weights, prepared.arrays())


def fit(trainer, batches, *, start, options, evaluators, save, log, stopping):
    """Run steps start..trainer.steps; returns the number of steps done.

    batches(step) -> Batch, called on another thread; options: a `config.TrainerConfig`. evaluators: callables that map
    the drafter to {name: figure}, run every `validate_every` steps and at the end. save(step, figures): called every
    `save_every` steps, after every evaluation (with its figures), and when stopping. log({...}): one line of metrics,
    of a step when the next one is launched, so that the device never waits for it. stopping() -> bool: asked after
    every step.
    """
    flight = None

    def land(launched):  # nothing is in flight after
        log(dataclasses.asdict(trainer.finish(launched)))

    with contextlib.closing(ahead(batches, start, trainer.steps)) as coming:
        for number, batch in enumerate(coming, start):
            launched = trainer.launch(number, batch)
            if flight is not None:
                land(flight)
            flight, done, last = launched, number + 1, number + 1 == trainer.steps
            if trainer.ranks.size > 1:  # they wait for each other to agree on stopping; a lost one shows in the step
                flight = land(flight)
            validate, stop = done % options.validate_every == 0 or last, stopping()
            if not (validate or stop or done % options.save_every == 0):
                continue
            if flight is not None:
                flight = land(flight)  # before anything is saved: it may not be finite
            figures = evaluate(trainer.drafter, evaluators) if validate else None
            if figures:
                log({"step": done, **figures})
            save(done, figures)
            if stop:
                return done
    return trainer.steps


def ahead(batches, start, end):
    """batches(start) … batches(end − 1), each made on another thread while the one before it is used."""
    with ThreadPoolExecutor(1, "batches") as thread:
        coming = [thread.submit(batches, start)] if start < end else []
        for number in range(start + 1, end + 1):
            batch = coming.pop().result()
            if number < end:
                coming.append(thread.submit(batches, number))
            yield batch


def evaluate(drafter, evaluators):
    """All evaluators' figures of a drafter, in one dict."""
    figures = {}
    for evaluator in evaluators:
        figures |= evaluator(drafter)
    return figures
