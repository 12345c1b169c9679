"""Products of a few rows with large weights: one pass over the weights, several of them in one launch.

W rows, K inputs, N outputs. A decode step moves every weight once, so up to 24 rows cost little more than one, provided
that the weights stream at full speed: 16 rows of a weight at a time go through MMA tiles as they arrive, the few rows
of x come from cache. The sum of an output is taken in one order whatever W is: a row's result does not depend on how
many rows are computed with it, bit for bit, so a wide verify agrees with narrow steps. (The stock route on CUDA takes
other sums for one row than for more, and per call of more than one row it prepares a cuBLASLt plan on the host.)
"""

import functools

import mlx.core as mx

from kernels.portable import Kernel
from kernels.verdicts import Check

MOST_ROWS = 24  # three tiles of 8; a verify of B = 16 has 16 rows, of the widest gated LoRA block 17
MOST_WEIGHTS = 4  # joined in one launch: the projections of a gated-delta layer
DTYPES = (mx.bfloat16, mx.float16)
WIDE = 8192  # outputs from which the launch has blocks enough; fewer outputs split K among more simdgroups (measured)
TOLERANCE = {mx.bfloat16: 1e-2, mx.float16: 2e-3}  # two roundings of an output, one of a weight that is quantised
MEASURED = 16  # rows at which the kernel is measured: a verify of B = 16
SHAPE = {True: (4, 2), False: (16, 1)}  # wide: (simdgroups that share a tile's K, loads in flight); measured on an H200


def product(x, *weights, residual=None, build=None):
    """x Wᵀ for one or several weights that share x, in one launch.

    x         [..., K], W rows in all, bfloat16 or float16; W ≤ MOST_ROWS
    weights   up to MOST_WEIGHTS dense [N_i,K] arrays, or Quantised
    residual  [..., N] added to the rounded product, for one weight only
    Sums are float32, each output rounded once. Returns one array [..., N] for one weight, else a tuple of them.
    """
    outputs = launch("residual" if residual is not None else "plain", x, weights, residual, build)
    return outputs[0] if len(weights) == 1 else tuple(outputs)


def gated_product(x, gate, up, build=None):
    """silu(x gateᵀ) · (x upᵀ) in one launch, each factor rounded as the operations apart round it.

    x [..., K]   gate, up  both [N,K] dense or both Quantised. Returns [..., N].
    """
    return launch("gated", x, (gate, up), None, build)[0]


