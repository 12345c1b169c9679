"""A byte n-gram model: the baseline that a trained target's bits per byte are put beside.

k context length, N different contexts-with-byte of one length, n bytes of text. Order K: every byte given the K before
it. Interpolated Kneser-Ney (Chen & Goodman 1998, §2.7), one discount a length, D = n₁ ÷ (n₁ + 2 n₂):

    P_k(b | h) = max(c(h b) − D, 0) ÷ c(h) + D · N₁₊(h ·) ÷ c(h) · P_{k−1}(b | h without its first byte)

c counts occurrences for k = K, and below it the different bytes seen before (h b); P₋₁ = 1/256; an h never seen leaves
P_{k−1} as it is. A context and its byte are one integer, so that counting is sorting.
"""

import dataclasses

import numpy as np

from kernels.errors import UserError

MAX_ORDER = 7  # a context and its byte fit eight bytes


@dataclasses.dataclass(frozen=True)
class Level:
    """Counts of one context length: sorted keys [N] uint64 of (h b) with c(h b) − D, and of h with c(h) and D·N₁₊."""

    keys: np.ndarray
    counts: np.ndarray  # float64 [N], discounted
    contexts: np.ndarray
    totals: np.ndarray  # float64, a context each
    escapes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Ngram:
    """A fitted model: `levels` from context length 0 to the order."""

    levels: tuple

    @property
    def order(self):
        """How many bytes of context it looks at."""
        return len(self.levels) - 1

    def probabilities(self, document):
        """P of every byte of `document` (bytes) given those before it: float64 [n]."""
        keys = windows(document, self.order)
        found = np.full(len(keys), 1 / 256)
        for length, level in enumerate(self.levels):
            found = interpolate(level, keys & mask(length + 1), found)
        return found

    def bits(self, documents):
        """The bits in which it encodes documents (a list of bytes), ends not counted."""
        return float(sum(-np.log2(self.probabilities(document)).sum() for document in documents))


def fit(documents, order):
    """The Ngram of `order` (1 to 7) over documents (a list of bytes). Raises UserError where there is no text."""
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order {order}: expected 1 to {MAX_ORDER}")
    if not any(documents):
        raise UserError("n-gram model: no text to count; give at least one file that is not empty")
    keys = np.concatenate([windows(document, order) for document in documents])
    keys, counts = np.unique(keys, return_counts=True)
    levels = [make_level(keys, counts)]
    for length in range(order - 1, -1, -1):  # the different bytes before (h b) are the keys above that end in it
        keys, counts = np.unique(keys & mask(length + 1), return_counts=True)
        levels.append(make_level(keys, counts))
    return Ngram(tuple(reversed(levels)))


def windows(document, order):
    """Every byte of a document with the `order` before it, as integers: uint64 [n]; zeros stand before its start."""
    text = np.frombuffer(bytes(order) + document, np.uint8).astype(np.uint64)
    keys = np.zeros(len(document), np.uint64)
    for place in range(order + 1):
        keys = (keys << np.uint64(8)) | text[place : place + len(document)]
    return keys


def mask(count):
    """The bits of the last `count` bytes of a key."""
    return np.uint64(2 ** (8 * count) - 1)


def make_level(keys, counts):
    """The Level of different keys and their counts."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = once / (once + 2 * twice) if once else 0.5  # 0.5: no key was seen once, so nothing tells (assumed)
    contexts, starts = np.unique(keys >> np.uint64(8), return_index=True)
    followers = np.diff(np.append(starts, len(keys)))
    return Level(keys, counts - discount, contexts, np.add.reduceat(counts, starts) * 1.0, discount * followers)


def interpolate(level, keys, lower):
    """P_k [n] of keys [n] from P_{k−1} [n]."""
    at, seen = look_up(level.contexts, keys >> np.uint64(8))
    place, counted = look_up(level.keys, keys)
    held = np.where(counted, level.counts[place], 0.0)
    return np.where(seen, (held + level.escapes[at] * lower) / level.totals[at], lower)


def look_up(table, keys):
    """Where keys [n] lie in a sorted table, and whether they do."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys
