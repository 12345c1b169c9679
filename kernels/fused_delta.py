"""The gated delta rule as one kernel, sequential over tokens with the state in registers; and the replay of a tape.

R rows, T tokens, Hk key heads, Hv value heads, Dk and Dv head dimensions, n committed rows. The rule, and what the
arguments are, stand in `gated_delta`. Both kernels write the state as S ← g S, then S ← S + δ k, each rounded once: so
a replay of n tokens ends in the bits of a step over those n.
"""

import functools
import typing

import mlx.core as mx

from kernels import plain_delta
from kernels.plain_delta import Tape, make_tape
from kernels.portable import SIMD, Kernel, scalar
from kernels.verdicts import Check

FEW, MANY = 17, 512  # tokens of the widest verify, and of a prompt to measure at
TOLERANCE = {mx.float32: 5e-3, mx.bfloat16: 2e-2, mx.float16: 5e-3}  # TF32 in chunks' products; then roundings of y
REPLAYED = 1e-6  # the same operations, one rounding fewer
MOST_KEYS = 256  # Dk up to which a lane's share of the state and of a token stays in registers
STAGES = {128: 16, MOST_KEYS: 8}  # tokens read ahead up to a Dk: 25 KB where keys, queries and gates are float32
REPLAY_THREADS = 128  # assumed: each has 4 elements of the state and nothing to share

HEADER = """
// The first `count` of N numbers, by one lane of those that hold them all.
template <typename T, int N> HELPER void write(DEVICE_OUT(T) to, LANE_ARRAY(const float) from, int count, int lane) {
  UNROLL
  for (int i = 0; i < N; ++i)
    if (lane == 0 && i < count) to[i] = CAST(T, from[i]);
}
// COUNT sums over the LANES lanes that share a value row, side by side, in all of these lanes.
template <int LANES, int COUNT> HELPER void across(LANE_ARRAY(float) sums) {
  UNROLL
  for (int apart = LANES / 2; apart > 0; apart /= 2) {
    UNROLL
    for (int i = 0; i < COUNT; ++i) sums[i] += SIMD_SHUFFLE_XOR(sums[i], apart);
  }
}
// S ← g S for the ROWS × PER elements that a lane holds, and its share of S k. Four sums do not wait for each other.
template <int ROWS, int PER, bool VECTOR>
HELPER void fade(LANE_ARRAY(float) held, LANE_ARRAY(const float) gate, LANE_ARRAY(const float) key,
                  LANE_ARRAY(float) read) {
  UNROLL
  for (int i = 0; i < ROWS; ++i) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL
    for (int e = 0; e < PER; ++e) {
      held[i * PER + e] = MUL(held[i * PER + e], gate[VECTOR ? e : 0]);
      part[e % 4] = FMA(held[i * PER + e], key[e], part[e % 4]);
    }
    read[i] = (part[0] + part[1]) + (part[2] + part[3]);
  }
}
// S ← S + δ k, and the lane's share of S q.
template <int ROWS, int PER>
HELPER void update(LANE_ARRAY(float) held, LANE_ARRAY(const float) delta, LANE_ARRAY(const float) key,
                   LANE_ARRAY(const float) query, LANE_ARRAY(float) answer) {
  UNROLL
  for (int i = 0; i < ROWS; ++i) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL
    for (int e = 0; e < PER; ++e) {
      held[i * PER + e] = FMA(delta[i], key[e], held[i * PER + e]);
      part[e % 4] = FMA(held[i * PER + e], query[e], part[e % 4]);
    }
    answer[i] = (part[0] + part[1]) + (part[2] + part[3]);
  }
}
// What a lane holds of its value rows, those that exist, from and to the state. `home` is its place in the first row.
template <int ROWS, int PER, int WIDE, int Dk, int LANES>
HELPER void take(DEVICE_IN(float) home, LANE_ARRAY(float) held, int rows) {
  UNROLL
  for (int i = 0; i < ROWS; ++i) {
    UNROLL
    for (int j = 0; j < PER / WIDE; ++j)
      if (i < rows) widen(load<float, WIDE>(home + i * Dk + j * WIDE * LANES), held + i * PER + j * WIDE);
  }
}
template <int ROWS, int PER, int WIDE, int Dk, int LANES>
HELPER void put(DEVICE_OUT(float) home, LANE_ARRAY(const float) held, int rows) {
  UNROLL
  for (int i = 0; i < ROWS; ++i) {
    UNROLL
    for (int j = 0; j < PER / WIDE; ++j) {
      Pack<float, WIDE> pack;
      UNROLL
      for (int c = 0; c < WIDE; ++c) pack.x[c] = held[i * PER + j * WIDE + c];
      if (i < rows) store(home + i * Dk + j * WIDE * LANES, pack);
    }
  }
}
"""

