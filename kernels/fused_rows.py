"""What a few rows need between two products, one launch each where the operations apart take six to ten.

W rows, H query heads, G key/value heads, d head dimension, Hv value heads of a recurrent layer, Dv their dimension.
Each value is rounded where the operations apart round it: the kernels and `*_reference` differ by float32 order only.
"""

import functools

import mlx.core as mx

from kernels.portable import SIMD, Kernel, first, float_bits
from kernels.verdicts import Check

MEASURED = 16  # rows at which the kernels are measured
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2, mx.float16: 5e-3}  # up to four roundings


def rotate_heads(q, k, v, norms, frequencies, offset, *, heads, gated=False, eps=0.0, build=None):
    """Projections to attention's heads: normed by head, rotated to their positions, heads before rows.

    q [1,W,H·d], or [1,W,H,2·d] with each head's gate after its query where `gated`;  k, v [1,W,G·d]
    norms        (q_norm, k_norm), both [d], or None for heads without norms;  eps: theirs
    frequencies  [m] float32, m ≤ d/2: radians a position; element i turns with element i + m, elements past 2m stay
    offset       int32, its first element: the first row's position
    heads        (H, G)
    Returns q [1,H,W,d], k and v [1,G,W,d].
    """
    H, G = heads
    W, d = k.shape[1], k.shape[2] // G
    kernel = ROTATE[norms is not None]
    return kernel(
        [q, k, v, frequencies, *(norms or ())],
        scalars=[offset],
        template={
            "T": q.dtype, "D": d, "HEADS": H, "GROUPS": G, "WIDTH": W, "HALF": frequencies.size, "GATED": gated,
            "EPSILON": float_bits(eps),
        },
        groups=(H + 2 * G, W, 1),
        threads=(32, 1, 1),
        shapes=[(1, H, W, d), (1, G, W, d), (1, G, W, d)],
        dtypes=[q.dtype] * 3,
        build=build,
    )  # fmt: skip


