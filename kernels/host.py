"""The host build of a kernel: C++ text compiled once on this machine, and its arrays, each between two guards."""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import mlx.core as mx
import numpy as np

from kernels.blas import cache_folder
from kernels.errors import UserError

GUARD = 256  # bytes of 0xFF on both sides of every host array: what lies beyond an array is NaN, and stays untouched
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
PLAIN = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # what NumPy, which has no bfloat16, sees instead


def run(name, source, arrays, groups, threads, shapes, dtypes):
    """(outputs, names' places that were written outside of, fault) of a text run over a grid of `groups`.

    threads: how many a threadgroup has. Outputs hold 0xFF where nothing was written; fault is a text or empty.
    """
    library = build(name, source)
    cells = [Guarded(a.shape, a.dtype, a) for a in arrays] + [Guarded(s, d) for s, d in zip(shapes, dtypes)]
    addresses = (ctypes.c_void_p * len(cells))(*(cell.address for cell in cells))
    fault = library.run(addresses, (ctypes.c_int * 3)(*groups), threads).decode()
    broken = [place for place, cell in enumerate(cells) if cell.broken()]
    return [cell.array() for cell in cells[len(arrays) :]], broken, fault


class Guarded:
    """Memory for one array of the host build, 64-byte aligned, between two guards."""

    def __init__(self, shape, dtype, values=None):
        self.shape, self.dtype = tuple(shape), dtype
        self.bytes = int(np.prod(self.shape)) * dtype.size
        cells = np.full(self.bytes + 2 * GUARD + 64, 0xFF, np.uint8)
        self.cells = cells[-cells.ctypes.data % 64 :][: self.bytes + 2 * GUARD]
        self.content = self.cells[GUARD : GUARD + self.bytes]
        if values is not None:
            self.content[:] = np.ascontiguousarray(np.asarray(values.reshape(-1).view(PLAIN[dtype.size]))).view(
                np.uint8
            )
        self.address = self.content.ctypes.data if self.bytes else self.cells.ctypes.data + GUARD

    def broken(self):
        """Whether anything was written outside the array."""
        return bool((self.cells[:GUARD] != 0xFF).any() or (self.cells[GUARD + self.bytes :] != 0xFF).any())

    def array(self):
        """The content as an mx array."""
        plain = self.content.view(f"u{self.dtype.size}")
        return mx.array(plain).view(self.dtype).reshape(self.shape)


@functools.cache
def build(name, source):
    """The host build of one source text: compiled once for each text, flags and kind of processor, then loaded.

    Raises UserError without a C++ compiler, RuntimeError with the compiler's words where the body does not compile.
    """
    key = hashlib.sha256("\0".join((source, *FLAGS, platform.machine())).encode()).hexdigest()[:16]
    path = cache_folder() / f"host-{name}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # beside it, so that the rename is atomic
            compile_text(name, source, pathlib.Path(folder, path.name))
            os.replace(pathlib.Path(folder, path.name), path)
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library


def compile_text(name, source, out):
    """Compile a source text to `out`. Raises as `build_host`."""
    compiler = find_compiler()
    if compiler is None:
        raise UserError(
            f"kernel {name}: no C++ compiler for its host build; expected c++, g++ or clang++; install one, or set CXX"
        )
    done = subprocess.run(
        [compiler, *FLAGS, "-x", "c++", "-", "-o", str(out)], input=source, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"kernel {name}: its host build failed:\n{done.stderr}")


def find_compiler():
    """The C++ compiler's path: CXX where set, else c++, g++ or clang++; None without any."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)