def launch(epilogue, x, weights, residual, build):
    """Run the kernel for one of the epilogues "plain", "residual" and "gated"; returns its list of outputs."""
    K, rows = x.shape[-1], x.size // x.shape[-1]
    quantised = isinstance(weights[0], Quantised)
    sizes = [weight.shape[0] for weight in weights]
    columns = 8 if epilogue == "gated" else 16
    outputs = sizes[:1] if epilogue == "gated" else sizes
    simdgroups, loads = SHAPE[sum(sizes) >= WIDE]
    arrays = [x, *(part for weight in weights for part in (weight.parts if quantised else [weight]))]
    layout = weights[0].layout if quantised else {}
    return kernel(epilogue, len(weights), bool(layout))(
        arrays + ([residual] if residual is not None else []),
        template={
            "T": x.dtype, "ROWS": rows, "TILES": -(-rows // 8), "K": K, "SIMDGROUPS": simdgroups, "LOADS": loads,
            **{f"N{i}": size for i, size in enumerate(sizes)}, **layout,
        },
        groups=(sum(-(-size // columns) for size in outputs), 1, 1),
        threads=(32 * simdgroups, 1, 1),
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
    """The Checks of `product` against MLX's own products, for the weights of a model."""
    dtype = getattr(mx, dims["dtype"])
    found = []
    for shape in [*dims["dense"], *dims["quantised"]]:
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

# A lane holds row g of a tile (and row g + 8), and of 32 (dense) or 64 (quantised) inputs in a chunk the t-th quarter.
# MMA's own order of the inputs is another one; as both factors are read in the same order, the sum is the same.
OPENING = """
  constexpr int COLUMNS = GATED ? 8 : 16;
  const int g = LANE / 4, t = LANE % 4;
  int tile = GROUP_X, N = N0;
  auto out = y0;
  {pointers}
  float sums[TILES][4] = {};
  const Words none = {{0, 0, 0, 0}};
"""

DENSE_STREAM = """
  constexpr int CHUNKS = K / (32 * LOADS);
  auto lower = weight + (long)row_of(tile * COLUMNS + g, N) * K + t * 8;
  auto upper = second + (long)row_of(tile * COLUMNS + (GATED ? g : g + 8), N) * K + t * 8;
  Words now[2 * LOADS], next[2 * LOADS];
  UNROLL
  for (int u = 0; u < 2 * LOADS; ++u)
    if (SIMDGROUP < CHUNKS) now[u] = LOAD16_ONCE((u % 2 ? upper : lower) + (SIMDGROUP * LOADS + u / 2) * 32);
  for (int chunk = SIMDGROUP; chunk < CHUNKS; chunk += SIMDGROUPS) {
    UNROLL
    for (int u = 0; u < 2 * LOADS; ++u)
      if (chunk + SIMDGROUPS < CHUNKS)
        next[u] = LOAD16_ONCE((u % 2 ? upper : lower) + ((chunk + SIMDGROUPS) * LOADS + u / 2) * 32);
    UNROLL
    for (int u = 0; u < LOADS; ++u) {
      const Words low = now[2 * u], high = now[2 * u + 1];
      unsigned left[4] = {low.w[0], high.w[0], low.w[1], high.w[1]};
      unsigned right[4] = {low.w[2], high.w[2], low.w[3], high.w[3]};
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        Words row = none;
        if (ROWS % 8 == 0 || i * 8 + g < ROWS) row = LOAD16(x + (i * 8 + g) * K + (chunk * LOADS + u) * 32 + t * 8);
        unsigned first[2] = {row.w[0], row.w[1]}, last[2] = {row.w[2], row.w[3]};
        MMA_16x8x16(T, sums[i], left, first);
        MMA_16x8x16(T, sums[i], right, last);
      }
    }
    UNROLL
    for (int u = 0; u < 2 * LOADS; ++u) now[u] = next[u];
  }
"""

QUANTISED_STREAM = """
  constexpr int CHUNKS = K / 64, WORDS = K * BITS / 32, GROUPS = K / GROUP;
  const int low_row = row_of(tile * COLUMNS + g, N), high_row = row_of(tile * COLUMNS + (GATED ? g : g + 8), N);
  auto lower = weight + (long)low_row * WORDS + t * (BITS / 2);
  auto upper = second + (long)high_row * WORDS + t * (BITS / 2);
  Words low_next = none, high_next = none;
  if (SIMDGROUP < CHUNKS) {
    low_next = load_values<BITS>(lower + SIMDGROUP * 2 * BITS);
    high_next = load_values<BITS>(upper + SIMDGROUP * 2 * BITS);
  }
  for (int chunk = SIMDGROUP; chunk < CHUNKS; chunk += SIMDGROUPS) {
    const Words low = low_next, high = high_next;
    if (chunk + SIMDGROUPS < CHUNKS) {
      low_next = load_values<BITS>(lower + (chunk + SIMDGROUPS) * 2 * BITS);
      high_next = load_values<BITS>(upper + (chunk + SIMDGROUPS) * 2 * BITS);
    }
    const int group = (chunk * 64 + t * 16) / GROUP;
    const long low_at = (long)low_row * GROUPS + group, high_at = (long)high_row * GROUPS + group;
    const float low_scale = F32(scales[low_at]), low_bias = F32(biases[low_at]);
    const float high_scale = F32(second_scales[high_at]), high_bias = F32(second_biases[high_at]);
    UNROLL
    for (int step = 0; step < 4; ++step) {
      unsigned tile_words[4];
      UNROLL
      for (int part = 0; part < 2; ++part) {
        const int at = step * 4 + part * 2;
        const float a = value_of<BITS>(low, at, low_scale, low_bias);
        const float b = value_of<BITS>(low, at + 1, low_scale, low_bias);
        const float c = value_of<BITS>(high, at, high_scale, high_bias);
        const float d = value_of<BITS>(high, at + 1, high_scale, high_bias);
        tile_words[2 * part] = PACK(T, a, b);
        tile_words[2 * part + 1] = PACK(T, c, d);
      }
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        Words row = none;
        if (ROWS % 8 == 0 || i * 8 + g < ROWS) row = LOAD16(x + (i * 8 + g) * K + chunk * 64 + t * 16 + (step / 2) * 8);
        unsigned pair[2] = {row.w[step % 2 * 2], row.w[step % 2 * 2 + 1]};
        MMA_16x8x16(T, sums[i], tile_words, pair);
      }
    }
  }
"""

# The simdgroups' parts of a sum meet in threadgroup memory and are added in one order.
CLOSING = """
  SHARED(float, parts, SIMDGROUPS * TILES * 8 * 17);
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    UNROLL
    for (int j = 0; j < 4; ++j)
      parts[(SIMDGROUP * TILES * 8 + i * 8 + 2 * t + j % 2) * 17 + g + j / 2 * 8] = sums[i][j];
  }
  BARRIER();
  for (int cell = THREAD; cell < ROWS * COLUMNS; cell += SIMDGROUPS * 32) {
    const int row = cell / COLUMNS, column = cell % COLUMNS, n = tile * COLUMNS + column;
    if (n < N) {
      const float value = total<SIMDGROUPS, TILES>(parts, row, column);
      const int place = row * N + n;
      {store}
    }
  }
"""

STORE = {
    "plain": "out[place] = CAST(T, value);",
    "residual": "out[place] = CAST(T, F32(CAST(T, value)) + F32(residual[place]));",
    "gated": """const float gate = F32(CAST(T, value));
      const float up = F32(CAST(T, (total<SIMDGROUPS, TILES>(parts, row, column + 8))));
      const float sigmoid = F32(CAST(T, 1.0f / (1.0f + EXP(-gate))));
      out[place] = CAST(T, F32(CAST(T, gate * sigmoid)) * up);""",
}

HEADER = """
HELPER int row_of(int n, int N) { return n < N ? n : N - 1; }  // past the last row the last is read, and dropped

template <int SIMDGROUPS, int TILES, typename P> HELPER float total(P parts, int row, int column) {
  float sum = 0.0f;
  UNROLL
  for (int part = 0; part < SIMDGROUPS; ++part) sum += parts[(part * TILES * 8 + row) * 17 + column];
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
        lines.append(f"if (tile * 16 >= N) {{ tile -= (N + 15) / 16; N = N{i}; out = y{i};{moves}")
    lines.append("}" * len(others))
    for name, letter in names.items():
        other = "second" if name == "weight" else f"second_{name}"
        lines.append(f"auto {other} = {letter}1;" if gated else f"auto {other} = {name};")
    return "\n  ".join(lines)
