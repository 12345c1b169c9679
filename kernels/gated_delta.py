"""The gated delta rule: what it is, and the route that serves here.

R rows, T tokens, Hk key heads, Hv value heads, Dk and Dv head dimensions, n committed rows. Value head h reads key head
h // (Hv/Hk). The state S [R,Hv,Dv,Dk] is float32, and so is all arithmetic. For each token ("Gated Delta Networks",
arXiv 2412.06464; a gate for each key dimension: "Kimi Linear", arXiv 2510.26692)

    S' = g_t S_{t−1}      δ_t = β_t (v_t − S' k_t)      S_t = S' + δ_t k_tᵀ      y_t = S_t q_t

with q already scaled. g = 0 forgets everything before, which is how packed documents begin; β may reach 2. A token that
the mask leaves out does not touch the state, and its y is 0. Replaying a tape of δ, k and g is S ← g_t S + δ_t k_tᵀ: it
stops the state after any of the tape's tokens, and touches no weights.
"""

from kernels import cpu_delta, fused_delta, plain_delta, verdicts
from kernels.errors import UserError
from kernels.fused_delta import step
from kernels.plain_delta import Tape, chunked, recur, states_at
from kernels.plain_delta import replay as replay_reference

__all__ = ["Tape", "chunked", "gated_delta", "recur", "replay", "replay_reference", "states_at", "step"]


def gated_delta(q, k, v, g, beta, state=None, mask=None, record=False, differentiable=False):
    """The rule by the fastest route that serves here: the fused kernel, chunks (a CPU has its own), or the loop.

    q, k [R,T,Hk,Dk]   v [R,T,Hv,Dv]   g [R,T,Hv] or [R,T,Hv,Dk]   beta [R,T,Hv]   mask [R,T] bool, or None
    state           [R,Hv,Dv,Dk] float32, or None for zero
    record          whether to keep a Tape, whose bytes grow with T: only for the few rows of a verify
    differentiable  whether gradients are wanted, which only chunks in plain operations give
    Returns y [R,T,Hv,Dv] in v's dtype, the state after the last token, and the Tape or None.
    Raises UserError for shapes that do not fit each other.
    """
    check(q, k, v, g, beta)
    fused = (
        not differentiable and fused_delta.serves(k) and verdicts.allowed("fused_delta.step", fused_delta.case(k, v, g))
    )
    if fused:
        return step(q, k, v, g, beta, state, mask, record)
    if not differentiable and cpu_delta.serves(g, mask):
        return cpu_delta.run(q, k, v, g, beta, state, record)
    return plain_delta.run(q, k, v, g, beta, state, mask, record, differentiable)


def replay(state, tape, n, build=None):
    """The state after the first n rows of a tape, from the state before them.

    state  [R,Hv,Dv,Dk] float32, or None for zero
    n      int, or int32 array of one number or of R; 0 gives the state back
    build  a build of the kernel, as `portable.Kernel` takes it; None takes the kernel where it serves, else plain
           operations
    """
    if build or serves("fused_delta.replay", tape.k, tape.delta, tape.g):
        return fused_delta.replay(state, tape, n, build)
    return replay_reference(state, tape, n)


def serves(kernel, k, v, g):
    """Whether a kernel knows these shapes and may be used for them on this machine."""
    return fused_delta.serves(k) and verdicts.allowed(kernel, fused_delta.case(k, v, g))


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
