"""Many blocks behind one reading of a text: each block starts where the target stood at its position.

R rows, T tokens, N blocks, B rows of a block, H query heads, G key/value heads, d head dimension, C channels of the
convolution, K its width. The target reads the text once. Its keys and values are shared by all blocks, which attend to
those before them; recurrent states are made at every block's position from what the layers wrote. All blocks then run
as one batch through the target's own layers, by caches that answer as a cache of the block's prefix would.
"""

import dataclasses
import functools
import types
from collections.abc import Callable

import mlx.core as mx

from drafter import anchors, packed
from drafter.hybrid import stock
from drafter.recurrent_cache import RecurrentCache
from kernels.block_attention import attend
from kernels.causal_conv import state_after
from kernels.errors import UserError
from kernels.gated_delta import states_at

ATTENTION = "scaled_dot_product_attention"  # the name by which mlx-lm's models attend


class Kept(packed.PackedCache):
    """An attention layer's keys and values [R,G,T,d] of a text being read."""

    def update_and_fetch(self, keys, values):
        """Keep what is written."""
        self.keys, self.values = keys, values
        return keys, values

    def behind(self, positions, documents, causal):
        """The cache of blocks [R,N]."""
        return SharedKeys(self.keys, self.values, positions, documents, causal)


@dataclasses.dataclass
class Written:
    """What a recurrent layer wrote while a text was read: the inputs of its rule, and its convolution's window."""

    k: mx.array = None  # [R,T,Hk,Dk]
    v: mx.array = None  # [R,T,Hv,Dv]
    g: mx.array = None  # [R,T,Hv] or [R,T,Hv,Dk]
    beta: mx.array = None  # [R,T,Hv]
    window: mx.array = None  # [R,K−1+T,C]

    def watch(self, *rows):
        """Take the rows of the one forward."""
        self.k, self.v, self.g, self.beta, self.window = rows

    def behind(self, positions, documents, causal):
        """The cache of blocks [R,N]: convolution state [R·N,K−1,C] and S [R·N,Hv,Dv,Dk]; `causal` is all there is."""
        T = self.v.shape[1]
        S = states_at(self.k, self.v, self.g, self.beta, positions)
        before, own = (mx.take_along_axis(documents, at, axis=1) for at in (mx.maximum(positions - 1, 0), positions))
        S = mx.where((before == own)[..., None, None, None], S, 0)  # where a document begins, nothing is before it
        conv = state_after(self.window, positions, self.window.shape[1] - T + 1, documents)
        entry = RecurrentCache(2)
        entry.cache = [value.flatten(0, 1) for value in (conv, S)]
        return entry


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A text read by the target: its hidden states, and what blocks behind any of its positions start from."""

    hidden: mx.array  # [R,T,D] after the final norm
    layers: tuple  # of Kept or Written
    documents: mx.array  # [R,T]

    def caches(self, positions, causal=True):
        """Caches for one batch of R·N blocks whose first rows stand at positions [R,N] (≥ 0, inside the text).

        A block sees the rows before its position that are of the same document as the text's row there. causal:
        whether its own rows see only those before them, or all.
        """
        return [layer.behind(positions, self.documents, causal) for layer in self.layers]


def read(target, tokens, documents):
    """Read packed rows: tokens and documents [R,T]. Returns Prefix.

    Raises UserError for a target that cannot take packed rows, or several of them, in one forward.
    """
    if target.rows_at_once and len(tokens) > 1:
        raise UserError(
            f"target {target.source}: its rows cannot be read together, so blocks cannot share them; use "
            "adapter.layout=suffix"
        )
    layers, caches = [], []
    for entry in packed.caches(target.make_cache(), documents):
        recurrent = isinstance(entry, RecurrentCache)
        layers.append(Written() if recurrent else Kept(documents))
        caches.append(entry if recurrent else layers[-1])
        if recurrent:
            entry.watcher = layers[-1].watch
    return Prefix(target.by_modules(tokens, caches).hidden, tuple(layers), documents)


@dataclasses.dataclass(frozen=True, eq=False)
class SharedKeys:
    """Stands in for the caches of N blocks a row over the keys and values [R,G,T,d] of one text."""

    keys: mx.array
    values: mx.array
    positions: mx.array  # [R,N] int
    documents: mx.array  # [R,T]
    causal: bool

    @property
    def offset(self):
        """Where each block's first row stands: [R·N]."""
        return self.positions.reshape(-1)

    def update_and_fetch(self, keys, values):
        """Nothing is kept: `attend` joins the block's own rows to the text's."""
        return keys, values

    def make_mask(self, N, return_array=False, window_size=None):
        """What rows of blocks of N rows see of the text and of their blocks, as `attend` takes it."""
        return anchors.visibility(self.positions, self.documents, N, window=window_size, causal=self.causal)

    def attend(self, queries, keys, values, scale, seen):
        """Attention of blocks' rows: queries [R·N,H,B,d], their own keys and values [R·N,G,B,d]."""
        R, N = self.positions.shape
        own = [x.reshape(R, N, *x.shape[1:]).swapaxes(1, 2) for x in (queries, keys, values)]
        return attend(own[0], self.keys, self.values, *own[1:], *seen, scale).swapaxes(1, 2).flatten(0, 1)


def let_blocks_in(backbone, source="target"):
    """Let the attention of a model tree's own modules ask a `SharedKeys` instead, where it is handed one.

    Each such module gets a subclass whose forward is its class's own code with that one name looked up here: no
    module's global is replaced. Returns the backbone; raises UserError where a model attends in some other way.
    """
    found = [module for module in backbone.modules() if attends(stock(module))]
    for module in found:
        module.__class__ = asking(stock(module))
    wanted = sum(any(name in layer for name in ("self_attn", "attention", "attn")) for layer in backbone.layers)
    if len(found) < max(1, wanted):
        raise UserError(f"target {source}: its attention cannot be shared by blocks; use adapter.layout=suffix")
    return backbone


def attends(base):
    """Whether a module's forward calls mlx-lm's attention by its name."""
    call = next((vars(kind)["__call__"] for kind in base.__mro__ if "__call__" in vars(kind)), None)
    return ATTENTION in getattr(getattr(call, "__code__", None), "co_names", ())


@functools.cache
def asking(base):
    """The subclass of an attention class whose cache may answer in place of mlx-lm's attention."""
    call = base.__call__
    names = call.__globals__ | {ATTENTION: through_cache(call.__globals__[ATTENTION])}
    own = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return type(base.__name__, (base,), {"__call__": own})


def through_cache(usual: Callable):
    """mlx-lm's attention function, but that a SharedKeys is asked first."""

    def attention(queries, keys, values, cache, scale, mask, **options):
        if isinstance(cache, SharedKeys):
            return cache.attend(queries, keys, values, scale, mask)
        return usual(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)

    return attention
