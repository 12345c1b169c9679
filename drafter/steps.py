"""A target's forward for few rows as one compiled function of few launches: what plain steps and verifies run on a GPU.

W rows, M rows padded to a width that repeats, D hidden, H query heads, G key/value heads, d head dimension, L rows of
a key/value buffer. A decode step of mlx-lm builds some twenty operations a layer anew for each token, and on CUDA every
product of more than one row prepares a plan on the host. Here a layer is a handful of launches from `kernels/`, traced
once for each width and buffer size. All shapes repeat: rows are padded to M, which later rows alone could notice,
buffers grow in large steps, and positions are arrays. No kernel's answer for a row depends on how many rows there are,
so a wide verify ends in the bits of narrow steps, but for the few rows of a block in which the context outgrows
`keys_of_a_part`. Weights are read when a step is planned: after one is replaced, plan anew.
"""

import functools
import hashlib
import pathlib

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from drafter import layers
from drafter.layers import KERNELS, Place, Unknown, needed, plan, served, weight
from drafter.recurrent_cache import Cut, RecurrentCache
from kernels import block_attention, verdicts
from kernels.plain_delta import Tape
from kernels.portable import WIDE, scalar
from kernels.small_matmul import MOST_ROWS

WIDTHS = (1, 8, 16, MOST_ROWS)  # M: one row, or whole tiles of the few-row products
NAME = "steps.forward"  # of the verdict on the whole
verdicts.register("steps", pathlib.Path(__file__), pathlib.Path(layers.__file__))
GROWTH = 1024  # rows by which a key/value buffer grows: every growth is another shape, and another trace


