"""The drafter's training step in plain PyTorch: what the project's own is measured against, and checked against.

R rows, T tokens, N blocks, B block, D hidden, n taps, H query heads, G key/value heads, d head dimension, V vocabulary,
M supervised slots. PyTorch is no dependency: whoever imports this module has it. Written from the paper (DFlash, arXiv
2602.06036) and the released checkpoints' names, as a person would without a kernel of their own: `F.` functions, one
dense boolean mask over all keys, the head in chunks under automatic differentiation, AdamW's fused form on CUDA.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

DEVICES = {"cpu": "cpu", "cuda": "cuda", "metal": "mps"}  # by the name that `backend.describe` gives MLX's


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One batch, the frozen target's part done: tensors on the device, in the dtype it computes in."""

    taps: torch.Tensor  # [R,T,n·D]
    rows: torch.Tensor  # [R,N,B,D] embedded blocks
    positions: torch.Tensor  # [R,N] int64, each block's anchor
    documents: torch.Tensor  # [R,T] int64
    slots: torch.Tensor  # [M] int64: supervised slots as flat indices into R·N·B
    labels: torch.Tensor  # [M] int64
    weights: torch.Tensor  # [M] float32
    head: torch.Tensor  # [V,D] the target's head, frozen


def available(device):
    """Whether PyTorch has the device on which MLX runs, by `backend.describe`'s name of it."""
    return {"cpu": True, "cuda": torch.cuda.is_available(), "metal": torch.backends.mps.is_available()}[device]


class Step:
    """A drafter's float32 weights with AdamW's moments; `step` moves them once.

    weights: {name: float32 array} under the names of a checkpoint; config: a DFlash checkpoint's shape, with full
    attention; options: AdamW's; chunk: slots scored at a time; compiled: forward and loss through `torch.compile`.
    """

    def __init__(self, config, weights, options, *, device, dtype, chunk, compiled=False):
        self.config, self.options, self.dtype, self.chunk = config, options, getattr(torch, dtype), chunk
        self.device = torch.device(DEVICES[device])
        self.weights = {
            name: torch.tensor(value, dtype=torch.float32, device=self.device, requires_grad=True)
            for name, value in weights.items()
        }
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.loss = torch.compile(self.sums, dynamic=False) if compiled else self.sums

    def inputs(self, **arrays):
        """Inputs of NumPy arrays: whole numbers as int64, `weights` as float32, the others in the compute dtype."""
        kinds = dict.fromkeys(("positions", "documents", "slots", "labels"), torch.int64) | {"weights": torch.float32}
        put = {name: torch.tensor(value).to(self.device, kinds.get(name, self.dtype)) for name, value in arrays.items()}
        return Inputs(**put)

    def step(self, rate, inputs):
        """Take a step at a learning rate; returns the loss, a tensor that nothing has waited for."""
        self.optimizer.zero_grad(set_to_none=True)
        total, measure = self.loss(self.weights, inputs)
        loss = total / measure.clamp(min=1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.options.max_gradient_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return loss.detach()

    def synchronize(self):
        """Wait for all work on the device."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def sums(self, weights, inputs):
        """(Σ w·loss, Σ w) of the float32 master weights, which the forward casts."""
        weights = {name: value.to(self.dtype) for name, value in weights.items()}
        hidden = self.hidden(weights, inputs)[inputs.slots]
        total = torch.zeros((), device=self.device)
        for start in range(0, len(inputs.slots), self.chunk):
            part = slice(start, start + self.chunk)
            logits = (hidden[part] @ inputs.head.T).float()
            total = (
                total + (F.cross_entropy(logits, inputs.labels[part], reduction="none") * inputs.weights[part]).sum()
            )
        return total, inputs.weights.sum()

    def hidden(self, weights, inputs):
        """The final hidden state of every block row: [R·N·B, D]."""
        R, N, B, D = inputs.rows.shape
        context = self.norm(F.linear(inputs.taps, weights["fc.weight"]), weights["hidden_norm.weight"])
        rows = inputs.rows.reshape(R, N * B, D)
        own = (inputs.positions[:, :, None] + torch.arange(B, device=self.device)).reshape(R, N * B)
        places = torch.arange(context.shape[1], device=self.device).expand(R, -1)
        turns = self.turns(own), self.turns(places)
        seen = mask(inputs.positions, inputs.documents, B)
        for index in range(self.config.num_hidden_layers):
            rows = self.layer(f"layers.{index}.", weights, context, rows, turns, seen)
        return self.norm(rows, weights["norm.weight"]).reshape(R * N * B, D)

    def layer(self, prefix, weights, context, rows, turns, seen):
        """One pre-norm decoder layer over rows [R,N·B,D]; context [R,T,D] enters through its own k and v."""
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        normed = self.norm(rows, own["input_layernorm.weight"])
        rows = rows + self.attend(own, context, normed, turns, seen)
        normed = self.norm(rows, own["post_attention_layernorm.weight"])
        gate, up = (F.linear(normed, own[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return rows + F.linear(F.silu(gate) * up, own["mlp.down_proj.weight"])

    def attend(self, own, context, rows, turns, seen):
        """Attention of block rows over context and all blocks' rows, of which the mask leaves each its own."""
        d, share = self.config.head_dim, self.config.num_attention_heads // self.config.num_key_value_heads
        here, there = turns

        def heads(values, name):
            return F.linear(values, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, d)).transpose(1, 2)

        queries = rotate(self.norm(heads(rows, "q"), own["self_attn.q_norm.weight"]), here)
        scale = own["self_attn.k_norm.weight"]
        keys = [rotate(self.norm(heads(x, "k"), scale), turn) for x, turn in ((context, there), (rows, here))]
        values = [heads(context, "v"), heads(rows, "v")]
        # Spelt out rather than `enable_gqa`, with which SDPA has no fused kernel for a mask.
        keys, values = (torch.cat(pair, dim=2).repeat_interleave(share, dim=1) for pair in (keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        return F.linear(mixed.transpose(1, 2).flatten(2), own["self_attn.o_proj.weight"])

    def norm(self, values, scale):
        """RMSNorm over the last dimension."""
        return F.rms_norm(values, scale.shape, scale, self.config.rms_norm_eps)

    def turns(self, places):
        """(cos, sin) [R,1,n,d] of places [R,n], of halves that turn together: what `rotate` takes."""
        d = self.config.head_dim
        rates = self.config.rope_theta ** (-torch.arange(0, d, 2, device=self.device, dtype=torch.float32) / d)
        angles = (places[..., None] * rates).repeat(1, 1, 2)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x, turn):
    """Rotary embedding of x [R,H,n,d] by (cos, sin)."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def mask(positions, documents, B):
    """What block rows see of T context rows and N·B block rows: bool [R,1,N·B,T+N·B].

    The context strictly before the block's anchor, in the anchor's document, and the whole of the own block.
    """
    R, N = positions.shape
    there = torch.arange(documents.shape[1], device=documents.device)
    own = documents.gather(1, positions)[:, :, None]
    context = (there < positions[:, :, None]) & (documents[:, None] == own)  # [R,N,T]
    block = torch.arange(N * B, device=documents.device) // B
    same = (block[:, None] == block).expand(R, N * B, N * B)
    return torch.cat((context.repeat_interleave(B, dim=1), same), dim=-1)[:, None]


def decay(B, gamma):
    """exp(−(k−1)/γ) of slots 1…B−1, as a list."""
    return [math.exp(-(k - 1) / gamma) for k in range(1, B)]
