"""Which device and which BLAS this process has, and why. `load()` must run before MLX does.

Only a Linux CPU needs anything done: there `blas.open_blas` puts a tuned BLAS in front of the reference one that MLX's
wheel carries. `FOREDRAFT_BLAS=stock` leaves MLX's own. Nothing here imports mlx except `describe()`.
"""

import ctypes.util
import dataclasses
import functools
import importlib.metadata
import logging
import os
import pathlib
import platform
import sys

from kernels.blas import Blas, open_blas

STOCK = "stock"
WHEELS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")  # each carries mlx/lib: only one can lie there
VERSIONS = ("mlx", *WHEELS, "mlx-lm", "transformers", "datasets", "safetensors", "hydra-core", "numpy")
REMEDY = (
    "pip install scipy-openblas32 (needs a C compiler once), or install the system's OpenBLAS, or name a library in "
    "FOREDRAFT_BLAS"
)


@dataclasses.dataclass(frozen=True)
class Backend:
    """What `load()` decided. `tuned`: not the reference BLAS on a CPU. `passed_over`: why others do not serve."""

    device: str  # "metal", "cuda" or "cpu"
    reason: str
    blas: Blas
    tuned: bool
    tf32: str  # "on", "off", or "unused" on a CPU
    passed_over: tuple[str, ...] = ()


@functools.cache
def load():
    """Put a tuned BLAS under MLX where that helps (Linux CPU) and say what this process runs on.

    Idempotent: the first call decides, and warns once, with the remedy, when MLX's reference BLAS is left to serve.
    Returns a Backend. Raises UserError when FOREDRAFT_BLAS names a library that cannot serve.
    """
    device, reason = find_device()
    blas, passed_over = choose_blas(device)
    tuned = sys.platform == "darwin" or device == "cuda" or blas.name != STOCK
    return Backend(device, reason, blas, tuned, tf32_state(device), passed_over)


def check():
    """The same record for library code that a person may have reached without a script, with the same one warning."""
    return load()


def describe():
    """What to record about this process in a result or manifest. Imports mlx, whose own word on the device counts.

    Returns {device, device_name, reason, blas: {name, path, reason}, tf32, versions: {distribution: version}}.
    """
    backend = load()
    import mlx.core as mx  # here alone: describing must not come before load() has decided

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    device = ("metal" if sys.platform == "darwin" else "cuda") if on_gpu else "cpu"
    return {
        "device": device,
        "device_name": mx.device_info().get("device_name", platform.machine()),
        "reason": backend.reason,
        "blas": dataclasses.asdict(backend.blas),
        "tf32": tf32_state(device),
        "versions": versions(),
    }


def choose_blas(device):
    """(the Blas that serves on this device, what was passed over); opens it where one must be opened."""
    if sys.platform == "darwin":
        return Blas("Accelerate", None, "MLX on macOS is built against it"), ()
    if device == "cuda":
        return Blas(STOCK, None, "products run on the GPU, so the CPU's BLAS is left alone"), ()
    if os.environ.get("FOREDRAFT_BLAS") == STOCK:
        return Blas(STOCK, None, "FOREDRAFT_BLAS=stock"), ()
    if "mlx.core" in sys.modules:
        return keep_stock("mlx was imported first", "call kernels.backend.load() before importing mlx"), ()
    blas, passed_over = open_blas()
    return blas or keep_stock("no tuned library was found", REMEDY, passed_over), passed_over


def keep_stock(why, remedy, passed_over=()):
    """MLX's own BLAS, with one warning that says why, what was passed over, and how to do better."""
    logging.getLogger("foredraft").warning(
        "warning: MLX's reference BLAS serves, tens of times slower than a tuned one: %s",
        "; ".join((why, *passed_over, remedy)),
    )
    return Blas(STOCK, None, why)


def find_device():
    """(device, reason), from the platform, the installed backend wheel and the driver, without importing mlx."""
    if sys.platform == "darwin":
        return ("metal", "macOS on Apple silicon") if platform.machine() == "arm64" else ("cpu", "macOS without Metal")
    wheel = serving_wheel()
    if wheel is None:
        return "cpu", "no MLX backend wheel is installed"
    installed = f"{wheel} {version_of(wheel)} is installed"
    if not wheel.startswith("mlx-cuda"):
        return "cpu", installed
    if has_nvidia_driver():
        return "cuda", f"{installed} and an NVIDIA driver is present"
    return "cpu", f"{installed}, but no NVIDIA driver is present"


def has_nvidia_driver():
    """Whether this machine has NVIDIA's driver: its user library, or its entry under /proc."""
    return bool(ctypes.util.find_library("cuda")) or pathlib.Path("/proc/driver/nvidia/version").exists()


def installed_wheels():
    """The MLX backend distributions that are installed, in WHEELS' order."""
    return [name for name in WHEELS if version_of(name)]


def serving_wheel():
    """The installed wheel whose libmlx really lies in mlx/lib: of two, the last to be unpacked. None without any."""
    wheels = installed_wheels()
    return next(filter(owns_libmlx, wheels), wheels[0] if wheels else None)


def owns_libmlx(wheel):
    """Whether the libmlx on disk has the size that this wheel's own record states."""
    libraries = [file for file in importlib.metadata.files(wheel) or () if file.name.startswith("libmlx.")]
    return any(file.locate().is_file() and file.locate().stat().st_size == file.size for file in libraries)


def tf32_state(device):
    """Whether float32 products may be rounded to TF32: MLX reads MLX_ENABLE_TF32 once, and its default is on."""
    if device == "cpu":
        return "unused"
    return "off" if os.environ.get("MLX_ENABLE_TF32", "1").strip() == "0" else "on"


def version_of(distribution):
    """An installed distribution's version, else None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions():
    """{distribution: version} of what decides a result, Python included; what is not installed is left out."""
    found = {name: version_of(name) for name in VERSIONS}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}
