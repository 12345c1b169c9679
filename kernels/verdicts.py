"""Which kernels this machine may use: the results of selfcheck, remembered by device, MLX and source.

A kernel's name is `module.route` (`gated_delta.step`), its case a text for one class of shapes and dtype, made by the
module that asks and by its checks alike. A verdict holds for one device, one version of MLX and one text of the module:
after a change of any of them the kernel is unknown, hence unused, until it is measured again.

A module states how its kernels are measured in `checks(dims) -> list[Check]`. `dims` describes one model:
  dtype      "bfloat16", "float16" or "float32": of activations
  dense      [[N, K], ...]: distinct shapes of its dense weights
  quantised  [[N, K, bits, group_size], ...]: of its affinely quantised weights
  attention  [[heads, key/value heads, head dimension], ...]
  delta      [[Hk, Hv, Dk, Dv, convolution width], ...]: of its gated-delta layers
  blocks     [[T, B], ...]: tokens of a packed row and rows of a block, where a drafter is trained; may be missing
  logits     [V, ...]: what it is trained over; may be missing

Environment: `FOREDRAFT_KERNELS` = `on`, `off`, or names of modules or kernels, separated by commas, that are used
unmeasured while all others are not.
"""

import ast
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import re
import tempfile
from collections.abc import Callable

import mlx.core as mx

from kernels.backend import version_of
from kernels.blas import cache_folder
from kernels.errors import UserError

GPU = mx.DeviceType.gpu
USE, SLOW, WRONG, HANGS, UNBUILT = "use", "slow", "wrong", "hangs", "unbuilt"
FOLDER = pathlib.Path(__file__).parent
AROUND = {"errors", "blas", "backend", "verdicts"}  # modules that no kernel's result or speed depends on
SCHEMA = "foredraft.verdicts/1"
WORDS = ("kernel", "case", "verdict", "reason")  # what every entry of the file says


@dataclasses.dataclass(frozen=True)
class Check:
    """How one kernel is measured at one case.

    `inputs_fn()` draws random arrays; `kernel_fn(*arrays)` calls the kernel and `stock_fn(*arrays)` what serves without
    it, each giving an array or a sequence of them. `tolerance` bounds max |kernel − stock| ÷ max |stock| of an output.
    """

    kernel: str
    case: str
    kernel_fn: Callable
    stock_fn: Callable
    inputs_fn: Callable
    tolerance: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found. `ratio`: kernel's time ÷ stock's; `error`: the largest relative one; None where not measured."""

    kernel: str
    case: str
    verdict: str
    reason: str
    ratio: float | None = None
    error: float | None = None
    measured: str = ""


def allowed(kernel, case):
    """Whether a dispatcher may take this kernel here: on a GPU, and measured right and faster, or forced.

    Cheap enough for every call of every layer: what decides is read once, the environment too.
    """
    return on_gpu() and decided(kernel, case)


def sound(kernel, case):
    """Whether a kernel may be part of something larger here: on a GPU, and measured right, or forced."""
    if chosen() is not None:
        return allowed(kernel, case)
    found = state(kernel, case)
    return on_gpu() and found is not None and found.verdict in {USE, SLOW}


def state(kernel, case):
    """The Verdict that holds now, or None."""
    return current().get((kernel, case))


def record(kernel, case, verdict, reason, ratio=None, error=None):
    """Remember what was found, at once and for every later process. Raises UserError where nothing can be written."""
    measured = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = Verdict(kernel, case, verdict, reason, ratio, error, measured)
    change(lambda entries: entries | {key(kernel, case): dataclasses.asdict(found)})
    return found


def forget(kernel, case):
    """Take back what was recorded for a kernel at a case."""
    change(lambda entries: {name: entry for name, entry in entries.items() if name != key(kernel, case)})


def current():
    """{(kernel, case): Verdict} of all that holds for this device, this MLX and today's sources."""
    entries = {name: entry for name, entry in read().items() if known(module_of(entry["kernel"]))}.items()
    return {(e["kernel"], e["case"]): Verdict(**e) for name, e in entries if name == key(e["kernel"], e["case"])}


# --- what is forced

_choices = []  # of forced() in effect, the innermost last


@contextlib.contextmanager
def forced(names):
    """Within it, FOREDRAFT_KERNELS counts as `names`: "on", "off", or a set of modules or kernels."""
    _choices.append(frozenset([names] if isinstance(names, str) else names))
    decided.cache_clear()
    try:
        yield
    finally:
        _choices.pop()
        decided.cache_clear()


