"""What this machine and environment offer Foredraft, what is missing, and the traps that others fell into.

  python scripts/doctor.py                    every check, in seconds
  python scripts/doctor.py --target T         also: does the installed mlx-lm know this target's architecture?
  python scripts/doctor.py --blas             also: time one float32 product against MLX's stock BLAS
  python scripts/doctor.py --selfcheck        also: measure every kernel again, at the shapes of --target where given

Each check is one function that returns a Finding. Exit code 0: usable (warnings included); 1: something is bad.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import tomllib

import edge
from kernels import backend, blas
from traps import Finding, check_commands, check_names, check_target, check_transformers, check_wheels

GIB = 1 << 30
LITTLE_MEMORY = 4 * GIB  # assumed: the 135M target in float32, a drafter, its optimizer state and a batch
LITTLE_DISK = 4 * GIB  # assumed: an environment, the target's download and conversion, one run's checkpoints

# M = 64 rows of hidden states times SmolLM2's head, and how much faster than the stock wheel it should be.
SHAPE = (64, 576, 49152)
FASTER = 15  # measured: 24 to 47 times on two shared x86 cores with AVX-512, by how busy they were
REPEATS = {"ours": 15, "stock": 3}  # the stock product takes seconds


def main(argv):
    """Run the checks, print them, and return the closing figures."""
    options = parse(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it speaks of a missing PyTorch, which nobody misses here
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what the hub refuses is said once, by us
    if options.product:
        return {"status": "done", "ms": time_product(REPEATS["stock"])}
    if options.selfcheck:
        measure_kernels(options.target)
    checks = dict(CHECKS)
    if options.target:
        checks["target"] = lambda: check_target(options.target)
    findings = {}
    for name, check in checks.items():
        findings[name] = report(name, check())
    product = {}
    if options.blas:
        findings["product"], product = measure_product()
        report("product", findings["product"])
    return close(findings, product, options.out)


def parse(argv):
    """The command's options."""
    parser = edge.Parser(prog="doctor.py", description=__doc__)
    parser.add_argument("--target", metavar="T", help="a name under configs/target, a folder, or a hub id")
    parser.add_argument("--blas", action="store_true", help="time [64x576]x[576x49152] against the stock wheel's BLAS")
    parser.add_argument("--selfcheck", action="store_true", help="measure every kernel again (a minute; GPUs only)")
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, help="write the findings as JSON too")
    parser.add_argument("--product", action="store_true", help=argparse.SUPPRESS)  # the child process of --blas
    return parser.parse_args(argv)


def report(name, finding):
    """Print one finding, and return it."""
    remedy = f"\n{'':20}-> {finding.remedy}" if finding.remedy else ""
    print(f"{finding.level:<5} {name:<13} {finding.text}{remedy}", flush=True)
    return finding


def close(findings, product, out):
    """The closing figures; written to `out` with every finding when that is given."""
    levels = collections.Counter(finding.level for finding in findings.values())
    closing = {
        "status": "failed" if levels["bad"] else "done",
        "out": str(out) if out else None,
        "device": backend.load().device,
        "blas": backend.load().blas.name,
        **{level: levels[level] for level in ("ok", "warn", "bad")},
        **product,
    }
    if out:
        from drafter import manifest

        details = {name: dataclasses.asdict(finding) for name, finding in findings.items()}
        manifest.write_json(out, {**closing, "versions": backend.versions(), "findings": details})
    return closing


# --- what is here


def check_device():
    """The device MLX really uses, and why."""
    try:
        seen = backend.describe()
    except ImportError as error:
        return Finding("bad", f"MLX cannot be imported: {error}", "pip install -e . in this environment")
    text = f"{seen['device']}: {seen['device_name']} ({seen['reason']})"
    if seen["device"] != backend.load().device:
        return Finding("warn", f"{text}; a {backend.load().device} device was expected", "check the driver")
    return Finding("ok", text)


def check_blas():
    """The BLAS under MLX's products on the CPU, and what was passed over on the way to it."""
    chosen = backend.load()
    text = f"{chosen.blas.name}: {chosen.blas.reason}" + "".join(f"; passed over {each}" for each in chosen.passed_over)
    return Finding("ok", text) if chosen.tuned else Finding("warn", text, backend.REMEDY)


def check_tf32():
    """Whether float32 products are float32: identity checks on a GPU need TF32 off."""
    state = backend.load().tf32
    if state == "on":
        return Finding("warn", "on: float32 products are rounded", "MLX_ENABLE_TF32=0 for identity checks in float32")
    return Finding("ok", {"off": "off: float32 products stay float32", "unused": "not used on a CPU"}[state])


