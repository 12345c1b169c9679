"""The token-conditional LoRA drafter: the target itself, with a low-rank update on the rows that hold noise.

R rows, T tokens, B block, D hidden, r rank. A projection W of the target becomes x W + gate · (alpha/r) (x A) B, the
gate being 1 on noise rows and 0 on every other. (LoRA: arXiv 2106.09685; gated: arXiv 2507.11851.)

The target is never changed. A forward whose gate is on anywhere runs through a *view*: a copy of the target's module
tree that shares every array, in which the adapted projections know which rows they update. A view belongs to one gate,
so the gate travels with the forward: two forwards may be nested, or run in two threads, and no state says which is
which. A gate that is off everywhere is the target's own forward, compiled step included.
"""

import contextlib
import copy
import dataclasses
import itertools

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from drafter import rng, shared_prefix
from kernels.errors import UserError

KIND = "gated_lora"
GROUPS = {  # what `targets` may name: projections of a decoder layer
    "attention": tuple(f"self_attn.{name}_proj" for name in "qkvo"),
    "mlp": tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "delta": tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")),
    "delta_gates": tuple(f"linear_attn.in_proj_{name}" for name in ("a", "b", "ba")),
}
INIT_STD = 0.01  # of A, as the published adapter's; B is 0
ALPHA = 16  # times the rank, where an adapter does not say: the published one's 256 at rank 16
BLOCK_SIZE = 4  # of an adapter that does not say: the published one's first
NOISES = ("random", "mask")


@dataclasses.dataclass(frozen=True)
class GatedLoraConfig:
    """An adapter's shape, and what its noise rows hold.

    targets      names of GROUPS, or of projections such as self_attn.q_proj
    noise        random: uniform ids in [1, noise_limit); mask: the mask token
    causal       whether a noise row sees only the noise before it, or its whole block (pure-attention targets)
    fingerprint  of the target it was trained for, None where that is not known
    """

    rank: int
    alpha: float
    block_size: int
    targets: tuple
    mask_token_id: int
    noise_limit: int
    noise: str = "random"
    causal: bool = True
    fingerprint: str | None = None

    def __post_init__(self):
        """Refuse what cannot draft."""
        checks = [
            (self.rank >= 1, f"rank is {self.rank}; expected at least 1"),
            (self.alpha > 0, f"alpha is {self.alpha}; expected above 0"),
            (self.block_size >= 1, f"block_size is {self.block_size}; expected at least 1"),
            (self.noise in NOISES, f"noise is {self.noise!r}; expected {' or '.join(NOISES)}"),
            (self.noise_limit > 1, f"noise_limit is {self.noise_limit}; expected above 1: ids are drawn from 1 on"),
        ]
        for holds, what in checks:
            if not holds:
                raise UserError(f"gated LoRA: {what}; mend its config.json or the adapter options")

    @staticmethod
    def from_json(config):
        """Read what `to_json` made."""
        names = {field.name for field in dataclasses.fields(GatedLoraConfig)}
        found = {name: value for name, value in config.items() if name in names}
        return GatedLoraConfig(**found | {"targets": tuple(config["targets"])})

    def to_json(self):
        """A checkpoint's config.json (dict)."""
        return {"kind": KIND} | dataclasses.asdict(self)


def config_for(target, options, block_size, mask_token_id=None):
    """The GatedLoraConfig of an adapter for `target`; options: a `config.AdapterConfig`."""
    mask = target.spare_id()[0] if mask_token_id is None else mask_token_id
    return GatedLoraConfig(
        rank=options.rank,
        alpha=ALPHA * options.rank if options.alpha is None else options.alpha,
        block_size=block_size,
        targets=tuple(options.targets),
        mask_token_id=mask,
        noise_limit=noise_limit(target, mask),
        noise=options.noise,
        causal=options.causal,
        fingerprint=target.fingerprint,
    )


def noise_limit(target, mask_token_id):
    """Where random noise ids end: at the mask token where that lies past the text's ids, else at the vocabulary's end.

    The published recipe draws from [1, mask_id), its mask id being behind all text; a spare id among the first few
    would leave nothing to draw from.
    """
    return mask_token_id if mask_token_id > target.vocab_size // 2 else target.vocab_size


class Factors(nn.Module):
    """One projection's low-rank factors: lora_a [inputs,r], lora_b [r,outputs]."""

    def __init__(self, inputs, rank, outputs):
        super().__init__()
        self.lora_a, self.lora_b = mx.zeros((inputs, rank)), mx.zeros((rank, outputs))


