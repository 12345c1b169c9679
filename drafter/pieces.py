"""Which pieces of a training step go through `mx.compile` on this machine: the step as a whole, measured once.

R rows, T tokens. Compiled, a step of thousands of operations is not built anew in Python each time, and what can be
fused is; but MLX builds a module for every distinct fused kernel (some 30 for a step, seconds each, kept on disk by
MLX_PTX_CACHE_DIR), and traces each new set of shapes. On a CPU it would call a C++ compiler for each, so nothing is
compiled there.
"""

import pathlib

import mlx.core as mx

from drafter import trainer, trial
from drafter.trainer import PIECES
from kernels import selfcheck, verdicts

NAME = "training.step"  # of the verdict on a compiled step
HERE = pathlib.Path(__file__).parent
verdicts.register("training", *(HERE / f"{name}.py" for name in ("trainer", "objective", "turns", "losses", "dflash")))
RUN = 4  # steps that follow each other without a wait in what is timed (assumed: as a run of training flows)


def chosen(loop, batch):
    """The PIECES that a `trainer.Trainer`'s step, on batches like this one, should compile here; measured if unknown.

    loop.objective: one whose batches are `objective.Prepared`. The loop and its drafter are left as they were.
    """
    if not verdicts.on_gpu():
        return ()
    ensure_kernels(loop.objective.target, loop.drafter.config, batch.tokens.shape[1], loop.dtype)
    name = case(loop, batch)
    if verdicts.chosen() is None and verdicts.state(NAME, name) is None:
        trial.settle(NAME, name, loop.dtype, lambda: measure(loop, batch))
        loop.show(loop.weights)
    return PIECES if verdicts.allowed(NAME, name) else ()


def ensure_kernels(target, config, T, dtype):
    """Measure, once a machine, the kernels that steps of a drafter with this config on rows of T tokens may use."""
    logits = target.score(mx.zeros((1, config.hidden_size), dtype))
    mine = {"blocks": [[T, config.block_size]], "logits": [logits.shape[-1]]}
    others = dict.fromkeys(("dense", "quantised", "attention", "delta"), [])
    selfcheck.ensure({"dtype": str(dtype).removeprefix("mlx.core."), **mine, **others})


def case(loop, batch):
    """What a verdict holds for: dtype, the drafter's shape, loss and weights, and the rows of a step."""
    config, goal, kind = loop.drafter.config, loop.objective, str(loop.dtype).removeprefix("mlx.core.")
    shape = f"{config.num_hidden_layers} layers of {config.hidden_size}x{config.intermediate_size}"
    heads = "".join(f", {name} head" for name in ("markov", "confidence") if getattr(loop.drafter, f"{name}_head"))
    loss = f"{type(goal.weights).__name__} {goal.loss.value.__name__}{heads}"
    return f"{kind} {shape}, {loss}, {'x'.join(map(str, batch.tokens.shape))} tokens"


def measure(loop, batch):
    """(the distance of the gradients, seconds of RUN steps with PIECES compiled, and without), medians."""
    dtype = str(loop.dtype).removeprefix("mlx.core.")
    twins = [
        trainer.Trainer(loop.drafter, loop.objective, loop.options, loop.steps, dtype, compiled=each)
        for each in (PIECES, ())
    ]
    prepared = loop.objective.prepare(loop.drafter, batch)
    found, expected = (mx.concatenate(twin.slopes(twin.weights, prepared)[2]) for twin in twins)
    return trial.distance(found, expected), *trial.in_turns([lambda _, twin=twin: run(twin, batch) for twin in twins])


def run(twin, batch):
    """RUN steps on one batch, of which only the last is waited for."""
    for number in range(RUN):
        launched = twin.launch(number, batch)
    twin.finish(launched)
    mx.eval(twin.master, twin.optimizer.state)