def check_requirements():
    """Every requirement in pyproject.toml, present and in range."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return Finding("bad", "the package `packaging` is missing, as no installed environment is", "pip install -e .")
    project = tomllib.loads((edge.ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    faults = []
    for each in needed:
        version = backend.version_of(each.name)
        if (each.marker is None or each.marker.evaluate()) and (version is None or version not in each.specifier):
            faults.append(f"{each.name} {version or 'missing'} (expected {each.specifier})")
    if faults:
        return Finding("bad", "; ".join(faults), "pip install -e . in this environment")
    return Finding("ok", ", ".join(f"{name} {version}" for name, version in backend.versions().items()))


def check_kernels():
    """Which kernels serve on this machine, and why the others do not."""
    try:
        from drafter import steps  # noqa: F401, so that verdicts on compiled steps are known too
        from kernels import verdicts
    except ImportError as error:
        return Finding("bad", f"MLX cannot be imported: {error}", "pip install -e . in this environment")
    found = sorted(verdicts.current().values(), key=lambda each: (each.kernel, each.case))
    if not found:
        return Finding(
            "ok", "none measured" + (": loading a target does" if verdicts.on_gpu() else ": a CPU runs none")
        )
    used = sum(each.verdict == verdicts.USE for each in found)
    lines = [f"{each.kernel} [{each.case}] {each.verdict}: {each.reason}" for each in found]
    text = f"\n{'':20}".join([f"{used} of {len(found)} measured on {verdicts.device_name()} are used", *lines])
    if all(each.verdict in {verdicts.USE, verdicts.SLOW} for each in found):
        return Finding("ok", text)
    return Finding("warn", text, f"plain MLX serves instead; to have them tried again, delete {verdicts.path()}")


def check_memory():
    """Free memory for a target, a drafter and a batch."""
    free = free_memory()
    if free is None:
        return Finding("ok", f"{physical_memory() / GIB:.1f} GiB in all; this system does not say how much is free")
    text = f"{free / GIB:.1f} GiB free of {physical_memory() / GIB:.1f}"
    remedy = "close other programs, or lower the batch: trainer.rows_per_step=1"
    return Finding("ok", text) if free >= LITTLE_MEMORY else Finding("warn", text, remedy)


def check_disk():
    """Free disk for runs and for the cache."""
    places = {"runs": edge.ROOT, "cache": blas.cache_folder()}
    free = {name: shutil.disk_usage(existing(path)).free for name, path in places.items()}
    text = ", ".join(f"{size / GIB:.1f} GiB for {name} in {places[name]}" for name, size in free.items())
    remedy = "free some space, or set FOREDRAFT_CACHE and give --out on another disk"
    return Finding("ok", text) if min(free.values()) >= LITTLE_DISK else Finding("warn", text, remedy)


def free_memory():
    """Bytes that can be had without swapping; None where the system does not say."""
    path = pathlib.Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def physical_memory():
    """Bytes of memory in the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def existing(path):
    """The nearest folder above `path` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


CHECKS = {
    "device": check_device,
    "blas": check_blas,
    "tf32": check_tf32,
    "versions": check_requirements,
    "kernels": check_kernels,
    "memory": check_memory,
    "disk": check_disk,
    "backend": check_wheels,
    "names": check_names,
    "transformers": check_transformers,
    "commands": check_commands,
}


# --- what the options measure


def measure_kernels(target):
    """Measure every kernel again, at the shapes of a target or of selfcheck's example; none runs on a CPU."""
    backend.load()
    from kernels import selfcheck, verdicts

    if not verdicts.on_gpu():
        print("selfcheck: nothing to measure: kernels run on GPUs only")
        return
    dims = selfcheck.EXAMPLE
    if target:
        from drafter import target as targets

        with verdicts.forced("off"):  # loading would measure what is unknown, and then it would be measured twice
            loaded = targets.load(target)
        dims = selfcheck.dims_of(loaded.model)
    selfcheck.run(dims, again=True)
    if target:
        from drafter import steps, trial

        step = steps.for_model(loaded.model, loaded.backbone)
        if step and step.sound:
            trial.judge(loaded, step)


def measure_product():
    """(Finding, figures): SHAPE's product here against the stock wheel's BLAS in a child process, medians in ms."""
    if backend.load().device != "cpu" or sys.platform == "darwin":
        return Finding("ok", "nothing to measure: only MLX's Linux CPU wheel brings a reference BLAS"), {}
    before = time_product(REPEATS["ours"])
    child = subprocess.run(
        [sys.executable, __file__, "--product"],
        env={**os.environ, "FOREDRAFT_BLAS": backend.STOCK},
        capture_output=True,
        text=True,
        check=True,
    )
    stock = json.loads(child.stdout.splitlines()[-1])["ms"]
    ours = min(before, time_product(REPEATS["ours"]))  # two threads suffer from other programs more than stock's one
    ratio = stock / ours
    figures = {"shape": SHAPE, "ours_ms": round(ours, 2), "stock_ms": round(stock, 2), "ratio": round(ratio, 1)}
    m, k, n = SHAPE
    text = f"float32 {m}x{k} by {k}x{n}: {ours:.1f} ms, stock {stock:.1f} ms: {ratio:.1f} times faster"
    if ratio >= FASTER:
        return Finding("ok", text), figures
    remedy = backend.REMEDY if not backend.load().tuned else "run it again when nothing else uses the machine"
    return Finding("warn", f"{text}; at least {FASTER} times expected", remedy), figures


def time_product(repeats):
    """Median milliseconds of SHAPE's float32 product with the BLAS that this process has, after one unmeasured run."""
    backend.load()
    import mlx.core as mx

    m, k, n = SHAPE
    left, right = mx.random.normal((m, k)), mx.random.normal((k, n))
    mx.eval(left, right, left @ right)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(left @ right)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    edge.run(main)
