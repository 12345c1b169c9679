"""Which positions become draft blocks, and what each block row may see.

R rows, T tokens, N blocks, B block. Documents are numbered from 1 in each packed row; 0 is padding.
"""

import dataclasses

import mlx.core as mx
import numpy as np


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The blocks of a batch. A block that pads its row has `used` False and no supervised label."""

    positions: np.ndarray  # [R,N] int32: where the anchor token stands in its row
    labels: np.ndarray  # [R,N,B] int32: slot k's label is the token at position + k (slot 0: the anchor itself)
    supervised: np.ndarray  # [R,N,B] bool: the label is an answer token of the anchor's own document; never slot 0
    used: np.ndarray  # [R,N] bool

    def rows(self, some):
        """The blocks of some rows, a slice of R."""
        return Anchors(*(getattr(self, field.name)[some] for field in dataclasses.fields(self)))


def valid_positions(loss_mask, documents):
    """Where an anchor may stand: [R,T] bool, a supervised token whose successor is supervised in the same document.

    In decoding the first anchor is the token that prefill yields, so the last prompt token never is one.
    """
    follows = np.zeros_like(loss_mask)
    follows[:, :-1] = loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, :-1] > 0)
    return loss_mask & follows


def sample(tokens, loss_mask, documents, *, block_size, per_row, rng):
    """Draw N = `per_row` anchors in each row, shared out evenly over its documents, or all where there are fewer.

    tokens [R,T] int, loss_mask [R,T] bool, documents [R,T] int; rng: a NumPy generator. A document's share does not
    depend on its length, so a short one is not starved beside a long one; and every row has as many blocks, so none is
    computed to be thrown away. Returns Anchors, in order of position.
    """
    chosen = [draw(valid, row, per_row, rng) for valid, row in zip(valid_positions(loss_mask, documents), documents)]
    positions = np.zeros((len(chosen), per_row), np.int32)
    used = np.zeros((len(chosen), per_row), bool)
    for row, picked in enumerate(chosen):
        positions[row, : len(picked)] = picked
        used[row, : len(picked)] = True
    return blocks_at(tokens, loss_mask, documents, positions, used, block_size)


def draw(valid, documents, count, rng):
    """One row's anchors, sorted: `count` of its valid positions without replacement, or all where there are fewer."""
    places = [np.flatnonzero(valid & (documents == document)) for document in np.unique(documents[valid])]
    picked = []
    for index, mine in enumerate(sorted(places, key=len)):  # the shortest first: what it has no room for, others get
        share = min(len(mine), count // (len(places) - index))
        picked.append(mine if share == len(mine) else rng.choice(mine, share, replace=False))
        count -= share
    return np.sort(np.concatenate(picked)) if picked else np.zeros(0, np.int64)


def blocks_at(tokens, loss_mask, documents, positions, used, block_size):
    """Labels and supervision of blocks at given positions [R,N] with used [R,N]. Returns Anchors."""
    slots = positions[:, :, None] + np.arange(block_size)
    inside = slots < tokens.shape[1]
    rows = np.arange(len(tokens))[:, None, None]
    slots = np.minimum(slots, tokens.shape[1] - 1)
    anchor_document = np.take_along_axis(documents, positions, axis=1)[:, :, None]
    supervised = inside & loss_mask[rows, slots] & (documents[rows, slots] == anchor_document) & used[:, :, None]
    supervised[:, :, 0] = False
    return Anchors(positions, tokens[rows, slots].astype(np.int32), supervised, used)


def visibility(positions, documents, block_size, *, window=None, causal=False):
    """What block rows may see: (context_seen [R,1,N,B,T], block_seen [1,1,1,B,B]), boolean.

    positions: anchors [R,N]; documents [R,T]. The row of slot j stands at position anchor + j. It sees
    - a context row t when t is of the anchor's document, t < anchor, and, with a window, (anchor + j) − t < window;
    - block row i of its own block: every i, or i ≤ j when causal. It never sees another block.
    The anchor's own context row is hidden: in decoding its tap does not exist yet. (DFlash, arXiv 2602.06036; the
    window is per query, as in the published 0.1.0 code.)
    """
    T = documents.shape[1]
    anchor = positions[:, :, None, None]  # [R,N,1,1]
    slot, key = mx.arange(block_size)[:, None], mx.arange(T)[None]
    own = mx.take_along_axis(documents, positions, axis=1)[:, :, None, None]
    seen = (key < anchor) & (documents[:, None, None, :] == own)
    if window:
        seen = seen & (anchor + slot - key < window)
    seen = mx.broadcast_to(seen, (*positions.shape, block_size, T))
    block = slot >= mx.arange(block_size)[None] if causal else mx.ones((block_size, block_size), mx.bool_)
    return seen[:, None], block[None, None, None]