def chosen():
    """The names in force, "on" and "off" among them; None where measurements decide."""
    return _choices[-1] if _choices else from_environment(os.environ.get("FOREDRAFT_KERNELS"))


@functools.cache
def from_environment(text):
    """FOREDRAFT_KERNELS as a set of names. Raises UserError for a name that no module of kernels/ has."""
    if not text:
        return None
    names = frozenset(name.strip() for name in text.split(","))
    known = [*kernel_modules(), *_above]
    unknown = [name for name in sorted(names) if module_of(name) not in {"on", "off", *known}]
    if unknown:
        raise UserError(
            f"FOREDRAFT_KERNELS={text}: no kernel is called {unknown[0]}; expected on, off, or some of "
            f"{', '.join(known)}, separated by commas; correct it, or unset it"
        )
    return names


_above = {}  # name -> the files of what stands above this room and keeps verdicts here


def register(name, *paths):
    """Let something above this room, made of these files, keep verdicts here under `name.…`."""
    _above[name] = paths


def kernel_modules():
    """The modules of kernels/ that state how their kernels are measured, by name."""
    return sorted(
        path.stem for path in FOLDER.glob("*.py") if re.search(r"^def checks\(", path.read_text(), re.MULTILINE)
    )


# --- what a verdict holds for


def on_gpu():
    """Whether the default device runs kernels."""
    return mx.default_device().type is GPU


@functools.cache
def decided(kernel, case):
    """What is forced, else what was measured, of a kernel; emptied whenever either changes."""
    choice = chosen()
    if choice is not None:
        return "on" in choice or kernel in choice or module_of(kernel) in choice
    found = state(kernel, case)
    return found is not None and found.verdict == USE


def key(kernel, case):
    """The name of a verdict: all that it holds for."""
    return " | ".join((kernel, case, device_name(), f"mlx {version_of('mlx')}", source_digest(module_of(kernel))[:16]))


def module_of(kernel):
    """The module of kernels/ that a kernel's name begins with."""
    return kernel.split(".")[0]


def known(module):
    """Whether a module is in this room or registered in this process; verdicts of other processes may name more."""
    return module in _above or (FOLDER / f"{module}.py").exists()


@functools.cache
def device_name():
    """The default device's name, as MLX gives it."""
    return mx.device_info().get("device_name", platform.machine())


@functools.cache
def source_digest(module):
    """SHA-256 over the module's text, over the modules of this room that it is made of, and over the prologues."""
    files = _above.get(module, (FOLDER / f"{module}.py",))
    paths = [*sorted(set().union(*map(made_of, files))), *sorted((FOLDER / "prologue").glob("*.h"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def made_of(path):
    """The path and those of the kernel modules that it imports, directly or not."""
    found, waiting = set(), {path}
    while waiting:
        found |= waiting
        named = {name for each in waiting for name in imported(each.read_text())} - AROUND
        waiting = {each for name in named if (each := FOLDER / f"{name}.py").exists()} - found
    return found


def imported(text):
    """The names that Python text imports from this room, modules among them."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    rooms = {node.module.removeprefix("kernels.") for node in nodes if node.module.startswith("kernels.")}
    return rooms | {alias.name for node in nodes if node.module == "kernels" for alias in node.names}


# --- the file


def path():
    """Where verdicts are kept."""
    return cache_folder() / "verdicts.json"


def read():
    """{key: a Verdict's fields} of the whole file; nothing where there is none, or where it is damaged (it says so)."""
    try:
        content = json.loads(path().read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}; expected {SCHEMA}")
        for name, entry in content["verdicts"].items():
            if not all(isinstance(entry[word], str) for word in WORDS):
                raise ValueError(f"{name}: expected words for {', '.join(WORDS)}")
        return content["verdicts"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logging.getLogger("foredraft").warning(
            "warning: %s cannot be read (%s): kernels count as unmeasured", path(), error
        )
        return {}


def change(edit):
    """Replace the entries by `edit(entries)`, one process at a time, the file whole at every moment."""
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with open(path().with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write(edit(read()))
    except OSError as error:
        raise UserError(
            f"{path()}: verdicts cannot be written ({error}); set FOREDRAFT_CACHE to a writable folder"
        ) from None
    decided.cache_clear()


def write(entries):
    """Write the file under a temporary name, to disk, then under its own."""
    with tempfile.NamedTemporaryFile("w", dir=path().parent, suffix=".json", delete=False) as file:
        json.dump({"schema": SCHEMA, "verdicts": entries}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path())
