"""A target's forward for few rows as one compiled function of few launches: what plain steps and verifies run on a GPU.

W rows, M rows padded to a width that repeats, D hidden, H query heads, G key/value heads, d head dimension, L rows of
a key/value buffer. A decode step of mlx-lm builds some twenty operations a layer anew for each token, and on CUDA every
product of more than one row prepares a plan on the host. Here a layer is a handful of launches from `kernels/`, traced
once for each width and buffer size. All shapes repeat: rows are padded to M, which later rows alone could notice,
buffers grow in large steps, and positions are arrays. No kernel's answer for a row depends on how many rows there are,
so a wide verify ends in the bits of narrow steps.

The model is not touched: `plan` reads its weights, and only architectures that it knows to the last operation are run.
"""

import dataclasses
import functools
import math

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3, qwen3_5, qwen3_next, rope_utils
from mlx_lm.models.cache import KVCache

from drafter import hybrid
from kernels import block_attention, fused_layer, fused_rows, small_matmul, verdicts
from kernels.fused_layer import Owed
from kernels.plain_delta import Tape
from kernels.portable import WIDE, scalar
from kernels.small_matmul import MOST_ROWS, Quantised

WIDTHS = (1, 8, 16, MOST_ROWS)  # M: one row, or whole tiles of the few-row products
GROWTH = 1024  # rows by which a key/value buffer grows: every growth is another shape, and another trace
BACKBONES = (llama.LlamaModel, qwen3.Qwen3Model, qwen3_5.Qwen3_5TextModel)
LAYERS = (llama.TransformerBlock, qwen3.TransformerBlock, qwen3_5.DecoderLayer)
ATTENTIONS = (llama.Attention, qwen3.Attention, qwen3_next.Qwen3NextAttention)
ROPES = (nn.RoPE, rope_utils.Llama3RoPE)


class Unknown(Exception):
    """A part of a model that this module does not know to the last operation."""


@dataclasses.dataclass(frozen=True)
class Route:
    """Where a step's operations come from: the kernels, or plain operations, which tests run on a CPU."""

    product: callable
    gated_product: callable
    rotate_heads: callable
    attend_rows: callable
    gated_norm: callable
    recurrence: callable


