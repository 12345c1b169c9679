"""Packed rows: several documents in one row, and none sees another: masks keep keys apart, resets keep states apart.

R rows, T tokens, D hidden. Documents are numbered from 1 in each row; 0 is padding.
"""

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from drafter.recurrent_cache import RecurrentCache

MASKED = (KVCache, RotatingKVCache)  # caches of layers that see what a mask lets them see
TOLERANCE = 1e-2  # of the largest hidden value; masked keys weigh exactly 0, a leak moves values by tenths (assumed)


class PackedCache:
    """Stands in for an empty cache so that mlx-lm's own masks respect document boundaries in packed rows."""

    offset = 0

    def __init__(self, documents):
        self.documents = documents

    def update_and_fetch(self, keys, values):
        """Nothing is kept: the row is seen whole."""
        return keys, values

    def make_mask(self, N, return_array=False, window_size=None):
        """Boolean [R,1,N,N]: key ≤ query, same document, and within the window where there is one."""
        query, key = mx.arange(N)[:, None], mx.arange(N)[None]
        seen = key <= query
        if window_size:
            seen = seen & (query < key + window_size)
        return (seen & (self.documents[:, :, None] == self.documents[:, None, :]))[:, None]


def foreign(empty):
    """Names of the kinds among a target's new caches whose layers may carry a state from document to document."""
    return sorted({kind.__name__ for kind in set(map(type, empty)) - {*MASKED, RecurrentCache}})


def caches(empty, documents):
    """What to feed packed rows of documents [R,T] with, in place of a target's new caches."""
    return [cache_for(entry, documents) for entry in empty]


def cache_for(entry, documents):
    """One cache of packed rows: a recurrent layer's own, told where its state is emptied; else a PackedCache."""
    if not isinstance(entry, RecurrentCache):
        return PackedCache(documents)
    entry.documents = documents
    return entry


def separates(forward, rows):
    """Whether other tokens in the first document of each of `rows` (1 or 2) rows leave its second as it was.

    forward(tokens [R,T], documents [R,T]) -> hidden [R,T,D]. The boundaries of the two rows differ, so that a model
    which applies a row's mask to another row, or to heads, is found out; so is one that makes masks of its own.
    """
    documents = mx.array([[1] * 3 + [2] * 6, [1] * 5 + [2] * 4][:rows])
    tokens = mx.array([[1, 2, 3, 5, 8, 1, 3, 2, 5]] * rows)
    try:
        first = forward(tokens, documents)
        second = forward(mx.where(documents == 1, tokens + 1, tokens), documents)
    except (ValueError, TypeError, AttributeError):  # the mask does not fit, or the model asks more of its cache
        return False
    moved = mx.where((documents == 2)[..., None], mx.abs(first - second), 0)
    return (moved.max() <= TOLERANCE * mx.abs(first).max()).item()
