"""What a step of few rows computes, layer by layer: mlx-lm's own layers, read once and run on few launches.

M rows, D hidden, H query heads, G key/value heads, d head dimension, L rows of a key/value buffer, N outputs, K inputs.
The model is not touched: `plan` reads its weights, and only architectures that it knows to the last operation are run.
A route says where the operations come from: the kernels, or plain operations, which the tests run on a CPU.
"""

import dataclasses
import math

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3, qwen3_5, qwen3_next, rope_utils

from drafter import hybrid
from kernels import block_attention, fused_layer, fused_rows, small_matmul
from kernels.fused_layer import Owed
from kernels.plain_delta import Tape
from kernels.small_matmul import Quantised

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

    def served(self, dtype):
        """Whether the kernels know heads of this size."""
        rows = mx.zeros((1, 1, 1, self.dim), dtype)
        return block_attention.serves_rows(rows, rows)

    def needed(self, dtype):
        """The (kernel, case) that this layer calls besides products."""
        sizes = (*self.heads, self.dim)
        attend = ("block_attention.attend_rows", block_attention.case(dtype, *sizes))
        return {attend, ("fused_rows.rotate_heads", fused_rows.case(dtype, *sizes))}

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

    @property
    def heads(self):
        """(Hk, Hv, Dk, Dv)."""
        layer = self.layer
        return layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def served(self, dtype):
        """Whether the kernels know heads of this size."""
        Hk, Hv, Dk, Dv = self.heads
        rows = mx.zeros((1, 1, 2 * Hk * Dk + Hv * Dv), dtype)
        return fused_layer.serves(rows, self.heads) and Dv % 32 == 0

    def needed(self, dtype):
        """The (kernel, case) that this layer calls besides products."""
        _, Hv, _, Dv = self.heads
        weight, C = self.layer.conv1d.weight, self.layer.conv_dim
        cases = {fused_layer.case(mx.zeros((1, T, C), dtype), weight, self.heads) for T in (1, 2)}
        norm = ("fused_rows.gated_norm", fused_rows.case(dtype, Hv, Dv))
        return {norm, *(("fused_layer.layer_step", case) for case in cases)}

    def run(self, route, x, residual, place, state, record):
        """(residual + the layer's answer to x, (window, state after the rows that count, tape, settled state)).

        Where a tape is recorded there is no state after: it is owed the tape's rows.
        state is (convolution's state, S), or (window, S, δ, k, g, n) where S is owed the first n rows of a tape.
        """
        layer = self.layer
        qkv, z, b, a = route.product(x, *self.projections)
        gating, (before, S, *owed) = (layer.conv1d.weight, layer.A_log, layer.dt_bias), state
        options = {"kept": place.rows, "owed": Owed(Tape(*owed[:3]), owed[3]) if owed else None}
        rows = route.recurrence(qkv, a, b, *gating, self.heads, before, S, record=record, owe=record, **options)
        answer = route.gated_norm(rows.y, z, layer.norm.weight, layer.norm.eps)
        tape = (rows.tape.delta, rows.tape.k, rows.tape.g) if record else ()
        left = rows.window, () if record else (rows.state,), tape, (rows.settled,) if owed else ()
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
    if type(layer) not in LAYERS or getattr(layer, "use_sliding", False):
        raise Unknown(f"{type(layer).__name__}, perhaps with a window")
    recurrent = getattr(layer, "is_linear", False)
    mixer = plan_recurrence(layer.linear_attn) if recurrent else plan_attention(layer.self_attn)
    mlp = layer.mlp
    if hasattr(mlp, "gate_proj"):
        mlp = tuple(weight(getattr(mlp, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    return Layer((layer.input_layernorm, layer.post_attention_layernorm), mixer, mlp)


def plan_attention(layer):
    """The Attention of one attention layer."""
    kind = hybrid.stock(layer)
    if kind not in ATTENTIONS or type(layer.rope) not in ROPES or getattr(layer.rope, "traditional", False):
        raise Unknown(f"{kind.__name__} with {type(layer.rope).__name__}")
    gated = kind is qwen3_next.Qwen3NextAttention
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


def weights(layers, head):
    """(inputs' width, the weights that share them) of every product of a step."""
    for layer in layers:
        mlp = [] if callable(layer.mlp) else [layer.mlp[:2], layer.mlp[2:]]
        yield from (layer.mixer.projections, (layer.mixer.output,), *mlp)
    yield (head,)


def served(layers, head):
    """Whether the kernels can take every part of these layers."""
    dtype = layers[0].norms[0].weight.dtype
    products = all(small_matmul.serves(mx.zeros((1, each[0].shape[1]), dtype), *each) for each in weights(layers, head))
    return products and all(layer.mixer.served(dtype) for layer in layers)


def needed(layers, head):
    """The (kernel, case) of every kernel that a step of these layers calls."""
    dtype = layers[0].norms[0].weight.dtype
    large = [weight for each in weights(layers, head) for weight in each if weight.shape[0] >= small_matmul.LEAST]
    found = {("small_matmul.product", small_matmul.case(dtype, weight)) for weight in large}
    return found.union(*(layer.mixer.needed(dtype) for layer in layers))
