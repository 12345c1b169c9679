"""begin … commit: every cache of a target advances by exactly the committed rows.

H heads, L held rows, d head dimension. A verify feeds more rows than the target will keep. `begin(rows)` notes where
each cache stands, the caller feeds the rows, `commit(n)` leaves what feeding exactly the first n would have left:

- key/value and quantised caches: the offset goes back; nothing is copied.
- concatenating caches: keys and values are sliced (mlx-lm's own `trim` moves the offset alone and leaves the rows in).
- rotating caches: the overwritten slots come back and the n rows are written again, as keys and values.
- recurrent states: state and convolution state go back by reference and the tape of the n rows is replayed.
- a list of caches: each by its own kind.
- anything else: a snapshot comes back and the target re-runs the n rows. Correct, slow, and announced once.

An mx.array is a name for a value that `a[...] = x` moves to another value, for *every* holder of that Python object.
So a snapshot holds a new array of the same value (`copy`): no bytes move unless the original is then written to.
"""

import contextlib
import copy
import functools
import warnings

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from drafter.recurrent_cache import RecurrentCache


class TransactionError(RuntimeError):
    """begin and commit were called out of order, or the rows fed are not the rows announced."""


class Trimmed:
    """A cache whose offset alone says how many rows it holds."""

    def __init__(self, cache):
        self.cache, self.start = cache, cache.offset

    def fed(self):
        """Rows fed since the transaction began."""
        return self.cache.offset - self.start

    def keep(self, rows, n):
        """Leave the first n of the rows fed."""
        self.cache.offset = self.start + n


class Sliced(Trimmed):
    """A cache that holds exactly its rows, [R,H,L,d], and appends by making new arrays."""

    def __init__(self, cache):
        super().__init__(cache)
        self.before = cache.keys, cache.values

    def keep(self, rows, n):
        """Leave the first n of the rows fed; none is the arrays held before, or None where there were none."""
        super().keep(rows, n)
        end = self.start + n
        kept = (self.cache.keys[..., :end, :], self.cache.values[..., :end, :]) if n else self.before
        self.cache.keys, self.cache.values = kept


class Rewritten(Trimmed):
    """A rotating cache: restored, then given the kept rows' keys and values again.

    Where it pins its first `keep` rows, mlx-lm's mask for several rows hides pinned rows from all but the first of
    them; while the transaction is open the cache answers with the mask of rows fed one at a time.
    """

    def __init__(self, cache):
        super().__init__(cache)
        self.before = snapshot(cache)
        pin(cache)

    def keep(self, rows, n):
        """Leave the first n of the rows fed."""
        tail = self._tail(rows) if 0 < n < rows else None
        unpin(self.cache)
        if n == rows:
            return
        restore(self.cache, self.before)
        if tail:
            self.cache.update_and_fetch(*(value[..., :n, :] for value in tail))

    def _tail(self, rows):
        """Keys and values of the rows fed, in order; remembered, for a commit may be repeated with fewer."""
        if not hasattr(self, "tail"):
            ordered = [self.cache._temporal_order(value) for value in (self.cache.keys, self.cache.values)]
            if ordered[0].shape[2] - min(self.cache.keep, self.start) < rows:
                raise TransactionError(f"{rows} rows were fed piecewise through a window of {self.cache.max_size}")
            self.tail = [value[..., -rows:, :] for value in ordered]
        return self.tail


class Replayed:
    """A recurrent state, which records its rows' tape from here to the first `keep`."""

    def __init__(self, cache):
        self.cache = cache
        cache.arm()

    def fed(self):
        """Rows fed since the transaction began."""
        return self.cache.rows

    def keep(self, rows, n):
        """Leave the first n of the rows fed."""
        self.cache.keep(n)


class Rerun:
    """A cache of unknown kind: only its state before and the target itself can say what n rows leave."""

    def __init__(self, cache):
        self.cache, self.before = cache, snapshot(cache)

    def fed(self):
        """Unknown."""
        return None

    def keep(self, rows, n):
        """All rows stay as they are; fewer means back to before them, and the transaction re-runs the n."""
        if n < rows:
            restore(self.cache, self.before)


KINDS = {
    KVCache: Trimmed,
    QuantizedKVCache: Trimmed,
    ConcatenateKVCache: Sliced,
    RotatingKVCache: Rewritten,
    RecurrentCache: Replayed,
}  # exact types: a subclass may keep its rows differently


