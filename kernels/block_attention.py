"""Attention of few rows against long keys: blocks in training, one block in a verify, one row of many sequences.

R rows, T context rows, N blocks, B block, H query heads, G key/value heads, d head dimension, W rows of a verify,
L rows of a cache's buffer. Arrays in, arrays out. The context half and the block half are scored apart and share one
softmax, so the work is T+B keys a query, never the N·B keys of a dense mask over all blocks, and in a verify the new
rows need not be in the cache yet.
"""

import functools

import mlx.core as mx

from kernels import fused_weights
from kernels.portable import Kernel, first, float_bits
from kernels.verdicts import Check

MOST_PARTS = 65  # of a context, each the work of a simdgroup for 16 rows (assumed: fills an H200 at four heads)
MEASURED = 16, 4096  # rows and context at which the kernel is measured
TOLERANCE = {mx.bfloat16: 2e-2, mx.float16: 5e-3}  # weights and answers rounded
LEAST_KEYS = 32  # of a part, two steps of 16 (assumed)


def attend(queries, context_keys, context_values, block_keys, block_values, context_seen, block_seen, scale):
    """Softmax attention over a context part and a block part joined along the keys; differentiable.

    queries         [R,H,N,B,d]
    context_keys    [R,G,T,d]     context_values  [R,G,T,d]     shared by all blocks of a row
    block_keys      [R,G,N,B,d]   block_values    [R,G,N,B,d]   each block's own
    context_seen    bool, broadcastable to [R,1,N,B,T]          block_seen  bool, broadcastable to [R,1,N,B,B]
    scale           multiplies the scores. H is a multiple of G; query head h reads key head h // (H/G).

    Scores are softmaxed in float32 whatever the dtype. Every query must see at least one key of its block.
    Returns [R,H,N,B,d] in the queries' dtype. The backward pass keeps the weights alone and reads them twice: with
    dP = dO Vᵀ the gradient of the scores is P∘(dP − Σ dO∘O), which is 0 wherever a key is hidden (FlashAttention, arXiv
    2205.14135, appendix B), so neither the mask nor the joined softmax is differentiated.
    """

    @mx.custom_function
    def run(*given):
        return mix(*given, context_seen, block_seen, scale)

    @run.vjp
    def back(given, cotangents, outputs):
        return pull_back(*given, *outputs, cotangents[0], scale)

    return run(queries, context_keys, context_values, block_keys, block_values)[0]


