"""Measures every kernel of this room on this machine: right, and faster than what serves without it, or not used.

Checks run in a child process with its own session, so that a kernel that hangs or crashes takes nobody with it. Before
a check begins it is recorded as hanging, and the record is replaced when it ends: what takes the whole machine down is
remembered too, and no kernel that hung is ever tried again. The child that ran it is ended, and another does the rest.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import mlx.core as mx
import mlx.nn as nn

from kernels import verdicts
from kernels.errors import UserError
from kernels.verdicts import FOLDER, HANGS, SLOW, UNBUILT, USE, WRONG

MODULES = tuple(f"kernels.{name}" for name in verdicts.kernel_modules())
START_SECONDS = 120  # assumed: far beyond what importing MLX and waking a device take
CHECK_SECONDS = 90  # assumed: building takes up to ten seconds on CUDA (measured), measuring about one
LONGEST = 400  # characters of a failed build's words that are kept
END_SECONDS = 10  # assumed: a killed process that is not gone after that is stuck in the driver
DRAWS = 3  # of random inputs that are compared
SAMPLES = 21  # of each route's time, taken in turns
BATCH_SECONDS = 0.002  # calls are timed in batches of about this, so that the wait at its end weighs little
MOST_CALLS = 16  # in a batch

# What is measured where no model says otherwise: the shapes of Qwen3.5-4B, from its config.json.
EXAMPLE = {
    "dtype": "bfloat16",
    "dense": [[8192, 2560], [4096, 2560], [9216, 2560], [2560, 9216], [2560, 4096], [248320, 2560]],
    "quantised": [[8192, 2560, 4, 64], [9216, 2560, 4, 64], [2560, 9216, 4, 64], [248320, 2560, 4, 64]],
    "attention": [[16, 4, 256]],
    "delta": [[16, 32, 128, 128, 4]],
    "blocks": [[512, 16]],
    "logits": [49152],
}


def ensure(dims, modules=MODULES):
    """Measure, once, what this machine has no verdict on, and log what came of it. Nothing on a CPU, or when forced."""
    if not verdicts.on_gpu() or verdicts.chosen() is not None:
        return
    logger, known = logging.getLogger("foredraft"), verdicts.current()
    unknown = {(check.kernel, check.case) for check in checks_for(dims, modules)} - set(known)
    if not unknown:
        return
    logger.warning("kernels: measuring %d on this machine, once; about a minute", len(unknown))
    try:
        found = run(dims, modules)
    except UserError as error:  # nothing can be remembered, so nothing is used: slower, and no reason to stop
        logger.warning("warning: kernels stay unused: %s", error)
        return
    used = sum(each.verdict == USE for each in found)
    logger.warning("kernels: %d of %d serve here; python scripts/doctor.py says why", used, len(found))


def checks_for(dims, modules=MODULES):
    """Every check that the modules state for a model's dims (see verdicts)."""
    return [check for module in modules for check in importlib.import_module(module).checks(dims)]


