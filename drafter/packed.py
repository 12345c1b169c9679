"""Packed rows: several documents in one row, through mlx-lm's own masks, and none sees another.

R rows, T tokens, D hidden. Documents are numbered from 1 in each row; 0 is padding.
"""

import mlx.core as mx

MASKED = {"KVCache", "RotatingKVCache"}  # caches of layers that see what a mask lets them see; others carry a state
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
