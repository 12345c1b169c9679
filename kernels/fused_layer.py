"""A gated-delta layer's few rows in one kernel, from its projections to y: convolution, norms, gates, and the rule.

R rows, T tokens, Hk key heads, Hv value heads, Dk and Dv head dimensions, C = 2·Hk·Dk + Hv·Dv channels of the
convolution (queries, keys, values), K its width. For a verify's few rows each of these steps is smaller than its
launch. The layer is Qwen3.5's and Qwen3-Next's, in mlx-lm's order of operations and roundings:

    q, k, v = silu(conv(qkv))      q ← q / (√Dk |q|)      k ← k / |k|
    g = exp(−exp(A) softplus(a + dt))      β = σ(b)      then the rule of `gated_delta`
"""

import functools
import typing

import mlx.core as mx

from kernels import verdicts
from kernels.causal_conv import causal_conv, state_after
from kernels.fused_delta import FEW, HEADER, TOLERANCE, Layout
from kernels.gated_delta import gated_delta, replay
from kernels.plain_delta import Tape
from kernels.portable import SIMD, Kernel, first

EPSILON = 1e-6  # added to the sum of squares that queries and keys are normalised by, as mlx-lm does
LAYOUT = Layout(lanes=8, rows=1, simdgroups=16)  # measured on an H200 at 16 rows of Qwen3.5-4B's heads
MOST = 24  # tokens: three tiles of the few-row products, into which a verify's rows are padded
SHARED_BYTES = 28 << 10  # for queries and keys of the widest verify, of the 32 KiB that Metal gives a threadgroup