# LANES lanes hold ROWS value rows of the state, in packs that alternate between them. The threadgroup reads STAGE
# tokens at once into shared memory, and those after them into registers while these are computed: no token waits for
# memory. Nothing waits for y, so its sum over the lanes comes one token late, beside the sum that δ waits for.
STEP = """
  constexpr int PER = Dk / LANES, WIDE = PER % 8 ? 4 : 8, PACKS = PER / WIDE, THREADS = 32 * SIMDGROUPS;
  constexpr int TILE = SIMDGROUPS * (32 / LANES) * ROWS, GATES = VECTOR ? Dk : 1;
  constexpr int PARTS = STAGE * Dk / WIDE, MY_PARTS = (PARTS + THREADS - 1) / THREADS;
  constexpr int MY_GATES = (STAGE * GATES + THREADS - 1) / THREADS, MY_VALUES = (STAGE * TILE + THREADS - 1) / THREADS;
  using Part = Pack<KeyT, WIDE>;
  SHARED(Part, key_of, PARTS);
  SHARED(Part, query_of, PARTS);
  SHARED(float, gate_of, STAGE * GATES);
  SHARED(float, value_of, STAGE * TILE);
  SHARED(float, strength_of, STAGE);
  const int h = GROUP_Y, r = GROUP_Z, own = h / (Hv / Hk), count = SCALAR(tokens), lane = LANE % LANES;
  const int top = GROUP_X * TILE, below = (SIMDGROUP * (32 / LANES) + LANE / LANES) * ROWS, rows = Dv - top - below;
  const long start = long(r) * count;  // tokens of the rows before this one
  const long home = ((long(r) * Hv + h) * Dv + top + below) * Dk + WIDE * lane;  // in the state
  auto answers = y + (start * Hv + h) * Dv + top + below;
  auto deltas = delta + (RECORD ? (start * Hv + h) * Dv + top + below : 0);

  float held[ROWS * PER], sums[2 * ROWS];  // shares of S k for this token, then of y for the one before
  UNROLL
  for (int i = 0; i < ROWS; ++i) sums[ROWS + i] = 0.0f;
  take<ROWS, PER, WIDE, Dk, LANES>(state + home, held, rows);

  Part next_key[MY_PARTS], next_query[MY_PARTS];
  float next_gate[MY_GATES], next_value[MY_VALUES], next_strength = 0.0f;
  int owed = -1;  // the token whose y is not written yet
  for (int stage = -STAGE; stage < count; stage += STAGE) {
    if (stage >= 0) {
      BARRIER();  // the stage before is computed
      UNROLL
      for (int i = 0; i < MY_PARTS; ++i) {
        const int at = THREAD + i * THREADS;
        if (at < PARTS) key_of[at] = next_key[i], query_of[at] = next_query[i];
      }
      UNROLL
      for (int i = 0; i < MY_GATES; ++i)
        if (THREAD + i * THREADS < STAGE * GATES) gate_of[THREAD + i * THREADS] = next_gate[i];
      UNROLL
      for (int i = 0; i < MY_VALUES; ++i)
        if (THREAD + i * THREADS < STAGE * TILE) value_of[THREAD + i * THREADS] = next_value[i];
      if (THREAD < STAGE) strength_of[THREAD] = next_strength;
      BARRIER();
    }
    const int after_it = stage + STAGE, left = count - after_it;  // tokens still to be read
    UNROLL
    for (int i = 0; i < MY_PARTS; ++i) {
      const int at = (THREAD + i * THREADS) * WIDE, t = at / Dk;
      const long from = ((start + after_it + t) * Hk + own) * Dk + at % Dk;
      if (t < STAGE && t < left) next_key[i] = load<KeyT, WIDE>(k + from), next_query[i] = load<KeyT, WIDE>(q + from);
    }
    UNROLL
    for (int i = 0; i < MY_GATES; ++i) {
      const int at = THREAD + i * THREADS, t = at / GATES;
      if (t < STAGE && t < left) next_gate[i] = F32(g[((start + after_it + t) * Hv + h) * GATES + at % GATES]);
    }
    UNROLL
    for (int i = 0; i < MY_VALUES; ++i) {
      const int at = THREAD + i * THREADS, t = at / TILE, row = top + at % TILE;
      if (t < STAGE && t < left && row < Dv) next_value[i] = F32(v[((start + after_it + t) * Hv + h) * Dv + row]);
    }
    if (THREAD < STAGE && THREAD < left) next_strength = F32(beta[(start + after_it + THREAD) * Hv + h]);

    for (int s = 0; stage >= 0 && s < STAGE && stage + s < count; ++s) {
      const int t = stage + s;
      const long place = long(t) * Hv * Dv;
      float key[PER], query[PER], gate[VECTOR ? PER : 1], change[ROWS];
      if (MASKED && !mask[MASKED ? start + t : 0]) {  // alike for all lanes
        for (int i = 0; i < ROWS; ++i) change[i] = 0.0f;
        write<ValueT, ROWS>(answers + place, change, rows, lane);
        if (RECORD) write<float, ROWS>(deltas + place, change, rows, lane);
        continue;
      }
      UNROLL
      for (int j = 0; j < PACKS; ++j) {
        const int at = s * Dk / WIDE + lane + j * LANES;
        widen(key_of[at], key + j * WIDE), widen(query_of[at], query + j * WIDE);
        UNROLL
        for (int c = 0; c < WIDE; ++c)
          if (VECTOR) gate[VECTOR ? j * WIDE + c : 0] = gate_of[VECTOR ? at * WIDE + c : 0];
      }
      if (!VECTOR) gate[0] = gate_of[VECTOR ? 0 : s];
      fade<ROWS, PER, VECTOR>(held, gate, key, sums);
      across<LANES, 2 * ROWS>(sums);
      if (owed >= 0) write<ValueT, ROWS>(answers + long(owed) * Hv * Dv, sums + ROWS, rows, lane);
      owed = t;
      UNROLL
      for (int i = 0; i < ROWS; ++i)
        change[i] = MUL(strength_of[s], (i < rows ? value_of[s * TILE + below + i] : 0.0f) - sums[i]);
      update<ROWS, PER>(held, change, key, query, sums + ROWS);
      if (RECORD) write<float, ROWS>(deltas + place, change, rows, lane);
    }
  }
  across<LANES, ROWS>(sums + ROWS);
  if (owed >= 0) write<ValueT, ROWS>(answers + long(owed) * Hv * Dv, sums + ROWS, rows, lane);
  put<ROWS, PER, WIDE, Dk, LANES>(after + home, held, rows);
"""

