"""How a DFlash drafter drafts: by its own modules, or on a GPU as two compiled functions of few launches.

n committed rows, B block, M rows padded to a width that repeats, D hidden, N layers, H query heads, G key/value heads,
d head dimension, L rows of a buffer. A cycle gives the drafter the taps of the rows that were committed (`extend`), and
asks for the hidden states of a block after the pending token (`draft`). The routes may differ where two sums in another
order do, which changes what is accepted and never what is written.
"""

import functools
import pathlib

import mlx.core as mx
import mlx.nn as nn

from drafter import dflash, layers, steps, trial
from drafter.layers import KERNELS
from kernels import block_attention, selfcheck, small_matmul, verdicts
from kernels.small_matmul import MOST_ROWS

NAME = "drafting.cycle"  # of the verdict on the compiled route
verdicts.register("drafting", pathlib.Path(__file__), pathlib.Path(layers.__file__), pathlib.Path(dflash.__file__))
COMMITTED = 5  # rows of a cycle that is measured
CONTEXT = 64  # rows before it


class ByModules:
    """Drafting by the drafter's own modules."""

    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter

    def make_cache(self):
        """An empty context."""
        return self.drafter.make_cache()

    def extend(self, cache, taps):
        """Append n committed rows, given their taps of [1,n,D]; nothing is evaluated."""
        self.drafter.extend(cache, self.drafter.fuse(taps))

    def draft(self, cache, pending, B):
        """Hidden states [1,B,D] of a block that begins with the pending token [1,1]; not evaluated."""
        return self.drafter.draft(cache, self.drafter.noise(self.target, pending, B))

    def state(self, cache):
        """The context's arrays."""
        return [layer.state for layer in cache.layers]