# Every threadgroup has TILE value rows of one value head, and prepares that head's queries and keys for itself: the
# work is small, and no threadgroup waits for another.
BODY = """
  constexpr int PER = Dk / LANES, WIDE = PER % 8 ? 4 : 8, PACKS = PER / WIDE, TILE = SIMDGROUPS * (32 / LANES) * ROWS;
  constexpr int C = 2 * Hk * Dk + Hv * Dv, AHEAD = 4;
  const int h = GROUP_Y, r = GROUP_Z, own = h / (Hv / Hk), count = SCALAR(tokens), lane = LANE % LANES;
  const int top = GROUP_X * TILE, below = (SIMDGROUP * (32 / LANES) + LANE / LANES) * ROWS, rows = Dv - top - below;
  const int wide = K - 1 + (OWED ? SCALAR(owed_tokens) : 0), skip = OWED ? SCALAR(owed) : 0;  // of `before`
  const bool speaks = GROUP_X == 0 && h % (Hv / Hk) == 0;  // one threadgroup of a key head writes for all
  const long start = long(r) * count, home = ((long(r) * Hv + h) * Dv + top + below) * Dk + WIDE * lane;
  using Whole = Pack<InT, WIDE>;
  SHARED(Whole, key_of, MOST * Dk / WIDE);
  SHARED(Whole, query_of, MOST * Dk / WIDE);
  SHARED(InT, value_of, MOST * TILE);
  SHARED(float, gate_of, MOST);
  SHARED(float, strength_of, MOST);

  float held[ROWS * PER], sums[2 * ROWS];  // shares of S k for this token, then of y for the one before
  UNROLL
  for (int i = 0; i < ROWS; ++i) sums[ROWS + i] = 0.0f;
  take<ROWS, PER, WIDE, Dk, LANES>(state + home, held, rows);
  if (OWED) {  // rows of an earlier tape, in the operations of `replay`
    const int taped = SCALAR(owed_tokens), due = SCALAR(owed);
    for (int from = 0; from < due; from += AHEAD) {  // AHEAD rows are read at once: each alone would wait for memory
      Whole key_pack[AHEAD][PACKS];
      float gate[AHEAD], change[AHEAD][ROWS];
      UNROLL
      for (int u = 0; u < AHEAD; ++u) {
        const long at = long(r) * taped + (from + u < due ? from + u : due - 1);
        gate[u] = owed_g[OWED ? at * Hv + h : 0];
        UNROLL
        for (int j = 0; j < PACKS; ++j)
          key_pack[u][j] = load<InT, WIDE>(owed_k + (OWED ? (at * Hk + own) * Dk + WIDE * (lane + j * LANES) : 0));
        UNROLL
        for (int i = 0; i < ROWS; ++i)
          change[u][i] = i < rows ? owed_delta[OWED ? (at * Hv + h) * Dv + top + below + i : 0] : 0.0f;
      }
      UNROLL
      for (int u = 0; u < AHEAD; ++u) {
        if (from + u >= due) continue;
        float key[PER];
        UNROLL
        for (int j = 0; j < PACKS; ++j) widen(key_pack[u][j], key + j * WIDE);
        UNROLL
        for (int i = 0; i < ROWS * PER; ++i)
          held[i] = FMA(change[u][i / PER], key[i % PER], MUL(held[i], gate[u]));
      }
    }
    put<ROWS, PER, WIDE, Dk, LANES>(settled + (OWED ? home : 0), held, rows);
  }

  if (THREAD < count) {
    const long at = (start + THREAD) * Hv + h;
    const float sum = F32(CAST(SumT, F32(a[at]) + F32(dt[h])));
    const float soft = F32(CAST(SumT, (sum > 0.0f ? sum : 0.0f) + LOG1P(EXP(sum > 0.0f ? -sum : sum))));
    const bool counts = THREAD < SCALAR(kept);  // a token that does not neither fades the state nor writes to it
    gate_of[THREAD] = counts ? EXP(-MUL(EXP(F32(A[h])), soft)) : 1.0f;
    strength_of[THREAD] = counts ? F32(CAST(InT, 1.0f / (1.0f + EXP(-F32(b[at]))))) : 0.0f;
    if (RECORD && GROUP_X == 0) tape_g[RECORD ? at : 0] = gate_of[THREAD];
  }

  for (int i = THREAD; i < 2 * Dk + TILE; i += 32 * SIMDGROUPS) {  // one channel after another: queries, keys, values
    const int part = i < Dk ? 0 : i < 2 * Dk ? 1 : 2, d = part == 2 ? i - 2 * Dk : i % Dk;
    if (part == 2 && top + d >= Dv) continue;
    const int c = part == 2 ? 2 * Hk * Dk + h * Dv + top + d : (part * Hk + own) * Dk + d;
    InT line[K - 1 + MOST];
    UNROLL
    for (int t = 1 - K; t < MOST; ++t) {
      if (t >= count) continue;
      line[t + K - 1] = t < 0 ? before[(long(r) * wide + skip + K - 1 + t) * C + c] : qkv[(start + t) * C + c];
      if (speaks || part == 2) window[(long(r) * (K - 1 + count) + K - 1 + t) * C + c] = line[t + K - 1];
    }
    UNROLL
    for (int t = 0; t < MOST; ++t) {
      if (t >= count) continue;
      float total = 0.0f;
      UNROLL
      for (int j = 0; j < K; ++j) total = FMA(F32(line[t + j]), F32(weight[c * K + j]), total);
      const float z = F32(CAST(InT, total)), open = F32(CAST(InT, 1.0f / (1.0f + EXP(-z))));
      const InT out = CAST(InT, MUL(z, open));
      if (part == 0) query_of[(t * Dk + d) / WIDE].x[d % WIDE] = out;
      if (part == 1) key_of[(t * Dk + d) / WIDE].x[d % WIDE] = out;
      if (part == 2) value_of[t * TILE + d] = out;
    }
  }
  BARRIER();

  const float scale = F32(CAST(InT, RSQRT(float(Dk)))), twice = F32(CAST(InT, 1.0f / float(Dk)));
  for (int t = SIMDGROUP; t < count; t += SIMDGROUPS) {
    float key[Dk / 32], query[Dk / 32], of_key = 0.0f, of_query = 0.0f;
    UNROLL
    for (int i = 0; i < Dk / 32; ++i) {
      const int d = LANE + 32 * i;
      key[i] = F32(key_of[(t * Dk + d) / WIDE].x[d % WIDE]);
      query[i] = F32(query_of[(t * Dk + d) / WIDE].x[d % WIDE]);
      of_key = FMA(key[i], key[i], of_key), of_query = FMA(query[i], query[i], of_query);
    }
    of_key = RSQRT((SIMD_SUM(of_key) + 1e-6f) / float(Dk)), of_query = RSQRT((SIMD_SUM(of_query) + 1e-6f) / float(Dk));
    UNROLL
    for (int i = 0; i < Dk / 32; ++i) {
      const int d = LANE + 32 * i;
      const InT normed = CAST(InT, MUL(scale, F32(CAST(InT, MUL(key[i], of_key)))));
      key_of[(t * Dk + d) / WIDE].x[d % WIDE] = normed;
      query_of[(t * Dk + d) / WIDE].x[d % WIDE] = CAST(InT, MUL(twice, F32(CAST(InT, MUL(query[i], of_query)))));
      if (RECORD && speaks) tape_k[RECORD ? ((start + t) * Hk + own) * Dk + d : 0] = normed;
    }
  }
  BARRIER();

  auto answers = y + (start * Hv + h) * Dv + top + below;
  auto deltas = delta + (RECORD ? (start * Hv + h) * Dv + top + below : 0);
  for (int t = 0; t < count; ++t) {
    float key[PER], query[PER], change[ROWS];
    const float gate[1] = {gate_of[t]};
    UNROLL
    for (int j = 0; j < PACKS; ++j) {
      widen(key_of[t * Dk / WIDE + lane + j * LANES], key + j * WIDE);
      widen(query_of[t * Dk / WIDE + lane + j * LANES], query + j * WIDE);
    }
    fade<ROWS, PER, false>(held, gate, key, sums);
    across<LANES, 2 * ROWS>(sums);
    if (t > 0) write<InT, ROWS>(answers + (t - 1) * Hv * Dv, sums + ROWS, rows, lane);
    UNROLL
    for (int i = 0; i < ROWS; ++i)
      change[i] = i < rows ? MUL(strength_of[t], F32(value_of[t * TILE + below + i]) - sums[i]) : 0.0f;
    update<ROWS, PER>(held, change, key, query, sums + ROWS);
    if (RECORD) write<float, ROWS>(deltas + t * Hv * Dv, change, rows, lane);
  }
  across<LANES, ROWS>(sums + ROWS);
  write<InT, ROWS>(answers + (count - 1) * Hv * Dv, sums + ROWS, rows, lane);
  if (AFTER) put<ROWS, PER, WIDE, Dk, LANES>(after + (AFTER ? home : 0), held, rows);
"""