KERNELS = Route(
    small_matmul.product,
    small_matmul.gated_product,
    fused_rows.rotate_heads,
    block_attention.attend_rows,
    fused_rows.gated_norm,
    fused_layer.layer,
)
PLAIN = Route(
    small_matmul.reference,
    small_matmul.gated_reference,
    fused_rows.rotate_heads_reference,
    block_attention.attend_rows_reference,
    fused_rows.gated_norm_reference,
    fused_layer.by_parts,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the rows stand, as scalar arguments: rows before them, how many of the M count, `keys_of_a_part`."""

    offset: mx.array
    rows: mx.array
    part: mx.array


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention layer's part of a step: weights of q, k, v and of the output, and how heads are made of them."""

    projections: tuple
    output: object
    norms: tuple | None
    eps: float
    frequencies: mx.array
    heads: tuple
    dim: int
    scale: float
    gated: bool

    def empty(self, rows, dtype):
        """Key and value buffers [1,G,rows,d]."""
        return tuple(mx.zeros((1, self.heads[1], rows, self.dim), dtype) for _ in range(2))

    def run(self, route, x, residual, place, state, record):
        """(residual + attention of x, the rows' keys and values [1,G,M,d]); state is the buffers [1,G,L,d]."""
        q, k, v = route.product(x, *self.projections)
        if self.gated:
            q = q.reshape(1, x.shape[1], self.heads[0], -1)
        turned, k, v = route.rotate_heads(
            q, k, v, self.norms, self.frequencies, place.offset, heads=self.heads, gated=self.gated, eps=self.eps
        )
        gate = q.reshape(1, x.shape[1], self.heads[0], 2, -1) if self.gated else None
        answer = route.attend_rows(turned, *state, place.offset, place.part, k, v, self.scale, gate)
        return route.product(answer, self.output, residual=residual), (k, v)


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A gated-delta layer's part of a step: weights of qkv, z, b and a, of the output, and the layer itself."""

    projections: tuple
    output: object
    layer: nn.Module

    def empty(self, rows, dtype):
        """The convolution's state [1,K−1,C] and S [1,Hv,Dv,Dk] before any row."""
        layer = self.layer
        S = (1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
        return mx.zeros((1, layer.conv_kernel_size - 1, layer.conv_dim), dtype), mx.zeros(S)

    def run(self, route, x, residual, place, state, record):
        """(residual + the layer's answer to x, (window, state after the rows that count, tape, settled state)).

        state is (convolution's state, S), or these and a tape's δ, k, g and n where S is owed n of its rows.
        """
        layer = self.layer
        qkv, z, b, a = route.product(x, *self.projections)
        heads = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        gating, (before, S, *owed) = (layer.conv1d.weight, layer.A_log, layer.dt_bias), state
        options = {"record": record, "kept": place.rows, "owed": Owed(Tape(*owed[:3]), owed[3]) if owed else None}
        rows = route.recurrence(qkv, a, b, *gating, heads, before, S, **options)
        answer = route.gated_norm(rows.y, z, layer.norm.weight, layer.norm.eps)
        tape = (rows.tape.delta, rows.tape.k, rows.tape.g) if record else ()
        left = rows.window, rows.state, tape, (rows.settled,) if owed else ()
        return route.product(answer, self.output, residual=residual), left


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: two norms, what mixes rows, and the MLP's gate, up and down weights, or an MLP of any kind."""

    norms: tuple
    mixer: object
    mlp: object

    def run(self, route, x, place, state, record):
        """(the layer's output for x [1,M,D], what the mixer leaves)."""
        first, second = self.norms
        x, left = self.mixer.run(route, mx.fast.rms_norm(x, first.weight, first.eps), x, place, state, record)
        normed = mx.fast.rms_norm(x, second.weight, second.eps)
        if callable(self.mlp):
            return x + self.mlp(normed), left
        gate, up, down = self.mlp
        return route.product(route.gated_product(normed, gate, up), down, residual=x), left


def plan(backbone):
    """The Layers of a backbone. Raises Unknown where any part of it is not known to the last operation."""
    if type(backbone) not in BACKBONES:
        raise Unknown(type(backbone).__name__)
    return [plan_layer(layer) for layer in backbone.layers]


def plan_layer(layer):
    """The Layer of one decoder layer."""
    if type(layer) not in LAYERS:
        raise Unknown(type(layer).__name__)
    recurrent = getattr(layer, "is_linear", False)
    mixer = plan_recurrence(layer.linear_attn) if recurrent else plan_attention(layer.self_attn)
    mlp = layer.mlp
    if hasattr(mlp, "gate_proj"):
        mlp = tuple(weight(getattr(mlp, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    return Layer((layer.input_layernorm, layer.post_attention_layernorm), mixer, mlp)


def plan_attention(layer):
    """The Attention of one attention layer."""
    if type(layer) not in ATTENTIONS or type(layer.rope) not in ROPES or getattr(layer.rope, "traditional", False):
        raise Unknown(f"{type(layer).__name__} with {type(layer.rope).__name__}")
    gated = type(layer) is qwen3_next.Qwen3NextAttention
    names = ("num_attention_heads", "num_key_value_heads") if gated else ("n_heads", "n_kv_heads")
    norms = (layer.q_norm, layer.k_norm) if "q_norm" in layer else None
    return Attention(
        tuple(weight(getattr(layer, name)) for name in ("q_proj", "k_proj", "v_proj")),
        weight(layer.o_proj),
        norms and tuple(norm.weight for norm in norms),
        norms[0].eps if norms else 0.0,
        frequencies(layer.rope),
        tuple(getattr(layer, name) for name in names),
        layer.head_dim if gated else round(layer.scale**-2),
        layer.scale,
        gated,
    )


def frequencies(rope):
    """Radians a position of a rotation [m], float32."""
    if type(rope) is rope_utils.Llama3RoPE:
        return 1 / rope._freqs
    half = rope.dims // 2
    turns = rope.scale * mx.exp(-mx.arange(half) / half * math.log(rope.base))
    mx.eval(turns)  # or every step would compute them again
    return turns


def plan_recurrence(layer):
    """The Recurrence of one gated-delta layer."""
    if hybrid.stock(layer) is not qwen3_5.GatedDeltaNet:
        raise Unknown(type(layer).__name__)
    projections = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return Recurrence(tuple(weight(layer[name]) for name in projections), weight(layer.out_proj), layer)


def weight(linear):
    """A linear layer's weight as the few-row products take it: an array [N,K], or Quantised."""
    if "bias" in linear or type(linear) not in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding):
        raise Unknown(f"{type(linear).__name__} with a bias" if "bias" in linear else type(linear).__name__)
    if "scales" not in linear:
        return linear.weight
    if linear.mode != "affine":
        raise Unknown(f"quantisation {linear.mode}")
    return Quantised(linear.weight, linear.scales, linear.biases, group_size=linear.group_size, bits=linear.bits)


def needed(layers, head):
    """The (kernel, case) of every kernel that a step of these layers calls with a choice."""
    dtype, found = layers[0].norms[0].weight.dtype, set()
    for layer in layers:
        mixer = layer.mixer
        weights = [*mixer.projections, mixer.output, *(() if callable(layer.mlp) else layer.mlp), head]
        found |= {("small_matmul.product", small_matmul.case(dtype, weight)) for weight in weights}
        if isinstance(mixer, Attention):
            sizes = (*mixer.heads, mixer.dim)
            found.add(("block_attention.attend_rows", block_attention.case(dtype, *sizes)))
            found.add(("fused_rows.rotate_heads", fused_rows.case(dtype, *sizes)))
        else:
            sizes = (mixer.layer.num_v_heads, mixer.layer.head_v_dim)
            found.add(("fused_rows.gated_norm", fused_rows.case(dtype, *sizes)))
    return found


class Step:
    """The forward of few rows through one target. Build it with `for_model`."""

    def __init__(self, backbone, layers, head, route):
        self.backbone, self.layers, self.head, self.route = backbone, layers, head, route
        self.functions = {}  # (taps, record) -> the compiled forward, which MLX traces anew for each set of shapes

    @functools.cached_property
    def ready(self):
        """Whether this machine may run it: a 16-bit type, and every kernel that it needs found right and faster."""
        dtype = self.layers[0].norms[0].weight.dtype
        return dtype in small_matmul.DTYPES and all(verdicts.allowed(*each) for each in needed(self.layers, self.head))

    def fits(self, tokens, cache):
        """Whether tokens [R,W] on these caches are a step's work."""
        return (
            cache is not None
            and tokens.shape[0] == 1
            and 0 < tokens.shape[1] <= MOST_ROWS
            and all(type(entry) in (KVCache, hybrid.RecurrentCache) for entry in cache)
            and all(getattr(entry, "lengths", None) is getattr(entry, "left_padding", None) is None for entry in cache)
            and all(getattr(entry, "documents", None) is None for entry in cache)
            and any(type(entry) is KVCache for entry in cache)
        )

    def __call__(self, tokens, cache, taps=()):
        """Feed tokens [1,W] into the caches: (hidden [1,W,D] after the final norm, taps of [1,W,D])."""
        W = tokens.shape[1]
        offset = next(entry.offset for entry in cache if type(entry) is KVCache)
        record = any(getattr(entry, "recording", False) for entry in cache)
        states = [self.state(layer, entry, W) for layer, entry in zip(self.layers, cache, strict=True)]
        place = mx.array([offset, block_attention.keys_of_a_part(offset) + W], mx.int32)
        hidden, tapped, left = self.function(tuple(taps), record)(pad_rows(tokens, width(W)), place, states)
        for entry, rows in zip(cache, left, strict=True):
            (append if type(entry) is KVCache else leave)(entry, rows, W)
        return (hidden, tuple(tapped)) if width(W) == W else (hidden[:, :W], tuple(tap[:, :W] for tap in tapped))

    def score(self, hidden):
        """Logits [...,V] of few hidden rows [...,D]; None where they are not few."""
        W = hidden.size // hidden.shape[-1]
        if W > MOST_ROWS:
            return None
        rows = pad_rows(hidden.reshape(1, W, -1), width(W))
        return self.route.product(rows, self.head)[:, :W].reshape(*hidden.shape[:-1], -1)

    def state(self, layer, entry, W):
        """What a layer reads of its cache, with room for W more rows."""
        dtype = layer.norms[0].weight.dtype
        if type(entry) is not KVCache:
            return recurrent_state(entry, layer.mixer.empty(0, dtype))
        held = 0 if entry.keys is None else entry.keys.shape[2]
        if held < entry.offset + W:
            more = layer.mixer.empty(-(-(entry.offset + W) // GROWTH) * GROWTH - held, dtype)
            old = (entry.keys, entry.values) if held else ()
            entry.keys, entry.values = (mx.concatenate(both, axis=2) for both in zip(*filter(None, (old, more))))
        return entry.keys, entry.values

    def function(self, taps, record):
        """The compiled forward: (tokens [1,M], place [2], states) -> (hidden, taps, what layers leave)."""
        if (taps, record) not in self.functions:
            self.functions[taps, record] = mx.compile(functools.partial(self.forward, taps, record))
        return self.functions[taps, record]

    def forward(self, taps, record, tokens, place, states):
        """The forward in one go, over every layer."""
        x, place, tapped, left = self.backbone.embed_tokens(tokens), locate(place), {}, []
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            x, rows = layer.run(self.route, x, place, state, record)
            tapped[index] = x
            left.append(rows)
        norm = self.backbone.norm
        return mx.fast.rms_norm(x, norm.weight, norm.eps), [tapped[index] for index in taps], left


def locate(place):
    """The Place of (rows before, keys of a part + rows that count), int32 [2].

    Widened on the device, where every launch reads it: see `portable.whole_number`. Parts are whole multiples of 32.
    """
    wide = mx.broadcast_to(place[:, None], (2, WIDE)) + mx.zeros((2, WIDE), mx.int32)
    offset, packed, unit = wide[:1], wide[1:], block_attention.LEAST_KEYS
    return Place(offset, packed % unit, packed // unit * unit)


def width(W):
    """The padded number of rows for W."""
    return next(M for M in WIDTHS if W <= M)


def pad_rows(x, M):
    """x [1,W,...] with rows of zeros up to M."""
    missing = M - x.shape[1]
    return mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def append(entry, rows, W):
    """Write the first W of the rows' keys and values [1,G,M,d] behind those that a KVCache holds."""
    end = entry.offset + W
    keys, values = rows if rows[0].shape[2] == W else (value[:, :, :W] for value in rows)
    entry.keys[:, :, entry.offset : end], entry.values[:, :, entry.offset : end] = keys, values
    entry.offset = end


def recurrent_state(entry, empty):
    """What a recurrent layer reads of its cache: (convolution's state, S), and what S is owed; empty: where unset."""
    held = tuple(first if value is None else value for value, first in zip(entry.held, empty, strict=True))
    tape, n = entry.owed or (None, 0)
    return (*held, tape.delta, tape.k, tape.g, scalar(n)) if tape else held


def leave(entry, rows, W):
    """Leave a recurrent layer's state after W rows in its cache, and their tape where the cache records."""
    window, after, tape, settled = rows
    kept = window.shape[1] - width(W)
    if settled:
        entry.settle(*settled)
    entry.cache = [window[:, W : W + kept], after]
    if tape and width(W) > W:
        tape, window = (part[:, :W] for part in tape), window[:, : kept + W]
    if tape:
        entry.record(Tape(*tape), window)


def for_model(model, backbone, route=KERNELS):
    """The Step of a model, or None where its architecture is not known to the last operation."""
    try:
        heads = [module for name, module in model.named_modules() if name.split(".")[-1] == "lm_head"]
        return Step(backbone, plan(backbone), weight(heads[0] if heads else backbone.embed_tokens), route)
    except Unknown:
        return None
