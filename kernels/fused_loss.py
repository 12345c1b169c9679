"""Cross-entropy of many rows of logits and its slope in one kernel, which reads the logits twice and writes once.

n rows, V vocabulary. V is so much wider than all else in a training step that its cost is the bytes moved; operations
apart move logits, their float32 copy, the softmax and the slope some ten times.
"""

import functools

import mlx.core as mx

from kernels import verdicts
from kernels.portable import Kernel
from kernels.verdicts import Check

SIMDGROUPS = 16  # to a row (assumed: a row of 49,152 logits is then 96 to a thread)
MEASURED = 1024  # rows at which the kernel is measured
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 5e-3, mx.float16: 1e-3}  # of the largest slope, rounded once

BODY = """
  constexpr int THREADS = 32 * SIMDGROUPS, WIDE = V % 8 ? 1 : 8;
  const int label = labels[GROUP_X];
  const long home = long(GROUP_X) * V;
  SHARED(float, most_of, SIMDGROUPS);
  SHARED(float, sum_of, SIMDGROUPS);

  float most = -INF, sum = 0.0f;  // of this thread's logits: the largest, and Σ exp(z − most)
  for (int at = THREAD * WIDE; at < V; at += THREADS * WIDE) {
    float z[WIDE], before = most;
    widen(load<T, WIDE>(logits + home + at), z);
    UNROLL
    for (int i = 0; i < WIDE; ++i) most = z[i] > most ? z[i] : most;
    sum = sum > 0.0f ? MUL(sum, EXP(before - most)) : 0.0f;
    UNROLL
    for (int i = 0; i < WIDE; ++i) sum += z[i] > -INF ? EXP(z[i] - most) : 0.0f;
  }
  float top = SIMD_MAX(most);
  sum = SIMD_SUM(sum > 0.0f ? MUL(sum, EXP(most - top)) : 0.0f);
  if (LANE == 0) most_of[SIMDGROUP] = top, sum_of[SIMDGROUP] = sum;
  BARRIER();
  for (int i = 0; i < SIMDGROUPS; ++i) top = most_of[i] > top ? most_of[i] : top;
  sum = 0.0f;
  for (int i = 0; i < SIMDGROUPS; ++i) sum += sum_of[i] > 0.0f ? MUL(sum_of[i], EXP(most_of[i] - top)) : 0.0f;
  if (THREAD == 0) loss[GROUP_X] = top - F32(logits[home + label]) + LOG(sum);

  const float share = 1.0f / sum;
  for (int at = THREAD * WIDE; at < V; at += THREADS * WIDE) {
    Pack<T, WIDE> pack;
    float z[WIDE];
    widen(load<T, WIDE>(logits + home + at), z);
    UNROLL
    for (int i = 0; i < WIDE; ++i)
      pack.x[i] = CAST(T, MUL(EXP(z[i] - top), share) - (at + i == label ? 1.0f : 0.0f));
    store(slope + home + at, pack);
  }
"""

kernel = Kernel(
    "cross_entropy",
    inputs=("logits", "labels"),
    outputs=("loss", "slope"),
    body=BODY,
)


def cross_entropy(logits, labels):
    """−log q(label) of rows of logits z, and its slope by z, q less 1 at the label: by the kernel where that may serve.

    logits [n,V] of any float dtype, no row of which is −∞ throughout; labels [n] int.
    Returns (loss [n] float32, slope [n,V] in the logits' dtype). Sums and exponentials are float32.
    """
    kernel = verdicts.allowed("fused_loss.fused", case(logits.dtype, logits.shape[-1]))
    return (fused if kernel else plain)(logits, labels)


def fused(logits, labels, build=None):
    """`cross_entropy` in one launch, by the named build of the kernel, or the default device's."""
    n, V = logits.shape
    return kernel(
        [logits, labels.astype(mx.int32)],
        template={"T": logits.dtype, "V": V, "SIMDGROUPS": SIMDGROUPS},
        groups=(n, 1, 1),
        threads=(32 * SIMDGROUPS, 1, 1),
        shapes=[(n,), logits.shape],
        dtypes=[mx.float32, logits.dtype],
        build=build,
    )


def plain(logits, labels):
    """`cross_entropy` in plain operations. The value is max z − z(label) − log max q: no term can underflow."""
    wide = logits.astype(mx.float32)
    q, places = mx.softmax(wide, axis=-1), labels[:, None]
    picked = mx.take_along_axis(wide, places, axis=-1)[:, 0]
    loss = mx.max(wide, axis=-1) - picked - mx.log(mx.max(q, axis=-1))
    slope = mx.put_along_axis(q, places, mx.take_along_axis(q, places, axis=-1) - 1, axis=-1)
    return loss, slope.astype(logits.dtype)


def case(dtype, V):
    """What a verdict on the kernel holds for."""
    return f"{str(dtype).removeprefix('mlx.core.')} of {V}"


def checks(dims):
    """The Checks of the kernel against plain operations, for the vocabularies that a drafter is trained over."""
    dtype, calls = getattr(mx, dims["dtype"]), (fused, plain)
    return [
        Check("fused_loss.fused", case(dtype, V), *calls, functools.partial(drawn, dtype, V), TOLERANCE[dtype])
        for V in dims.get("logits", ())
    ]


def drawn(dtype, V):
    """Random logits of MEASURED rows, and labels."""
    return 4 * mx.random.normal((MEASURED, V)).astype(dtype), mx.random.randint(0, V, (MEASURED,))