kernel = Kernel(
    "gated_delta_layer",
    inputs=("qkv", "a", "b", "weight", "A", "dt", "before", "state", "owed_delta", "owed_k", "owed_g"),
    scalars=("tokens", "kept", "owed_tokens", "owed"),
    outputs=("y", "after", "window", "delta", "tape_k", "tape_g", "settled"),
    header=HEADER,
    body=BODY,
)


class Owed(typing.NamedTuple):
    """Rows that a state still lacks: the first n (int, or int32 whose first element counts) of a tape."""

    tape: Tape
    n: int | mx.array


class Rows(typing.NamedTuple):
    """What a layer made of its rows: y [R,T,Hv,Dv] in qkv's dtype, the state after them, the convolution's window
    [R,K−1+T,C], the Tape or None, and the state before them with what was owed to it, or None where nothing was."""

    y: mx.array
    state: mx.array | None  # None where the rows are owed
    window: mx.array
    tape: Tape | None
    settled: mx.array | None


def layer(qkv, a, b, weight, A, dt, heads, before=None, state=None, record=False, kept=None, owed=None, owe=False):
    """A layer from its projections to y, in one kernel where that serves, else by its parts.

    qkv [R,T,C]   a, b [R,T,Hv]   weight [C,K,1]   A, dt [Hv]: the logarithm of the decay, and the bias of a
    heads   (Hk, Hv, Dk, Dv)
    before  [R,K−1,C], the convolution's state; None is zeros. Where rows are owed, their window [R,K−1+T',C]
    state   [R,Hv,Dv,Dk] float32; None is zeros
    record  whether to keep a Tape
    kept    how many of the T tokens count, int32 of one element: the state is the one after them; None is all
    owed    an Owed: rows to be added to `state` first; a commit costs no launch of its own then. None is none
    owe     whether to leave the state after the rows unwritten: it is owed them by the tape
    Returns Rows.
    """
    given = qkv, a, b, weight, A, dt, heads, before, state, record, kept, owed, owe
    kernel = serves(qkv, heads) and verdicts.allowed("fused_layer.layer_step", case(qkv, weight, heads))
    return (layer_step if kernel else by_parts)(*given)


