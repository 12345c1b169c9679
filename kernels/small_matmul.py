"""Products of a few rows with large weights: one pass over the weights, several of them in one launch.

W rows, K inputs, N outputs. A decode step moves every weight once, so up to 24 rows cost little more than one, provided
that the weights stream at full speed: 16 rows of a weight at a time go through MMA tiles as they arrive, the few rows
of x come from cache. The sum of an output is taken in one order whatever W is: a row's result does not depend on how
many rows are computed with it, bit for bit, so a wide verify agrees with narrow steps. (The stock route on CUDA takes
other sums for one row than for more, and per call of more than one row it prepares a cuBLASLt plan on the host.)
"""

import functools
import typing

import mlx.core as mx

from kernels.portable import Kernel
from kernels.verdicts import Check


class Tiling(typing.NamedTuple):
    """How a launch is laid out; any is right, and a row's sums depend on it, so it follows from the weights alone."""

    simdgroups: int  # of a threadgroup, which share its inputs among them
    pairs: int  # tiles of 16 weight rows that a simdgroup multiplies at a time: 1 or 2
    loads: int  # of each weight row in flight: 1 or 2


TILINGS = {16384: Tiling(4, 2, 2), 8192: Tiling(4, 2, 1), 0: Tiling(8, 1, 2)}  # by the least outputs; measured (H200)
MOST_ROWS = 24  # three tiles of 8; a verify of B = 16 has 16 rows, of the widest gated LoRA block 17
MOST_WEIGHTS = 4  # joined in one launch: the projections of a gated-delta layer
DTYPES = (mx.bfloat16, mx.float16)
TOLERANCE = {mx.bfloat16: 1e-2, mx.float16: 2e-3}  # two roundings of an output, one of a weight that is quantised
LEAST = 256  # outputs from which a weight is measured by itself; a smaller one joins another's launch
MEASURED = 16  # rows at which the kernel is measured: a verify of B = 16


def product(x, *weights, residual=None, build=None, tiling=None):
    """x Wᵀ for one or several weights that share x, in one launch.

    x         [..., K], W rows in all, bfloat16 or float16; W ≤ MOST_ROWS
    weights   up to MOST_WEIGHTS dense [N_i,K] arrays, or Quantised
    residual  [..., N] added to the rounded product, for one weight only
    tiling    a Tiling; None takes that of TILINGS
    Sums are float32, each output rounded once. Returns one array [..., N] for one weight, else a tuple of them.
    """
    outputs = launch("residual" if residual is not None else "plain", x, weights, residual, build, tiling)
    return outputs[0] if len(weights) == 1 else tuple(outputs)


def gated_product(x, gate, up, build=None, tiling=None):
    """silu(x gateᵀ) · (x upᵀ) in one launch, each factor rounded as the operations apart round it.

    x [..., K]   gate, up  both [N,K] dense or both Quantised. Returns [..., N].
    """
    return launch("gated", x, (gate, up), None, build, tiling)[0]


