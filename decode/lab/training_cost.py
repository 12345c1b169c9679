"""What a training step costs: steps a second and utilisation, where the time goes, and plain PyTorch's beside it.

R rows, T tokens, N blocks, B block, D hidden, I MLP width, n taps, L layers, H query heads, G key/value heads, d head
dimension, V vocabulary, M supervised slots. The arms take the same steps from the same weights on the same batch, whose
taps and embedded rows are computed before: what is timed is the drafter's forward, loss, backward and update. They run
in turns within one process, a run of several steps each; no arm waits for a step's loss before it starts the next.
"""

import dataclasses
import functools
import statistics
import time

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from decode.lab import health
from drafter import anchors, config, dflash, losses, objective, pieces, trainer
from kernels import backend

DOCUMENTS = 2  # of a row, of equal length (assumed: about what packing gives)
RATES = "tokens_s", "block_tokens_s", "supervised_slots_s"
HEADER = "arm", "ms a step", "tokens/s", "block tokens/s", "slots/s", "utilisation", "over best", "first step s"
PEAK_SIZE = {"gpu": 8192, "cpu": 1024}  # rows of the square product that utilisation is a share of


@dataclasses.dataclass(frozen=True)
class Shape:
    """A step's size: rows of so many tokens, blocks a row, and slots scored at a time."""

    rows: int = 32
    row_tokens: int = 512
    blocks: int = 32
    rows_per_chunk: int = 4096


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all arms share: one drafter's first weights, its objective, one batch, and AdamW's options over `steps`."""

    drafter: dflash.DFlash
    goal: objective.Objective
    batch: objective.Batch
    prepared: objective.Prepared
    options: config.OptimizerConfig
    steps: int

    @property
    def dtype(self):
        """What is computed in."""
        return self.goal.target.dtype


def set_up(target, drafter_options, shape, steps):
    """The Setup of a drafter (a `config.DrafterConfig`) drawn for a target, with everything in memory."""
    drafter = dflash.initialise(dflash.DFlash(dflash.config_for(target, drafter_options)), target, 0)
    goal = objective.Objective(target, "cross_entropy", drafter.config.block_size, rows_per_chunk=shape.rows_per_chunk)
    batch = batch_for(target, drafter.config.block_size, shape)
    prepared = goal.prepare(drafter, batch)
    mx.eval(drafter.parameters(), prepared.arrays())
    pieces.ensure_kernels(target, drafter.config, shape.row_tokens, getattr(mx, target.dtype))
    return Setup(drafter, goal, batch, prepared, config.OptimizerConfig(), steps)


# The arms.


class Given:
    """An objective whose batches are prepared already: the target's part is outside the step."""

    def __init__(self, goal):
        self.goal = goal

    def prepare(self, drafter, prepared):
        """The batch as it is."""
        return prepared

    def __call__(self, drafter, prepared):
        return self.goal(drafter, prepared)


class Ours:
    """The project's own step, the pieces named in `compiled` through `mx.compile`."""

    def __init__(self, name, setup, compiled):
        drafter = dflash.DFlash(setup.drafter.config)
        drafter.update(setup.drafter.parameters())
        self.name, self.prepared = name, setup.prepared
        self.trainer = trainer.Trainer(
            drafter, Given(setup.goal), setup.options, setup.steps, setup.dtype, compiled=compiled
        )

    def run(self, first, count):
        """Take `count` steps from 0-based `first` and wait for the last; returns its loss."""
        flight = None
        for number in range(first, first + count):
            launched = self.trainer.launch(number, self.prepared)
            if flight:
                self.trainer.finish(flight)
            flight = launched
        loss = self.trainer.finish(flight).loss
        mx.eval(self.trainer.state())
        mx.synchronize()
        return loss


class Plain:
    """The same step in plain PyTorch."""

    def __init__(self, name, setup, device, compiled):
        from decode.lab import plain_torch

        weights = {name: as_numpy(value) for name, value in tree_flatten(setup.drafter.trainable_parameters())}
        how = {"device": device, "dtype": setup.dtype, "chunk": setup.goal.rows_per_chunk, "compiled": compiled}
        self.name = name
        self.plain = plain_torch.Step(setup.drafter.config, weights, setup.options, **how)
        self.inputs = self.plain.inputs(**plain_inputs(setup))
        self.rate = functools.partial(trainer.learning_rate, steps=setup.steps, options=setup.options)

    def run(self, first, count):
        """As `Ours.run`."""
        for number in range(first, first + count):
            loss = self.plain.step(self.rate(number), self.inputs)
        self.plain.synchronize()
        return loss.item()


OURS = {"foredraft": (), "foredraft update": ("update",), "foredraft compiled": trainer.PIECES}
PLAIN = {"torch": False, "torch compiled": True}


def arms(setup, names):
    """(the arms of these names, why any that were asked for are missing)."""
    found = [Ours(name, setup, OURS[name]) for name in names if name in OURS]
    asked = [name for name in names if name in PLAIN]
    why = absence(backend.describe()["device"]) if asked else None
    return found + (
        [] if why else [Plain(name, setup, backend.describe()["device"], PLAIN[name]) for name in asked]
    ), why


