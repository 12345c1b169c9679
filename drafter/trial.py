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
        """(hidden of tokens [1,W], seconds until the argmax of every row and the caches were there)."""
        mx.synchronize()
        start = time.perf_counter()
        hidden = self.forward(tokens, self.cache)
        mx.eval(mx.argmax(self.score(hidden), -1), [entry.state for entry in self.cache])
        return hidden, time.perf_counter() - start


def ensure(target):
    """Measure, once a machine, whether the target's step pays, and log what came of it; nothing where none is made.

    Nothing on a CPU, when kernels are forced, or where one of the step's kernels was not found right.
    """
    step = steps.for_model(target.model, target.backbone)
    if verdicts.chosen() is not None or not verdicts.on_gpu() or not (step and step.sound):
        return
    if verdicts.state(steps.NAME, step.case) is None:
        found = judge(target, step)
        logging.getLogger("foredraft").warning("compiled step: %s: %s", found.verdict, found.reason)


def judge(target, step):
    """Compare and time a step beside its target's modules; records and returns the Verdict."""
    try:
        error, mine, theirs = measure(target, step)
    except (RuntimeError, UserError) as fault:  # MLX's own, or a kernel that does not build
        return verdicts.record(steps.NAME, step.case, verdicts.UNBUILT, " ".join(str(fault).split()))
    tolerance, ratio = TOLERANCE[step.dtype], mine / theirs
    if not error <= tolerance:
        reason = f"its hidden states are {error:.1e} away; at most {tolerance:.1e} expected"
        return verdicts.record(steps.NAME, step.case, verdicts.WRONG, reason, error=error)
    times = " and ".join(map(str, WIDTHS))
    reason = f"{1e3 * mine:.2f} ms for {times} rows, {1e3 * theirs:.2f} ms without it; error {error:.1e}"
    verdict = verdicts.USE if ratio <= 1 else verdicts.SLOW
    return verdicts.record(steps.NAME, step.case, verdict, reason, round(ratio, 3), error)


def measure(target, step):
    """(the largest error, seconds of one forward of each of WIDTHS by the step, and by the modules), medians."""
    mine = Route(lambda *fed: step(*fed)[0], step.score, target.make_cache())
    theirs = Route(lambda *fed: target.by_modules(*fed).hidden, target.by_head, target.make_cache())
    prompt = draw(target, PROMPT)
    for route in (mine, theirs):
        mx.eval(target.by_modules(prompt, route.cache).hidden, [entry.state for entry in route.cache])
    errors, times = [], {(route, W): [] for route in (0, 1) for W in WIDTHS}
    for turn in range(ROUNDS + 2):
        for W in WIDTHS:
            fed = draw(target, W, seed=turn + 1)
            (found, first), (expected, second) = mine.feed(fed), theirs.feed(fed)
            errors.append(distance(found, expected))
            if turn > 1:
                times[0, W].append(first), times[1, W].append(second)
    return max(errors), *(sum(statistics.median(times[route, W]) for W in WIDTHS) for route in (0, 1))


def draw(target, T, seed=0):
    """T random ids [1,T], as an argmax gives them."""
    return mx.random.randint(0, target.vocab_size, (1, T), dtype=mx.uint32, key=mx.random.key(seed))


def distance(found, expected):
    """‖found − expected‖ ÷ ‖expected‖; infinite where anything found is not a finite number."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    if not mx.isfinite(found).all():
        return float("inf")
    return (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item()
