"""Short causal depthwise convolution with carried state, followed by SiLU, and the state after any of its tokens.

R rows, T tokens, C channels, K width of the kernel, N positions. Token t reads tokens t−K+1 … t; the state is the last
K−1 inputs, [R,K−1,C], and `window` is the state and the T inputs after it, from which every later state is a slice.
"""

import functools

import mlx.core as mx

from kernels import exponential, verdicts
from kernels.portable import Kernel

THREADS = 128  # of a threadgroup, neighbouring channels; assumed
FEW, SHORT, LONG = 17, 4, 16  # up to FEW tokens, the widest verify, a thread takes SHORT of them, else LONG; assumed
MANY = 512  # tokens of a prompt to measure at
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2, mx.float16: 3e-3}  # two roundings of y

# One thread for SPAN tokens of one channel: everything it reads is loaded first.
BODY = """
  const int c = GROUP_X * THREADS + THREAD, first = GROUP_Y * SPAN, r = GROUP_Z, count = SCALAR(tokens);
  if (c >= C) return;
  InT line[K - 1 + SPAN];  // the inputs from `first` − K + 1 on
  int owner[K - 1 + SPAN];
  UNROLL
  for (int i = 0; i < K - 1 + SPAN; ++i) {
    const int t = first + i - (K - 1), past = t < 0 ? 0 : t;
    if (t >= count) continue;
    line[i] = t < 0 ? state[(long(r) * (K - 1) + K - 1 + t) * C + c] : x[(long(r) * count + t) * C + c];
    if (PACKED) owner[i] = documents[PACKED ? r * count + past : 0];
    if (i >= K - 1 || first == 0) window[(long(r) * (K - 1 + count) + K - 1 + t) * C + c] = line[i];
  }
  UNROLL
  for (int s = 0; s < SPAN; ++s) {
    if (first + s >= count) continue;
    float total = 0.0f;
    UNROLL
    for (int j = 0; j < K; ++j)
      if (!PACKED || owner[s + j] == owner[s + K - 1]) total = FMA(F32(line[s + j]), F32(weight[c * K + j]), total);
    const float z = F32(CAST(InT, total)), open = F32(CAST(InT, 1.0f / (1.0f + EXP(-z))));
    y[(long(r) * count + first + s) * C + c] = CAST(InT, MUL(z, open));
  }
"""

kernel = Kernel(
    "causal_conv",
    inputs=("x", "weight", "state", "documents"),
    scalars=("tokens",),
    outputs=("y", "window"),
    body=BODY,
)


def causal_conv(x, weight, state=None, documents=None, differentiable=False, build=None):
    """y_t = silu(Σ_j w_j x_{t−K+1+j}), j from 0 to K−1: (y [R,T,C], window [R,K−1+T,C]), both in x's dtype.

    x               [R,T,C]
    weight          [C,K,1], as mlx's Conv1d stores it
    state           [R,K−1,C], the inputs before the first; None is zeros
    documents       [R,T] int, or None: no tap reads another document. What the state holds belongs to the first's.
    differentiable  whether gradients are wanted, which the kernel does not give
    build           a build of the kernel, as `portable.Kernel` takes it; None takes the kernel where it serves, else
                    plain operations

    The sum is float32, and rounded to x's dtype before silu, as mlx's convolution does.
    """
    state = mx.zeros((len(x), weight.shape[1] - 1, x.shape[-1]), x.dtype) if state is None else state
    if build or not differentiable and verdicts.allowed("causal_conv.fused", case(x, weight)):
        return fused(x, weight, state, documents, build)
    if not differentiable and documents is None and exponential.serves(x):
        return compiled(x, weight, state)
    return plain(x, weight, state, documents)


def plain(x, weight, state, documents=None):
    """`causal_conv` in shifted multiplications and additions; differentiable."""
    (R, T, C), K = x.shape, weight.shape[1]
    window = mx.concatenate([state, x], axis=1)
    taps = weight[..., 0].T.astype(mx.float32)  # [K,C]
    total = mx.zeros((R, T, C))
    for j in range(K):
        shifted = window[:, j : j + T].astype(mx.float32)
        if documents is not None:
            shifted = mx.where((owners(documents, K)[:, j : j + T] == documents)[..., None], shifted, 0)
        total = total + shifted * taps[j]
    rounded = total.astype(x.dtype)
    return rounded * mx.sigmoid(rounded), window


