"""The gated delta rule in plain operations, differentiable on every backend: by tokens, by chunks, and from a tape.

R rows, T tokens, N positions, Hk key heads, Hv value heads, G = Hv/Hk, Dk and Dv head dimensions, C chunks of L tokens,
D = 1 for scalar gates and Dk for vector gates. The rule, and what the arguments are, stand in `gated_delta`.

`recur` is the rule itself. `chunked` is the same in products of matrices; its arrays lie as [R,Hk,G,C,L,·], where what
belongs to a key head has G = 1. Within a chunk that starts from the state S, with P_ti the product of the gates after
token i up to token t,

    δ_t = β_t (v_t − S (P_t0 ⊙ k_t) − Σ_{i<t} δ_i (k_i ⊙ P_ti)·k_t)

is a unit lower triangular system, (I + A) δ = β (v − k̃ Sᵀ): the WY form of "Parallelizing Linear Transformers with the
Delta Rule" (arXiv 2406.06484) with the gates of "Gated Delta Networks" (arXiv 2412.06464). The products P are built by
halves, (gates of the second half up to t) × (gates of the first after i): no logarithm, and no quotient of two small
numbers, so a gate of exactly 0 (a reset) is nothing special, its gradient included. The inverse is built by halves
as well: in Σ(−A)^j, the shorter way, terms as large as binomial(L, j) cancel where keys repeat, and in text they do.
"""

import dataclasses

import mlx.core as mx

from kernels.errors import UserError

LOOP = 8  # tokens up to which the loop is the faster one; measured on a CPU, heads 64 and 128: from 8 to 12
CHUNK = 64  # measured on a CPU at 512 and 2,048 tokens: 32 to 128 lie within a tenth, 16 is slower by a third


@dataclasses.dataclass(frozen=True)
class Chunks:
    """C chunks of L tokens, apart from the state each starts from: δ = own − reads Sᵀ, then S ← S ⊙ total + δᵀ kept."""

    keys: mx.array  # [R,Hk,1,C,L,Dk]
    gates: mx.array  # [R,Hk,G,C,L,D]
    own: mx.array  # [R,Hk,G,C,L,Dv]
    reads: mx.array  # [R,Hk,G,C,L,Dk]
    kept: mx.array  # [R,Hk,G,C,L,Dk]: keys times the gates after them
    until: mx.array  # [R,Hk,G,C,L,D]: gates up to each token; the last is `total`
    pairs: mx.array | None  # [R,Hk,G,C,L,L]: P, where gates are scalar


@dataclasses.dataclass(frozen=True)
class Tape:
    """What a forward wrote to the state, token by token: enough to stop it after any of them, without the weights."""

    delta: mx.array  # [R,T,Hv,Dv] float32
    k: mx.array  # [R,T,Hk,Dk]
    g: mx.array  # [R,T,Hv] or [R,T,Hv,Dk]; 1 where a token was masked


def make_tape(delta, k, g, mask):
    """The Tape of a forward: a masked token forgets nothing and, with δ = 0, writes nothing."""
    return Tape(delta, k, g if mask is None else mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1))


def run(q, k, v, g, beta, state=None, mask=None, record=False, differentiable=False):
    """The rule as it is fastest without a kernel: (y, state, Tape or None).

    Where a gradient is wanted, that is in chunks: the loop's backward pass keeps several states a token, theirs none.
    (Measured on a CPU, 256 rows of 3 tokens from given states: an eighth of the time, a twelfth of the memory.)
    """
    route = recur_with_deltas if v.shape[1] <= LOOP and not differentiable else chunked_with_deltas
    y, state, delta = route(q, k, v, g, beta, state, mask)
    return y, state, make_tape(delta, k, g, mask) if record else None


def recur(q, k, v, g, beta, state=None, mask=None):
    """The reference: the rule's formula, token after token. Returns y [R,T,Hv,Dv] in v's dtype, and the state."""
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
        read = (kept @ keys[:, t, :, :, None])[..., 0]  # [R,Hv,Dv]
        delta = strength[:, t, :, None] * (values[:, t] - read)
        written = kept + delta[..., None] * keys[:, t, :, None]
        state = written if mask is None else mx.where(mask[:, t, None, None, None], written, state)
        answers.append((written @ queries[:, t, :, :, None])[..., 0])
        deltas.append(delta)
    y, delta = (hide(mx.stack(found, axis=1), mask) for found in (answers, deltas))
    return y.astype(v.dtype), state, delta