def absence(device):
    """Why PyTorch cannot be measured here, or None where it can."""
    try:
        from decode.lab import plain_torch
    except ImportError as error:
        return f"PyTorch cannot be imported ({error})"
    return None if plain_torch.available(device) else f"this PyTorch has no {device} device, where MLX runs"


def plain_inputs(setup):
    """The batch as NumPy arrays by the names of `plain_torch.Inputs`; slots and weights are worked out anew."""
    from decode.lab import plain_torch

    drawn, B = setup.batch.anchors, setup.drafter.config.block_size
    flat = np.flatnonzero(drawn.supervised)
    weights = np.array([0.0, *plain_torch.decay(B, losses.gamma_for(B))])
    return {
        "taps": as_numpy(mx.concatenate(setup.prepared.taps, axis=-1)),
        "rows": as_numpy(setup.prepared.rows),
        "positions": drawn.positions,
        "documents": np.array(setup.batch.documents),
        "slots": flat,
        "labels": drawn.labels.reshape(-1)[flat],
        "weights": weights[flat % B],
        "head": as_numpy(head(setup.goal.target)),
    }


def head(target):
    """The target's head as a matrix [V,D]: what it scores the unit vectors with."""
    return target.by_head(mx.eye(target.hidden_size, dtype=getattr(mx, target.dtype))).T


def as_numpy(value):
    """An array as float32 NumPy."""
    return np.array(value.astype(mx.float32))


# The batch.