def compiled(x, weight, state):
    """`causal_conv` of a prompt on a CPU, float32, in a pass over all taps and one of SiLU; not differentiable."""
    T, K = x.shape[1], weight.shape[1]
    window = mx.concatenate([state, x], axis=1)
    taps = mx.split(mx.contiguous(weight[..., 0].T), K)  # [1,C] each; strided, they would take twice the time
    return exponential.silu(sum_taps(*taps, *(window[:, j : j + T] for j in range(K)))), window


@exponential.shapeless
def sum_taps(*arrays):
    """Σ_j taps_j shifted_j, of K taps [1,C] and as many shifted inputs [R,T,C]."""
    K = len(arrays) // 2
    return sum(taps * inputs for taps, inputs in zip(arrays[:K], arrays[K:], strict=True))


def fused(x, weight, state, documents=None, build=None):
    """`causal_conv` in one launch, by the named build of the kernel, or the default device's."""
    (R, T, C), K = x.shape, weight.shape[1]
    span = SHORT if T <= FEW else LONG
    template = {"InT": x.dtype, "C": C, "K": K, "SPAN": span, "THREADS": THREADS, "PACKED": documents is not None}
    return kernel(
        [x, weight, state, one_document() if documents is None else documents.astype(mx.int32)],
        scalars=[T],
        template=template,
        groups=(-(-C // THREADS), -(-T // span), R),
        threads=(THREADS, 1, 1),
        shapes=[x.shape, (R, K - 1 + T, C)],
        dtypes=[x.dtype, x.dtype],
        build=build,
    )


def case(x, weight):
    """What a verdict on the kernel holds for: dtype, channels, width, and how many tokens."""
    count = "one token" if x.shape[1] == 1 else "few tokens" if x.shape[1] <= FEW else "many tokens"
    return f"{str(x.dtype).removeprefix('mlx.core.')} {x.shape[-1]} channels width {weight.shape[1]} {count}"


@functools.cache
def one_document():
    """What stands for documents that are not given; the kernel does not read it."""
    document = mx.zeros(1, mx.int32)
    mx.eval(document)  # or it would belong to the trace, and the thread, that asked first
    return document


def state_after(window, n, K, documents=None):
    """The state after n tokens of a window [R,K−1+T,C].

    n  int: [R,K−1,C].  int array [R], a number for each row: [R,K−1,C].  int array [R,N]: [R,N,K−1,C]. For an int
       the state is a view of the window, and holds all of it in memory: make it contiguous where the window is long.
    documents  [R,T] or None: inputs of another document than the token after the n belong to no state: they are 0
    """
    if isinstance(n, int) and documents is None:
        return window[:, n : n + K - 1]
    R, T = len(window), window.shape[1] - K + 1
    n = mx.broadcast_to(mx.array(n), (R,)) if isinstance(n, int) or n.ndim < 2 else n
    rows = mx.arange(R).reshape(-1, *[1] * n.ndim)
    at = n[..., None] + mx.arange(K - 1)
    found = window[rows, at]
    if documents is None:
        return found
    own = documents[rows[..., 0], mx.minimum(n, T - 1)]  # after the last token, that one's document
    return mx.where((owners(documents, K)[rows, at] == own[..., None])[..., None], found, 0)


def owners(documents, K):
    """The document of each row of a window [R,K−1+T]: the state's is that of the first token."""
    return mx.concatenate([mx.repeat(documents[:, :1], K - 1, axis=1), documents], axis=1)


def checks(dims):
    """The Checks of `fused` against `plain`, for the gated-delta layers of a model."""
    dtype, found = getattr(mx, dims["dtype"]), []
    for Hk, Hv, Dk, Dv, K in dims["delta"]:
        for T in (1, FEW, MANY):
            draw = functools.partial(drawn, T, 2 * Hk * Dk + Hv * Dv, K, dtype)
            name = case(*draw()[:2])
            found.append(verdicts.Check("causal_conv.fused", name, fused, plain, draw, TOLERANCE[dtype]))
    return found


def drawn(T, C, K, dtype):
    """Random (x, weight, state) of one row."""
    shapes = (1, T, C), (C, K, 1), (1, K - 1, C)
    return tuple(mx.random.normal(shape).astype(dtype) for shape in shapes)