def mix(queries, context_keys, context_values, block_keys, block_values, context_seen, block_seen, scale):
    """(`attend`'s answer, the weights [R,G,H/G·N·B,T] of the context and [R,G,H/G,N,B,B] of the blocks)."""
    R, H, N, B, d = queries.shape
    G = context_keys.shape[1]
    grouped = (queries * scale).reshape(R, G, H // G, N, B, d)
    flat = grouped.reshape(R, G, H // G * N * B, d)
    context_scores = flat @ context_keys.swapaxes(-1, -2)  # [R,G,H/G·N·B,T]
    block_scores = grouped @ block_keys[:, :, None].swapaxes(-1, -2)  # [R,G,H/G,N,B,B]
    of_context, of_block = fused_weights.weigh(context_scores, block_scores, context_seen, block_seen)
    from_block = of_block @ block_values[:, :, None]
    answer = (of_context @ context_values).reshape(from_block.shape) + from_block
    return answer.reshape(R, H, N, B, d), of_context, of_block


def pull_back(queries, context_keys, context_values, block_keys, block_values, answer, of_context, of_block, by, scale):
    """The gradients of `mix`'s five arrays, given its three results and the cotangent `by` of the answer."""
    grouped, flat = of_block.shape[:5] + queries.shape[-1:], of_context.shape[:3] + queries.shape[-1:]
    offset = mx.sum((by * answer).astype(mx.float32), axis=-1, keepdims=True).astype(by.dtype)
    by_block, by_context, scaled = by.reshape(grouped), by.reshape(flat), queries * scale
    context_slope = of_context * (by_context @ context_values.swapaxes(-1, -2) - offset.reshape(*flat[:3], 1))
    block_slope = of_block * (by_block @ block_values[:, :, None].swapaxes(-1, -2) - offset.reshape(*grouped[:5], 1))
    from_block = block_slope @ block_keys[:, :, None]
    by_query = ((context_slope @ context_keys).reshape(grouped) + from_block) * scale
    return (
        by_query.reshape(queries.shape),
        context_slope.swapaxes(-1, -2) @ scaled.reshape(flat),
        of_context.swapaxes(-1, -2) @ by_context,
        mx.sum(block_slope.swapaxes(-1, -2) @ scaled.reshape(grouped), axis=2),
        mx.sum(of_block.swapaxes(-1, -2) @ by_block, axis=2),
    )


def attend_sequences(queries, keys, values, seen, scale):
    """Softmax attention of the W rows of each of R sequences over a cache; heads that share keys are rows of a product.

    queries [R,H,W,d]   keys, values [R,G,L,d]   seen  bool, broadcastable to [R,1,W,L]; a row must see some key
    Query head h reads key head h // (H/G). Scores are softmaxed in float32. Returns [R,H,W,d] in the queries' dtype.
    MLX's own attention takes masked queries head by head, and reads the keys as often: one layer of SmolLM2's heads,
    1,024 sequences, one row each, took 0.98 ms over 300 keys where this took 0.48, and 0.32 over 512, whose products
    are aligned (H200, bfloat16).
    """
    R, H, W, d = queries.shape
    G, L = keys.shape[1:3]
    scores = ((queries * scale).reshape(R, G, H // G * W, d) @ keys.swapaxes(-1, -2)).reshape(R, G, H // G, W, L)
    hidden = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    weights = mx.softmax(mx.where(seen[:, :, None], scores, hidden), axis=-1, precise=True)
    return (weights.reshape(R, G, H // G * W, L) @ values).reshape(R, H, W, d)


def attend_rows(
    queries, keys, values, length, part, block_keys, block_values, scale, gate=None, whole=None, build=None
):
    """Softmax attention of the W rows of a verify: each sees a cache's rows and its own block up to itself.

    queries      [1,H,W,d]      H·W/G rows share a key/value head and are scored together
    keys, values [1,G,L,d]      a cache's buffers, of which the first `length` (int32, its first element) rows count
    part         int32, its first element: `keys_of_a_part(length)`, the keys that one simdgroup takes
    block_keys, block_values    [1,G,W,d], the rows' own
    scale        float          multiplies the scores
    gate         [1,W,H,2,d]    a gated query projection: the answer is multiplied by the sigmoid of its second half
    whole        int            of a draft: each row sees the first `whole` rows of the block instead, later ones too
    The keys are split by their position, and the parts' softmaxes merged by their log-sum-exp. So a row's answer is the
    same bit for bit whether a key before it comes from the cache or from the block, whatever W is, at equal `part`.
    Scores and sums are float32, weights rounded to the queries' dtype before they meet the values. Returns [1,W,H·d].
    """
    _, H, W, d = queries.shape
    G, L = keys.shape[1:3]
    rows = H // G * W
    tiles = -(-rows // 16)
    sizes = {"T": queries.dtype, "D": d, "WIDTH": W, "ROWS": rows, "TILED": tiles * 16, "GROUPS": G}
    sizes |= {"CAUSAL": whole is None, "OWN": whole or W}
    answers, stats = PARTS(
        [queries, keys, values, block_keys, block_values],
        scalars=[length, L, part],
        template={**sizes, "SCALE": float_bits(scale)},
        groups=(MOST_PARTS, tiles, G),
        threads=(32, 1, 1),
        shapes=[(MOST_PARTS, G, tiles * 16, d), (MOST_PARTS, G, tiles * 16, 2)],
        dtypes=[mx.float32, mx.float32],
        build=build,
    )
    return merge(gate is not None)(
        [answers, stats, *([] if gate is None else [gate])],
        scalars=[length, part],
        template={**sizes, "HEADS": H, "SHARE": H // G, "PARTS": -(-MOST_PARTS // 32)},
        groups=(H, W, 1),
        threads=(d, 1, 1),
        shapes=[(1, W, H * d)],
        dtypes=[queries.dtype],
        build=build,
    )[0]


def keys_of_a_part(length):
    """Keys of one part for a context of `length` rows: at most MOST_PARTS parts, also with a block of 32 rows more."""
    part = LEAST_KEYS
    while part * (MOST_PARTS - 1) < length + 32:
        part *= 2
    return part


def serves_rows(queries, keys):
    """Whether the kernel can take these: one sequence, 16-bit, a head dimension in whole tiles."""
    if queries.shape[0] != 1 or queries.shape[-1] not in (64, 128, 256):
        return False
    return queries.dtype in (mx.bfloat16, mx.float16) and keys.dtype == queries.dtype


def attend_rows_reference(queries, keys, values, length, part, block_keys, block_values, scale, gate=None, whole=None):
    """`attend_rows` in plain operations, which know no parts."""
    _, H, W, d = queries.shape
    L = keys.shape[2]
    context = mx.broadcast_to(mx.arange(L)[None] < first(length), (W, L))
    row, own = mx.arange(W)[:, None], mx.arange(W)[None]
    block = mx.broadcast_to(own < whole, (W, W)) if whole else own <= row
    seen = mx.concatenate([context, block], axis=1)
    keys, values = (mx.concatenate(both, axis=2) for both in ((keys, block_keys), (values, block_values)))
    answer = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen)
    answer = answer.swapaxes(1, 2).reshape(1, W, H * d)
    return answer if gate is None else answer * mx.sigmoid(gate[..., 1, :].reshape(1, W, H * d))


# --- how it is measured


def case(dtype, H, G, d):
    """What a verdict on `attend_rows` holds for: dtype, heads, head dimension."""
    return f"{str(dtype).removeprefix('mlx.core.')} {H}/{G} heads of {d}"


def checks(dims):
    """The Checks of `attend_rows` against plain operations, for the attention layers of a model."""
    dtype, found = getattr(mx, dims["dtype"]), []
    for H, G, d in dims["attention"]:
        draw = functools.partial(drawn, dtype, H, G, d)
        if serves_rows(*draw()[:2]):
            args = (case(dtype, H, G, d), by_kernel, by_stock, draw, TOLERANCE[dtype])
            found.append(Check("block_attention.attend_rows", *args))
    return found


def drawn(dtype, H, G, d):
    """Random (queries, keys, values, block keys, block values)."""
    W, L = MEASURED
    shapes = ((1, H, W, d), (1, G, L, d), (1, G, L, d), (1, G, W, d), (1, G, W, d))
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]


def by_kernel(q, k, v, own_k, own_v):
    """Attention over nine tenths of the buffer through the kernels."""
    length = k.shape[2] * 9 // 10
    return attend_rows(q, k, v, mx.array(length), mx.array(keys_of_a_part(length)), own_k, own_v, q.shape[-1] ** -0.5)


def by_stock(q, k, v, own_k, own_v):
    """The same in plain operations."""
    return attend_rows_reference(q, k, v, mx.array(k.shape[2] * 9 // 10), None, own_k, own_v, q.shape[-1] ** -0.5)


# --- the bodies

# A simdgroup scores 16 query rows against 16 keys at a time: S = Q Kᵀ and O = P V on MMA tiles, with a running maximum.
# A row that sees no key of a part gets no number there, and the merge does not look at it.
# For V, column g of tile j is element 8g + j of 64, so that a lane's 16-byte loads hold its columns of eight tiles.
PARTS = Kernel(
    "attend_rows",
    inputs=["queries", "keys", "values", "block_keys", "block_values"],
    scalars=["length", "rows", "part"],
    outputs=["answers", "stats"],
    body="""
  const int g = LANE / 4, t = LANE % 4, head = GROUP_Z, first = GROUP_Y * 16;
  const int held = SCALAR(length), begin = GROUP_X * SCALAR(part), last = begin + SCALAR(part);
  const int end = held + OWN < last ? held + OWN : last;
  if (begin >= end) return;
  auto K = keys + (long)head * SCALAR(rows) * D, V = values + (long)head * SCALAR(rows) * D;
  auto own_K = block_keys + head * WIDTH * D, own_V = block_values + head * WIDTH * D;
  const float factor = FLOAT_OF_BITS(SCALE);

  int row[2];
  SHARED(Words, q, D * 2);  // each lane's own part of the queries, where it costs no registers: [c, half, LANE]
  UNROLL
  for (int half = 0; half < 2; ++half) {
    const int at = first + g + half * 8;
    row[half] = at < ROWS ? at : ROWS - 1;
    UNROLL
    for (int c = 0; c < D / 32; ++c)
      q[(c * 2 + half) * 32 + LANE] = LOAD16(queries + (head * ROWS + row[half]) * D + c * 32 + t * 8);
  }
  float highest[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, out[D / 8][4] = {};

  for (int key = begin; key < end; key += 16) {
    float scores[2][4] = {};
    UNROLL
    for (int c = 0; c < D / 32; ++c) {
      const Words low = LOAD16(q + c * 64 + LANE), high = LOAD16(q + c * 64 + 32 + LANE);
      unsigned left[4] = {low.w[0], high.w[0], low.w[1], high.w[1]};
      unsigned right[4] = {low.w[2], high.w[2], low.w[3], high.w[3]};
      UNROLL
      for (int j = 0; j < 2; ++j) {
        const int at = key + j * 8 + g < end ? key + j * 8 + g : end - 1;
        const Words k = LOAD16((at < held ? K + (long)at * D : own_K + (at - held) * D) + c * 32 + t * 8);
        unsigned front[2] = {k.w[0], k.w[1]}, back[2] = {k.w[2], k.w[3]};
        MMA_16x8x16(T, scores[j], left, front);
        MMA_16x8x16(T, scores[j], right, back);
      }
    }
    unsigned weights[4];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      float top = highest[half], p[4];
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = key + i / 2 * 8 + 2 * t + i % 2;
        const bool seen = at < end && (!CAUSAL || at <= held + row[half] % WIDTH);
        p[i] = seen ? scores[i / 2][half * 2 + i % 2] * factor : -INF;
        top = p[i] > top ? p[i] : top;
      }
      float other = SIMD_SHUFFLE_XOR(top, 1);
      top = other > top ? other : top;
      other = SIMD_SHUFFLE_XOR(top, 2);
      top = other > top ? other : top;
      const float fade = EXP(highest[half] - top);
      highest[half] = top;
      sum[half] *= fade;
      UNROLL
      for (int i = 0; i < 4; ++i) {
        p[i] = EXP(p[i] - top);
        sum[half] += p[i];
      }
      UNROLL
      for (int i = 0; i < D / 8; ++i) {
        out[i][half * 2] *= fade;
        out[i][half * 2 + 1] *= fade;
      }
      weights[half] = PACK(T, p[0], p[1]);
      weights[half + 2] = PACK(T, p[2], p[3]);
    }
    UNROLL
    for (int base = 0; base < D / 64; ++base) {
      Words v[4];
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = key + 2 * t + i % 2 + i / 2 * 8;
        const int place = at < end ? at : end - 1;
        v[i] = LOAD16((place < held ? V + (long)place * D : own_V + (place - held) * D) + base * 64 + g * 8);
      }
      UNROLL
      for (int j = 0; j < 8; ++j) {
        unsigned pair[2];
        UNROLL
        for (int i = 0; i < 2; ++i) {
          const unsigned above = v[2 * i].w[j / 2], below = v[2 * i + 1].w[j / 2];
          pair[i] = j % 2 ? (above >> 16) | (below & 0xffff0000u) : (above & 0xffffu) | (below << 16);
        }
        MMA_16x8x16(T, out[base * 8 + j], weights, pair);
      }
    }
  }
  UNROLL
  for (int half = 0; half < 2; ++half) {
    float total = sum[half];
    total += SIMD_SHUFFLE_XOR(total, 1);
    total += SIMD_SHUFFLE_XOR(total, 2);
    const long at = ((long)GROUP_X * GROUPS + head) * TILED + first + g + half * 8;
    if (t == 0) {
      stats[at * 2] = highest[half];
      stats[at * 2 + 1] = total;
    }
    UNROLL
    for (int i = 0; i < D / 8; ++i) {
      UNROLL
      for (int side = 0; side < 2; ++side)
        answers[at * D + i / 8 * 64 + (2 * t + side) * 8 + i % 8] = out[i][half * 2 + side];
    }
  }
""",
)


@functools.cache
def merge(gated):
    """The kernel that merges the parts' answers by their maxima and sums, and applies the gate."""
    return Kernel(
        "merge_rows" + ("_gated" if gated else ""),
        inputs=["answers", "stats", *(["gate"] if gated else [])],
        scalars=["length", "part"],
        outputs=["y"],
        body="""
  const int head = GROUP_X, w = GROUP_Y;
  const int row = head % SHARE * WIDTH + w, groups = HEADS / SHARE;
  const int used = (SCALAR(length) + (CAUSAL ? w : OWN - 1)) / SCALAR(part) + 1;
  auto stat = stats + (head / SHARE * TILED + row) * 2;
  float top = -INF, share[PARTS];
  UNROLL
  for (int i = 0; i < PARTS; ++i) {
    const int number = i * 32 + LANE;
    share[i] = number < used ? stat[(long)number * groups * TILED * 2] : -INF;
    top = share[i] > top ? share[i] : top;
  }
  top = SIMD_MAX(top);
  float total = 0.0f, out = 0.0f;
  UNROLL
  for (int i = 0; i < PARTS; ++i) {
    const int number = i * 32 + LANE;
    share[i] = EXP(share[i] - top);
    if (number < used) total += share[i] * stat[(long)number * groups * TILED * 2 + 1];
  }
  total = SIMD_SUM(total);
  auto answer = answers + ((long)(head / SHARE) * TILED + row) * D + THREAD;
  UNROLL
  for (int i = 0; i < PARTS; ++i) {
    for (int from = 0; from < 32 && i * 32 + from < used; from += 8) {
      float part[8];
      UNROLL
      for (int j = 0; j < 8; ++j) {
        const int number = i * 32 + from + j;
        part[j] = number < used ? answer[(long)number * groups * TILED * D] : 0.0f;
      }
      UNROLL
      for (int j = 0; j < 8; ++j) out = FMA(SIMD_SHUFFLE(share[i], from + j), part[j], out);
    }
  }
  const int place = (w * HEADS + head) * D + THREAD;
  const float value = F32(CAST(T, out / total));
"""
        + (
            """
  const float opening = F32(gate[((w * HEADS + head) * 2 + 1) * D + THREAD]);
  y[place] = CAST(T, value * F32(CAST(T, 1.0f / (1.0f + EXP(-opening)))));
"""
            if gated
            else "  y[place] = CAST(T, value);\n"
        ),
    )
