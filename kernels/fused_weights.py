"""Attention weights of many drafted blocks in one kernel: the softmax of a row's scores over its context and its block.

R rows, G key/value heads, S block rows to a head (query heads sharing it × N blocks × B), T context rows. Operations
apart hide, join, softmax and part the scores: five times the bytes, most of them strided.
"""

import functools

import mlx.core as mx

from kernels import verdicts
from kernels.portable import Kernel
from kernels.verdicts import Check

SIMDGROUPS = 8  # rows to a threadgroup (assumed)
MEASURED = {"R": 4, "G": 3, "SHARE": 3, "N": 16}  # what the kernel is measured at
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 5e-3, mx.float16: 1e-3}  # of the largest weight, rounded once

BODY = """
  constexpr int WIDE = LENGTH % 8 ? 1 : 8;
  const long row = long(GROUP_X) * SIMDGROUPS + SIMDGROUP;
  const int r = int(row / (GROUPS * ROWS)), b = int(row % BLOCK), n = int(row / BLOCK % COUNT);
  if (row >= long(SCALAR(rows))) return;
  auto scores = context_scores + row * LENGTH;
  auto seen = context_seen + ((long(r) * COUNT + n) * BLOCK + b) * LENGTH;

  float most = -INF, sum = 0.0f;
  for (int i = LANE; i < BLOCK; i += 32)
    if (block_seen[b * BLOCK + i]) {
      const float z = F32(block_scores[row * BLOCK + i]);
      most = z > most ? z : most;
    }
  for (int at = LANE * WIDE; at < LENGTH; at += 32 * WIDE) {
    float z[WIDE];
    const Pack<bool, WIDE> visible = load<bool, WIDE>(seen + at);
    widen(load<T, WIDE>(scores + at), z);
    UNROLL
    for (int i = 0; i < WIDE; ++i) most = visible.x[i] && z[i] > most ? z[i] : most;
  }
  most = SIMD_MAX(most);
  for (int i = LANE; i < BLOCK; i += 32)
    sum += block_seen[b * BLOCK + i] ? EXP(F32(block_scores[row * BLOCK + i]) - most) : 0.0f;
  for (int at = LANE * WIDE; at < LENGTH; at += 32 * WIDE) {
    float z[WIDE];
    const Pack<bool, WIDE> visible = load<bool, WIDE>(seen + at);
    widen(load<T, WIDE>(scores + at), z);
    UNROLL
    for (int i = 0; i < WIDE; ++i) sum += visible.x[i] ? EXP(z[i] - most) : 0.0f;
  }
  const float share = 1.0f / SIMD_SUM(sum);
  for (int i = LANE; i < BLOCK; i += 32)
    of_block[row * BLOCK + i] =
        CAST(T, block_seen[b * BLOCK + i] ? MUL(EXP(F32(block_scores[row * BLOCK + i]) - most), share) : 0.0f);
  for (int at = LANE * WIDE; at < LENGTH; at += 32 * WIDE) {
    float z[WIDE];
    Pack<T, WIDE> pack;
    const Pack<bool, WIDE> visible = load<bool, WIDE>(seen + at);
    widen(load<T, WIDE>(scores + at), z);
    UNROLL
    for (int i = 0; i < WIDE; ++i) pack.x[i] = CAST(T, visible.x[i] ? MUL(EXP(z[i] - most), share) : 0.0f);
    store(of_context + row * LENGTH + at, pack);
  }
"""

kernel = Kernel(
    "block_weights",
    inputs=("context_scores", "block_scores", "context_seen", "block_seen"),
    scalars=("rows",),
    outputs=("of_context", "of_block"),
    body=BODY,
)


def weigh(context_scores, block_scores, context_seen, block_seen):
    """The weights of scores, softmaxed in float32 over context and block together; 0 where a key is hidden.

    By the kernel where that may serve.

    context_scores [R,G,S,T]       block_scores [R,G,S/B/N,N,B,B]     of one dtype, theirs and the weights'
    context_seen   [R,1,N,B,T]     block_seen   [1,1,1,B,B]           bool; every row must see a key of its block
    Returns (weights of the context [R,G,S,T], of the blocks, in block_scores' shape).
    """
    B = block_scores.shape[-1]
    fits = context_seen.shape[1:2] == (1,) and block_seen.shape == (1, 1, 1, B, B)
    kernel = fits and verdicts.allowed("fused_weights.fused", case(context_scores.dtype, B))
    return (fused if kernel else plain)(context_scores, block_scores, context_seen, block_seen)


def fused(context_scores, block_scores, context_seen, block_seen, build=None):
    """`weigh` in one launch, by the named build of the kernel, or the default device's."""
    (R, G, S, T), (N, B) = context_scores.shape, block_scores.shape[3:5]
    return kernel(
        [context_scores, block_scores, context_seen, block_seen],
        scalars=[R * G * S],
        template={
            "T": context_scores.dtype, "LENGTH": T, "BLOCK": B, "COUNT": N, "ROWS": S, "GROUPS": G,
            "SIMDGROUPS": SIMDGROUPS,
        },
        groups=(-(-R * G * S // SIMDGROUPS), 1, 1),
        threads=(32 * SIMDGROUPS, 1, 1),
        shapes=[context_scores.shape, block_scores.shape],
        dtypes=[context_scores.dtype] * 2,
        build=build,
    )  # fmt: skip


def plain(context_scores, block_scores, context_seen, block_seen):
    """`weigh` in plain operations."""
    T = context_scores.shape[-1]
    parts = context_scores.reshape(*block_scores.shape[:-1], T), block_scores
    seen = context_seen[:, :, None], block_seen[:, :, None]
    hidden = [mx.where(each, part, mx.finfo(part.dtype).min) for each, part in zip(seen, parts)]
    weights = mx.softmax(mx.concatenate(hidden, axis=-1), axis=-1, precise=True)
    return weights[..., :T].reshape(context_scores.shape), weights[..., T:]


def case(dtype, B):
    """What a verdict on the kernel holds for."""
    return f"{str(dtype).removeprefix('mlx.core.')} blocks of {B}"


def checks(dims):
    """The Checks of the kernel against plain operations, for the (T, B) that a drafter is trained at."""
    dtype, calls = getattr(mx, dims["dtype"]), (fused, plain)
    return [
        Check("fused_weights.fused", case(dtype, B), *calls, functools.partial(drawn, dtype, T, B), TOLERANCE[dtype])
        for T, B in dims.get("blocks", ())
    ]


def drawn(dtype, T, B):
    """Random scores, and masks that hide about half of them."""
    R, G, H, N = MEASURED.values()
    scores = [3 * mx.random.normal(shape).astype(dtype) for shape in ((R, G, H * N * B, T), (R, G, H, N, B, B))]
    return *scores, mx.random.uniform(shape=(R, 1, N, B, T)) < 0.5, mx.ones((1, 1, 1, B, B), mx.bool_)
