"""What sharing a prefix buys in training: supervised noise rows a second, many blocks a window over one block a window.

R rows, T tokens of a window, N blocks a window, B block, V vocabulary. Both layouts take whole training steps (the
target's reading, forward, backward, update) on the same random windows; only noise rows that are judged are counted.
Steps of all arms alternate within one process, after two untimed rounds that compile and allocate.
"""

import dataclasses
import statistics
import time

import mlx.core as mx
import numpy as np

from drafter import gated_lora, gated_objective, trainer
from drafter.config import AdapterConfig, OptimizerConfig

HEADER = "layout", "blocks a window", "rows", "s a step", "rows/s", "over suffix", "peak GiB"
WARMUP = 2
STEPS = 1_000_000  # of the schedule, whose rate the clock does not see


@dataclasses.dataclass(frozen=True)
class Windows:
    """R windows of T random tokens, each one document, all of it supervised: as a `corpus.Batch`."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray


@dataclasses.dataclass(frozen=True)
class Arm:
    """One layout: its batch, and the trainer that steps on it."""

    name: str
    blocks: int
    batch: gated_objective.Batch
    loop: trainer.Trainer

    @property
    def rows(self):
        """Supervised noise rows of a step."""
        return int(self.batch.anchors.supervised.sum())


def draw(target, R, T, seed=0):
    """Random Windows of a target's ids."""
    tokens = np.random.default_rng(seed).integers(1, target.vocab_size - 1, (R, T)).astype(np.int32)
    return Windows(tokens, np.ones((R, T), bool), np.ones((R, T), np.int32))


def arms(target, windows, block_size, anchors, *, rank, loss, rows_per_chunk):
    """The suffix layout, and the prefix layout with each number of anchors; each with an adapter of its own."""
    mask = target.vocab_size - 1
    shape = gated_lora.config_for(target, AdapterConfig(rank=rank), block_size, mask)
    options = {"weights": "uniform", "rows_per_chunk": rows_per_chunk}
    found = []
    for layout, N in [("suffix", 1), *(("prefix", N) for N in anchors)]:
        drafter = gated_lora.initialise(gated_lora.GatedLora(target, shape), 0)
        goal = gated_objective.OBJECTIVES[layout](target, loss, block_size, **options)
        blocks = gated_objective.Blocks(shape, block_size, N, "all", layout, 0)
        loop = trainer.Trainer(drafter, goal, OptimizerConfig(), STEPS, target.dtype)
        name = layout if layout == "suffix" else f"{layout}-{N}"
        found.append(Arm(name, N, blocks(windows, block_size, "training", 0), loop))
    return found


def step(arm, number):
    """(seconds, peak bytes above what was held before) of one training step."""
    mx.synchronize()
    mx.reset_peak_memory()
    held, start = mx.get_active_memory(), time.perf_counter()
    arm.loop.step(number, arm.batch)
    mx.synchronize()
    return time.perf_counter() - start, mx.get_peak_memory() - held


def measure(compared, rounds, progress):
    """{arm: figures} of arms whose steps alternate; the first is what the others are held against.

    progress: wraps an iterable to show how far it is, as tqdm does.
    """
    samples = {arm.name: [] for arm in compared}
    for number in progress(range(rounds + WARMUP), total=rounds + WARMUP, desc="rounds"):
        for arm in compared:
            sample = step(arm, number)
            if number >= WARMUP:
                samples[arm.name].append(sample)
    figures = {arm.name: summary(arm, samples[arm.name]) for arm in compared}
    base = figures[compared[0].name]["rows_per_second"]
    return {name: one | {"over_suffix": one["rows_per_second"] / base} for name, one in figures.items()}


def summary(arm, samples):
    """Medians of one arm's (seconds, peak bytes), and the range of its seconds."""
    seconds, peaks = zip(*samples)
    middle = statistics.median(seconds)
    return {
        "blocks": arm.blocks,
        "supervised_rows": arm.rows,
        "step_seconds": middle,
        "range_seconds": [min(seconds), max(seconds)],
        "rows_per_second": arm.rows / middle,
        "peak_bytes": max(peaks),
    }


def tables(found):
    """What a report shows of `measure`'s result: [(title, header, rows of text, notes)]."""
    rows = [
        [name, str(one["blocks"]), str(one["supervised_rows"]), f"{one['step_seconds']:.3f}",
         f"{one['rows_per_second']:,.1f}", f"{one['over_suffix']:.2f}", f"{one['peak_bytes'] / 2**30:.2f}"]
        for name, one in found.items()
    ]  # fmt: skip
    note = "rows/s: supervised noise rows, of which a gated LoRA learns; the same windows in all, steps in turns"
    return [("layouts of a training step", HEADER, rows, [note])]
