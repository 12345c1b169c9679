"""Whether a compiled step serves on this machine: beside the modules' own forward, as near to it, and faster.

W rows, D hidden. What a step is made of has been found right kernel by kernel, in a child process. Whether it pays can
only be seen whole: a product that alone is slower than MLX's may still win, since MLX prepares each of its own on the
host, every time; and a step that wins on one machine's host may lose on another's.
"""

import dataclasses
import logging
import statistics
import time

import mlx.core as mx

from drafter import steps
from kernels import verdicts
from kernels.errors import UserError

WIDTHS = (1, 16)  # rows of a plain step and of a wide verify
PROMPT = 64  # rows before them
ROUNDS = 9  # timed forwards of each width and route, in turns, after two that compile
# max ‖step − modules‖ ÷ ‖modules‖ over hidden states; assumed: several times what two orders of summation differ by in
# a deep model (in float32 with TF32 on)
TOLERANCE = {mx.bfloat16: 0.08, mx.float16: 0.02, mx.float32: 0.01}


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to feed few rows: `forward(tokens, cache)` to hidden [1,W,D], `score(hidden)` to logits, and caches."""

    forward: object
    score: object
    cache: list

    def feed(self, tokens):
        """Hidden of tokens [1,W], when the argmax of every row and the caches are there."""
        hidden = self.forward(tokens, self.cache)
        mx.eval(mx.argmax(self.score(hidden), -1), hidden, [entry.state for entry in self.cache])
        return hidden


def ensure(target):
    """Measure, once a machine, whether the target's step pays; nothing where none is made.

    Nothing on a CPU, when kernels are forced, or where one of the step's kernels was not found right.
    """
    step = steps.for_model(target.model, target.backbone)
    if verdicts.chosen() is not None or not verdicts.on_gpu() or not (step and step.sound):
        return
    if verdicts.state(steps.NAME, step.case) is None:
        judge(target, step)


def judge(target, step):
    """Compare and time a step beside its target's modules; records and returns the Verdict."""
    return settle(steps.NAME, step.case, step.dtype, lambda: measure(target, step))


def settle(name, case, dtype, measured):
    """Record and return the Verdict on a compiled route, and log it.

    measured() gives (the distance of what it computes from what the modules do, its seconds, theirs); bounded by dtype.
    """
    found = verdicts.record(name, case, *weigh(TOLERANCE[dtype], measured))
    logging.getLogger("foredraft").warning("compiled %s: %s: %s", name.split(".")[0], found.verdict, found.reason)
    return found


def weigh(tolerance, measured):
    """(verdict, reason, ratio, error) of a measurement."""
    try:
        error, mine, theirs = measured()
    except (RuntimeError, UserError) as fault:  # MLX's own, or a kernel that does not build
        return verdicts.UNBUILT, " ".join(str(fault).split()), None, None
    if not error <= tolerance:
        return verdicts.WRONG, f"its results are {error:.1e} away; at most {tolerance:.1e} expected", None, error
    reason = f"{1e3 * mine:.2f} ms, {1e3 * theirs:.2f} ms without it; error {error:.1e} of at most {tolerance:.1e}"
    return verdicts.USE if mine <= theirs else verdicts.SLOW, reason, round(mine / theirs, 3), error


def measure(target, step):
    """(the largest distance, seconds of one forward of each of WIDTHS by the step, and by the modules), medians."""
    mine = Route(lambda *fed: step(*fed)[0], step.score, target.make_cache())
    theirs = Route(lambda *fed: target.by_modules(*fed).hidden, target.by_head, target.make_cache())
    prompt, errors, seconds = draw(target, PROMPT), [], [0.0, 0.0]
    for route in (mine, theirs):
        mx.eval(target.by_modules(prompt, route.cache).hidden, [entry.state for entry in route.cache])
    for W in WIDTHS:
        errors.append(distance(*(route.feed(draw(target, W)) for route in (mine, theirs))))
        times = in_turns([lambda seed, route=route, W=W: route.feed(draw(target, W, seed)) for route in (mine, theirs)])
        seconds = [total + each for total, each in zip(seconds, times, strict=True)]
    return max(errors), *seconds


def in_turns(calls):
    """Median seconds of each call over ROUNDS, in turns, after two that compile; a call is given a seed and waits."""
    samples = [[timed(call, seed) for call in calls] for seed in range(1, ROUNDS + 3)][2:]
    return tuple(map(statistics.median, zip(*samples)))


def timed(call, seed):
    """Seconds of one call, from an idle device on."""
    mx.synchronize()
    start = time.perf_counter()
    call(seed)
    return time.perf_counter() - start


def draw(target, T, seed=0):
    """T random ids [1,T], as an argmax gives them."""
    return mx.random.randint(0, target.vocab_size, (1, T), dtype=mx.uint32, key=mx.random.key(seed))


def distance(found, expected):
    """‖found − expected‖ ÷ ‖expected‖; infinite where anything found is not a finite number."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    if not mx.isfinite(found).all():
        return float("inf")
    return (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item()