class Context:
    """Keys and values of committed rows, [1,N·G,L,d]: every layer's side by side, for one write a cycle."""

    def __init__(self, keys, values):
        self.keys, self.values, self.offset = keys, values, 0

    def append(self, keys, values, n):
        """Add the first n of the rows [1,N·G,M,d]; the buffers grow in steps, so that shapes repeat."""
        end, held = self.offset + n, self.keys.shape[2]
        if held < end:
            missing = -(-end // steps.GROWTH) * steps.GROWTH - held
            more = mx.zeros((1, keys.shape[1], missing, keys.shape[3]), keys.dtype)
            self.keys, self.values = (mx.concatenate([old, more], axis=2) for old in (self.keys, self.values))
        self.keys[:, :, self.offset : end], self.values[:, :, self.offset : end] = keys[:, :, :n], values[:, :, :n]
        self.offset = end


class Compiled:
    """Drafting by kernels. Weights are read here: after one is replaced, make another."""

    def __init__(self, target, drafter, route=KERNELS):
        self.target, self.drafter, self.route, config = target, drafter, route, drafter.config
        self.heads, self.dim = (config.num_attention_heads, config.num_key_value_heads), config.head_dim
        self.eps = config.rms_norm_eps
        mixers = [layer.self_attn for layer in drafter.layers]
        joint = [mixer.k_proj.weight for mixer in mixers] + [mixer.v_proj.weight for mixer in mixers]
        self.joint = mx.concatenate(joint)  # [2·N·G·d, D]: keys of every layer, then values
        norms = mx.stack([mixer.k_norm.weight for mixer in mixers])
        self.key_norms = mx.repeat(norms, self.heads[1], axis=0)[:, None]  # [N·G,1,d]
        self.frequencies = layers.frequencies(drafter._rope)
        mx.eval(self.joint, self.key_norms)
        self.context = mx.compile(self.context_rows)
        self.blocks = {}  # B -> the compiled draft

    def make_cache(self):
        """An empty context."""
        shape = (1, len(self.drafter.layers) * self.heads[1], steps.GROWTH, self.dim)
        return Context(*(mx.zeros(shape, self.joint.dtype) for _ in range(2)))

    def extend(self, cache, taps):
        """Append n committed rows, given their taps of [1,n,D]; nothing is evaluated."""
        n, offset = taps[0].shape[1], mx.array(cache.offset)
        few = n <= MOST_ROWS
        taps = [steps.pad_rows(tap, steps.width(n)) for tap in taps] if few else taps
        cache.append(*(self.context if few else self.many_rows)(tuple(taps), offset), n)

    def draft(self, cache, pending, B):
        """Hidden states [1,B,D] of a block that begins with the pending token [1,1]; not evaluated."""
        if B not in self.blocks:
            self.blocks[B] = mx.compile(functools.partial(self.block, B))
        part = block_attention.keys_of_a_part(cache.offset)
        place = mx.array([cache.offset, part + steps.width(B)], mx.int32)
        return self.blocks[B](pending, place, cache.keys, cache.values)

    def state(self, cache):
        """The context's arrays."""
        return [cache.keys, cache.values]

    def context_rows(self, taps, offset):
        """Keys and values [1,N·G,M,d] of M rows of context by few launches; offset: the first one's position."""
        rows = self.route.product(mx.concatenate(taps, axis=-1), self.drafter.fc.weight)
        return self.keys_values(self.route.product(self.normed(rows, self.drafter.hidden_norm), self.joint), offset)

    def many_rows(self, taps, offset):
        """The same for any number of rows, as a prompt has, by MLX's own products."""
        return self.keys_values(self.drafter.fuse(taps) @ self.joint.T, offset)

    def keys_values(self, rows, offset):
        """Keys (normed, rotated) and values [1,N·G,M,d] of projected rows [1,M,2·N·G·d]."""
        keys, values = mx.split(rows.reshape(1, rows.shape[1], -1, self.dim).swapaxes(1, 2), 2, axis=1)
        keys = mx.fast.rms_norm(keys, None, self.eps) * self.key_norms
        return self.drafter._rope(keys, offset=offset), values

    def block(self, B, pending, place, keys, values):
        """`draft` in one go, over every layer."""
        place, G = steps.locate(place), self.heads[1]
        rows = steps.pad_rows(self.drafter.noise(self.target, pending, B), steps.width(B))
        for index, layer in enumerate(self.drafter.layers):
            held = [buffer[:, index * G : (index + 1) * G] for buffer in (keys, values)]
            rows = self.layer(layer, rows, place, held, B)
        return self.normed(rows, self.drafter.norm)[:, :B]

    def layer(self, layer, rows, place, held, B):
        """One decoder layer over the block's rows [1,M,D], of which B count."""
        mixer, mlp, route = layer.self_attn, layer.mlp, self.route
        projections = (mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight)
        q, k, v = route.product(self.normed(rows, layer.input_layernorm), *projections)
        norms, options = (mixer.q_norm.weight, mixer.k_norm.weight), {"heads": self.heads, "eps": self.eps}
        q, k, v = route.rotate_heads(q, k, v, norms, self.frequencies, place.offset, **options)
        answer = route.attend_rows(q, *held, place.offset, place.part, k, v, self.dim**-0.5, whole=B)
        rows = route.product(answer, mixer.o_proj.weight, residual=rows)
        normed = self.normed(rows, layer.post_attention_layernorm)
        gated = route.gated_product(normed, mlp.gate_proj.weight, mlp.up_proj.weight)
        return route.product(gated, mlp.down_proj.weight, residual=rows)

    def normed(self, rows, norm):
        """Rows through an RMS norm."""
        return mx.fast.rms_norm(rows, norm.weight, self.eps)


def fastest(target, drafter):
    """The route by which this drafter drafts on this machine; what is not known of it yet is measured, once."""
    if not verdicts.on_gpu() or not known(drafter):
        return ByModules(target, drafter)
    selfcheck.ensure(dims(drafter))
    if not all(verdicts.sound(*each) for each in needed(drafter)):
        return ByModules(target, drafter)
    compiled, name = Compiled(target, drafter), case(drafter)
    if verdicts.chosen() is None and verdicts.state(NAME, name) is None:
        trial.settle(NAME, name, compiled.joint.dtype, lambda: measure(target, drafter, compiled))
    return compiled if verdicts.allowed(NAME, name) else ByModules(target, drafter)


def known(drafter):
    """Whether the compiled route knows every part of a drafter: it sees whole blocks, and sizes fit the kernels."""
    config, dtype = drafter.config, drafter.norm.weight.dtype
    whole = all(drafter.sliding(index) == (None, False) for index in range(len(drafter.layers)))
    heads = mx.zeros((1, 1, 1, config.head_dim), dtype)
    served = all(small_matmul.serves(mx.zeros((1, each.shape[1]), dtype), each) for each in weights(drafter))
    rotated = type(drafter._rope) is nn.RoPE and config.block_size <= MOST_ROWS
    return whole and rotated and served and block_attention.serves_rows(heads, heads)


def weights(drafter):
    """Every matrix of a drafter."""
    yield drafter.fc.weight
    for layer in drafter.layers:
        mixer, mlp = layer.self_attn, layer.mlp
        yield from (each.weight for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj))
        yield from (each.weight for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def dims(drafter):
    """The dims (see `verdicts`) of the compiled route's kernels."""
    config, found = drafter.config, {tuple(each.shape) for each in weights(drafter)}
    joint = 2 * len(drafter.layers) * config.num_key_value_heads * config.head_dim, config.hidden_size
    heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
    dtype = str(drafter.norm.weight.dtype).removeprefix("mlx.core.")
    return {
        "dtype": dtype,
        "dense": sorted(map(list, found | {joint})),
        "quantised": [],
        "attention": [heads],
        "delta": [],
    }


def needed(drafter):
    """The (kernel, case) of every kernel that the compiled route calls."""
    return {(check.kernel, check.case) for check in selfcheck.checks_for(dims(drafter))}


def case(drafter):
    """What a verdict on the compiled route holds for."""
    config, dtype = drafter.config, str(drafter.norm.weight.dtype).removeprefix("mlx.core.")
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads} heads of {config.head_dim}"
    return f"{dtype} {len(drafter.layers)} layers of {config.hidden_size}x{config.intermediate_size}, {heads}"


def measure(target, drafter, compiled):
    """(the distance of the hidden states, seconds of a cycle by the compiled route, and by modules), medians."""
    routes = compiled, ByModules(target, drafter)
    taps, D, dtype = len(drafter.config.target_layer_ids), drafter.config.hidden_size, drafter.norm.weight.dtype
    caches = [route.make_cache() for route in routes]

    def drawn(n, seed):
        return [
            mx.random.normal((1, n, D), key=key).astype(dtype) for key in mx.random.split(mx.random.key(seed), taps)
        ]

    def cycle(place, n, seed):
        route, cache = routes[place], caches[place]
        route.extend(cache, drawn(n, seed))
        hidden = route.draft(cache, mx.array([[seed]], mx.uint32), drafter.config.block_size)
        mx.eval(hidden, route.state(cache))
        return hidden

    first = [cycle(place, CONTEXT, 0) for place in (0, 1)]
    return trial.distance(*first), *trial.in_turns([functools.partial(cycle, place, COMMITTED) for place in (0, 1)])