def rotate_heads_reference(q, k, v, norms, frequencies, offset, *, heads, gated=False, eps=0.0):
    """`rotate_heads` in plain operations."""
    (H, G), W = heads, k.shape[1]
    q = q.reshape(1, W, H, -1)[..., : q.shape[-1] // (2 if q.ndim == 4 else 2 * H if gated else H)]
    q, k, v = (part.reshape(1, W, count, -1) for part, count in ((q, H), (k, G), (v, G)))
    if norms:
        q, k = (mx.fast.rms_norm(part, weight, eps) for part, weight in zip((q, k), norms))
    q, k, v = (part.swapaxes(1, 2) for part in (q, k, v))
    turn = {"traditional": False, "base": None, "scale": 1.0, "offset": first(offset), "freqs": 1 / frequencies}
    return (*(mx.fast.rope(part, 2 * frequencies.size, **turn) for part in (q, k)), v)


def gated_norm(y, z, weight, eps, build=None):
    """RMS norm of y over its last axis, times weight [Dv] and silu(z): [1,W,Hv,Dv], z in any shape of that size.

    Returns [1,W,Hv·Dv] in y's dtype (Qwen3-Next's gated norm: the gate in float32).
    """
    _, W, Hv, Dv = y.shape
    return GATED_NORM(
        [y, z, weight],
        template={"T": y.dtype, "DV": Dv, "ROWS": W * Hv, "EPSILON": float_bits(eps)},
        groups=(-(-W * Hv // 4), 1, 1),
        threads=(128, 1, 1),
        shapes=[(1, W, Hv * Dv)],
        dtypes=[y.dtype],
        build=build,
    )[0]


def gated_norm_reference(y, z, weight, eps):
    """`gated_norm` in plain operations."""
    gate = z.reshape(y.shape).astype(mx.float32)
    normed = mx.fast.rms_norm(y, weight, eps).astype(mx.float32)
    return (gate * mx.sigmoid(gate) * normed).astype(y.dtype).reshape(1, y.shape[1], -1)


def case(dtype, *sizes):
    """What a verdict on these kernels holds for: dtype and sizes, (H, G, d) or (Hv, Dv)."""
    return f"{str(dtype).removeprefix('mlx.core.')} {'x'.join(map(str, sizes))}"


def checks(dims):
    """The Checks of both kernels against plain operations, for the layers of a model."""
    dtype, found = getattr(mx, dims["dtype"]), []
    for H, G, d in dims["attention"]:
        if d % SIMD == 0:
            route = [
                functools.partial(by_rotation, rotate, (H, G)) for rotate in (rotate_heads, rotate_heads_reference)
            ]
            draw = functools.partial(drawn, dtype, (H * d, G * d, G * d))
            found.append(Check("fused_rows.rotate_heads", case(dtype, H, G, d), *route, draw, TOLERANCE[dtype]))
    for _, Hv, _, Dv, _ in dims["delta"]:
        if Dv % SIMD == 0:
            route = [functools.partial(by_norm, norm, (Hv, Dv)) for norm in (gated_norm, gated_norm_reference)]
            draw = functools.partial(drawn, dtype, (Hv * Dv, Hv * Dv))
            found.append(Check("fused_rows.gated_norm", case(dtype, Hv, Dv), *route, draw, TOLERANCE[dtype]))
    return found


def drawn(dtype, sizes):
    """Random rows [1,MEASURED,size], one array for each size."""
    return [mx.random.normal((1, MEASURED, size)).astype(dtype) for size in sizes]


def by_rotation(rotate, heads, q, k, v):
    """Heads of unit norms' weights at position 1,000, half of each head rotated."""
    d = k.shape[-1] // heads[1]
    norms = (mx.ones(d, q.dtype), mx.ones(d, q.dtype))
    return rotate(q, k, v, norms, 10.0 ** -mx.arange(d // 4), mx.array(1000), heads=heads, eps=1e-6)


def by_norm(norm, heads, y, z):
    """The gated norm with weights of one."""
    return norm(y.reshape(1, -1, *heads), z, mx.ones(heads[1], y.dtype), 1e-6)


HEADER = """
template <int COUNT> HELPER float squares(LANE_ARRAY(float) x) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < COUNT; ++i) sum = FMA(x[i], x[i], sum);
  return SIMD_SUM(sum);
}
"""

ROTATE = {
    normed: Kernel(
        "rotate_heads" + ("_normed" if normed else ""),
        inputs=["q", "k", "v", "frequencies", *(["q_norm", "k_norm"] if normed else [])],
        scalars=["offset"],
        outputs=["turned_q", "turned_k", "turned_v"],
        header=HEADER,
        body="""
  const int w = GROUP_Y, head = GROUP_X < HEADS ? GROUP_X : (GROUP_X - HEADS) % GROUPS;
  const bool is_q = GROUP_X < HEADS, is_v = GROUP_X >= HEADS + GROUPS;
  auto from = is_q ? q + (w * HEADS + head) * (GATED ? 2 * D : D) : (is_v ? v : k) + (w * GROUPS + head) * D;
  auto to = is_q ? turned_q + (head * WIDTH + w) * D : (is_v ? turned_v : turned_k) + (head * WIDTH + w) * D;
  SHARED(float, row, D);
  float x[D / 32];
  UNROLL
  for (int i = 0; i < D / 32; ++i) x[i] = F32(from[i * 32 + LANE]);
"""
        + (
            """
  if (!is_v) {
    const float inverse = RSQRT(squares<D / 32>(x) / D + FLOAT_OF_BITS(EPSILON));
    auto weight = is_q ? q_norm : k_norm;
    UNROLL
    for (int i = 0; i < D / 32; ++i) x[i] = F32(CAST(T, F32(weight[i * 32 + LANE]) * F32(CAST(T, x[i] * inverse))));
  }
"""
            if normed
            else ""
        )
        + """
  UNROLL
  for (int i = 0; i < D / 32; ++i) row[i * 32 + LANE] = x[i];
  BARRIER();
  UNROLL
  for (int i = 0; i < D / 32; ++i) {
    const int at = i * 32 + LANE, pair = at % HALF;
    float value = x[i];
    if (!is_v && at < 2 * HALF) {
      const float angle = float(SCALAR(offset) + w) * frequencies[pair];
      const float sine = SIN(angle), cosine = COS(angle), left = row[pair], right = row[pair + HALF];
      value = at < HALF ? left * cosine - right * sine : left * sine + right * cosine;
    }
    to[at] = CAST(T, value);
  }
""",
    )
    for normed in (False, True)
}

GATED_NORM = Kernel(
    "gated_norm",
    inputs=["y", "z", "weight"],
    outputs=["out"],
    header=HEADER,
    body="""
  const int row = GROUP_X * 4 + SIMDGROUP;
  if (row >= ROWS) return;
  float x[DV / 32];
  UNROLL
  for (int i = 0; i < DV / 32; ++i) x[i] = F32(y[row * DV + i * 32 + LANE]);
  const float inverse = RSQRT(squares<DV / 32>(x) / DV + FLOAT_OF_BITS(EPSILON));
  UNROLL
  for (int i = 0; i < DV / 32; ++i) {
    const int at = row * DV + i * 32 + LANE;
    const float gate = F32(z[at]), normed = F32(CAST(T, F32(weight[i * 32 + LANE]) * F32(CAST(T, x[i] * inverse))));
    out[at] = CAST(T, gate / (1.0f + EXP(-gate)) * normed);
  }
""",
)