@dataclasses.dataclass(frozen=True, eq=False)
class GatedLinear:
    """A projection of a view: the target's own, plus the update on the rows whose gate is on.

    runs  ((first row, whether on), …): neighbouring rows of one gate; the last run goes on to the end
    """

    base: nn.Module
    factors: Factors
    scale: float
    runs: tuple

    def __call__(self, x):
        """[R,T,inputs] -> [R,T,outputs]; rows gated off are the base's own bits and cost nothing more."""
        y = self.base(x)
        ends = [start for start, _ in self.runs[1:]] + [x.shape[1]]
        parts = []
        for (start, on), end in zip(self.runs, ends, strict=True):
            part = y[:, start:end]
            parts.append(part + self.update(x[:, start:end], y.dtype) if on else part)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def update(self, x, dtype):
        """(alpha/r) (x A) B."""
        return (((x @ self.factors.lora_a) @ self.factors.lora_b) * self.scale).astype(dtype)


class GatedLora(nn.Module):
    """An adapter on one target. Parameters are named by the target's module paths, then .lora_a and .lora_b.

    Its heads are none: block logits are the target's own head's.
    """

    markov_head = confidence_head = None

    def __init__(self, target, config):
        super().__init__()
        self.config = config
        object.__setattr__(self, "target", target)  # a module's own fields would be taken for parts of it
        object.__setattr__(self, "views", {})
        if not config.causal and any(type(entry) is not KVCache for entry in target.make_cache()):
            raise UserError(
                f"target {target.source}: some of its layers keep more than keys and values, so rows of a block cannot"
                " see those after them; use adapter.causal=true"
            )
        for name, (inputs, outputs) in adapted(target.model, config.targets).items():
            self[name] = Factors(inputs, config.rank, outputs)

    def load_weights(self, weights, strict=True):
        """Take [(name, array)]: names hold dots of their own, so MLX's way of nesting them does not apply."""
        for name, value in weights:
            stem, _, factor = name.rpartition(".")
            self[stem][factor] = value
        return self

    def forward(self, tokens, gate, cache=None, differentiable=False):
        """Run the target on tokens [R,T], adapted in the rows where `gate`, T booleans, is true: hidden [R,T,D].

        differentiable: whether gradients by the factors are wanted; the caches are then the caller's own kinds.
        Raises ValueError for a gate of another length.
        """
        gate = tuple(map(bool, gate))
        if len(gate) != tokens.shape[1]:
            raise ValueError(f"a gate of {len(gate)} for {tokens.shape[1]} rows")
        if not (any(gate) or differentiable):
            return self.target.forward(tokens, cache).hidden
        return self.view(runs_of(gate), differentiable)(tokens, cache=cache)

    def view(self, runs, differentiable=False):
        """The backbone whose adapted projections are on in `runs`; made once for each."""
        key = runs, differentiable
        if key not in self.views:
            scale = self.config.alpha / self.config.rank
            modules = dict(self.target.model.named_modules())
            changes = {name: GatedLinear(modules[name], self[name], scale, runs) for name in self}
            twin = twin_of(self.target.backbone, path_of(self.target), changes)
            self.views[key] = twin.train() if differentiable else twin
        return self.views[key]

    def blocks(self, prefix, positions, tokens):
        """Run blocks of noise rows [R,N,n] that begin at positions [R,N] of a `shared_prefix.Prefix`; differentiable.

        Every row is adapted: the pending row before them is the target's own, and part of the prefix. Returns hidden
        [R,N,n,D] after the final norm.
        """
        caches = prefix.caches(positions, self.config.causal)
        hidden = self.sharing()(tokens.flatten(0, 1), cache=caches)
        return hidden.reshape(*tokens.shape, -1)

    def sharing(self):
        """The view whose every row is adapted and whose attention many blocks may share."""
        if "sharing" not in self.views:
            view = self.view(((0, True),), differentiable=True)
            self.views["sharing"] = shared_prefix.let_blocks_in(view, self.target.source)
        return self.views["sharing"]

    def draft(self, tokens, cache, gate=None):
        """One draft pass over [pending, noise…] [R,B] behind the caches, which it feeds: hidden [R,B,D].

        gate: whether each row is adapted; None: all but the pending row.
        """
        gate = (False,) + (True,) * (tokens.shape[1] - 1) if gate is None else gate
        with contextlib.nullcontext() if self.config.causal else whole_block(cache):
            return self.forward(tokens, gate, cache)

    def noise(self, shape, key):
        """Token ids of noise rows, uint32; key: of mx.random."""
        if self.config.noise == "mask":
            return mx.full(shape, self.config.mask_token_id, mx.uint32)
        return mx.random.randint(1, self.config.noise_limit, shape, dtype=mx.uint32, key=key)

    def score(self, target, hidden, previous=None, differentiable=False):
        """Logits [..., V] of hidden [..., D] by the target's head."""
        return target.score(hidden, differentiable=differentiable)