class Step:
    """The forward of few rows through one target. Build it with `for_model`."""

    def __init__(self, backbone, planned, head, route):
        self.backbone, self.layers, self.head, self.route = backbone, planned, head, route
        self.functions = {}  # (taps, record) -> the compiled forward, which MLX traces anew for each set of shapes

    @functools.cached_property
    def sound(self):
        """Whether this machine has kernels for every part, each found right, if not faster by itself."""
        parts = self.layers, self.head
        return served(*parts) and all(verdicts.sound(*each) for each in needed(*parts))

    @functools.cached_property
    def ready(self):
        """Whether this machine may run it: sound, and found faster than the modules' own forward (see `trial`)."""
        return self.sound and verdicts.allowed(NAME, self.case)

    @property
    def dtype(self):
        """What hidden states are computed in."""
        return self.backbone.norm.weight.dtype

    @functools.cached_property
    def case(self):
        """What a verdict on the whole holds for: dtype, layers, hidden size, and a digest of every kernel's case."""
        parts = hashlib.sha256(repr(sorted(needed(self.layers, self.head))).encode()).hexdigest()[:8]
        kind, D = str(self.dtype).removeprefix("mlx.core."), self.backbone.norm.weight.size
        return f"{kind} {len(self.layers)} layers of {D}, kernels {parts}"

    def fits(self, tokens, cache):
        """Whether tokens [R,W] on these caches are a step's work."""
        return (
            cache is not None
            and tokens.shape[0] == 1
            and 0 < tokens.shape[1] <= MOST_ROWS
            and all(type(entry) in (KVCache, RecurrentCache) for entry in cache)
            and all(getattr(entry, "lengths", None) is getattr(entry, "left_padding", None) is None for entry in cache)
            and all(getattr(entry, "documents", None) is None for entry in cache)
            and any(type(entry) is KVCache for entry in cache)
        )

    def __call__(self, tokens, cache, taps=()):
        """Feed tokens [1,W] into the caches: (hidden [1,W,D] after the final norm, taps of [1,W,D])."""
        W = tokens.shape[1]
        offset = next(entry.offset for entry in cache if type(entry) is KVCache)
        record = any(getattr(entry, "recording", False) for entry in cache)
        states = [self.state(layer, entry, W) for layer, entry in zip(self.layers, cache, strict=True)]
        place = mx.array([offset, block_attention.keys_of_a_part(offset) + W], mx.int32)
        taps = tuple(tap % len(self.layers) for tap in taps)
        hidden, tapped, left = self.function(taps, record)(pad_rows(tokens, width(W)), place, states)
        for entry, rows in zip(cache, left, strict=True):
            (append if type(entry) is KVCache else leave)(entry, rows, W)
        return (hidden, tuple(tapped)) if width(W) == W else (hidden[:, :W], tuple(tap[:, :W] for tap in tapped))

    def score(self, hidden):
        """Logits [...,V] of few hidden rows [...,D] in the model's dtype; None where they are not few, or another's."""
        W = hidden.size // hidden.shape[-1]
        if W > MOST_ROWS or hidden.dtype != self.dtype:
            return None
        rows = pad_rows(hidden.reshape(1, W, -1), width(W))
        return self.route.product(rows, self.head)[:, :W].reshape(*hidden.shape[:-1], -1)

    def state(self, layer, entry, W):
        """What a layer reads of its cache, with room for W more rows."""
        dtype = layer.norms[0].weight.dtype
        if type(entry) is not KVCache:
            return recurrent_state(entry, layer.mixer.empty(0, dtype))
        held = 0 if entry.keys is None else entry.keys.shape[2]
        if held < entry.offset + W:
            more = layer.mixer.empty(-(-(entry.offset + W) // GROWTH) * GROWTH - held, dtype)
            old = (entry.keys, entry.values) if held else ()
            entry.keys, entry.values = (mx.concatenate(both, axis=2) for both in zip(*filter(None, (old, more))))
        return entry.keys, entry.values

    def function(self, taps, record):
        """The compiled forward: (tokens [1,M], place [2], states) -> (hidden, taps, what layers leave)."""
        if (taps, record) not in self.functions:
            self.functions[taps, record] = mx.compile(functools.partial(self.forward, taps, record))
        return self.functions[taps, record]

    def forward(self, taps, record, tokens, place, states):
        """The forward in one go, over every layer."""
        x, place, tapped, left = self.backbone.embed_tokens(tokens), locate(place), {}, []
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            x, rows = layer.run(self.route, x, place, state, record)
            tapped[index] = x
            left.append(rows)
        norm = self.backbone.norm
        return mx.fast.rms_norm(x, norm.weight, norm.eps), [tapped[index] for index in taps], left


def locate(place):
    """The Place of (rows before, keys of a part + rows that count), int32 [2].

    Widened on the device, where every launch reads it: see `portable.whole_number`. Parts are whole multiples of 32.
    """
    wide = mx.broadcast_to(place[:, None], (2, WIDE)) + mx.zeros((2, WIDE), mx.int32)
    offset, packed, unit = wide[:1], wide[1:], block_attention.LEAST_KEYS
    return Place(offset, packed % unit, packed // unit * unit)


def width(W):
    """The padded number of rows for W."""
    return next(M for M in WIDTHS if W <= M)


def pad_rows(x, M):
    """x [1,W,...] with its last row repeated up to M: what pads must be finite wherever the rows are."""
    missing = M - x.shape[1]
    return mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode="edge") if missing else x


def append(entry, rows, W):
    """Write the first W of the rows' keys and values [1,G,M,d] behind those that a KVCache holds."""
    end = entry.offset + W
    keys, values = rows if rows[0].shape[2] == W else (value[:, :, :W] for value in rows)
    entry.keys[:, :, entry.offset : end], entry.values[:, :, entry.offset : end] = keys, values
    entry.offset = end


def recurrent_state(entry, empty):
    """What a recurrent layer reads of its cache: (convolution's state, S), or (window, S, what S is owed of its rows).

    empty: the state where there is none.
    """
    if entry.owed and isinstance(entry.held[0], Cut):
        (conv, S), (tape, n) = entry.held, entry.owed
        return conv.window, empty[1] if S is None else S, tape.delta, tape.k, tape.g, scalar(n)
    return tuple(first if value is None else value for value, first in zip(entry.cache, empty, strict=True))


def leave(entry, rows, W):
    """Leave a recurrent layer's state after W rows in its cache, or their tape, owed to it, where the cache records."""
    window, after, tape, settled = rows
    if settled:
        entry.settle(*settled)
    if tape:
        entry.owe(Tape(*tape), window, W)
    else:
        entry.cache = [Cut(window, W, window.shape[1] - width(W)), *after]


def for_model(model, backbone, route=KERNELS):
    """The Step of a model, or None where its architecture is not known to the last operation."""
    try:
        heads = [module for name, module in model.named_modules() if name.split(".")[-1] == "lm_head"]
        return Step(backbone, plan(backbone), weight(heads[0] if heads else backbone.embed_tokens), route)
    except Unknown:
        return None
