"""What a recurrent layer carries from row to row, and how rows are taken back: by a tape that states are owed.

R rows, T tokens, Hv value heads, Dk and Dv head dimensions, C channels of the short convolution, K its width. A layer's
own forward writes its state and leaves the rows' tape beside it; a compiled step leaves the tape alone, and the state
is owed its rows. Either way a commit only says how many of them count: nothing is computed until the state is read.
"""

import copy
import dataclasses
import typing

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kernels import fused_layer
from kernels.causal_conv import state_after
from kernels.gated_delta import Tape, replay

SHORT = 32  # assumed: rows whose window a view may keep alive; of a longer one, a prompt's, only the end is copied


class RecurrentCache(ArraysCache):
    """What a recurrent layer carries: [convolution state [R,K−1,C], S [R,Hv,Dv,Dk] float32], each None when empty.

    As mlx-lm's ArraysCache of two, but that rows fed between `arm` and `keep` can be taken back: meanwhile the layer
    leaves the rows' tape, and the window they were convolved in, here. Nothing is kept of any other row.

    documents  ids [R,T] of the packed rows about to be fed: the state is emptied where a document begins
    tape       of the rows fed since `arm`, None before the first; past the first `rows`, what only pads
    window     [R,K−1+T,C]: the convolution state at `arm`, then the inputs of the tape's T rows
    owed       rows of a tape that S still lacks (fused_layer.Owed) or None: added by whoever reads `cache`, or by the
               next rows' own kernel, which then says so with `settle`
    watcher    called with (k, v, g, beta, window) of the rows fed, from which the state after any of them can be had
    """

    documents = tape = window = before = owed = watcher = None
    recording = owing = False
    fed = 0

    @property
    def cache(self):
        """[convolution state, S], S with what it was owed."""
        if self.owed:
            self.settle(replay(self.held[1], *self.owed))
        if isinstance(self.held[0], Cut):
            self.held = [self.held[0].rows(), self.held[1]]
        return self.held

    @cache.setter
    def cache(self, held):
        if self.owing:
            self.settle(replay(self.held[1], *self.owed))  # for `before`, which a commit may come back to
        self.held, self.owed = held, None

    def settle(self, S):
        """Take S for the state with what it was owed, before any further row."""
        self.held, self.owed = [self.held[0], S], None
        if self.owing:
            self.before[0][1], self.owing = S, False

    @property
    def rows(self):
        """Rows fed since `arm`."""
        return 0 if self.tape is None else self.fed

    def arm(self):
        """Note where the state stands and record from here on; references, no copies."""
        self.before = [list(self.held), own(self.lengths), own(self.left_padding)]
        self.tape = self.window = None
        self.recording, self.owing = True, self.owed is not None

    def record(self, tape, window, count=None):
        """Add the tape of T more rows and the window [R,K−1+T,C] they were convolved in; the first `count` count."""
        T = tape.delta.shape[1]
        count = T if count is None else count
        if self.tape is not None:  # rows fed piecewise
            kept = window.shape[1] - T
            window = mx.concatenate([self.window[:, : kept + self.fed], window[:, kept : kept + count]], axis=1)
            tape = joined((self.tape, self.fed), (tape, count))
            count += self.fed
        self.tape, self.window, self.fed = tape, window, count

    def owe(self, tape, window, count):
        """Record, and leave the state as it is, owed the first `count` rows of the tape."""
        self.record(tape, window, count)
        conv = Cut(window, count, window.shape[1] - tape.delta.shape[1])
        self.held, self.owed = [conv, self.held[1]], fused_layer.Owed(tape, count)

    def keep(self, n):
        """Leave what the first n of the recorded rows would have left, and stop recording.

        S ← g S + δ kᵀ for each of them, from the state at `arm`. May be repeated until the next `arm`.
        """
        self.recording = False
        if 0 < n == self.rows:
            return
        (conv, S), lengths, padding = self.before
        self.lengths, self.left_padding = own(lengths), own(padding)
        if n:
            T = self.tape.delta.shape[1]
            short = T <= SHORT and self.lengths is None
            conv = Cut(self.window, n, self.window.shape[1] - T) if short else conv_after(self, self.window, n, T)
            self.held, self.owed = [conv, S], fused_layer.Owed(self.tape, n)
            self.advance(n)
        else:  # where no row was fed, what was owed at `arm` still is
            self.held, self.owed = [conv, S], self.owed if self.owing else None

    def extract(self, idx):
        """One row's cache, of this kind."""
        return grown(super().extract(idx))


RecurrentCache.__name__ = ArraysCache.__name__  # what mlx-lm's files of caches call it, who loads only its own kinds


def arrays(entry):
    """Every array that a cache holds, a tree: what to wait for. What a recurrent state is owed stays owed to it."""
    if not isinstance(entry, RecurrentCache):
        return entry.state
    taped = [vars(tape) for tape in (entry.tape, entry.owed and entry.owed.tape) if tape]
    return [*(part.window if isinstance(part, Cut) else part for part in entry.held if part is not None), *taped]


class Cut(typing.NamedTuple):
    """A convolution's state [R,K−1,C] still in its window: `size` rows from row n.

    Most are never cut out: the next rows' kernel reads them where they are.
    """

    window: mx.array  # [R,L,C]
    n: int
    size: int  # K − 1

    def rows(self):
        """The state, [R,K−1,C]."""
        return self.window[:, self.n : self.n + self.size]


def grown(entry):
    """An ArraysCache made a RecurrentCache, with what it holds."""
    held = vars(entry).pop("cache")
    entry.__class__ = RecurrentCache
    entry.cache = held
    return entry


def own(array):
    """The same array, or None, under a Python object of its own: mlx-lm counts rows down in place."""
    return array if array is None else copy.copy(array)


def joined(*parts):
    """One tape of the first n rows of each (tape, n), one after the other."""
    names = [field.name for field in dataclasses.fields(Tape)]
    return Tape(*(mx.concatenate([getattr(tape, name)[:, :n] for tape, n in parts], axis=1) for name in names))


def conv_after(cache, window, n, T):
    """The convolution state [R,K−1,C] after n of the T rows whose window is given, or each row's own length if less."""
    ends = n if cache.lengths is None else mx.clip(cache.lengths, 0, n)
    state = state_after(window, ends, window.shape[1] - T + 1)
    return mx.contiguous(state) if T > SHORT else state
