"""The full block-diffusion drafter (DFlash, arXiv 2602.06036), in the layout of its released checkpoints.

R rows, T context rows, N blocks, B block, D hidden, n taps, H query heads, G key/value heads, d head dimension.
The target's taps are fused into context rows; every layer applies its own k and v projections to those rows and to the
block rows. Block rows see the context before their anchor and their own block. Embedding and head are the target's.
"""

import dataclasses
import functools
import json
import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from drafter import anchors, heads, rng
from kernels import block_attention
from kernels.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
HEADS = ("markov_rank", "confidence_head")  # fields that say which heads a drafter has
INIT_STD = 0.02  # assumed, as Qwen3's initializer_range


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """The drafter's shape, as in its config.json (`to_json` and `from_json` know where each key lives there)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple
    num_target_layers: int
    layer_types: tuple
    sliding_window: int | None = None
    is_causal: bool | None = None
    rope_scaling: dict | None = None
    input_embedding_scale: float | None = None
    final_logit_softcapping: float | None = None
    output_multiplier: float | None = None
    markov_rank: int | None = None  # None: no Markov head
    confidence_head: bool = False

    def __post_init__(self):
        """Refuse shapes that cannot draft."""
        checks = [
            (self.block_size >= 2, f"block_size is {self.block_size}; a DFlash block has at least 2 rows"),
            (len(self.layer_types) == self.num_hidden_layers, f"layer_types names {len(self.layer_types)} layers"),
            (set(self.layer_types) <= {FULL, SLIDING}, f"layer_types are {FULL} or {SLIDING}, not {self.layer_types}"),
            (SLIDING not in self.layer_types or self.sliding_window, "sliding layers need a sliding_window"),
            (self.num_attention_heads % self.num_key_value_heads == 0, "query heads must be a multiple of kv heads"),
            (len(self.target_layer_ids) > 0, "target_layer_ids is empty; name at least one layer to tap"),
            (
                all(0 <= i < self.num_target_layers for i in self.target_layer_ids),
                f"target_layer_ids {list(self.target_layer_ids)} outside the target's {self.num_target_layers} layers",
            ),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} is outside the vocabulary",
            ),
            (self.markov_rank is None or self.markov_rank >= 1, f"markov_rank is {self.markov_rank}; at least 1"),
        ]
        for holds, what in checks:
            if not holds:
                raise UserError(f"DFlash drafter: {what}; mend its config.json or the drafter options")

    @staticmethod
    def from_json(config):
        """Read a checkpoint's config.json (dict): block size and extras at the top level or in `dflash_config`."""
        nested = config.get("dflash_config") or {}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        layers = config["num_hidden_layers"]
        found = {field.name: config.get(field.name) for field in dataclasses.fields(DFlashConfig)} | nested
        found["layer_types"] = tuple(config.get("layer_types") or [FULL] * layers)
        found["target_layer_ids"] = tuple(nested["target_layer_ids"])
        found["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
        scaled = rope.get("rope_type") or rope.get("type") or "default"  # older files say `type`
        found["rope_scaling"] = rope if scaled != "default" else None
        found |= {"markov_rank": None, "confidence_head": False} | config.get("foredraft_heads", {})
        names = {field.name for field in dataclasses.fields(DFlashConfig)}
        return DFlashConfig(**{name: value for name, value in found.items() if name in names})

    def to_json(self):
        """The config.json (dict) of a released checkpoint of this shape.

        Heads stand under a key and an architecture of ours: a DFlash loader that knows neither refuses them, and
        DSpark's checkpoints, whose slots predict one token further, are not taken for ours.
        """
        own = dataclasses.asdict(self)
        own_heads = {name: value for name in HEADS if (value := own.pop(name))}
        nested = {name: own.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        kept = {name: value for name, value in own.items() if value is not None}
        for name in ("input_embedding_scale", "final_logit_softcapping", "output_multiplier"):
            if name in kept:
                nested[name] = kept[name]
        name = "ForedraftHeadsDraftModel" if own_heads else "DFlashDraftModel"
        head = {"architectures": [name], "model_type": "qwen3", "tie_word_embeddings": False}
        own_heads = {"foredraft_heads": own_heads} if own_heads else {}
        return head | kept | {"attention_bias": False, "dflash_config": nested} | own_heads


def default_taps(num_layers, count):
    """Evenly spread 0-based layers: round(1 + i(L−4)/(n−1)), halves to even; one tap: L//2. (DFlash)"""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def config_for(target, options):
    """The DFlashConfig of a drafter for `target`; options: a `config.DrafterConfig`, None meaning as the target is."""
    settings, layers = target.settings, options.num_hidden_layers
    rope = settings.get("rope_parameters") or {}
    heads = options.num_attention_heads or settings["num_attention_heads"]
    taps = options.target_layer_ids
    taps = default_taps(target.num_layers, options.num_taps or layers) if taps is None else taps
    sliding = options.layer_types and SLIDING in options.layer_types
    scale = target.embedding_scale
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or settings["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=options.num_key_value_heads or settings.get("num_key_value_heads") or heads,
        head_dim=options.head_dim or settings.get("head_dim") or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        rope_theta=options.rope_theta or settings.get("rope_theta") or rope.get("rope_theta", 10000.0),
        max_position_embeddings=target.max_length or 32768,
        block_size=options.block_size,
        mask_token_id=target.spare_id()[0] if options.mask_token_id is None else options.mask_token_id,
        target_layer_ids=tuple(dict.fromkeys(taps)),  # a shallow target's even spread repeats itself
        num_target_layers=target.num_layers,
        layer_types=tuple(options.layer_types or [FULL] * layers),
        sliding_window=options.sliding_window if sliding else None,
        is_causal=options.is_causal,
        input_embedding_scale=None if scale == 1.0 else scale,
        final_logit_softcapping=settings.get("final_logit_softcapping"),
        markov_rank=options.markov_rank,
        confidence_head=options.confidence_head,
    )


class Attention(nn.Module):
    """Projections and per-head norms of one layer; how rows attend is the caller's."""

    def __init__(self, config):
        super().__init__()
        D, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(D, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, D, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)

    def queries(self, rows):
        """[R,n,D] -> [R,H,n,d], normed, not rotated."""
        return self.q_norm(split_heads(self.q_proj(rows), self.q_norm.weight.size))

    def keys_values(self, rows):
        """[R,n,D] -> keys (normed, not rotated) and values, [R,G,n,d] each."""
        d = self.k_norm.weight.size
        return self.k_norm(split_heads(self.k_proj(rows), d)), split_heads(self.v_proj(rows), d)

    def __call__(self, rows, attend):
        mixed = attend(self.queries(rows), *self.keys_values(rows))  # [R,H,n,d]
        return self.o_proj(mixed.swapaxes(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) · up x)."""

    def __init__(self, config):
        super().__init__()
        D, M = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, M, bias=False)
        self.up_proj = nn.Linear(D, M, bias=False)
        self.down_proj = nn.Linear(M, D, bias=False)

    def __call__(self, rows):
        return self.down_proj(nn.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, rows, attend):
        rows = rows + self.self_attn(self.input_layernorm(rows), attend)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class ContextCache:
    """Keys and values of the committed rows, a layer each. Grows by `DFlash.extend`; a draft leaves it as it was."""

    def __init__(self, layers):
        self.layers = [KVCache() for _ in range(layers)]

    @property
    def offset(self):
        """How many committed rows it holds: the position of the next anchor."""
        return self.layers[0].offset


class DFlash(nn.Module):
    """The drafter. `blocks` is its training form (many anchors at once), `extend` and `draft` its decoding form."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        rank = config.markov_rank
        self.markov_head = heads.MarkovHead(config.vocab_size, rank) if rank else None
        features = config.hidden_size + (rank or 0)
        self.confidence_head = heads.ConfidenceHead(features) if config.confidence_head else None
        self._rope = initialize_rope(
            config.head_dim, config.rope_theta, False, config.rope_scaling, config.max_position_embeddings
        )

    def sliding(self, index):
        """(window or None, causal) of layer `index`: sliding layers are causal in the block unless the config says."""
        slides = self.config.layer_types[index] == SLIDING
        causal = slides if self.config.is_causal is None else self.config.is_causal
        return (self.config.sliding_window if slides else None), causal

    def fuse(self, taps):
        """n taps of [R,T,D] -> context rows [R,T,D]: hidden_norm(fc(concatenation))."""
        return self.hidden_norm(self.fc(mx.concatenate(list(taps), axis=-1)))

    def embed(self, target, tokens):
        """Block rows [R,n,D] of token ids [R,n]: the target's embedding, at the checkpoint's scale where it has one."""
        rows, scale = target.embed(tokens), self.config.input_embedding_scale
        return rows if scale is None else rows * (scale / target.embedding_scale)

    def noise(self, target, pending, block_size):
        """Block rows [R,B,D] of pending tokens [R,1]: the anchor, then B−1 mask tokens."""
        masks = mx.full((pending.shape[0], block_size - 1), self.config.mask_token_id, pending.dtype)
        return self.embed(target, mx.concatenate([pending, masks], axis=1))

    def blocks(self, context, rows, positions, documents):
        """Run many blocks against shared context; differentiable. The training form.

        context [R,T,D] from `fuse`; rows [R,N,B,D] embedded blocks; positions [R,N] int, each block's anchor;
        documents [R,T] int. Visibility is `anchors.visibility`. Returns hidden [R,N,B,D] after the final norm.
        """
        R, N, B, D = rows.shape
        hidden = rows.reshape(R, N * B, D)
        see = functools.cache(
            lambda window, causal: anchors.visibility(positions, documents, B, window=window, causal=causal)
        )
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(context)
            seen = see(*self.sliding(index))
            attend = functools.partial(self._attend_blocks, (self._rope(keys), values), seen, positions)
            hidden = layer(hidden, attend)
        return self.norm(hidden).reshape(R, N, B, D)

    def _attend_blocks(self, context, seen, positions, queries, keys, values):
        """Attention of [R,H,N·B,d] block rows against the context's (keys, values) and their own blocks."""
        R, N = positions.shape
        queries, keys = (self._rotate_blocks(x, positions) for x in (queries, keys))
        values = values.reshape(R, values.shape[1], N, -1, values.shape[-1])
        mixed = block_attention.attend(queries, *context, keys, values, *seen, self.config.head_dim**-0.5)
        return mixed.flatten(2, 3)

    def _rotate_blocks(self, x, positions):
        """Rotate [R,H,N·B,d] so that slot j of block n stands at positions[n] + j; returns [R,H,N,B,d]."""
        R, N = positions.shape
        H, d = x.shape[1], x.shape[-1]
        by_block = x.reshape(R, H, N, -1, d).swapaxes(1, 2).reshape(R * N, H, -1, d)
        return self._rope(by_block, offset=positions.reshape(-1)).reshape(R, N, H, -1, d).swapaxes(1, 2)

    def score(self, target, hidden, previous, differentiable=False):
        """Logits [..., V] of hidden [..., D] whose preceding tokens [...] are known. The training form.

        differentiable: as for `Target.score`.
        """
        logits = target.score(hidden, differentiable=differentiable)
        return logits if self.markov_head is None else self.markov_head(logits, previous)

    def propose(self, target, hidden, pending, choose=heads.greedy):
        """Choose tokens for the hidden states [..., K, D] of slots 1..K after pending [...]: `heads.Drawn`.

        The decoding form: each slot's logits are `score`'s, once the tokens chosen are the preceding ones.
        """
        return heads.left_to_right(self.markov_head, target.score(hidden), pending, choose)

    def confidence(self, hidden, previous):
        """Scores [...] float32 of the confidence head, before the sigmoid; previous: the tokens [...] before."""
        return self.confidence_head(hidden, self.markov_head, previous)

    def make_cache(self):
        """An empty ContextCache for this drafter."""
        return ContextCache(len(self.layers))

    def extend(self, cache, context):
        """Append committed rows' context [1,n,D] to the cache, at the positions that follow what it holds."""
        for layer, held in zip(self.layers, cache.layers):
            keys, values = layer.self_attn.keys_values(context)
            held.update_and_fetch(self._rope(keys, offset=held.offset), values)

    def draft(self, cache, rows):
        """Run one block [1,B,D] (embedded anchor and masks) after the cached context; the cache is left as it was.

        Returns hidden [1,B,D]; `propose` makes the B−1 proposals of hidden[:, 1:].
        """
        offset = cache.offset
        for index, layer in enumerate(self.layers):
            held = cache.layers[index].keys_and_values() if offset else ()
            rows = layer(rows, functools.partial(self._attend_draft, held, offset, self.sliding(index)))
        return self.norm(rows)

    def _attend_draft(self, held, offset, sliding, queries, keys, values):
        """Attention of one block's [1,H,B,d] rows against the held context and themselves."""
        queries, keys = self._rope(queries, offset=offset), self._rope(keys, offset=offset)
        if held:
            keys, values = (mx.concatenate(pair, axis=2) for pair in zip(held, (keys, values)))
        mask = draft_mask(offset, queries.shape[2], *sliding)
        scale = self.config.head_dim**-0.5
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def draft_mask(offset, block_size, window, causal):
    """Boolean [B, offset+B] of one block's rows after `offset` context rows, or None where all is seen."""
    if window is None and not causal:
        return None
    slot, key = mx.arange(block_size)[:, None], mx.arange(offset + block_size)[None]
    context = key < offset
    seen = context & (offset + slot - key < window) if window else context
    return seen | (~context & (key <= offset + slot) if causal else ~context)


def split_heads(x, d):
    """[R,n,H·d] -> [R,H,n,d]."""
    return x.reshape(*x.shape[:2], -1, d).swapaxes(1, 2)


def initialise(drafter, target, seed):
    """Draw every matrix from N(0, 0.02), the residual outputs from N(0, 0.02/√(2N)); keyed by name. Norms are 1.

    Heads say nothing at first: the Markov head's W2 and the confidence head are 0.

    The final norm alone is set lower where the target's head is large, so that random hidden states score with a
    deviation of at most 1 and training starts near ln V (SmolLM2's tied head gives 13 and a first loss of 95:
    measured).
    """

    def drawn(name, value):
        if name.startswith(("markov_head.markov_w2", "confidence_head")):
            return mx.zeros_like(value)
        if value.ndim < 2:
            return mx.ones_like(value)
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = INIT_STD / math.sqrt(2 * len(drafter.layers)) if residual else INIT_STD
        return mx.random.normal(value.shape, key=rng.key(seed, f"init/{name}", 0)) * std

    drafter.update(tree_map_with_path(drawn, drafter.parameters()))
    rows = mx.random.normal((16, target.hidden_size), key=rng.key(seed, "init/head", 0))
    deviation = mx.std(target.score(rows.astype(getattr(mx, target.dtype))).astype(mx.float32)).item()
    drafter.norm.weight = drafter.norm.weight * min(1.0, 1 / deviation)
    return drafter


def parameter_count(drafter):
    """How many numbers the drafter trains."""
    return sum(value.size for _, value in tree_flatten(drafter.parameters()))


def describe(config):
    """One line for an opening card."""
    taps = json.dumps(list(config.target_layer_ids))
    kinds = "".join("s" if kind == SLIDING else "f" for kind in config.layer_types)
    markov = f", Markov rank {config.markov_rank}" if config.markov_rank else ""
    heads_named = markov + (", confidence" if config.confidence_head else "")
    return f"DFlash, {config.num_hidden_layers} layers ({kinds}), block {config.block_size}, taps {taps}{heads_named}"
