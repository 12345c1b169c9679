"""A tuned BLAS under MLX on a Linux CPU: where to look, how to try it safely, how to put it in front.

MLX's Linux CPU wheel is linked against the reference BLAS, tens of times slower than a tuned one. A tuned library
opened with RTLD_GLOBAL before MLX comes first in the dynamic linker's search, so that MLX's calls of `cblas_sgemm`,
`cblas_dgemm` and `cblas_cgemm` find it instead of the wheel's own. `SOURCES` is the order in which libraries are
tried; one that crashes, computes wrong products or lacks a symbol is passed over, and says so.

Letters: a product is [M,K]·[K,N]. Environment: `FOREDRAFT_BLAS` names a library; `FOREDRAFT_CACHE` moves the cache
folder. OpenBLAS and MKL read their own variables (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, ...), which stay untouched.
"""

import ctypes
import ctypes.util
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile

from kernels.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
SYMBOLS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all that libmlx.so imports of CBLAS (read with nm -D)
SECONDS = 120  # assumed: far beyond what building the shim or trying a library takes

SHIM = pathlib.Path(__file__).with_name("cblas.c")
FULL = ("-O3", "-march=native", "-fopenmp", "-DFEW_ROWS")  # products of few rows too; the compiler may not know these
PLAIN = ("-O2",)  # forwards only

PROBE = "import sys; sys.path.insert(0, sys.argv[1]); from kernels import blas; sys.exit(blas.fault(sys.argv[2]))"


class Unusable(Exception):
    """Why one library cannot serve; the search goes on with the next."""


@dataclasses.dataclass(frozen=True)
class Blas:
    """The library that serves MLX's matrix products: what it is, where it lies (None: MLX's own), why it serves."""

    name: str
    path: str | None
    reason: str


def open_blas():
    """Open the first library of SOURCES that serves. Returns (Blas or None, what was passed over and why).

    Raises UserError when FOREDRAFT_BLAS names one that cannot serve: a choice is never overruled in silence.
    """
    passed_over = []
    for source in SOURCES:
        try:
            for blas in source():
                try:
                    return open_globally(blas), tuple(passed_over)
                except Unusable as why:
                    passed_over.append(f"{blas.path}: {why}")
                    if source is explicit:
                        raise refusal(blas, why) from None
        except Unusable as why:
            passed_over.append(str(why))
    return None, tuple(passed_over)


def refusal(blas, why):
    """The UserError for a library that FOREDRAFT_BLAS names and that cannot serve."""
    return UserError(
        f"FOREDRAFT_BLAS={blas.path}: {why}; expected a BLAS exporting {', '.join(SYMBOLS)}; name another, `stock` for "
        "MLX's own, or unset it"
    )


# --- where to look, in this order: each yields Blas candidates or raises Unusable


def explicit():
    """The library that FOREDRAFT_BLAS names."""
    path = os.environ.get("FOREDRAFT_BLAS")
    if path:
        yield Blas("BLAS", os.path.expanduser(path), "FOREDRAFT_BLAS names it")


def mkl():
    """Intel's MKL, from PyPI's `mkl` in this environment, from conda, or from the system."""
    prefixes = (sys.prefix, sys.base_prefix, os.environ.get("CONDA_PREFIX"), os.environ.get("MKLROOT"), "/usr")
    for path in libraries((*prefixes, "/opt/intel/oneapi/mkl/latest", "/opt/intel/mkl"), "libmkl_rt.so*"):
        if "ILP64" in os.environ.get("MKL_INTERFACE_LAYER", ""):
            raise Unusable(f"{path}: MKL_INTERFACE_LAYER asks for 64-bit indices; MLX passes 32-bit ones")
        yield Blas("MKL", path, "an installed MKL")


def pypi_openblas():
    """PyPI's scipy-openblas32 through a shim that gives its prefixed symbols their plain names."""
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None:
        raise Unusable("scipy-openblas32 is not installed")
    library = pathlib.Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    if not library.is_file():
        raise Unusable(f"{library}: missing from scipy-openblas32")
    version = importlib.metadata.version("scipy-openblas32")
    path = build_shim(library, version)
    few = " with products of few rows of its own" if b"scipy_openblas_get_num_threads" in path.read_bytes() else ""
    yield Blas("OpenBLAS", str(path), f"scipy-openblas32 {version} through a compiled shim{few}")


def system_openblas():
    """The system's OpenBLAS. Only libraries of that name: `libblas.so.3` may be the reference BLAS again."""
    found = ctypes.util.find_library("openblas")
    if found:
        yield Blas("OpenBLAS", found, "the system's OpenBLAS")
    for path in libraries(("/usr", "/usr/local", "/opt/OpenBLAS"), "libopenblas*.so*"):
        yield Blas("OpenBLAS", path, "the system's OpenBLAS")


SOURCES = (explicit, mkl, pypi_openblas, system_openblas)  # an OpenBLAS without the shim's products of few rows last


def libraries(prefixes, pattern):
    """Paths matching `pattern` in the library folders under each prefix (None is skipped), each file once."""
    kinds = ("lib", "lib64", "lib/intel64", f"lib/{platform.machine()}-linux-gnu")
    folders = [pathlib.Path(prefix, kind) for prefix in prefixes if prefix for kind in kinds]
    return list(dict.fromkeys(str(path.resolve()) for folder in folders for path in sorted(folder.glob(pattern))))


# --- trying a library


