"""One kernel body, three builds: Metal and CUDA for `mx.fast`, and host C++, in which CI runs every body.

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
  EXP LOG LOG1P SQRT RSQRT SIN COS INF    float: the precise functions, and infinity
  LOAD16(p) -> Words {w[4]}      one 16-byte load from an aligned address (whole arrays are aligned; slices need not be)
  LOAD16_ONCE(p) LOAD8_ONCE(p)   the same, and half of it, for what is read once and need not stay in a cache
  FLOAT_OF_BITS(word)            the float with these bits
  PAIR_LO(T, word) PAIR_HI(T, word) PACK(T, lo, hi)    two 16-bit elements in an unsigned word, from and to float
  MMA_16x8x16(T, acc, a, b)      acc[4] += a[4 words] b[2 words]: PTX's mma.sync.m16n8k16 with float sums, its layout
  HELPER, DEVICE_IN(T), DEVICE_OUT(T), LANE_ARRAY(T)   a function in `header`; its pointers to inputs, outputs, locals
  UNROLL                         before a loop of constant length

Inputs, outputs and scalars go by their names, template values too (`constexpr`, `using`). Shuffles and barriers are met
by all lanes or by none. A body uses no `std::` and no name ending in _shape, _strides or _ndim.
"""

import functools
import hashlib
import pathlib
import sys

import mlx.core as mx
import numpy as np

from kernels import host, nvrtc

GPU = mx.DeviceType.gpu
SIMD = 32  # lanes of a simdgroup (Metal) or warp (CUDA)
WIDE = 32  # elements of a scalar argument, of which the first counts: see `whole_number`
MOST_THREADS = 1024  # of a threadgroup, on both
CONSTANT = 8  # Metal passes arrays of fewer elements in another address space (mlx/backend/common/metal_kernel.cpp)

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
C_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.float32: "float",
}


