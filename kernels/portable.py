"""One kernel body, three builds: Metal and CUDA through `mx.fast`, and host C++, in which CI runs every body.

A body is plain C++ over the words that `prologue/` defines for each build:

  THREAD LANE SIMDGROUP          int: place in the threadgroup, in the simdgroup of 32, and the simdgroup's place
  GROUP_X GROUP_Y GROUP_Z        int: the threadgroup's place in the grid
  SCALAR(name)                   int: a scalar argument
  SHARED(type, name, count)      memory of the threadgroup, 16-byte aligned; all of a body's within 48 KiB (Metal: 32)
  BARRIER()                      all threads of the threadgroup meet
  SIMD_SUM(x) SIMD_MAX(x)        float: over the simdgroup by a butterfly, xor 16, 8, 4, 2, 1; the result in all lanes
  SIMD_SHUFFLE(x, lane) SIMD_SHUFFLE_XOR(x, mask)
  F32(x) CAST(Type, x)           any element to float; float to an element, rounded to nearest even
  MUL(x, y) FMA(x, y, z)         float: x y and x y + z with one rounding each, which no compiler fuses or splits
  EXP LOG1P SQRT RSQRT SIN COS INF    float: the precise functions, and infinity
  LOAD16(p) -> Words {w[4]}      one 16-byte load from an aligned address (whole arrays are aligned; slices need not be)
  LOAD16_ONCE(p) LOAD8_ONCE(p)   the same, and half of it, for what is read once and need not stay in a cache
  FLOAT_OF_BITS(word)            the float with these bits
  PAIR_LO(T, word) PAIR_HI(T, word) PACK(T, lo, hi)    two 16-bit elements in an unsigned word, from and to float
  MMA_16x8x16(T, acc, a, b)      acc[4] += a[4 words] b[2 words]: PTX's mma.sync.m16n8k16 with float sums, its layout
  HELPER, DEVICE_IN(T), DEVICE_OUT(T), LANE_ARRAY(T)   a function in `header`; its pointers to inputs, outputs, locals
  UNROLL                         before a loop of constant length

Inputs, outputs and scalars go by their names, template values too (`constexpr`, `using`). Shuffles and barriers are met
by all lanes or by none. A body uses no `std::`, no name ending in _shape, _strides or _ndim, and never `inf`: on CUDA
that is MLX's macro.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import mlx.core as mx
import numpy as np

from kernels.blas import cache_folder
from kernels.errors import UserError

GPU = mx.DeviceType.gpu
SIMD = 32  # lanes of a simdgroup (Metal) or warp (CUDA)
WIDE = 32  # elements of a scalar argument, of which the first counts: see `whole_number`
MOST_THREADS = 1024  # of a threadgroup, on both
CONSTANT = 8  # Metal passes arrays of fewer elements in another address space (mlx/backend/common/metal_kernel.cpp)
GUARD = 256  # bytes of 0xFF on both sides of every host array: what lies beyond an array is NaN, and stays untouched
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")

# What opens a body. MLX declares exactly those Metal attributes that it finds by name in this text.
OPENING = {
    "metal": """
  const int THREAD = int(thread_index_in_threadgroup), LANE = int(thread_index_in_simdgroup);
  const int GROUP_X = int(threadgroup_position_in_grid.x), GROUP_Y = int(threadgroup_position_in_grid.y);
  const int GROUP_Z = int(threadgroup_position_in_grid.z), SIMDGROUP = THREAD / 32;
""",
    "cuda": """
  const int THREAD = int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
  const int LANE = THREAD % 32, SIMDGROUP = THREAD / 32;
  const int GROUP_X = int(blockIdx.x), GROUP_Y = int(blockIdx.y), GROUP_Z = int(blockIdx.z);
""",
    "host": """
  const int THREAD = current, LANE = THREAD % 32, SIMDGROUP = THREAD / 32;
  const int GROUP_X = group[0], GROUP_Y = group[1], GROUP_Z = group[2];