# One thread for 4 elements of the state.
REPLAY = """
  const int h = GROUP_Y, r = GROUP_Z, at = (GROUP_X * THREADS + THREAD) * 4, row = at / Dk, count = SCALAR(tokens);
  if (row >= Dv) return;
  const long start = long(r) * count, home = (long(r) * Hv + h) * Dv * Dk + at;
  auto keys = k + (start * Hk + h / (Hv / Hk)) * Dk + at % Dk;
  auto gates = g + (start * Hv + h) * (VECTOR ? Dk : 1) + (VECTOR ? at % Dk : 0);
  auto deltas = delta + (start * Hv + h) * Dv + row;
  float held[4], key[4], gate[4];
  widen(load<float, 4>(state + home), held);
  const int kept = n[EACH ? r : 0];
  for (int t = 0; t < kept; ++t) {
    widen(load<KeyT, 4>(keys), key);
    widen(load<GateT, VECTOR ? 4 : 1>(gates), gate);
    UNROLL
    for (int c = 0; c < 4; ++c) held[c] = FMA(deltas[0], key[c], MUL(held[c], gate[VECTOR ? c : 0]));
    keys += Hk * Dk, gates += Hv * (VECTOR ? Dk : 1), deltas += Hv * Dv;
  }
  Pack<float, 4> pack;
  UNROLL
  for (int c = 0; c < 4; ++c) pack.x[c] = held[c];
  store(after + home, pack);
"""