def dims_of(model):
    """The dims (see verdicts) of an mlx-lm model, read from its modules."""
    modules = [module for _, module in model.named_modules()]
    dense = [each for each in modules if isinstance(each, nn.Linear | nn.Embedding)]
    packed = [each for each in modules if isinstance(each, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    packed = [each for each in packed if getattr(each, "mode", "affine") == "affine"]
    values = [each.weight for each in dense] + [each.scales for each in packed]
    return {
        "dtype": str(values[0].dtype).removeprefix("mlx.core."),
        "dense": distinct(each.weight.shape for each in dense),
        "quantised": distinct((*packed_shape(each), each.bits, each.group_size) for each in packed),
        "attention": distinct(filter(None, map(attention_shape, modules))),
        "delta": distinct(filter(None, map(delta_shape, modules))),
    }


def distinct(shapes):
    """Each shape once, as lists."""
    return [list(shape) for shape in dict.fromkeys(map(tuple, shapes))]


def packed_shape(module):
    """(N, K) of a quantised weight."""
    return len(module.scales), module.scales.shape[-1] * module.group_size


def attention_shape(module):
    """(heads, key/value heads, head dimension) of an attention module of mlx-lm's kind, else None."""
    heads = getattr(module, "n_heads", None) or getattr(module, "num_attention_heads", None)
    shared = getattr(module, "n_kv_heads", None) or getattr(module, "num_key_value_heads", None)
    if heads and shared and hasattr(module, "k_proj"):
        return heads, shared, len(module.k_proj.weight) // shared


def delta_shape(module):
    """(Hk, Hv, Dk, Dv, convolution width) of a gated-delta module of mlx-lm's kind, else None."""
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
    if all(hasattr(module, name) for name in names):
        return tuple(getattr(module, name) for name in names)


def run(dims, modules=MODULES, *, again=False, timeout_s=CHECK_SECONDS):
    """Measure every check without a verdict, or with `again` all but those that hung. Returns the new Verdicts.

    Ends early, with the rest unknown, where the device does not answer any more.
    """
    known = verdicts.current()
    checks = dict.fromkeys((check.kernel, check.case) for check in checks_for(dims, modules))
    waiting = [place for place in checks if place not in known or (again and known[place].verdict != HANGS)]
    found = []
    while len(found) < len(waiting):
        with Child(dims, modules) as child:
            if fault := child.starts():
                left = len(waiting) - len(found)
                logging.getLogger("foredraft").warning("warning: %d kernels stay unmeasured: %s", left, fault)
                break
            while len(found) < len(waiting) and not child.ended:
                found.append(measure_in(child, *waiting[len(found)], timeout_s))
    return found


def measure_in(child, kernel, case, timeout_s):
    """One check in a child process: recorded as hanging before it begins, as what was found when it ends."""
    verdicts.record(kernel, case, HANGS, "it was being measured when the process or the machine went down")
    try:
        result = child.ask(kernel, case, timeout_s)
    except BaseException:  # an interrupt says nothing of the kernel
        verdicts.forget(kernel, case)
        raise
    return verdicts.record(kernel, case, **result)


class Child:
    """A process that measures the checks it is told, one after another, until one fails."""

    def __init__(self, dims, modules):
        self.words = tempfile.TemporaryFile()  # noqa: SIM115  (what it says beside its results; closed on exit)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernels.selfcheck", json.dumps(dims), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *filter(None, sys.path)])},
        )
        self.read = b""  # of its results, beyond the last whole line
        self.ended = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self.process.stdin.close()
        self.process.stdout.close()
        self.words.close()

    def starts(self):
        """None once it is up and its device works, else why not."""
        try:
            self.line(START_SECONDS)
        except TimeoutError:
            return f"the device gave no answer in {START_SECONDS} s"
        except EOFError:
            return f"the process that measures {self.death()}"

    def ask(self, kernel, case, seconds):
        """What it found: the fields of a Verdict. It is ended when it hangs, dies, or fails."""
        try:
            self.process.stdin.write(f"{json.dumps([kernel, case])}\n".encode())
            self.process.stdin.flush()
            result = json.loads(self.line(seconds))
        except TimeoutError:
            result = {"verdict": HANGS, "reason": f"no result after {seconds:g} s; it is never tried again"}
        except (EOFError, BrokenPipeError):
            result = {"verdict": UNBUILT, "reason": f"its process {self.death()}"}
        if result["verdict"] in {HANGS, UNBUILT}:  # what failed may have left the device's context unusable
            self.end()
        return result

    def line(self, seconds):
        """Its next line. Raises TimeoutError when none comes in time, EOFError when it has died."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.read:
            if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise EOFError
            self.read += more
        line, self.read = self.read.split(b"\n", 1)
        return line

    def death(self):
        """How it died, and its last words."""
        self.end(END_SECONDS)
        self.words.seek(0)
        lines = self.words.read().decode(errors="replace").strip().splitlines() or ["no word"]
        code = self.process.returncode
        how = f"died of {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        return f"{how}: {lines[-1][:LONGEST]}"

    def end(self, patience=0):
        """Kill it, if it is not gone within `patience` seconds; one that is stuck in a driver is left behind."""
        self.ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(END_SECONDS)


# --- in the child process


def serve(dims, modules):
    """Measure the checks that standard input names, one a line; a result a line on what was standard output."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed must not be taken for a result
    checks = {(check.kernel, check.case): check for check in checks_for(dims, modules)}
    mx.eval(mx.zeros(8) + 1)
    print("ready", file=results)
    for line in sys.stdin:
        try:
            result = measure(checks[tuple(json.loads(line))])
        except Exception as error:
            result = {"verdict": UNBUILT, "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"}
        print(json.dumps(result), file=results)


def measure(check):
    """A check's verdict, reason, ratio and error."""
    error = max(largest_error(check, seed) for seed in range(DRAWS))
    if not error <= check.tolerance:
        found = f"{error:.1e}" if math.isfinite(error) else "not a number, of another shape or of another dtype"
        return {"verdict": WRONG, "reason": f"its error is {found}; at most {check.tolerance:.1e} expected"}
    mine, stock = time_routes(check)
    reason = f"{1e6 * mine:.0f} us, {1e6 * stock:.0f} us without it; error {error:.1e} of at most {check.tolerance:.1e}"
    verdict = USE if mine <= stock else SLOW
    return {"verdict": verdict, "reason": reason, "ratio": round(mine / stock, 3), "error": error}


def largest_error(check, seed):
    """max |kernel − stock| ÷ max |stock| over the outputs for one draw; infinite where they cannot be compared."""
    mx.random.seed(seed)
    arrays = check.inputs_fn()
    found, expected = (as_list(route(*arrays)) for route in (check.kernel_fn, check.stock_fn))
    if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in expected]:
        return math.inf
    return max(relative_error(one.astype(mx.float32), other.astype(mx.float32)) for one, other in zip(found, expected))


def relative_error(found, expected):
    """max |found − expected| ÷ max |expected|; infinite where anything found is not a finite number."""
    if not mx.isfinite(found).all():
        return math.inf
    scale = mx.abs(expected).max().item()
    return mx.abs(found - expected).max().item() / (scale or 1.0)


def time_routes(check):
    """Median seconds a call of (kernel, stock), in turns, after one unmeasured batch of each."""
    arrays = check.inputs_fn()
    routes = (check.kernel_fn, check.stock_fn)
    calls = max(1, min(MOST_CALLS, int(BATCH_SECONDS / max(time_batch(route, arrays, 1) for route in routes))))
    for route in routes:
        time_batch(route, arrays, calls)
    samples = [[time_batch(route, arrays, calls) for route in routes] for _ in range(SAMPLES)]
    return tuple(statistics.median(each) for each in zip(*samples))


def time_batch(route, arrays, calls):
    """Seconds a call, over `calls` calls with one wait for the device."""
    mx.eval(arrays)
    mx.synchronize()
    start = time.perf_counter()
    mx.eval([route(*arrays) for _ in range(calls)])
    mx.synchronize()
    return (time.perf_counter() - start) / calls


def as_list(outputs):
    """A route's outputs as a list."""
    return [outputs] if isinstance(outputs, mx.array) else list(outputs)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), sys.argv[2:])
