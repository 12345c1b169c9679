"""The timed pass: arms interleaved within each prompt within each repeat, on a synchronised clock.

The baseline runs first on every prompt; the other arms rotate by one place a prompt and a repeat, so that over a set
each stands equally often early and late. The order is recorded with every row. What a row needs beyond the run itself
(machine state, digests of text) is taken outside the clock.
"""

import dataclasses
import importlib

import mlx.core as mx

from decode.lab import health


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a pass is run: cap in tokens, timed repeats, untimed warm-up runs of every arm."""

    max_tokens: int
    repeats: int = 1
    warmup: int = 1


def order(arms, prompt, repeat):
    """The arms in the order they run on the prompt with this index in this repeat; the first arm stays first."""
    first, *rest = arms
    shift = (prompt + repeat) % len(rest) if rest else 0
    return [first, *rest[shift:], *rest[:shift]]


def warm_up(arms, prompts, plan):
    """Run every arm untimed on the first prompts, so that no timed run compiles or allocates for the first time."""
    for turn in range(plan.warmup):
        for arm in arms:
            arm.run(prompts[turn % len(prompts)].tokens, plan.max_tokens)
            settle()
            yield


def timed_rows(arms, prompts, plan):
    """Yield (arm, prompt, place, repeat, Run, reasons for which the row is flagged), one a run, in the order run."""
    for repeat in range(plan.repeats):
        for index, prompt in enumerate(prompts):
            for place, arm in enumerate(order(arms, index, repeat)):
                before = health.pulse()
                run = arm.run(prompt.tokens, plan.max_tokens)
                settle()  # outside the run's clock: work that an arm left in flight must not fall on the next one
                yield arm, prompt, place, repeat, run, health.disturbance(before, health.pulse())


def settle():
    """Wait until nothing is in flight, on MLX's own stream and on the one mlx_lm generates on."""
    mx.synchronize()
    mx.synchronize(importlib.import_module("mlx_lm.generate").generation_stream)