class Kernel:
    """A body with its arguments' names, built for a device when first called.

    `inputs`, `scalars` and `outputs` name the body's arguments in the order of the call; `header` holds its helper
    functions. `digest` is the SHA-256 of all that decides what is built.
    """

    def __init__(self, name, *, inputs, outputs, body, scalars=(), header=""):
        self.name, self.inputs, self.scalars, self.outputs = name, tuple(inputs), tuple(scalars), tuple(outputs)
        self.body, self.header = body, header
        self.functions = {}  # (build, all that decides what is compiled) -> what runs it
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
        if build == "cuda":
            return self.run_cuda(arrays, scalars, template, groups, threads, shapes, dtypes)
        arrays = [*arrays, *[scalar(value) for value in scalars]]
        if build == "host":
            return self.run_host(arrays, template, groups, threads, shapes, dtypes)
        return self.run_metal(arrays, template, groups, threads, shapes, dtypes)

    @property
    def names(self):
        """The arguments' names, as the generated functions take them (outputs follow)."""
        return (*self.inputs, *self.scalars)

    def run_metal(self, arrays, template, groups, threads, shapes, dtypes):
        """The call through `mx.fast.metal_kernel`."""
        arrays = [metal_argument(a, name in self.scalars) for name, a in zip(self.names, arrays)]
        return self.metal_function((*[a.dtype for a in arrays], *dtypes))(
            inputs=arrays,
            template=list(template.items()),
            grid=in_threads(groups, threads),
            threadgroup=threads,
            output_shapes=shapes,
            output_dtypes=dtypes,
        )

    def metal_function(self, dtypes):
        """MLX's kernel for these dtypes of arguments, made once.

        MLX caches what it compiles by name, on disk too, and puts only the template values into it: so source and
        dtypes must be in the name.
        """
        function = self.functions.get(("metal", dtypes))
        if function is None:
            name, names = f"{self.name}_{self.mark(dtypes)}", (list(self.names), list(self.outputs))
            header = f"{prologue('metal')}\n{self.header}\n"
            function = mx.fast.metal_kernel(name, *names, OPENING["metal"] + self.body, header)
            self.functions["metal", dtypes] = function
        return function

    def run_cuda(self, arrays, scalars, template, groups, threads, shapes, dtypes):
        """The call through `mx.fast.precompiled_cuda_kernel`; scalars that are ints are passed by value."""
        by_value = tuple(isinstance(value, int) for value in scalars)
        held = [*arrays, *[value for value, whole in zip(scalars, by_value) if not whole]]
        kinds = tuple(a.dtype for a in arrays), tuple(dtypes)
        return self.cuda_function(*kinds, tuple(template.items()), by_value, threads)(
            inputs=held,
            scalars=[value for value, whole in zip(scalars, by_value) if whole],
            grid=in_threads(groups, threads),
            threadgroup=threads,
            output_shapes=shapes,
            output_dtypes=dtypes,
        )

    def cuda_function(self, *kind):
        """What runs the kernel of one kind (see `cuda_source`), compiled once on this machine and loaded once by MLX.

        MLX keeps what it loads by name: so all that decides what is compiled must be in the name.
        """
        function = self.functions.get(("cuda", kind))
        if function is None:
            name = f"{self.name}_{self.mark(kind)}"
            code = nvrtc.machine_code(name, self.cuda_source(name, *kind), mx.device_info()["architecture"])
            options = {"name": name, "compiled_source": code, "ensure_row_contiguous": True}
            function = self.functions["cuda", kind] = functools.partial(mx.fast.precompiled_cuda_kernel, **options)
        return function

    def cuda_source(self, name, inputs, outputs, template, by_value, threads):
        """The whole CUDA text of a function `name`.

        inputs, outputs  their dtypes       template  (name, value) pairs       threads  of a threadgroup
        by_value         for each scalar whether it is an int, and not an array whose first element counts
        """
        arrays = [f"const {C_TYPES[kind]}* __restrict__ {each}" for kind, each in zip(inputs, self.inputs)]
        arrays += [f"const int* __restrict__ {each}_at" for each, whole in zip(self.scalars, by_value) if not whole]
        arrays += [f"{C_TYPES[kind]}* __restrict__ {each}" for kind, each in zip(outputs, self.outputs)]
        arrays += [f"const int {each}" for each, whole in zip(self.scalars, by_value) if whole]
        first = [f"const int {each} = {each}_at[0];" for each, whole in zip(self.scalars, by_value) if not whole]
        lines = "\n".join(f"  {line}" for line in [*(constant(*pair) for pair in template), *first])
        signature = f'extern "C" __global__ void __launch_bounds__({int(np.prod(threads))}) {name}({", ".join(arrays)})'
        return f"{prologue('cuda')}\n{self.header}\n{signature} {{\n{lines}{OPENING['cuda']}{self.body}\n}}\n"

    def mark(self, kind):
        """Sixteen digits of a digest over the source and over what one compiled kernel of it is for."""
        return hashlib.sha256(f"{self.digest}{kind}".encode()).hexdigest()[:16]

    def host_source(self, dtypes, template):
        """The whole C++ text of the host build for these dtypes of inputs, scalars and outputs."""
        kinds = [C_TYPES[dtype] for dtype in dtypes]
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
        source = self.host_source((*(a.dtype for a in arrays), *dtypes), template)
        found, broken, fault = host.run(self.name, source, arrays, groups, count, shapes, dtypes)
        if fault or broken:
            names = (*self.names, *self.outputs)
            where = ", ".join(names[place] for place in broken)
            raise RuntimeError(f"kernel {self.name}: {fault or 'wrote outside ' + where}")
        return found


@functools.cache
def prologue(build):
    """The text before a body: the build's own words, then the common ones."""
    folder = pathlib.Path(__file__).parent / "prologue"
    return (folder / f"{build}.h").read_text() + (folder / "common.h").read_text()


def in_threads(groups, threads):
    """A grid of threadgroups as MLX counts it, in threads."""
    return tuple(count * size for count, size in zip(groups, threads))


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
    """The scalar argument for an int that must be an array, made once and computed on the device.

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
    """A template value's declaration."""
    if isinstance(value, mx.Dtype):
        return f"using {name} = {C_TYPES[value]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