class Transaction:
    """begin(rows) … commit(n) over all caches of one target.

    cache    mlx-lm's list of caches, read anew at each begin, since quantising replaces its entries
    forward  feeds token ids [n] or [R,n] (mx.array) through the target into the same caches; used only by the re-run
    """

    def __init__(self, cache, forward):
        self.cache, self.forward = cache, forward
        self.rows = self.committed = None
        self.marks, self.announced = [], False

    @property
    def open(self):
        """Whether rows may have been fed that no commit has judged."""
        return self.rows is not None and self.committed is None

    def begin(self, rows, tokens=None):
        """Announce that `rows` rows are about to be fed.

        tokens  their ids [rows], or [R,rows] of a batch (mx.array), needed only where a cache of unknown kind may
                have to re-run them
        Raises TransactionError when a transaction is open, or tokens are needed and missing.
        """
        if self.open:
            raise TransactionError(f"begin({rows}) while a transaction of {self.rows} rows is open; commit it first")
        if rows < 1:
            raise TransactionError(f"begin({rows}): a transaction has at least one row")
        caches = [member for cache in self.cache for member in members(cache)]
        self.unknown = sorted({type(cache).__name__ for cache in caches if type(cache) not in KINDS})
        if self.unknown:
            self._announce(tokens, rows)
        self.marks = [KINDS.get(type(cache), Rerun)(cache) for cache in caches]
        self.rows, self.committed, self.tokens = rows, None, tokens

    def commit(self, n):
        """Keep the first n of the rows begun, 0 ≤ n ≤ rows.

        Until the next begin it may be repeated with a smaller n, for a text that turns out to end inside the block.
        Raises TransactionError without a begin, for n outside the rows, or when the rows were not all fed.
        """
        self._check(n)
        rerun = bool(self.unknown) and n < self.rows
        for mark in self.marks:
            mark.keep(self.rows, 0 if rerun else n)
        self.committed = n
        if rerun and n:
            with self._pinned():
                self.forward(self.tokens[..., :n])

    def abort(self):
        """Leave every cache as it was at begin, however far the rows got; does nothing when no transaction is open."""
        if self.open:
            for mark in self.marks:
                mark.keep(self.rows, 0)
            self.committed = 0

    @contextlib.contextmanager
    def _pinned(self):
        """While the kept rows are re-run, rotating caches answer as they did when those rows were first fed."""
        rotating = [mark.cache for mark in self.marks if isinstance(mark, Rewritten)]
        try:
            for cache in rotating:
                pin(cache)
            yield
        finally:
            for cache in rotating:
                unpin(cache)

    def _announce(self, tokens, rows):
        if tokens is None or tokens.shape[-1] != rows:
            given = "none" if tokens is None else tokens.shape[-1]
            names = ", ".join(self.unknown)
            raise TransactionError(f"begin({rows}) over {names} needs the {rows} token ids to re-run; got {given}")
        if not self.announced:
            warnings.warn(
                f"cache {', '.join(self.unknown)}: no way to take rows back is known, so the target re-runs the kept "
                "rows of every block that is not accepted whole; the text is the same, the speed is not",
                stacklevel=3,
            )
        self.announced = True

    def _check(self, n):
        if self.rows is None:
            raise TransactionError(f"commit({n}) without begin")
        limit = self.rows if self.committed is None else self.committed
        if not 0 <= n <= limit:
            raise TransactionError(f"commit({n}): expected 0 to {limit}, the rows that are there to keep")
        if self.committed is None and n:
            for mark in self.marks:
                if mark.fed() not in (None, self.rows):
                    kind = type(mark.cache).__name__
                    raise TransactionError(f"begin({self.rows}), but {mark.fed()} rows were fed to a {kind}")


def members(cache):
    """The caches in one entry: itself, or each member of a list of caches."""
    if type(cache) is CacheList:
        return [member for held in cache.caches for member in members(held)]
    return [cache]


def snapshot(cache):
    """The attributes of a cache, every array under a new Python object, which no later write can move."""
    return copy.deepcopy(vars(cache))


def restore(cache, before):
    """Give a cache the attributes of a snapshot, which stays usable."""
    vars(cache).clear()
    vars(cache).update(copy.deepcopy(before))


def pin(cache):
    """Let a rotating cache that pins rows answer with `pinned_mask`, until `unpin`."""
    if cache.keep:
        cache.make_mask = functools.partial(pinned_mask, cache)


def unpin(cache):
    """Give a cache its own mask back."""
    vars(cache).pop("make_mask", None)


def pinned_mask(cache, N, window_size=None, return_array=False):
    """The mask of N rows over [pinned | recent | N new] that rows fed one at a time would see.

    Row i stands at column q = held + i and sees columns ≤ q that are pinned or among the last max_size − keep. One
    row, or a model whose window is narrower than the cache, gets the cache's own answer.
    """
    if N == 1 or (window_size or cache.max_size) < cache.max_size:
        return type(cache).make_mask(cache, N, window_size=window_size, return_array=return_array)
    held = min(cache.max_size - 1, cache.offset)
    query, key = mx.arange(held, held + N)[:, None], mx.arange(held + N)[None]
    return (key <= query) & ((key > query - (cache.max_size - cache.keep)) | (key < cache.keep))