def launch(epilogue, x, weights, residual, build, tiling):
    """Run the kernel for one of the epilogues "plain", "residual" and "gated"; returns its list of outputs."""
    K, rows = x.shape[-1], x.size // x.shape[-1]
    quantised = isinstance(weights[0], Quantised)
    sizes = [weight.shape[0] for weight in weights]
    outputs = sizes[:1] if epilogue == "gated" else sizes
    tiling = tiling or next(each for least, each in TILINGS.items() if sum(sizes) >= least)
    columns = tiling.pairs * (8 if epilogue == "gated" else 16)
    arrays = [x, *(part for weight in weights for part in (weight.parts if quantised else [weight]))]
    layout = weights[0].layout if quantised else {}
    return kernel(epilogue, len(weights), bool(layout))(
        arrays + ([residual] if residual is not None else []),
        template={
            "T": x.dtype, "ROWS": rows, "TILES": -(-rows // 8), "K": K,
            "SIMDGROUPS": tiling.simdgroups, "PAIRS": tiling.pairs, "LOADS": tiling.loads,
            **{f"N{i}": size for i, size in enumerate(sizes)}, **layout,
        },
        groups=(sum(-(-size // columns) for size in outputs), 1, 1),
        threads=(32 * tiling.simdgroups, 1, 1),
        shapes=[(*x.shape[:-1], size) for size in outputs],
        dtypes=[x.dtype] * len(outputs),
        build=build,
    )  # fmt: skip


def serves(x, *weights):
    """Whether the kernel can take these: few rows of a 16-bit type, weights of that type whose rows fill its loads."""
    K = x.shape[-1]
    if x.dtype not in DTYPES or not 0 < x.size // K <= MOST_ROWS or len(weights) > MOST_WEIGHTS:
        return False
    if isinstance(weights[0], Quantised):
        return all(isinstance(w, Quantised) and w.serves(x.dtype) and w.layout == weights[0].layout for w in weights)
    return K % 64 == 0 and all(isinstance(w, mx.array) and w.dtype == x.dtype for w in weights)


class Quantised:
    """An affinely quantised weight [N,K] as MLX stores it: packed words, and a scale and a bias for each group.

    weight [N,K·bits/32] uint32   scales, biases [N,K/group_size]   value = scale · q + bias, rounded to their dtype
    """

    def __init__(self, weight, scales, biases, *, group_size, bits):
        self.parts = (weight, scales, biases)
        self.shape = (weight.shape[0], weight.shape[1] * 32 // bits)
        self.group_size, self.bits = group_size, bits

    @property
    def layout(self):
        """Template values of the kernel."""
        return {"GROUP": self.group_size, "BITS": self.bits}

    def serves(self, dtype):
        """Whether the kernel knows the layout: 4 or 8 bits, a lane's 16 values in one group."""
        return self.bits in (4, 8) and self.group_size % 16 == 0 and self.shape[1] % 64 == 0 and (
            self.parts[1].dtype == dtype and self.parts[2] is not None
        )  # fmt: skip

    def dense(self):
        """The weight's values [N,K]."""
        return mx.dequantize(*self.parts, group_size=self.group_size, bits=self.bits)


def reference(x, *weights, residual=None):
    """`product` in plain operations."""
    dense = [weight.dense() if isinstance(weight, Quantised) else weight for weight in weights]
    outputs = [(x.astype(mx.float32) @ weight.astype(mx.float32).T).astype(x.dtype) for weight in dense]
    if residual is not None:
        return outputs[0] + residual
    return outputs[0] if len(weights) == 1 else tuple(outputs)


def gated_reference(x, gate, up):
    """`gated_product` in plain operations."""
    gate, up = reference(x, gate, up)
    return gate * mx.sigmoid(gate) * up


# --- how it is measured


def case(dtype, weight):
    """What a verdict holds for: dtype and weight, given as an array, a Quantised, or a row of `verdicts`' dims."""
    if not isinstance(weight, list | tuple):
        weight = [*weight.shape, *([weight.bits, weight.group_size] if isinstance(weight, Quantised) else [])]
    N, K, *layout = weight
    stored = "{} bits by {}".format(*layout) if layout else "dense"
    return f"{str(dtype).removeprefix('mlx.core.')} {N}x{K} {stored}"


def checks(dims):
    """The Checks of `product` against MLX's own products, for the weights of a model that are not small."""
    dtype = getattr(mx, dims["dtype"])
    found = []
    for shape in [each for each in [*dims["dense"], *dims["quantised"]] if each[0] >= LEAST]:
        draw = functools.partial(drawn, dtype, *shape)
        if dtype in DTYPES and serves(draw()[0], as_weight(*draw()[1:], shape=shape)):
            kernel_fn, stock_fn = (functools.partial(by, shape=shape) for by in (by_kernel, by_stock))
            found.append(Check("small_matmul.product", case(dtype, shape), kernel_fn, stock_fn, draw, TOLERANCE[dtype]))
    return found


def drawn(dtype, N, K, bits=None, group_size=None):
    """Random (x [MEASURED,K], weight), or the weight's parts where it is quantised."""
    x, dense = mx.random.normal((MEASURED, K)).astype(dtype), (mx.random.normal((N, K)) / K**0.5).astype(dtype)
    return (x, *(mx.quantize(dense, bits=bits, group_size=group_size) if bits else (dense,)))


def as_weight(*parts, shape):
    """A weight of drawn parts as `product` takes it."""
    return Quantised(*parts, bits=shape[2], group_size=shape[3]) if len(shape) > 2 else parts[0]


def by_kernel(x, *parts, shape):
    """The product through the kernel."""
    return product(x, as_weight(*parts, shape=shape))


def by_stock(x, *parts, shape):
    """The product through MLX."""
    if len(shape) > 2:
        return mx.quantized_matmul(x, *parts, transpose=True, bits=shape[2], group_size=shape[3])
    return x @ parts[0].T


# --- the body: where a tile's weights lie, how they stream, what becomes of the sums

# A simdgroup multiplies PAIRS tiles of 16 weight rows at a time, so that each part of x it reads serves all of them: x
# comes from the L2 cache, for 16 rows as many bytes as the weights themselves with PAIRS = 1. A lane holds rows g and
# g + 8 of each tile, and of 32 (dense) or 64 (quantised) inputs in a chunk the t-th quarter. MMA's own order of the
# inputs is another one; as both factors are read in the same order, the sum is the same. A gated product pairs 8 rows
# of `gate` with the same 8 of `up`, so that both meet in one lane.
OPENING = """
  constexpr int SPAN = GATED ? 8 : 16, COLUMNS = SPAN * PAIRS;  // outputs of a tile and of the threadgroup
  const int g = LANE / 4, t = LANE % 4;
  int block = GROUP_X, N = N0;
  auto out = y0;
  {pointers}
  float sums[PAIRS][TILES][4] = {};
  const Words none = {{0, 0, 0, 0}};
"""

DENSE_STREAM = """
  constexpr int CHUNKS = K / (32 * LOADS), HELD = PAIRS * LOADS * 2;
  DEVICE_IN(T) rows[PAIRS * 2];
  UNROLL
  for (int i = 0; i < PAIRS * 2; ++i) {
    const int n = block * COLUMNS + i / 2 * SPAN + g + (GATED ? 0 : i % 2 * 8);
    rows[i] = (i % 2 ? second : weight) + (long)row_of(n, N) * K + t * 8;
  }
  Words now[HELD], next[HELD];  // of load u and weight row i: [u * PAIRS * 2 + i]
  UNROLL
  for (int h = 0; h < HELD; ++h)
    if (SIMDGROUP < CHUNKS) now[h] = LOAD16_ONCE(rows[h % (PAIRS * 2)] + (SIMDGROUP * LOADS + h / (PAIRS * 2)) * 32);
  for (int chunk = SIMDGROUP; chunk < CHUNKS; chunk += SIMDGROUPS) {
    const int after = chunk + SIMDGROUPS;
    UNROLL
    for (int h = 0; h < HELD; ++h)
      if (after < CHUNKS) next[h] = LOAD16_ONCE(rows[h % (PAIRS * 2)] + (after * LOADS + h / (PAIRS * 2)) * 32);
    UNROLL
    for (int u = 0; u < LOADS; ++u) {
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        Words row = none;
        if (ROWS % 8 == 0 || i * 8 + g < ROWS) row = LOAD16(x + (i * 8 + g) * K + (chunk * LOADS + u) * 32 + t * 8);
        unsigned first[2] = {row.w[0], row.w[1]}, last[2] = {row.w[2], row.w[3]};
        UNROLL
        for (int p = 0; p < PAIRS; ++p) {
          const Words low = now[(u * PAIRS + p) * 2], high = now[(u * PAIRS + p) * 2 + 1];
          unsigned left[4] = {low.w[0], high.w[0], low.w[1], high.w[1]};
          unsigned right[4] = {low.w[2], high.w[2], low.w[3], high.w[3]};
          MMA_16x8x16(T, sums[p][i], left, first);
          MMA_16x8x16(T, sums[p][i], right, last);
        }
      }
    }
    UNROLL
    for (int h = 0; h < HELD; ++h) now[h] = next[h];
  }
"""

QUANTISED_STREAM = """
  constexpr int CHUNKS = K / 64, WORDS = K * BITS / 32, GROUPS = K / GROUP;
  DEVICE_IN(unsigned) rows[PAIRS * 2];
  DEVICE_IN(T) scale_rows[PAIRS * 2];
  DEVICE_IN(T) bias_rows[PAIRS * 2];
  Words next[PAIRS * 2];
  UNROLL
  for (int i = 0; i < PAIRS * 2; ++i) {
    const int n = row_of(block * COLUMNS + i / 2 * SPAN + g + (GATED ? 0 : i % 2 * 8), N);
    rows[i] = (i % 2 ? second : weight) + (long)n * WORDS + t * (BITS / 2);
    scale_rows[i] = (i % 2 ? second_scales : scales) + (long)n * GROUPS;
    bias_rows[i] = (i % 2 ? second_biases : biases) + (long)n * GROUPS;
    next[i] = SIMDGROUP < CHUNKS ? load_values<BITS>(rows[i] + SIMDGROUP * 2 * BITS) : none;
  }
  for (int chunk = SIMDGROUP; chunk < CHUNKS; chunk += SIMDGROUPS) {
    const int after = chunk + SIMDGROUPS, group = (chunk * 64 + t * 16) / GROUP;
    Words now[PAIRS * 2];
    float scale[PAIRS * 2], bias[PAIRS * 2];
    UNROLL
    for (int i = 0; i < PAIRS * 2; ++i) {
      now[i] = next[i];
      if (after < CHUNKS) next[i] = load_values<BITS>(rows[i] + after * 2 * BITS);
      scale[i] = F32(scale_rows[i][group]), bias[i] = F32(bias_rows[i][group]);
    }
    UNROLL
    for (int step = 0; step < 4; ++step) {
      unsigned tile[PAIRS][4];
      UNROLL
      for (int i = 0; i < PAIRS * 4; ++i) {
        const int row = i / 4 * 2 + i % 2, at = step * 4 + i / 2 % 2 * 2;
        const float lower = value_of<BITS>(now[row], at, scale[row], bias[row]);
        const float upper = value_of<BITS>(now[row], at + 1, scale[row], bias[row]);
        tile[i / 4][i % 4] = PACK(T, lower, upper);
      }
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        Words row = none;
        if (ROWS % 8 == 0 || i * 8 + g < ROWS)
          row = LOAD16(x + (i * 8 + g) * K + chunk * 64 + t * 16 + step / 2 * 8);
        unsigned pair[2] = {row.w[step % 2 * 2], row.w[step % 2 * 2 + 1]};
        UNROLL
        for (int p = 0; p < PAIRS; ++p) MMA_16x8x16(T, sums[p][i], tile[p], pair);
      }
    }
  }
"""

# The simdgroups' parts of a sum meet in threadgroup memory and are added in one order.
CLOSING = """
  constexpr int WIDTH = 16 * PAIRS + 1;  // one more than a row of sums, so that a column's cells lie in different banks
  SHARED(float, parts, SIMDGROUPS * TILES * 8 * WIDTH);
  UNROLL
  for (int i = 0; i < TILES * 4; ++i) {
    const int at = (SIMDGROUP * TILES * 8 + i / 4 * 8 + 2 * t + i % 2) * WIDTH + g + i % 4 / 2 * 8;
    UNROLL
    for (int p = 0; p < PAIRS; ++p) parts[at + p * 16] = sums[p][i / 4][i % 4];
  }
  BARRIER();
  for (int cell = THREAD; cell < ROWS * COLUMNS; cell += SIMDGROUPS * 32) {
    const int row = cell / COLUMNS, column = cell % COLUMNS, n = block * COLUMNS + column;
    const int at = row * WIDTH + column / SPAN * 16 + column % SPAN;
    if (n < N) {
      const float value = total<SIMDGROUPS, TILES * 8 * WIDTH>(parts, at);
      const int place = row * N + n;
      {store}
    }
  }
"""

STORE = {
    "plain": "out[place] = CAST(T, value);",
    "residual": "out[place] = CAST(T, F32(CAST(T, value)) + F32(residual[place]));",
    "gated": """const float gate = F32(CAST(T, value));
      const float up = F32(CAST(T, (total<SIMDGROUPS, TILES * 8 * WIDTH>(parts, at + 8))));
      const float sigmoid = F32(CAST(T, 1.0f / (1.0f + EXP(-gate))));
      out[place] = CAST(T, F32(CAST(T, gate * sigmoid)) * up);""",
}

HEADER = """
HELPER int row_of(int n, int N) { return n < N ? n : N - 1; }  // past the last row the last is read, and dropped

template <int PARTS, int APART, typename P> HELPER float total(P parts, int at) {
  float sum = 0.0f;
  UNROLL
  for (int part = 0; part < PARTS; ++part) sum += parts[part * APART + at];
  return sum;
}
"""

QUANTISED_HEADER = """
template <int BITS> HELPER Words load_values(DEVICE_IN(unsigned) p) {  // 16 values: two words of 4 bits, four of 8
  return BITS == 8 ? LOAD16_ONCE(p) : LOAD8_ONCE(p);
}
// 2^23 + q is the float whose low bits are q: a conversion without the conversion instruction, which is slow on CUDA
template <int BITS> HELPER float value_of(Words values, int at, float scale, float bias) {
  const unsigned q = values.w[at * BITS / 32] >> (at * BITS % 32) & ((1u << BITS) - 1u);
  return FMA(FLOAT_OF_BITS(0x4b000000u | q) - 8388608.0f, scale, bias);
}
"""


@functools.cache
def kernel(epilogue, count, quantised):
    """The kernel that multiplies by `count` weights and ends in one of the epilogues."""
    gated, letters = epilogue == "gated", ("w", "s", "b") if quantised else ("w",)
    body = [
        f"  constexpr bool GATED = {str(gated).lower()};",
        OPENING.replace("{pointers}", pointers(count, quantised, gated)),
        QUANTISED_STREAM if quantised else DENSE_STREAM,
        CLOSING.replace("{store}", STORE[epilogue]),
    ]
    return Kernel(
        f"small_matmul_{epilogue}_{count}" + ("_quantised" if quantised else ""),
        inputs=[
            "x",
            *(f"{letter}{i}" for i in range(count) for letter in letters),
            *["residual"][: epilogue == "residual"],
        ],
        outputs=[f"y{i}" for i in range(1 if gated else count)],
        header=HEADER + (QUANTISED_HEADER if quantised else ""),
        body="\n".join(body),
    )


def pointers(count, quantised, gated):
    """C++ that finds the weight of a threadgroup: `weight`, and `second` for the upper half of its tile."""
    names = {"weight": "w", **({"scales": "s", "biases": "b"} if quantised else {})}
    lines = [f"auto {name} = {letter}0;" for name, letter in names.items()]
    others = range(1, 1 if gated else count)
    for i in others:
        moves = "".join(f" {name} = {letter}{i};" for name, letter in names.items())
        lines.append(f"if (block * COLUMNS >= N) {{ block -= (N + COLUMNS - 1) / COLUMNS; N = N{i}; out = y{i};{moves}")
    lines.append("}" * len(others))
    for name, letter in names.items():
        other = "second" if name == "weight" else f"second_{name}"
        lines.append(f"auto {other} = {letter}1;" if gated else f"auto {other} = {name};")
    return "\n  ".join(lines)