def batch_for(target, block_size, shape, seed=0):
    """Random rows of DOCUMENTS documents each, with `shape.blocks` blocks a row whose slots are all supervised."""
    generator = np.random.default_rng(seed)
    R, T, N = shape.rows, shape.row_tokens, shape.blocks
    tokens = generator.integers(0, target.vocab_size, (R, T), dtype=np.int32)
    documents = np.broadcast_to(1 + np.arange(T, dtype=np.int32) * DOCUMENTS // T, (R, T))
    places = np.flatnonzero(documents[0, : T - block_size] == documents[0, block_size:])  # the block fits its document
    positions = np.sort(np.stack([generator.choice(places, N, replace=len(places) < N) for _ in range(R)]), axis=1)
    used, answers = np.ones((R, N), bool), np.ones((R, T), bool)
    drawn = anchors.blocks_at(tokens, answers, documents, positions.astype(np.int32), used, block_size)
    return objective.Batch(mx.array(tokens), mx.array(documents), drawn)


# What a step is.


def step_flops(config, shape, slots):
    """FLOP of a step, a multiplication and an addition counted as two; the target's forward is not in it.

    A product with trained weights is counted thrice (forward, and the gradients of input and weights), fc's twice (taps
    need no gradient), the frozen head's twice (no gradient of its own), scores and mixing of T + B keys a block row
    thrice. Left out: norms, rotations, softmax, the update, and whatever is computed a second time.
    """
    D, I, L, d = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim  # noqa: E741
    H, G, B = config.num_attention_heads, config.num_key_value_heads, config.block_size
    block_rows, context_rows = shape.rows * shape.blocks * B, shape.rows * shape.row_tokens
    return {
        "layers": 6 * block_rows * L * (2 * D * H * d + 2 * D * G * d + 3 * D * I),
        "context": context_rows * (6 * L * 2 * D * G * d + 4 * len(config.target_layer_ids) * D * D),
        "attention": 12 * block_rows * L * (shape.row_tokens + B) * H * d,
        "head": 4 * slots * D * config.vocab_size,
    }


def peak(dtype):
    """FLOP a second of a large square product in `dtype` on this device: the best of seven, after two."""
    size = PEAK_SIZE["gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"]
    left, right = (
        mx.random.normal((size, size), key=mx.random.key(seed)).astype(getattr(mx, dtype)) for seed in (1, 2)
    )
    return 2 * size**3 / min(timed(lambda: left @ right) for _ in range(9))


def timed(call):
    """Seconds until what `call` returns is there."""
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start


# The measurements.


def compare(arms, steps, rounds, warm, say=lambda line: None):
    """Seconds of `rounds` runs of `steps` steps of each arm, in turns, after `warm` steps that compile.

    Returns {arm: {"first_step_s", "runs_s", "step_ms", "loss"}}; the order turns around in every other round.
    say(line): told of each arm's first step, which may compile for minutes.
    """
    found = {}
    for arm in arms:
        found[arm.name] = {"first_step_s": stopwatch(arm, 0, 1)[0], "runs_s": []}
        say(f"{arm.name}: first step {found[arm.name]['first_step_s']:.1f} s")
    for arm in arms:
        arm.run(1, warm)
    for turn in range(rounds):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            seconds, loss = stopwatch(arm, 1 + warm + turn * steps, steps)
            found[arm.name]["runs_s"].append(seconds)
            found[arm.name]["loss"] = loss
    for row in found.values():
        row["step_ms"] = statistics.median(row["runs_s"]) / steps * 1e3
    return found


def stopwatch(arm, first, count):
    """(seconds of a run, its last loss)."""
    start = time.perf_counter()
    loss = arm.run(first, count)
    return time.perf_counter() - start, loss


def ratios(found, own):
    """{arm: {"median", "quartiles"}} of an arm's seconds ÷ `own`'s in the same round: above 1, `own` is faster."""
    ours, others = found[own]["runs_s"], {name: row["runs_s"] for name, row in found.items() if name != own}
    pairs = {name: [theirs / mine for theirs, mine in zip(runs, ours, strict=True)] for name, runs in others.items()}
    return {name: {"median": statistics.median(each), "quartiles": quartiles(each)} for name, each in pairs.items()}


def quartiles(values):
    """The first and third quartile."""
    return statistics.quantiles(values, n=4)[::2] if len(values) > 1 else values * 2


def parts(setup, repeats):
    """Milliseconds by part of an uncompiled step, each part made alone from an idle device and waited for: medians.

    target: its forward and the embedded rows, which the compared step is given. forward: to the drafter's hidden rows.
    loss: head and loss, beyond that. backward: beyond both. update: clipping, AdamW and the cast. So what overlaps in
    a running step is counted in full, and the parts may add up to more than one.
    """
    loop, goal, prepared = Ours("parts", setup, ()).trainer, setup.goal, setup.prepared
    drafter = loop.drafter
    slopes = loop.slopes(loop.weights, prepared)[2]
    mx.eval(slopes)
    made = {
        "target": lambda: goal.prepare(drafter, setup.batch).arrays(),
        "forward": lambda: goal.hidden(drafter, prepared),
        "loss": lambda: goal(drafter, prepared),
        "backward": lambda: loop.slopes(loop.weights, prepared),
        "update": lambda: loop.update(loop.master, loop.optimizer.state, slopes, mx.array(1.0)),
    }
    found = {}
    for name, call in made.items():
        loop.show(loop.weights)
        found[name] = statistics.median(timed(call) for _ in range(repeats + 1)) * 1e3
    found["backward"] -= found["loss"]
    found["loss"] -= found["forward"]
    return found


def measure(setup, shape, names, steps, rounds, warm, say=lambda line: None):
    """All of the above as one result. names: of OURS and PLAIN; those of PLAIN are left out where they cannot run."""
    compared, why = arms(setup, names)
    slots = int(setup.batch.anchors.supervised.sum())
    work, before, top = step_flops(setup.drafter.config, shape, slots), health.snapshot(), peak(setup.dtype)
    found = compare(compared, steps, rounds, warm, say)
    for row in found.values():
        row |= rates(row["step_ms"] / 1e3, setup, shape, slots, sum(work.values()), top)
    best = min((arm.name for arm in compared if arm.name in OURS), key=lambda name: found[name]["step_ms"])
    return {
        "shape": dataclasses.asdict(shape) | {"block_size": setup.drafter.config.block_size, "supervised_slots": slots},
        "flop_per_step": work,
        "peak_flop_s": top,
        "arms": found,
        "best": best,
        "over_best": ratios(found, best),
        "not_compared": why,
        "parts_ms": parts(setup, rounds),
        "health": {"before": before, "after": health.snapshot()},
    }


def rates(seconds, setup, shape, slots, flop, top):
    """What a step of so many seconds comes to: tokens are the rows' own, block tokens what the drafter computes."""
    block_tokens = shape.rows * shape.blocks * setup.drafter.config.block_size
    counts = {"tokens": shape.rows * shape.row_tokens, "block_tokens": block_tokens, "supervised_slots": slots}
    per_second = {f"{name}_s": count / seconds for name, count in counts.items()}
    return {"steps_s": 1 / seconds, **per_second, "utilisation": flop / seconds / top}


def tables(found):
    """What a report shows of `measure`'s result: [(title, header, rows of text, notes)]."""
    over = {found["best"]: 1.0} | {name: ratio["median"] for name, ratio in found["over_best"].items()}
    rows = [
        [name, f"{row['step_ms']:.2f}", *(f"{row[rate]:,.0f}" for rate in RATES), f"{row['utilisation']:.1%}",
         f"{over[name]:.2f}", f"{row['first_step_s']:.1f}"]
        for name, row in found["arms"].items()
    ]  # fmt: skip
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in found["parts_ms"].items())
    work = ", ".join(f"{name} {count / 1e9:,.1f}" for name, count in found["flop_per_step"].items())
    notes = [
        f"parts of an uncompiled step, each made alone, ms: {parts}",
        f"GFLOP a step: {work}",
        f"over best: an arm's seconds ÷ those of {found['best']}, medians over rounds in turns; above 1 it is slower",
    ]
    notes += [f"not compared: {found['not_compared']}"] if found["not_compared"] else []
    return [("a training step", HEADER, rows, notes)]
