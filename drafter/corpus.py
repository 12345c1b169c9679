"""Rows of tokens to train on: read, split, packed and digested.

Dimension letters: R rows, T tokens a row.

A document lies whole inside one row, beside others; `documents` says which token belongs to which, and 0 marks padding.
"""

import dataclasses
import hashlib

import numpy as np

from drafter import rng
from drafter.documents import Document, content_key, read_source
from kernels.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows: tokens [R,T] int32, loss_mask [R,T] bool, documents [R,T] int32 (ids over the corpus, 0 = padding).

    sha256: over the three arrays. sources: [{"name", "sha256"}], for manifests. counts: documents, rows, tokens,
    answer_tokens (those under the loss).
    """

    name: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray
    sha256: str
    sources: tuple
    counts: dict

    def __len__(self):
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two sides of the split; counts say what reading changed: documents cut, split or left out."""

    train: Rows
    validation: Rows
    counts: dict


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some rows: tokens, loss_mask, documents as in Rows; indices [R]: which of its rows they are."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray
    indices: np.ndarray


def rows(sources, target, *, length, seed, validation, max_documents=None, allow_mismatch=False):
    """Read Sources into packed rows of `length` tokens, split into training and validation; returns a Corpus.

    validation: share of the documents held out, by a hash of the prompt or text, so that neither the order of files
    nor the seed moves a document across. seed: decides which of equally long documents is packed first.
    max_documents: use that many, drawn by hash. allow_mismatch: accept answers that another target wrote.
    Raises UserError naming the file, and the line if any.
    """
    if length < 2 or not 0 <= validation < 1:
        raise UserError(f"row length {length}, validation {validation}: expected at least 2, and 0 up to below 1")
    reads = [read_source(source, target, allow_mismatch) for source in sources]
    digests = tuple({"name": read.name, "sha256": read.sha256} for read in reads)
    documents = choose([document for read in reads for document in read.documents], max_documents)
    counts = {"cut": 0, "left_out": 0, "split": 0}
    pieces = [piece for document in documents for piece in fit(document, length, counts)]
    if not pieces:
        names = ", ".join(source.name for source in sources) or "no sources"
        raise UserError(f"{names}: no answer tokens within {length} tokens; give more data or longer rows")
    held = held_out({piece.key for piece in pieces}, validation)
    sides = {False: [], True: []}
    for number, piece in enumerate(pieces, 1):
        sides[piece.key in held].append((number, piece))
    train = pack(sides[False], "train", length, seed, digests)
    return Corpus(train, pack(sides[True], "validation", length, seed, digests), counts)


def choose(documents, limit):
    """At most `limit` documents, in their order; which ones is drawn by a hash of their keys."""
    if limit is None or len(documents) <= limit:
        return documents
    order = sorted(range(len(documents)), key=lambda index: position("chosen", documents[index].key))
    return [documents[index] for index in sorted(order[:limit])]


def fit(document, length, counts):
    """A document as pieces of at most `length` tokens: an answer loses its tail, plain text becomes several pieces."""
    size = len(document.tokens)
    if size > length and document.loss_mask.all():
        counts["split"] += 1
        parts = [document.tokens[start : start + length] for start in range(0, size - 1, length)]  # none of one token
        return [Document(content_key(part.tolist()), part, np.ones(len(part), bool)) for part in parts]
    if size < 2 or not document.loss_mask[:length].any():
        counts["left_out"] += 1
        return []
    counts["cut"] += size > length
    return [Document(document.key, document.tokens[:length], document.loss_mask[:length])]


def held_out(keys, share):
    """The keys of the validation side: those hashed below `share`; at least one, and never all."""
    draws = sorted((position("validation", key), key) for key in keys)
    if share == 0 or len(draws) < 2:
        return set()
    below = sum(draw < share for draw, _ in draws)
    return {key for _, key in draws[: min(max(below, 1), len(draws) - 1)]}


def position(purpose, key):
    """Where a key lies between 0 and 1: a hash, so that it depends on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{key}".encode()).digest()[:8], "big") / 2**64


def pack(numbered, name, length, seed, sources):
    """Rows from (number, Document) pairs: the longest first, each into the first row with room for it."""
    shuffled = rng.numpy_rng(seed, f"pack {name}", 0).permutation(len(numbered))
    queue = sorted((numbered[index] for index in shuffled), key=lambda pair: -len(pair[1].tokens))
    row_of = first_fit([len(document.tokens) for _, document in queue], length)
    shape = (max(row_of, default=-1) + 1, length)
    tokens, loss_mask, documents = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)
    filled = np.zeros(len(tokens), int)
    for (number, document), row in zip(queue, row_of, strict=True):
        place = slice(filled[row], filled[row] + len(document.tokens))
        tokens[row, place] = document.tokens
        loss_mask[row, place] = document.loss_mask
        documents[row, place] = number
        filled[row] = place.stop
    counts = {"documents": len(queue), "rows": len(tokens), "tokens": int(filled.sum())}
    counts["answer_tokens"] = int(loss_mask.sum())
    return Rows(name, tokens, loss_mask, documents, digest(tokens, loss_mask, documents), sources, counts)


def first_fit(lengths, length):
    """For each length in turn, the first row of capacity `length` that still has room for it."""
    room = np.full(len(lengths), length)  # more rows than documents are never needed
    row_of = []
    opened = 0
    for size in lengths:
        row = int(np.argmax(room[: opened + 1] >= size))  # the row after the last one opened is empty, so one fits
        opened = max(opened, row + 1)
        room[row] -= size
        row_of.append(row)
    return row_of


def digest(*arrays):
    """SHA-256 over arrays: shapes, types and bytes."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(f"{array.shape}{array.dtype.str}".encode() + array.tobytes())
    return total.hexdigest()


# Batches.


def batches(rows, batch, seed, epoch, start=0):
    """Yield (index, Batch) of an epoch from its batch `start` on; the order depends on (seed, epoch) alone.

    batch: rows in each. Rows that do not fill a last batch sit this epoch out, unless there is no other batch.
    """
    order = rng.numpy_rng(seed, "order", epoch).permutation(len(rows))
    for index in range(start, batch_count(rows, batch)):
        yield index, select(rows, order[index * batch : (index + 1) * batch])


def batch_count(rows, batch):
    """How many batches an epoch has."""
    return max(len(rows) // batch, min(len(rows), 1))


def in_order(rows, batch):
    """Yield Batches of all rows as they lie, the last one perhaps smaller: for validation."""
    for start in range(0, len(rows), batch):
        yield select(rows, np.arange(start, min(start + batch, len(rows))))


def select(rows, indices):
    """The Batch of some rows."""
    return Batch(rows.tokens[indices], rows.loss_mask[indices], rows.documents[indices], indices)
