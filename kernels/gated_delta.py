"""The gated delta rule: the reference loop, a tape to take rows back, and the route that serves.

R rows, T tokens, Hk key heads, Hv value heads, Dk and Dv head dimensions, n committed rows. Value head h reads key head
h // (Hv/Hk). The state S [R,Hv,Dv,Dk] is float32, and so is all arithmetic. For each token ("Gated Delta Networks",
arXiv 2412.06464; vector gates: "Kimi Linear", arXiv 2510.26692)

    S' = g_t S_{t−1}      δ_t = β_t (v_t − S' k_t)      S_t = S' + δ_t k_tᵀ      y_t = S_t q_t

with q already scaled. g = 0 forgets everything before, which is how packed documents begin; β may reach 2. A token that
the mask leaves out does not touch the state, and its y is 0.
"""

import dataclasses

import mlx.core as mx

from kernels.chunked_delta import chunked, chunked_with_deltas, hide, states_at
from kernels.errors import UserError

__all__ = ["Tape", "chunked", "gated_delta", "recur", "replay", "replay_reference", "states_at"]

LOOP = 16  # tokens up to which the plain loop is the faster one; measured on a CPU with 4 value heads of 64 × 64


@dataclasses.dataclass(frozen=True)
class Tape:
    """What a forward wrote to the state, token by token: enough to stop it after any of them, without the weights."""

    delta: mx.array  # [R,T,Hv,Dv] float32
    k: mx.array  # [R,T,Hk,Dk]
    g: mx.array  # [R,T,Hv] or [R,T,Hv,Dk]; 1 where a token was masked


def gated_delta(q, k, v, g, beta, state=None, mask=None, record=False, differentiable=False):
    """The rule by the fastest route that serves here: fused kernel, chunks, or the loop.

    q, k [R,T,Hk,Dk]   v [R,T,Hv,Dv]   g [R,T,Hv] or [R,T,Hv,Dk]   beta [R,T,Hv]   mask [R,T] bool, or None
    state           [R,Hv,Dv,Dk] float32, or None for zero
    record          whether to keep a Tape, whose bytes grow with T: only for the few rows of a verify
    differentiable  whether gradients are wanted, which the kernel does not give
    Returns y [R,T,Hv,Dv] in v's dtype, the state after the last token, and the Tape or None.
    Raises UserError for shapes that do not fit each other.
    """
    check(q, k, v, g, beta)
    if v.shape[1] > LOOP or differentiable:
        y, state, delta = chunked_with_deltas(q, k, v, g, beta, state, mask)
    else:
        y, state, delta = recur_with_deltas(q, k, v, g, beta, state, mask)
    return y, state, make_tape(delta, k, g, mask) if record else None


def recur(q, k, v, g, beta, state=None, mask=None):
    """The reference: the formula above, token after token. Shapes as in `gated_delta`; returns (y, state)."""
    return recur_with_deltas(q, k, v, g, beta, state, mask)[:2]


def recur_with_deltas(q, k, v, g, beta, state=None, mask=None):
    """`recur`, and third the δ [R,T,Hv,Dv] float32 of every token."""
    R, T, Hv, Dv = v.shape
    queries, keys = (mx.repeat(value.astype(mx.float32), Hv // k.shape[2], axis=2) for value in (q, k))
    values, gates, strength = (value.astype(mx.float32) for value in (v, spread(g), beta))
    state = mx.zeros((R, Hv, Dv, k.shape[-1])) if state is None else state
    answers, deltas = [], []
    for t in range(T):
        kept = gates[:, t] * state
        read = mx.sum(kept * keys[:, t, :, None], axis=-1)  # [R,Hv,Dv]
        delta = strength[:, t, :, None] * (values[:, t] - read)
        written = kept + delta[..., None] * keys[:, t, :, None]
        state = written if mask is None else mx.where(mask[:, t, None, None, None], written, state)
        answers.append(mx.sum(written * queries[:, t, :, None], axis=-1))
        deltas.append(delta)
    y, delta = (hide(mx.stack(found, axis=1), mask) for found in (answers, deltas))
    return y.astype(v.dtype), state, delta


def make_tape(delta, k, g, mask):
    """The Tape of a forward: a masked token forgets nothing and, with δ = 0, writes nothing."""
    if mask is not None:
        g = mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1)
    return Tape(delta, k, g)


def replay(state, tape, n):
    """The state after the first n rows of a tape, from the state before them: S ← g_t S + δ_t k_tᵀ.

    state [R,Hv,Dv,Dk] float32, or None for zero;  n  int, or int32 array of one number or of R; 0 gives the state back
    """
    return replay_reference(state, tape, n)


def replay_reference(state, tape, n):
    """`replay` in plain operations, in `recur`'s order, so that it ends in the same bits."""
    R, T, Hv, Dv = tape.delta.shape
    keys = mx.repeat(tape.k.astype(mx.float32), Hv // tape.k.shape[2], axis=2)
    gates = spread(tape.g).astype(mx.float32)
    state = mx.zeros((R, Hv, Dv, keys.shape[-1])) if state is None else state
    for t in range(n if isinstance(n, int) else T):
        written = gates[:, t] * state + tape.delta[:, t, :, :, None] * keys[:, t, :, None]
        state = written if isinstance(n, int) else mx.where((t < n).reshape(-1, 1, 1, 1), written, state)
    return state


def spread(g):
    """Gates [R,T,Hv] or [R,T,Hv,Dk] as [R,T,Hv,1,D], to multiply a state by."""
    return g[..., None, None] if g.ndim == 3 else g[..., None, :]


def check(q, k, v, g, beta):
    """Raises UserError unless the shapes fit each other."""
    R, T, Hk, Dk = k.shape
    Hv = v.shape[2]
    expected = {"q": (q, [k.shape]), "v": (v, [(R, T, Hv, v.shape[-1])]), "beta": (beta, [(R, T, Hv)])}
    expected["g"] = g, [(R, T, Hv), (R, T, Hv, Dk)]
    for name, (array, shapes) in expected.items():
        if array.shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise UserError(f"gated delta: {name} is {array.shape}, expected {wanted} beside k {k.shape}, v {v.shape}")
    if Hv % Hk:
        raise UserError(f"gated delta: {Hv} value heads over {Hk} key heads; expected a multiple")