def runs_of(gate):
    """((first row, whether on), …) of a gate [T]."""
    changes = [0, *(t for t, pair in enumerate(itertools.pairwise(gate), 1) if pair[0] != pair[1])]
    return tuple((start, gate[start]) for start in changes)


def twin_of(module, path, changes):
    """A copy of a module tree that shares its arrays; modules at the paths that `changes` names are those instead."""
    twin = copy.copy(module)
    for name, value in module.items():
        at = f"{path}.{name}"
        if at in changes:
            twin[name] = changes[at]
        elif isinstance(value, nn.Module):
            twin[name] = twin_of(value, at, changes)
        elif isinstance(value, list):
            twin[name] = [twin_of(one, f"{at}.{i}", changes) if isinstance(one, nn.Module) else one
                          for i, one in enumerate(value)]  # fmt: skip
    return twin


def path_of(target):
    """The dotted path of a target's backbone in its model."""
    return next(name for name, module in target.model.named_modules() if module is target.backbone)


@contextlib.contextmanager
def whole_block(cache):
    """Let rows after the first of the block about to be fed see all of it; the first, the pending row, sees itself."""

    def mask_for(entry):
        def make_mask(N, return_array=False, window_size=None):
            row, key = mx.arange(N)[:, None], mx.arange(entry.offset + N)[None]
            return (key <= entry.offset) | (row > 0)

        return make_mask

    try:
        for entry in cache:
            entry.make_mask = mask_for(entry)
        yield
    finally:
        for entry in cache:
            vars(entry).pop("make_mask", None)


def adapted(model, targets):
    """{module path: (inputs, outputs)} of the linear layers of a model that `targets` names. Raises UserError."""
    leaves = tuple(leaf for target in targets for leaf in GROUPS.get(target, (target,)))
    found = {
        name: size_of(module)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.QuantizedLinear) and name.endswith(tuple(f".{leaf}" for leaf in leaves))
    }
    for target in targets:
        if not any(name.endswith(GROUPS.get(target, (target,))) for name in found):
            raise UserError(
                f"adapter.targets: the target has no linear layer {target!r}; expected some of {', '.join(GROUPS)}, or"
                " the end of a module's path, such as self_attn.q_proj"
            )
    return dict(sorted(found.items()))


def size_of(linear):
    """(inputs, outputs) of a linear layer, quantised or not."""
    outputs, inputs = linear.weight.shape
    return (inputs * 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else inputs), outputs


def initialise(drafter, seed):
    """Draw every A from N(0, 0.01), keyed by name; every B is 0, so that an untrained adapter changes nothing."""
    for name in drafter:
        shape = drafter[name].lora_a.shape
        drafter[name].lora_a = INIT_STD * mx.random.normal(shape, key=rng.key(seed, f"init/{name}", 0))
        drafter[name].lora_b = mx.zeros_like(drafter[name].lora_b)
    mx.eval(drafter.parameters())
    return drafter


def inferred(shapes, target, alpha=None):
    """The GatedLoraConfig of a bare adapter, {tensor name: shape}: rank and projections are read off its tensors.

    alpha: None for 16 times the rank. Raises UserError where the tensors are no adapter's.
    """
    ranks = {shape[-1 if name.endswith(".lora_a") else 0] for name, shape in shapes.items()}
    others = sorted(name for name, shape in shapes.items()
                    if len(shape) != 2 or not name.endswith((".lora_a", ".lora_b")))  # fmt: skip
    if others or len(ranks) != 1:
        what = f"tensor {others[0]!r}" if others else f"ranks {sorted(ranks)}"
        raise UserError(f"adapter: {what}; expected pairs of .lora_a [inputs,r] and .lora_b [r,outputs] of one rank r")
    leaves = {".".join(name.split(".")[-3:-1]) for name in shapes}
    mask = target.spare_id()[0]
    rank = ranks.pop()
    return GatedLoraConfig(
        rank=rank,
        alpha=ALPHA * rank if alpha is None else alpha,
        block_size=BLOCK_SIZE,
        targets=tuple(sorted(leaves)),
        mask_token_id=mask,
        noise_limit=noise_limit(target, mask),
    )


def describe(config):
    """One line for an opening card."""
    sight = "causal" if config.causal else "bidirectional"
    where = ", ".join(config.targets)
    return f"gated LoRA, rank {config.rank}, alpha {config.alpha:g}, block {config.block_size} ({sight}), on {where}"