""",
}
HOST_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.float32: "float",
}
PLAIN = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # what NumPy, which has no bfloat16, sees instead


class Kernel:
    """A body with its arguments' names, built for a device when first called.

    `inputs`, `scalars` and `outputs` name the body's arguments in the order of the call; `header` holds its helper
    functions. `digest` is the SHA-256 of all that decides what is built.
    """

    def __init__(self, name, *, inputs, outputs, body, scalars=(), header=""):
        self.name, self.inputs, self.scalars, self.outputs = name, tuple(inputs), tuple(scalars), tuple(outputs)
        self.body, self.header = body, header
        self.functions = {}  # (build, dtypes) -> MLX's kernel
        taken = [n + s for n in (*self.inputs, *self.scalars) for s in ("_shape", "_strides", "_ndim") if n + s in body]
        if taken:
            raise ValueError(
                f"kernel {name}: its body says {taken[0]}, which MLX would take for an argument; rename it"
            )

    @functools.cached_property
    def digest(self):
        """SHA-256 over the body, its header, its arguments' names and the prologues."""
        names = [",".join(each) for each in (self.inputs, self.scalars, self.outputs)]
        texts = [*names, self.header, self.body, *map(prologue, OPENING), *OPENING.values()]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def __call__(self, arrays, *, scalars=(), template=None, groups, threads, shapes, dtypes, build=None):
        """Run the body over a grid of `groups` = (x, y, z) threadgroups of `threads` = (x, y, z) threads each.

        `arrays` follow `inputs`, made row-contiguous where they are not; `scalars` are ints, or int32 arrays of which
        the first element counts; `template` maps names to ints, bools and dtypes. Returns one array for each of
        `shapes` and `dtypes`. `build`: "metal", "cuda" or "host"; None takes the default device's. On the host, outputs
        hold 0xFF (NaN in floats) where the body writes nothing. Raises RuntimeError where the build cannot
        run, which dispatchers avoid.
        """
        build, template = build or device_build(), template or {}
        arrays = [*arrays, *[scalar(value) for value in scalars]]
        if build == "host":
            return self.run_host(arrays, template, groups, threads, shapes, dtypes)
        if build == "metal":
            arrays = [metal_argument(a, name in self.scalars) for name, a in zip(self.names, arrays)]
        return self.function(build, (*[a.dtype for a in arrays], *dtypes))(
            inputs=arrays,
            template=list(template.items()),
            grid=(groups[0] * threads[0], groups[1] * threads[1], groups[2] * threads[2]),
            threadgroup=threads,
            output_shapes=shapes,
            output_dtypes=dtypes,
        )

    @property
    def names(self):
        """The arguments' names, as the generated functions take them (outputs follow)."""
        return (*self.inputs, *self.scalars)

    def source(self, build):
        """(header, body) as they are given to MLX for "metal" or "cuda"; MLX adds the signature."""
        return f"{prologue(build)}\n{self.header}\n", OPENING[build] + self.body

    def function(self, build, dtypes):
        """MLX's kernel for these dtypes of arguments, made once.

        MLX caches what it compiles by name, on disk too, and puts only the template values into it: so source and
        dtypes must be in the name.
        """
        function = self.functions.get((build, dtypes))
        if function is None:
            mark = hashlib.sha256(f"{self.digest}{dtypes}".encode()).hexdigest()[:8]
            header, body = self.source(build)
            make = mx.fast.cuda_kernel if build == "cuda" else mx.fast.metal_kernel
            function = make(f"{self.name}_{mark}", list(self.names), list(self.outputs), body, header)
            self.functions[build, dtypes] = function
        return function

    def host_source(self, dtypes, template):
        """The whole C++ text of the host build for these dtypes of inputs, scalars and outputs."""
        kinds = [HOST_TYPES[dtype] for dtype in dtypes]
        lines = [
            f"  const {kind}* {name} = (const {kind}*)arrays[{i}];"
            for i, (kind, name) in enumerate(zip(kinds, self.names))
        ]
        for i, name in enumerate(self.outputs, start=len(self.names)):
            lines.append(f"  {kinds[i]}* {name} = ({kinds[i]}*)arrays[{i}];")
        lines += [f"  {constant(name, value)}" for name, value in template.items()]
        arguments = "\n".join(lines)
        header = f'{prologue("host")}\n#line 1 "{self.name} header"\n{self.header}\n'
        return (
            f'{header}static void body() {{\n{arguments}{OPENING["host"]}#line 1 "{self.name} body"\n{self.body}\n}}\n'
        )

    def run_host(self, arrays, template, groups, threads, shapes, dtypes):
        """The call on the host: every array between two guards, the body run, the guards looked at."""
        count = int(np.prod(threads))
        if count % SIMD or not 0 < count <= MOST_THREADS:
            raise RuntimeError(
                f"kernel {self.name}: {count} threads; expected a multiple of {SIMD} up to {MOST_THREADS}"
            )
        library = build_host(self.name, self.host_source((*(a.dtype for a in arrays), *dtypes), template))
        cells = [Guarded(a.shape, a.dtype, a) for a in arrays] + [Guarded(s, d) for s, d in zip(shapes, dtypes)]
        addresses = (ctypes.c_void_p * len(cells))(*(cell.address for cell in cells))
        fault = library.run(addresses, (ctypes.c_int * 3)(*groups), count).decode()
        broken = [name for name, cell in zip((*self.names, *self.outputs), cells) if cell.broken()]
        if fault or broken:
            raise RuntimeError(f"kernel {self.name}: {fault or 'wrote outside ' + ', '.join(broken)}")
        return [cell.array() for cell in cells[len(arrays) :]]


