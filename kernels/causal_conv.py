"""Short causal depthwise convolution with carried state, followed by SiLU, and the state after any of its tokens.

R rows, T tokens, C channels, K width of the kernel, N positions. Token t reads tokens t−K+1 … t; the state is the last
K−1 inputs, [R,K−1,C], and `window` is the state and the T inputs after it, from which every later state is a slice.
"""

import mlx.core as mx


def causal_conv(x, weight, state=None, documents=None):
    """y_t = silu(Σ_j w_j x_{t−K+1+j}), j from 0 to K−1: (y [R,T,C], window [R,K−1+T,C]), both in x's dtype.

    x          [R,T,C]
    weight     [C,K,1], as mlx's Conv1d stores it
    state      [R,K−1,C], the inputs before the first; None is zeros
    documents  [R,T] int, or None: no tap reads another document. What the state holds belongs to the first token's.

    The sum is float32, and rounded to x's dtype before silu, as mlx's convolution does. Differentiable.
    """
    (R, T, C), K = x.shape, weight.shape[1]
    state = mx.zeros((R, K - 1, C), x.dtype) if state is None else state
    window = mx.concatenate([state, x], axis=1)
    taps = weight[..., 0].T.astype(mx.float32)  # [K,C]
    total = mx.zeros((R, T, C))
    for j in range(K):
        shifted = window[:, j : j + T].astype(mx.float32)
        if documents is not None:
            shifted = mx.where((owners(documents, K)[:, j : j + T] == documents)[..., None], shifted, 0)
        total = total + shifted * taps[j]
    return silu(total.astype(x.dtype)), window


def state_after(window, n, K, documents=None):
    """The state after n tokens of a window [R,K−1+T,C].

    n  int: [R,K−1,C].  int array [R], a number for each row: [R,K−1,C].  int array [R,N]: [R,N,K−1,C]
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


def silu(x):
    """x σ(x)."""
    return x * mx.sigmoid(x)