def replay(state, tape, n):
    """The state after the first n rows of a tape, in `recur`'s order, so that it ends in the same bits."""
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


def chunked(q, k, v, g, beta, state=None, mask=None, chunk=CHUNK):
    """`recur` in T/chunk steps of matrix products. Raises UserError for a chunk that is no power of two."""
    return chunked_with_deltas(q, k, v, g, beta, state, mask, chunk)[:2]


def chunked_with_deltas(q, k, v, g, beta, state=None, mask=None, chunk=CHUNK):
    """`chunked`, and third the δ [R,T,Hv,Dv] float32 of every token, which a tape holds."""
    length = chunk_length(v.shape[1], chunk)
    chunks = prepare(k, v, g, beta, mask, length)
    queries = fold(q, length, k.shape[2])
    read, delta, states = scan(chunks, start(state, k, v), queries * chunks.until)
    y = read + weights(queries, chunks.keys, chunks.gates, chunks.pairs) @ delta
    y, delta = (unfold(value, v.shape[1]) for value in (y, delta))
    return hide(y, mask).astype(v.dtype), states[-1].flatten(1, 2), delta


def states_at(k, v, g, beta, positions, state=None, mask=None, chunk=CHUNK):
    """The states before the tokens at given positions: [R,N,Hv,Dv,Dk] float32, differentiable.

    positions  [R,N] int, 0 to T: 0 gives the state at the start, T the one after the last token
    The rest as in `chunked`. Memory is that of T/chunk + N states.
    """
    length = chunk_length(v.shape[1], chunk)
    chunks = prepare(k, v, g, beta, mask, length)
    _, delta, states = scan(chunks, start(state, k, v))
    rows, at = mx.arange(len(positions))[:, None], positions // length
    origin = mx.stack(states, axis=1)[rows, at]  # [R,N,Hk,G,Dv,Dk]
    last = mx.minimum(at, len(states) - 2)  # position T may begin a chunk that is not there; it sees none of its tokens

    def seen(value, neutral):
        """A chunk's rows before the position, `neutral` from there on: [R,N,Hk,G,L,·]."""
        before = mx.arange(length) < (positions % length)[..., None]
        return mx.where(before[:, :, None, None, :, None], value.transpose(0, 3, 1, 2, 4, 5)[rows, last], neutral)

    until, after = spans(seen(chunks.gates, 1))
    kept = seen(chunks.keys, 0) * after
    found = origin * until[..., -1:, :] + seen(delta, 0).swapaxes(-1, -2) @ kept
    return found.reshape(*positions.shape, *v.shape[2:], k.shape[-1])


def chunk_length(T, chunk):
    """The tokens a chunk holds: `chunk`, or for a short text the power of two that holds it."""
    if chunk < 1 or chunk & (chunk - 1):
        raise UserError(f"chunk {chunk}: expected a power of two, since chunks are halved; try {CHUNK}")
    return min(chunk, 1 << (T - 1).bit_length())


def prepare(k, v, g, beta, mask, length):
    """The Chunks of keys, values and gates, a masked token as one that writes nothing and forgets nothing."""
    Hk = k.shape[2]
    gates = g[..., None] if g.ndim == 3 else g
    keys, values, strength = fold(hide(k, mask), length, Hk), fold(hide(v, mask), length, Hk), hide(beta, mask)
    gates = fold(gates if mask is None else mx.where(mask[..., None, None], gates, 1), length, Hk, 1)
    strength = fold(strength[..., None], length, Hk)
    one = mx.ones_like(gates)
    pairs, until, after = decays(one, one, gates) if g.ndim == 3 else (None, *spans(gates))
    inverse = unit_inverse(mx.tril(strength * weights(keys, keys, gates, pairs), -1))
    solved = inverse @ mx.concatenate([strength * values, strength * until * keys], axis=-1)
    own, reads = mx.split(solved, [v.shape[-1]], axis=-1)
    return Chunks(keys, gates, own, reads, keys * after, until, pairs)


def scan(chunks, state, queries=None):
    """Walk the chunks from a state [R,Hk,G,Dv,Dk].

    Returns queries Sᵀ [R,Hk,G,C,L,Dv] (None without queries), δ [R,Hk,G,C,L,Dv], and the C+1 states at the seams.
    """
    length = chunks.own.shape[-2]
    reads = chunks.reads if queries is None else mx.concatenate([chunks.reads, queries], axis=-2)
    states, found, deltas = [state], [], []
    for c in range(chunks.own.shape[3]):
        read = reads[:, :, :, c] @ states[-1].swapaxes(-1, -2)  # [R,Hk,G,2L,Dv]
        delta = chunks.own[:, :, :, c] - read[..., :length, :]
        kept, total = chunks.kept[:, :, :, c], chunks.until[:, :, :, c, -1:]
        states.append(states[-1] * total + delta.swapaxes(-1, -2) @ kept)
        found.append(read[..., length:, :])
        deltas.append(delta)
    return None if queries is None else mx.stack(found, axis=3), mx.stack(deltas, axis=3), states


