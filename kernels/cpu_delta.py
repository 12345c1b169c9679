"""The gated delta rule in chunks as it is fastest on a CPU, where no gradient is wanted and gates are scalar.

R rows, T tokens, Hk key heads, Hv value heads, G = Hv/Hk, Dk and Dv head dimensions, C chunks of L tokens. The rule
stands in `gated_delta`, and its form in chunks in `plain_delta`, whose arrays these are: [R,Hk,G,C,L,·]. There each
operation is one that a gradient can follow, and many are small; here a chunk's gates are multiplied up token after
token, LAPACK inverts its triangle (which is not less accurate), and the walk over chunks is two products a chunk.
"""

import functools

import mlx.core as mx

from kernels import exponential, plain_delta
from kernels.plain_delta import fold, unfold

CHUNK = 32  # L; measured on a CPU at 512 tokens: 16 and 64 are slower by a tenth and by a third


def serves(g, mask):
    """Whether `chunked` can take these: on a CPU, a gate for each head, no token masked, more than a loop is for."""
    return g.ndim == 3 and mask is None and g.shape[1] > plain_delta.LOOP and exponential.compiles()


def run(q, k, v, g, beta, state=None, record=False):
    """The rule in chunks: (y, state, Tape or None), arguments as in `gated_delta.gated_delta`."""
    y, state, delta = chunked(q, k, v, g, beta, state)
    return y, state, plain_delta.make_tape(delta, k, g, None) if record else None


def chunked(q, k, v, g, beta, state=None):
    """(y [R,T,Hv,Dv] in v's dtype, the state [R,Hv,Dv,Dk], δ [R,T,Hv,Dv]), both float32.

    With P_ti the product of the gates after token i up to token t: (I + A) δ = β (v − k̃ Sᵀ), A_ti = β_t k_t·k_i P_ti
    for i < t, k̃_t = P_t0 g_0 k_t; y = q̃ Sᵀ + (q kᵀ ∘ P) δ; and S ← S P_L0 g_0 + δᵀ (k ∘ P_L).
    """
    T, length = v.shape[1], plain_delta.chunk_length(v.shape[1], CHUNK)
    queries, keys, values = (mx.contiguous(fold(rows, length, k.shape[2])) for rows in (q, k, v))
    gates, strength = fold(g[..., None], length, k.shape[2], 1), fold(beta[..., None], length, k.shape[2])
    before, one = triangle(length)
    pairs = mx.where(before, mx.cumprod(mx.where(before, gates, 1), axis=-2), one)  # P, 0 above the diagonal
    until = pairs[..., :1] * gates[..., :1, :]
    inverse = mx.linalg.tri_inv(system(keys @ keys.swapaxes(-1, -2), pairs, strength, one))
    own, reads = inverse @ (strength * values), inverse @ (keys * (until * strength))
    kept = keys.swapaxes(-1, -2) * pairs[..., -1:, :]
    state = plain_delta.start(state, k, v).swapaxes(-1, -2)[:, :, :, None]
    starts, state, delta = walk(own, reads, kept, until[..., -1:, :], state)
    read = (queries * until) @ starts
    y = mx.addmm(read, (queries @ keys.swapaxes(-1, -2)) * pairs, delta)
    state = mx.contiguous(state[:, :, :, 0].flatten(1, 2).swapaxes(-1, -2))
    return unfold(y, T).astype(v.dtype), state, unfold(delta, T)


def walk(own, reads, kept, total, state):
    """δ = own − reads Sᵀ, then Sᵀ ← Sᵀ ⊙ total + kept δ, chunk after chunk from a state Sᵀ [R,Hk,G,1,Dk,Dv].

    Returns the Sᵀ that the chunks start from [R,Hk,G,C,Dk,Dv], the last one, and δ [R,Hk,G,C,L,Dv].
    """
    starts, deltas = [], []
    for given, read, key, gate in zip(*(mx.split(part, own.shape[3], axis=3) for part in (own, reads, kept, total))):
        starts.append(state)
        deltas.append(mx.addmm(given, read, state, alpha=-1.0))
        state = mx.addmm(state * gate, key, deltas[-1])
    return mx.concatenate(starts, axis=3), state, mx.concatenate(deltas, axis=3)


@exponential.shapeless
def system(products, pairs, strength, one):
    """I + A."""
    return mx.where(one > 0, one, products * pairs * strength)


@functools.cache
def triangle(length):
    """(bool [L,L]: below the diagonal, float32 [L,L]: the identity), in memory."""
    made = mx.tri(length, k=-1, dtype=mx.bool_), mx.eye(length)
    mx.eval(made)  # or they would belong to the trace, and the thread, that asked first
    return made