def open_globally(blas):
    """Try `blas` in a child process, then put it in this process's global scope. Raises Unusable.

    A library built for another processor dies of an illegal instruction, and what is once global stays: so the
    child goes first, in the same environment and therefore with the same choice of inner kernels.
    """
    child = run([sys.executable, "-S", "-c", PROBE, str(ROOT), blas.path])
    if child.returncode < 0:
        raise Unusable(f"died of {signal.Signals(-child.returncode).name} on a small product")
    if child.returncode:
        raise Unusable((child.stderr.strip().splitlines() or ["failed without a word"])[-1])
    handle = ctypes.CDLL(blas.path, mode=ctypes.RTLD_GLOBAL)
    return dataclasses.replace(blas, name=openblas_config(handle) or blas.name)


def run(command, text=None):
    """A finished child process with its output; one that hangs is Unusable."""
    try:
        return subprocess.run(command, input=text or "", capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unusable(f"{pathlib.Path(command[0]).name} did not finish in {SECONDS} s") from None


def openblas_config(library):
    """OpenBLAS's own line on its version, options and processor kernels; None for another library."""
    for name in ("openblas_get_config", "scipy_openblas_get_config"):
        if hasattr(library, name):
            getattr(library, name).restype = ctypes.c_char_p
            return getattr(library, name)().decode()
    return None


def fault(path):
    """Why the library at `path` cannot serve, or None. Runs in the child process of `open_globally`."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return str(error).removeprefix(f"{path}: ")
    missing = [name for name in SYMBOLS if not hasattr(library, name)]
    if missing:
        return f"exports no {', '.join(missing)}"
    if "USE64BITINT" in (openblas_config(library) or ""):
        return "is built for 64-bit indices; MLX passes 32-bit ones"
    # One row and few, as in decoding, and a size that OpenBLAS spreads over threads; all with odd edges.
    wrong = [
        shape
        for shape in ((1, 33, 70), (7, 97, 145), (65, 97, 145))
        if not product_is_right(library.cblas_sgemm, *shape)
    ]
    return f"computes a wrong float32 product at M, N, K = {wrong[0]}" if wrong else None


def product_is_right(sgemm, m, n, k):
    """Whether row-major [M,K]·[K,N] comes out exactly, plain and with either factor transposed.

    The factors have rank one and small whole entries, a_ik = u_i v_k and b_kj = w_k x_j, so that every entry of the
    product is u_i x_j Σ_k v_k w_k, exactly representable in float32. Sums of v_k w_k are kept away from zero.
    """
    u, v, w, x = ([(i * step) % 7 + 1 for i in range(size)] for size, step in ((m, 2), (k, 3), (k, 5), (n, 4)))
    inner = sum(a * b for a, b in zip(v, w))
    want = [a * inner * b for a in u for b in x]
    left = {111: (outer(u, v), k), 112: (outer(v, u), m)}  # 111: as it lies, 112: transposed (CBLAS's numbers)
    right = {111: (outer(w, x), n), 112: (outer(x, w), k)}
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    for ta, (a, lda) in left.items():
        for tb, (b, ldb) in right.items():
            c = outer([-1] * m, [1] * n)  # poisoned, and wiped by beta = 0
            sgemm(101, ta, tb, m, n, k, one, a, lda, b, ldb, zero, c, n)
            if list(c) != want:
                return False
    return True


def outer(rows, columns):
    """The outer product of two lists as a row-major C array of floats."""
    return (ctypes.c_float * (len(rows) * len(columns)))(*(a * b for a in rows for b in columns))


# --- the shim


def cache_folder():
    """The user's cache folder for downloads, conversions and the compiled shim (not created here)."""
    if chosen := os.environ.get("FOREDRAFT_CACHE"):
        return pathlib.Path(chosen).expanduser()
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "foredraft"
    except RuntimeError:  # a container's user that no file names
        raise UserError("no home folder is known for this user; set FOREDRAFT_CACHE to a writable folder") from None


def build_shim(library, version):
    """Compile SHIM against `library` once; later calls find it in the cache. Returns its path, raises Unusable.

    The name carries a digest of all that decides the result: source, flags, this processor, which the code is made
    for, OpenBLAS's version, and the path in its rpath.
    """
    decides = (SHIM.read_text(), *FULL, processor(), version, str(library))
    key = hashlib.sha256("\0".join(decides).encode()).hexdigest()[:16]
    shim = cache_folder() / f"cblas-{key}.so"
    if shim.exists():
        return shim
    try:
        shim.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shim.parent) as folder:  # beside the shim, so that the rename is atomic
            compile_shim(library, pathlib.Path(folder, shim.name))
            os.replace(pathlib.Path(folder, shim.name), shim)
    except OSError as error:
        raise Unusable(f"scipy-openblas32: its shim cannot be written ({error}); set FOREDRAFT_CACHE") from None
    return shim


def compile_shim(library, out):
    """Compile SHIM to `out`, linked to `library` where it lies, whole or else forwarding only. Raises Unusable."""
    compiler = find_compiler()
    if compiler is None:
        raise Unusable("scipy-openblas32: no C compiler (cc, gcc or clang, or CC) to build its shim")
    link = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(out)]
    for flags in (FULL, PLAIN):
        done = run([compiler, "-shared", "-fPIC", *flags, str(SHIM), *link])
        if done.returncode == 0:
            return
    raise Unusable(f"scipy-openblas32: {compiler} failed on its shim: {' '.join(done.stderr.split())[-300:]}")


def processor():
    """What the kernel says this processor can do; another one may not run what is compiled for it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def find_compiler():
    """The C compiler's path: CC where set, else cc, gcc or clang; None without any."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)
