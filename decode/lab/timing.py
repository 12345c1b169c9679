"""The timed pass: arms interleaved within each prompt within each repeat, on a synchronised clock.

The baseline runs first on every prompt; the other arms rotate by one place a prompt and a repeat, so that over a set
each stands equally often early and late. The order is recorded with every row. What a row needs beyond the run itself
(machine state, digests of text) is taken outside the clock.
"""

import dataclasses
import importlib

import mlx.core as mx

from decode.lab import health, statistics


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a pass is run: cap in tokens, timed repeats, untimed warm-up runs of every arm, rows that headlines count."""

    max_tokens: int
    repeats: int = 1
    warmup: int = 1
    headline: str = statistics.QUIET


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


def rounds(arms, prompts, plan, done=frozenset()):
    """Yield (repeat, prompt, runs, ailments) a round: all arms on one prompt, in the order run.

    runs is a list of (arm, place, Run, reasons for which that row alone is flagged), ailments what was wrong with the
    machine before or after the round. done: (repeat, prompt id, part) of rounds to pass over.
    """
    before = health.check()
    for repeat in range(plan.repeats):
        for index, prompt in enumerate(prompts):
            if (repeat, prompt.id, part_of(arms, prompt)) in done:
                continue
            runs = [timed(arm, place, prompt, plan) for place, arm in enumerate(order(arms, index, repeat))]
            after = health.check()
            yield repeat, prompt, runs, health.ailments(before, after)
            before = after


def places(arms, prompts, plan):
    """The (repeat, prompt id, part) of every round."""
    repeats = range(plan.repeats)
    return {(repeat, prompt.id, part_of(arms, prompt)) for repeat in repeats for prompt in prompts}


def part_of(arms, prompt):
    """The part of an evaluation that tells a round from others on the same prompt: the prompt's or the baseline's."""
    return prompt.part or arms[0].part


def timed(arm, place, prompt, plan):
    """One run of one arm between two pulses: (arm, place, Run, what disturbed it)."""
    before = health.pulse()
    run = arm.run(prompt.tokens, plan.max_tokens)
    settle()  # outside the run's clock: work that an arm left in flight must not fall on the next one
    return arm, place, run, health.disturbance(before, health.pulse())


def settle():
    """Wait until nothing is in flight, on MLX's own stream and on the one mlx_lm generates on."""
    mx.synchronize()
    mx.synchronize(importlib.import_module("mlx_lm.generate").generation_stream)