step_kernel = Kernel(
    "gated_delta_step",
    inputs=("q", "k", "v", "g", "beta", "mask", "state"),
    scalars=("tokens",),
    outputs=("y", "after", "delta"),
    header=HEADER,
    body=STEP,
)
replay_kernel = Kernel(
    "gated_delta_replay",
    inputs=("state", "delta", "k", "g", "n"),
    scalars=("tokens",),
    outputs=("after",),
    header=HEADER,
    body=REPLAY,
)


class Layout(typing.NamedTuple):
    """How the step kernel lays a head's Dv value rows over threads; any of them is right, one is fastest."""

    lanes: int = 8  # that share a value row: 4, 8, or 16 where Dk is a multiple of 64
    rows: int = 2  # value rows that the same lanes hold, reading keys and queries once
    simdgroups: int = 2  # of a threadgroup

    @property
    def tile(self):
        """Value rows of a threadgroup."""
        return SIMD // self.lanes * self.rows * self.simdgroups


LAYOUT = Layout()  # measured on an H200 at 2,048 tokens of Qwen3.5-4B's heads, beside eleven others
LONG_KEYS = Layout(rows=1)  # above that, where two rows' shares would leave the registers


def case(k, v, g):
    """What a verdict on these kernels holds for: dtype of keys, heads, head dimensions, and how many tokens."""
    (T, Hk, Dk), (Hv, Dv) = k.shape[1:], v.shape[2:]
    count = "one token" if T == 1 else "few tokens" if T <= FEW else "many tokens"
    gates = " vector gates" if g.ndim == 4 else ""
    return f"{str(k.dtype).removeprefix('mlx.core.')} {Hk}/{Hv} heads {Dk}x{Dv} {count}{gates}"


def serves(k):
    """Whether the kernels know keys [R,T,Hk,Dk] of this size."""
    return k.shape[-1] % SIMD == 0 and k.shape[-1] <= MOST_KEYS