def weights(rows, keys, gates, pairs):
    """(Σ_d rows_t keys_i P_ti)[..., t, i], zero above the diagonal; pairs is P where gates are scalar."""
    if pairs is not None:
        return (rows @ keys.swapaxes(-1, -2)) * pairs
    return decays(mx.broadcast_to(rows, gates.shape), mx.broadcast_to(keys, gates.shape), gates)[0]


def decays(a, b, g):
    """For a, b, g [..., L, D]: (Σ_d a_t b_i P_ti)[..., t, i] with P_tt = 1 and zero above the diagonal; and `spans(g)`.

    Across the middle, P_ti is (gates of the second half up to t) × (gates of the first after i): a product of matrices.
    """
    if g.shape[-2] == 1:
        return mx.sum(a * b, axis=-1, keepdims=True), g, mx.ones_like(g)
    a, b = halves(a), halves(b)
    inner, until, after = decays(a, b, halves(g))
    late, early = a[..., 1, :, :] * until[..., 1, :, :], (b[..., 0, :, :] * after[..., 0, :, :]).swapaxes(-1, -2)
    corner = late * early if g.shape[-1] == 1 else late @ early  # a product over one term is slow as a matrix product
    return join(inner[..., 0, :, :], corner, inner[..., 1, :, :]), *merge(until, after)


def spans(g):
    """The products of g [..., L, D] over the tokens up to each one, and over those after it: two of [..., L, D]."""
    return (g, mx.ones_like(g)) if g.shape[-2] == 1 else merge(*spans(halves(g)))


def merge(until, after):
    """The spans of a whole from those of its halves, [..., 2, L/2, D]."""
    total = until[..., -1:, :]
    return (
        mx.concatenate([until[..., 0, :, :], until[..., 1, :, :] * total[..., 0, :, :]], axis=-2),
        mx.concatenate([after[..., 0, :, :] * total[..., 1, :, :], after[..., 1, :, :]], axis=-2),
    )


def unit_inverse(a):
    """(I + a)⁻¹ of strictly lower triangular a [..., L, L], by halves: [[F, 0], [−S a₁₀ F, S]]."""
    length = a.shape[-1]
    if length <= 2:
        return mx.eye(length) - a
    half = length // 2
    first, second = a[..., :half, :half], a[..., half:, half:]
    inverses = unit_inverse(mx.stack([first, second], axis=-3))
    first, second = inverses[..., 0, :, :], inverses[..., 1, :, :]
    return join(first, -(second @ a[..., half:, :half] @ first), second)


def join(first, corner, second):
    """The lower triangular blocks [[first, 0], [corner, second]] as one matrix."""
    top = mx.concatenate([first, mx.zeros_like(corner)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)


def halves(x):
    """[..., L, D] as [..., 2, L/2, D]."""
    return x.reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1])


def fold(x, length, Hk, filling=0):
    """[R,T,H,D] as float32 [R,Hk,H/Hk,C,L,D], the last chunk filled up."""
    R, T, H, D = x.shape
    padded = mx.pad(x.astype(mx.float32), [(0, 0), (0, -T % length), (0, 0), (0, 0)], constant_values=filling)
    return padded.reshape(R, -1, length, Hk, H // Hk, D).transpose(0, 3, 4, 1, 2, 5)


def unfold(x, T):
    """The first T tokens of [R,Hk,G,C,L,D], as [R,T,Hv,D]."""
    R, Hk, G, C, L, D = x.shape
    return x.transpose(0, 3, 4, 1, 2, 5).reshape(R, C * L, Hk * G, D)[:, :T]


def hide(x, mask):
    """x [R,T,...] with zeros at the tokens that the mask [R,T] leaves out."""
    return x if mask is None else mx.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0)


def start(state, k, v):
    """A state [R,Hv,Dv,Dk], or None for zero, as [R,Hk,G,Dv,Dk]."""
    shape = (len(k), k.shape[2], v.shape[2] // k.shape[2], v.shape[-1], k.shape[-1])
    return mx.zeros(shape) if state is None else state.reshape(shape)