@functools.cache
def prologue(build):
    """The text before a body: the build's own words, then the common ones."""
    folder = pathlib.Path(__file__).parent / "prologue"
    return (folder / f"{build}.h").read_text() + (folder / "common.h").read_text()


def device_build():
    """The build for the default device. Raises RuntimeError on a CPU, where plain operations serve."""
    if mx.default_device().type is not GPU:
        raise RuntimeError(
            "the default device is the CPU, which runs no kernels; expected a plain route, or build='host'"
        )
    return "metal" if sys.platform == "darwin" else "cuda"


def scalar(value):
    """A scalar argument as an int32 array of WIDE equal elements, whose first counts."""
    return whole_number(value) if isinstance(value, int) else value


@functools.lru_cache(maxsize=4096)
def whole_number(value):
    """The scalar argument for an int, made once and computed on the device.

    MLX keeps arrays of up to 8 bytes, and what comes from Python, in memory that a CUDA device reads over PCIe, again
    in every threadgroup: a kernel of a few hundred threadgroups then takes 20 µs instead of 3 (measured on an H200).
    """
    wide = mx.arange(WIDE, dtype=mx.int32) * 0 + value
    mx.eval(wide)
    return wide


def first(value):
    """The number of a scalar argument, as plain operations take it: an array of no dimension."""
    return mx.array(value).reshape(-1)[0]


def float_bits(value):
    """A float as a template value: the int that FLOAT_OF_BITS turns back into it (float32, not negative)."""
    return int(np.float32(value).view(np.int32))


def metal_argument(array, is_scalar):
    """`array` as Metal's prologue expects it: scalars of no dimension, arrays long enough to lie in device memory."""
    if is_scalar:
        return first(array)
    return array if array.size >= CONSTANT else mx.pad(array.reshape(-1), (0, CONSTANT - array.size))


def constant(name, value):
    """A template value's declaration in the host build."""
    if isinstance(value, mx.Dtype):
        return f"using {name} = {HOST_TYPES[value]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"


# --- the host build


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
def build_host(name, source):
    """The host build of one source text: compiled once for each text, flags and kind of processor, then loaded.

    Raises UserError without a C++ compiler, RuntimeError with the compiler's words where the body does not compile.
    """
    key = hashlib.sha256("\0".join((source, *FLAGS, platform.machine())).encode()).hexdigest()[:16]
    path = cache_folder() / f"host-{name}-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # beside it, so that the rename is atomic
            compile_host(name, source, pathlib.Path(folder, path.name))
            os.replace(pathlib.Path(folder, path.name), path)
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library


def compile_host(name, source, out):
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
