"""One row of each of many sequences at once, through any of mlx-lm's models: the same forward, attention made cheaper.

R sequences, H query heads, G key heads, N rows, L keys, d head dimension.

Instances of attention classes get a subclass for the length of a block, whose forward is the class's own but finds
another `scaled_dot_product_attention`; no class and no module of mlx-lm changes. Caches are lent in a shape that suits
the products: keys up to a whole multiple of ALIGNED, those beyond the end hidden by the mask.
"""

import contextlib
import functools
import types

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache

from kernels.block_attention import attend_sequences

NAME = base.scaled_dot_product_attention.__name__
ALIGNED = 64  # keys: products of other lengths take slow routes on CUDA


class Lent:
    """A BatchKVCache for one forward, which hands out its keys up to a multiple of ALIGNED."""

    def __init__(self, entry):
        self.entry = entry

    def __getattr__(self, name):
        return getattr(self.entry, name)

    def make_mask(self, N, **options):
        """The cache's own mask for N rows more [R,1,N,L], its columns padded with False to a multiple of ALIGNED."""
        mask = self.entry.make_mask(N, **options)
        return mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % ALIGNED)])

    def update_and_fetch(self, keys, values):
        """Add keys, values [R,G,N,d]; returns all there are, each [R,G,L,d] with L a multiple of ALIGNED."""
        self.entry.update_and_fetch(keys, values)
        length = -(-self.entry._idx // ALIGNED) * ALIGNED
        return tuple(padded(held[..., :length, :], length) for held in (self.entry.keys, self.entry.values))


def padded(held, length):
    """Keys or values [R,G,L,d] with zeros up to `length`, where their buffer ends before it."""
    short = length - held.shape[2]
    return mx.pad(held, [(0, 0), (0, 0), (0, short), (0, 0)]) if short else held


def lend(caches):
    """A model's caches for one forward of one row a sequence: BatchKVCaches lent, others as they are."""
    return [Lent(entry) if type(entry) is BatchKVCache else entry for entry in caches]


def attention(queries, keys, values, cache, scale, mask, sinks=None):
    """What takes the place of mlx-lm's `scaled_dot_product_attention`: the same, grouped where the cache is lent."""
    if isinstance(cache, Lent) and sinks is None:
        return attend_sequences(queries, keys, values, mask, scale)
    return base.scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def attention_modules(model):
    """The modules of a model that call mlx-lm's attention, under its own name, in their forward."""
    return [module for module in model.modules() if attends(type(module))]


def attends(kind):
    """Whether the forward of a module's class is a plain function that calls mlx-lm's attention."""
    call = kind.__call__
    plain = isinstance(call, types.FunctionType) and NAME in call.__code__.co_names
    return plain and call.__globals__.get(NAME) is base.scaled_dot_product_attention


@contextlib.contextmanager
def grouped(modules):
    """Let `attention_modules` take lent caches by groups of heads while the block runs."""
    kinds = [type(module) for module in modules]
    try:
        for module, kind in zip(modules, kinds):
            module.__class__ = regrouped(kind)
        yield
    finally:
        for module, kind in zip(modules, kinds):
            module.__class__ = kind


@functools.cache
def regrouped(kind):
    """A subclass whose forward is the class's own, but that it finds `attention` where that looks for mlx-lm's."""
    call = kind.__call__
    own = types.FunctionType(
        call.__code__, {**call.__globals__, NAME: attention}, call.__name__, call.__defaults__, call.__closure__
    )
    own.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": own})
