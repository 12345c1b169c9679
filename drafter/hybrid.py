"""Recurrent layers of hybrid targets: run through `kernels/`, and able to take rows back.

R rows, T tokens, D hidden, Hk key heads, Hv value heads, Dk and Dv their dimensions, C = 2·Hk·Dk + Hv·Dv channels of
the short convolution, K its width.

mlx-lm runs a gated-delta layer as a loop over time wherever it has no Metal kernel, and nothing can undo a row of its
state. `attach` gives each such layer *instance* a subclass of its own class: weights, names and every other instance
stay as they are, and `detach` restores the object. Numerics are mlx-lm's: the same operations in the same dtypes up to
the recurrence, which accumulates in float32; only the order of its sums differs. On a CPU the attention and the MLPs
of such a model are attached as well (`cpu_layers`).
"""

import contextlib
import copy
import dataclasses
import functools
import typing
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from drafter import cpu_layers
from kernels import fused_layer
from kernels.causal_conv import causal_conv, state_after
from kernels.gated_delta import Tape, gated_delta, replay
from kernels.verdicts import allowed

QK_EPSILON = 1e-6  # added to the sum of squares that queries and keys are normalised by; mlx-lm's figure

NARROW = "fused_layer.layer_step"
SHORT = 32  # assumed: rows whose window a view may keep alive; of a longer one, a prompt's, only the end is copied


@dataclasses.dataclass(frozen=True)
class Projected:
    """What a layer reads from its input: qkv [R,T,C], z [R,T,Hv,Dv], and a, b [R,T,Hv] that its gates are made of."""

    qkv: mx.array
    z: mx.array
    a: mx.array
    b: mx.array


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How one class of layers feeds the recurrence, as functions of the layer. A new class needs one, and no more.

    project  (layer, x [R,T,D]) -> Projected
    weight   layer -> the convolution's weight [C,K,1]; of several convolutions, their concatenation
    heads    (layer, convolved [R,T,C]) -> q, k [R,T,Hk,Dk] and v [R,T,Hv,Dv], normalised and scaled
    gates    (layer, a, b) -> g [R,T,Hv] or [R,T,Hv,Dk] float32, beta [R,T,Hv]
    output   (layer, y [R,T,Hv,Dv], z) -> [R,T,D]
    narrow   (layer, Projected, conv_state, state, record) -> (y, state, window, tape) of a few rows in one kernel, or
             None where none serves; None for a class that no such kernel knows
    """

    project: Callable
    weight: Callable
    heads: Callable
    gates: Callable
    output: Callable
    narrow: Callable | None = None


def project_apart(layer, x):
    """Projected of a layer with a projection each for qkv, z, b and a (Qwen3.5)."""
    z = layer.in_proj_z(x).reshape(*x.shape[:2], layer.num_v_heads, layer.head_v_dim)
    return Projected(layer.in_proj_qkv(x), z, layer.in_proj_a(x), layer.in_proj_b(x))


def project_joined(layer, x):
    """Projected of a layer whose two projections hold q, k, v, z and b, a by key head (Qwen3-Next)."""
    *qkv, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return Projected(mx.concatenate([part.reshape(*x.shape[:2], -1) for part in qkv], axis=-1), z, a, b)


def conv_weight(layer):
    """The weight [C,K,1] of the layer's own convolution."""
    return layer.conv1d.weight


def split_heads(layer, convolved):
    """(q, k, v) of convolved rows [R,T,C]: unit length, q also by 1/√Dk."""
    q, k, v = mx.split(convolved, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q, k = (part.reshape(*part.shape[:2], layer.num_k_heads, layer.head_k_dim) for part in (q, k))
    q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=QK_EPSILON)
    return q, k, v.reshape(*v.shape[:2], layer.num_v_heads, layer.head_v_dim)


def scalar_gates(layer, a, b):
    """g = exp(−exp(A) softplus(a + dt)) and beta = σ(b)."""
    return compute_g(layer.A_log, a, layer.dt_bias), mx.sigmoid(b)