def layer_step(qkv, a, b, weight, A, dt, heads, before=None, state=None, record=False, kept=None, owed=None, owe=False,
               build=None, layout=LAYOUT):  # fmt: skip
    """`layer` in one launch, for rows it `serves`; build and layout as in `fused_delta.step`."""
    (R, T, C), K, (Hk, Hv, Dk, Dv) = qkv.shape, weight.shape[1], heads
    before = mx.zeros((R, K - 1, C), qkv.dtype) if before is None else before
    state = mx.zeros((R, Hv, Dv, Dk)) if state is None else state
    summed = a.dtype if a.dtype == dt.dtype else mx.float32
    template = {"InT": qkv.dtype, "SumT": summed, "Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv, "K": K, "MOST": MOST}
    template |= {"LANES": layout.lanes, "ROWS": layout.rows, "SIMDGROUPS": layout.simdgroups, "RECORD": record}
    template |= {"OWED": owed is not None, "AFTER": not owe}
    tapes = [(R, T, Hv, Dv), (R, T, Hk, Dk), (R, T, Hv)] if record else [(1,)] * 3
    tape, n = owed or (nothing(qkv.dtype), 0)
    y, after, window, *taped, settled = kernel(
        [qkv, a, b, weight, A, dt, before, state, tape.delta, tape.k, tape.g],
        scalars=[T, T if kept is None else kept, tape.delta.shape[1], n],
        template=template,
        groups=(-(-Dv // layout.tile), Hv, R),
        threads=(SIMD * layout.simdgroups, 1, 1),
        shapes=[
            (R, T, Hv, Dv),
            (1,) if owe else state.shape,
            (R, K - 1 + T, C),
            *tapes,
            state.shape if owed else (1,),
        ],
        dtypes=[qkv.dtype, mx.float32, qkv.dtype, mx.float32, qkv.dtype, mx.float32, mx.float32],
        build=build,
    )
    taped = Tape(*taped) if record else None
    return Rows(y, None if owe else after, window, taped, settled if owed else None)


@functools.cache
def nothing(dtype):
    """What stands for a tape that is not owed; the kernel does not read it."""
    tape = Tape(mx.zeros((1, 1)), mx.zeros((1, 1), dtype), mx.zeros((1, 1)))
    mx.eval(tape.delta, tape.k, tape.g)  # or it would belong to the trace, and the thread, that asked first
    return tape


def by_parts(qkv, a, b, weight, A, dt, heads, before=None, state=None, record=False, kept=None, owed=None, owe=False):
    """`layer` as its parts, each by its own route."""
    Hk, Hv, Dk, Dv = heads
    if owed:
        n = owed.n if isinstance(owed.n, int) else first(owed.n)
        before, state = state_after(before, n, weight.shape[1]), replay(state, owed.tape, n)
    settled = state
    convolved, window = causal_conv(qkv, weight, before)
    q, k, v = mx.split(convolved, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    q, k = (mx.fast.rms_norm(part.reshape(*qkv.shape[:2], Hk, Dk), None, EPSILON / Dk) for part in (q, k))
    g = mx.exp(-mx.exp(A.astype(mx.float32)) * mx.logaddexp(a + dt, 0))
    v = v.reshape(*qkv.shape[:2], Hv, Dv)
    mask = None if kept is None else mx.broadcast_to(mx.arange(qkv.shape[1]) < first(kept), qkv.shape[:2])
    y, state, tape = gated_delta(q / Dk, k * Dk**-0.5, v, g, mx.sigmoid(b), state, mask, record=record)
    return Rows(y, None if owe else state, window, tape, settled if owed else None)


def serves(qkv, heads):
    """Whether the kernel knows rows qkv [R,T,C] of these heads."""
    _, _, Dk, _ = heads
    return qkv.shape[1] <= MOST and Dk % SIMD == 0 and 2 * MOST * Dk * qkv.itemsize <= SHARED_BYTES


def case(qkv, weight, heads):
    """What a verdict on the kernel holds for: dtype, heads, their dimensions, width, and one token or few."""
    Hk, Hv, Dk, Dv = heads
    count = "one token" if qkv.shape[1] == 1 else "few tokens"
    return f"{str(qkv.dtype).removeprefix('mlx.core.')} {Hk}/{Hv} heads {Dk}x{Dv} width {weight.shape[1]} {count}"


# --- how it is measured


def checks(dims):
    """The Checks of `layer_step` against its parts by their fastest routes, for the gated-delta layers of a model."""
    dtype, found = getattr(mx, dims["dtype"]), []
    for *heads, K in dims["delta"]:
        for T in (1, FEW):
            draw = functools.partial(drawn, T, heads, K, dtype)
            qkv, _, _, weight, *_ = draw()
            calls = [functools.partial(call, heads) for call in (by_step, by_all_parts)]
            if serves(qkv, heads):
                name = case(qkv, weight, heads)
                found.append(verdicts.Check("fused_layer.layer_step", name, *calls, draw, TOLERANCE[dtype]))
    return found


def drawn(T, heads, K, dtype):
    """Random (qkv, a, b, weight, A, dt, before, state) of one row."""
    Hk, Hv, Dk, Dv = heads
    C = 2 * Hk * Dk + Hv * Dv
    shapes = (1, T, C), (1, T, Hv), (1, T, Hv), (C, K, 1), (Hv,), (Hv,), (1, K - 1, C)
    return *(mx.random.normal(shape).astype(dtype) for shape in shapes), mx.random.normal((1, Hv, Dv, Dk))


def by_step(heads, qkv, a, b, weight, A, dt, before, state):
    """y, state and window through the kernel."""
    return layer_step(qkv, a, b, weight, A, dt, heads, before, state)[:3]


def by_all_parts(heads, qkv, a, b, weight, A, dt, before, state):
    """y, state and window through the parts."""
    return by_parts(qkv, a, b, weight, A, dt, heads, before, state)[:3]
