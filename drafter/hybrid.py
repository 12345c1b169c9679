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
import dataclasses
import functools
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from drafter import cpu_layers
from drafter.recurrent_cache import conv_after, grown
from kernels import fused_layer
from kernels.causal_conv import causal_conv
from kernels.gated_delta import gated_delta
from kernels.verdicts import allowed

QK_EPSILON = 1e-6  # added to the sum of squares that queries and keys are normalised by; mlx-lm's figure

NARROW = "fused_layer.layer_step"


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