def gated_output(layer, y, z):
    """The layer's norm, gated by z, and its output projection."""
    return layer.out_proj(layer.norm(y, z).reshape(*y.shape[:2], -1))


def narrow_rows(layer, rows, conv_state, state, record):
    """Rows of a few rows by `kernels.fused_layer`, or None where that does not serve here."""
    weight, heads = conv_weight(layer), (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    if not (fused_layer.serves(rows.qkv, heads) and allowed(NARROW, fused_layer.case(rows.qkv, weight, heads))):
        return None
    gating = rows.a, rows.b, weight, layer.A_log, layer.dt_bias
    return fused_layer.layer_step(rows.qkv, *gating, heads, conv_state, state, record)


QWEN = {"weight": conv_weight, "heads": split_heads, "gates": scalar_gates, "output": gated_output}
KINDS = {  # exact classes; Qwen3.5's mixtures of experts use its layers
    qwen3_5.GatedDeltaNet: Adapter(project_apart, **QWEN, narrow=narrow_rows),
    qwen3_next.Qwen3NextGatedDeltaNet: Adapter(project_joined, **QWEN, narrow=narrow_rows),
}


class RecurrentCache(ArraysCache):
    """What a recurrent layer carries: [convolution state [R,K−1,C], S [R,Hv,Dv,Dk] float32], each None when empty.

    As mlx-lm's ArraysCache of two, but that rows fed between `arm` and `keep` can be taken back: meanwhile the layer
    leaves the rows' tape, and the window they were convolved in, here. Nothing is kept of any other row.

    documents  ids [R,T] of the packed rows about to be fed: the state is emptied where a document begins
    tape       of the rows fed since `arm`, None before the first; past the first `rows`, what only pads
    window     [R,K−1+T,C]: the convolution state at `arm`, then the inputs of the tape's T rows
    owed       rows of a tape that S still lacks (fused_layer.Owed) or None: added by whoever reads `cache`, or by the
               next rows' own kernel, which then says so with `settle`
    watcher    called with (k, v, g, beta, window) of the rows fed, from which the state after any of them can be had
    """

    documents = tape = window = before = owed = watcher = None
    recording = owing = False
    fed = 0

    @property
    def cache(self):
        """[convolution state, S], S with what it was owed."""
        if self.owed:
            self.settle(replay(self.held[1], *self.owed))
        if isinstance(self.held[0], Cut):
            self.held = [self.held[0].rows(), self.held[1]]
        return self.held

    @cache.setter
    def cache(self, held):
        if self.owing:
            self.settle(replay(self.held[1], *self.owed))  # for `before`, which a commit may come back to
        self.held, self.owed = held, None

    def settle(self, S):
        """Take S for the state with what it was owed, before any further row."""
        self.held, self.owed = [self.held[0], S], None
        if self.owing:
            self.before[0][1], self.owing = S, False

    @property
    def rows(self):
        """Rows fed since `arm`."""
        return 0 if self.tape is None else self.fed

    def arm(self):
        """Note where the state stands and record from here on; references, no copies."""
        self.before = [list(self.held), own(self.lengths), own(self.left_padding)]
        self.tape = self.window = None
        self.recording, self.owing = True, self.owed is not None

    def record(self, tape, window, count=None):
        """Add the tape of T more rows and the window [R,K−1+T,C] they were convolved in; the first `count` count."""
        T = tape.delta.shape[1]
        count = T if count is None else count
        if self.tape is not None:  # rows fed piecewise
            kept = window.shape[1] - T
            window = mx.concatenate([self.window[:, : kept + self.fed], window[:, kept : kept + count]], axis=1)
            tape = joined(first_rows(self.tape, self.fed), first_rows(tape, count))
            count += self.fed
        self.tape, self.window, self.fed = tape, window, count

    def owe(self, tape, window, count):
        """Record, and leave the state as it is, owed the first `count` rows of the tape."""
        self.record(tape, window, count)
        conv = Cut(window, count, window.shape[1] - tape.delta.shape[1])
        self.held, self.owed = [conv, self.held[1]], fused_layer.Owed(tape, count)

    def keep(self, n):
        """Leave what the first n of the recorded rows would have left, and stop recording.

        S ← g S + δ kᵀ for each of them, from the state at `arm`. May be repeated until the next `arm`.
        """
        self.recording = False
        if 0 < n == self.rows:
            return
        (conv, S), lengths, padding = self.before
        self.lengths, self.left_padding = own(lengths), own(padding)
        if n:
            T = self.tape.delta.shape[1]
            short = T <= SHORT and self.lengths is None
            conv = Cut(self.window, n, self.window.shape[1] - T) if short else conv_after(self, self.window, n, T)
            self.held, self.owed = [conv, S], fused_layer.Owed(self.tape, n)
            self.advance(n)
        else:  # where no row was fed, what was owed at `arm` still is
            self.held, self.owed = [conv, S], self.owed if self.owing else None

    def extract(self, idx):
        """One row's cache, of this kind."""
        return grown(super().extract(idx))


def arrays(entry):
    """Every array that a cache holds, a tree: what to wait for. What a recurrent state is owed stays owed to it."""
    if not isinstance(entry, RecurrentCache):
        return entry.state
    taped = [vars(tape) for tape in (entry.tape, entry.owed and entry.owed.tape) if tape]
    return [*(part.window if isinstance(part, Cut) else part for part in entry.held if part is not None), *taped]


class Cut(typing.NamedTuple):
    """A convolution's state that is still within a window: `size` rows of it from row `n`. Most are never cut out: the
    next rows' kernel reads them where they are."""

    window: mx.array
    n: int
    size: int

    def rows(self):
        """The state, [R,K−1,C]."""
        return self.window[:, self.n : self.n + self.size]


RecurrentCache.__name__ = ArraysCache.__name__  # what mlx-lm's files of caches call it, who loads only its own kinds


def grown(entry):
    """An ArraysCache made a RecurrentCache, with what it holds."""
    held = vars(entry).pop("cache")
    entry.__class__ = RecurrentCache
    entry.cache = held
    return entry


def own(array):
    """The same array, or None, under a Python object of its own: mlx-lm counts rows down in place."""
    return array if array is None else copy.copy(array)


def first_rows(tape, n):
    """A tape's first n rows."""
    fields = [field.name for field in dataclasses.fields(Tape)]
    return tape if n == tape.delta.shape[1] else Tape(*(getattr(tape, name)[:, :n] for name in fields))


def joined(first, second):
    """The tape of the rows of two, one after the other."""
    fields = [field.name for field in dataclasses.fields(Tape)]
    return Tape(*(mx.concatenate([getattr(tape, name) for tape in (first, second)], axis=1) for name in fields))


def conv_after(cache, window, n, T):
    """The convolution state [R,K−1,C] after n of the T rows whose window is given, or each row's own length if less."""
    ends = n if cache.lengths is None else mx.clip(cache.lengths, 0, n)
    state = state_after(window, ends, window.shape[1] - T + 1)
    return mx.contiguous(state) if T > SHORT else state


@functools.cache
def through_kernels(base):
    """The subclass of a class in KINDS or `cpu_layers.FORWARDS` whose forward is `kernels/`' own."""
    adapter = KINDS.get(base)

    def call(self, inputs, mask=None, cache=None):
        return forward(self, adapter, inputs, mask, cache)

    return type(base.__name__, (base,), {"__call__": call if adapter else cpu_layers.FORWARDS[base], "stock": base})


def forward(layer, adapter, inputs, mask=None, cache=None):
    """One layer: inputs [R,T,D] to outputs [R,T,D]; mask [R,T] bool; cache None, an ArraysCache or a RecurrentCache.

    In training mode every operation is differentiable.
    """
    T, rows = inputs.shape[1], adapter.project(layer, inputs)
    held = (None, None) if cache is None else cache.cache
    documents, record = getattr(cache, "documents", None), getattr(cache, "recording", False)
    watcher = getattr(cache, "watcher", None)
    bare = mask is None and documents is None and watcher is None and not layer.training
    found = adapter.narrow(layer, rows, *held, record) if bare and adapter.narrow else None
    y, state, window, tape, _ = found or by_parts(layer, adapter, rows, *held, mask, documents, record, watcher)
    if cache is not None:
        cache.cache = [conv_after(cache, window, T, T), state]
        cache.advance(T)
    if record:
        cache.record(tape, window)
    return adapter.output(layer, y, rows.z)


def by_parts(layer, adapter, rows, conv_state, state, mask=None, documents=None, record=False, watcher=None):
    """Rows of projected rows: convolution, heads, gates and the rule, each by its own route."""
    differentiable = layer.training
    qkv = rows.qkv if mask is None else mx.where(mask[..., None], rows.qkv, 0)
    convolved, window = causal_conv(qkv, adapter.weight(layer), conv_state, documents, differentiable=differentiable)
    g, beta = adapter.gates(layer, rows.a, rows.b)
    q, k, v = adapter.heads(layer, convolved)
    g = emptied(g, documents)
    if watcher:
        watcher(k, v, g, beta, window)
    y, state, tape = gated_delta(q, k, v, g, beta, state, mask, record=record, differentiable=differentiable)
    return fused_layer.Rows(y, state, window, tape, None)


def emptied(g, documents):
    """Gates g [R,T,Hv] or [R,T,Hv,Dk], 0 where a row of packed rows begins another document than the row before."""
    if documents is None:
        return g
    begins = mx.concatenate([mx.zeros_like(documents[:, :1]), documents[:, 1:] - documents[:, :-1]], axis=1) != 0
    return mx.where(begins.reshape(*begins.shape, *[1] * (g.ndim - 2)), 0, g)


def stock(module):
    """The class a module had before it was attached: its own where it never was."""
    return vars(type(module)).get("stock", type(module))


def is_attached(module):
    """Whether the module runs through `kernels/`."""
    return stock(module) is not type(module)


def is_recurrent(module):
    """Whether the module is a recurrent layer that runs through `kernels/`."""
    return is_attached(module) and stock(module) in KINDS


def attach(model):
    """Let every recurrent layer of a known class run through `kernels/`, and on a CPU what lies between them in a
    model that has one; once more changes nothing."""
    modules = model.modules()
    if not any(stock(module) in KINDS for module in modules):
        return
    kinds = {*KINDS, *(cpu_layers.FORWARDS if mx.default_device() == mx.cpu else ())}
    for module in modules:
        if type(module) in kinds:
            module.__class__ = through_kernels(type(module))


def detach(model):
    """Give every attached module the class that it was loaded with."""
    for module in filter(is_attached, model.modules()):
        module.__class__ = stock(module)


@contextlib.contextmanager
def detached(model):
    """The model as mlx-lm made it while the block runs: what a baseline is measured on."""
    modules = [(module, type(module)) for module in model.modules() if is_attached(module)]
    detach(model)
    try:
        yield model
    finally:
        for module, kind in modules:
            module.__class__ = kind


def make_cache(model, max_kv_size=None):
    """mlx-lm's own new caches, one a layer, but a RecurrentCache for each attached layer."""
    return adopt(model, make_prompt_cache(model, max_kv_size))


def adopt(model, caches):
    """Let mlx-lm's caches of attached layers, whatever they hold, take rows back from now on. Returns the same list."""
    for layer, entry in zip(model.layers, caches):
        if type(entry) is ArraysCache and any(map(is_recurrent, layer.modules())):
            grown(entry)
    return caches