def step(q, k, v, g, beta, state=None, mask=None, record=False, build=None, layout=None):
    """The rule over T tokens in one launch. Arguments and results as `gated_delta.gated_delta`, for keys it `serves`.

    build   as `portable.Kernel` takes it
    layout  how threads share the work; None is the one for this Dk
    """
    R, T, Hv, Dv = v.shape
    Hk, Dk = k.shape[2:]
    layout = layout or (LAYOUT if Dk <= 128 else LONG_KEYS)
    template = {"KeyT": k.dtype, "ValueT": v.dtype, "GateT": g.dtype, "Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    template |= {"LANES": layout.lanes, "ROWS": layout.rows, "SIMDGROUPS": layout.simdgroups}
    template |= {"VECTOR": g.ndim == 4, "MASKED": mask is not None, "RECORD": record}
    template["STAGE"] = next(tokens for most, tokens in STAGES.items() if Dk <= most)
    mask_given = everyone() if mask is None else mask
    state_given = mx.zeros((R, Hv, Dv, Dk)) if state is None else state
    y, after, delta = step_kernel(
        [q.astype(k.dtype), k, v, g, beta, mask_given, state_given],
        scalars=[T],
        template=template,
        groups=(-(-Dv // layout.tile), Hv, R),
        threads=(SIMD * layout.simdgroups, 1, 1),
        shapes=[v.shape, (R, Hv, Dv, Dk), v.shape if record else (1,)],
        dtypes=[v.dtype, mx.float32, mx.float32],
        build=build,
    )
    return y, after, make_tape(delta, k, g, mask) if record else None


def replay(state, tape, n, build=None):
    """The state after the first n rows of a tape, in one launch. Arguments as `gated_delta.replay`."""
    R, T, Hv, Dv = tape.delta.shape
    Hk, Dk = tape.k.shape[2:]
    each = not isinstance(n, int) and n.size > 1
    n = scalar(n)
    template = {"KeyT": tape.k.dtype, "GateT": tape.g.dtype, "Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    template |= {"THREADS": REPLAY_THREADS, "VECTOR": tape.g.ndim == 4, "EACH": each}
    return replay_kernel(
        [mx.zeros((R, Hv, Dv, Dk)) if state is None else state, tape.delta, tape.k, tape.g, n],
        scalars=[T],
        template=template,
        groups=(-(-Dv * Dk // (4 * REPLAY_THREADS)), Hv, R),
        threads=(REPLAY_THREADS, 1, 1),
        shapes=[(R, Hv, Dv, Dk)],
        dtypes=[mx.float32],
        build=build,
    )[0]


@functools.cache
def everyone():
    """What stands for a mask that is not there; the kernel does not read it."""
    every = mx.array([True])
    mx.eval(every)  # or it would belong to the trace, and the thread, that asked first
    return every


# --- how they are measured


def checks(dims):
    """The Checks of `step` and `replay` against plain operations, for the gated-delta layers of a model."""
    dtype, found = getattr(mx, dims["dtype"]), []
    for Hk, Hv, Dk, Dv, _ in dims["delta"]:
        for T in (1, FEW, MANY):
            draw = functools.partial(drawn, T, Hk, Hv, Dk, Dv, dtype)
            _, k, v, g, _, _ = draw()
            name = case(k, v, g)
            if serves(k):
                found.append(Check("fused_delta.step", name, by_step, by_plain_step, draw, TOLERANCE[dtype]))
            if serves(k) and 1 < T <= FEW:
                found.append(Check("fused_delta.replay", name, by_replay, by_plain_replay, draw, REPLAYED))
    return found


def drawn(T, Hk, Hv, Dk, Dv, dtype):
    """Random (q, k, v, g, beta, state) for one row: unit keys, gates from 0.8 to 1."""
    q, k, v = (mx.random.normal((1, T, *heads)) for heads in ((Hk, Dk), (Hk, Dk), (Hv, Dv)))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = mx.random.uniform(0.8, 1, (1, T, Hv)), mx.random.uniform(0, 1, (1, T, Hv))
    q, k, v, beta = (value.astype(dtype) for value in (q / Dk**0.5, k, v, beta))
    return q, k, v, g, beta, mx.random.normal((1, Hv, Dv, Dk))


def by_step(*arrays):
    """y and state through the kernel."""
    return step(*arrays)[:2]


def by_plain_step(*arrays):
    """y and state through what serves without it."""
    return plain_delta.run(*arrays)[:2]


def by_replay(q, k, v, g, beta, state):
    """Half the rows of a tape, v standing for δ."""
    return replay(state, Tape(v.astype(mx.float32), k, g), v.shape[1] // 2)


def by_plain_replay(q, k, v, g, beta, state):
    """The same in plain operations."""
    return plain_delta.replay(state, Tape(v.astype(mx.float32), k, g), v.shape[1] // 2)
