"""Features of packed rows on disk: what the frozen target makes of a row, computed once and read in every epoch.

R rows, T tokens, D hidden, n taps, r rows of a shard.

A store is a folder:
    shard-00000.safetensors …  taps [r,n,T,D] and, where a loss asks for it, hidden [r,T,D]: bfloat16, row by row
    manifest.json              kind "features": the SHA-256 of each shard, the target, the digest of the packed rows,
                               and in `extra` the Layout
The manifest is renewed after every shard. A store cut short, by whatever, holds whole shards that it answers for, and
filling it goes on with the first one missing.

Rows come back by `pread`, as exactly their bytes. Measured, 8 of 91 rows (24 of 268 MB) from a cold file: pread 34 ms
and 24 MB from the disk; a mapped file 92 ms and 119 MB, as the kernel reads ahead, or 604 ms and 24 MB when it is told
not to; `mx.load` and a slice 264 ms and 268 MB, since it is lazy by whole tensors only. It also works on any thread.
"""

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from drafter import fingerprint, manifest
from drafter.target import Forward
from kernels.errors import UserError

KIND = "features"
SHARD_BYTES = 1 << 28  # what a crash may cost, and what writing holds in memory besides (assumed)
ELSEWHERE = "name another features.folder, or delete this one"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a store holds of each row, and how rows are shared out over shards."""

    rows: int
    row_tokens: int
    width: int  # D
    layers: tuple  # 0-based target layers whose outputs are kept
    hidden: bool  # whether the final hidden state is kept too
    rows_per_shard: int

    @property
    def tensors(self):
        """{name: shape of one row}."""
        final = {"hidden": (self.row_tokens, self.width)} if self.hidden else {}
        return {"taps": (len(self.layers), self.row_tokens, self.width)} | final

    @property
    def row_bytes(self):
        """Bytes of a row on disk."""
        return sum(2 * math.prod(shape) for shape in self.tensors.values())

    @property
    def bytes(self):
        """Bytes of all rows on disk."""
        return self.rows * self.row_bytes

    def shards(self, limit=None):
        """[(name, first row, row after the last)]; limit: only as many whole shards as fit in that many bytes."""
        count = -(-self.rows // self.rows_per_shard)
        if limit is not None and limit < self.bytes:
            count = int(limit // (self.rows_per_shard * self.row_bytes))
        size = self.rows_per_shard
        return [(shard_name(at), at * size, min((at + 1) * size, self.rows)) for at in range(count)]


def shard_name(number):
    """The file of a 0-based shard."""
    return f"shard-{number:05d}.safetensors"


def layout_of(target, rows, layers, hidden=False):
    """The Layout for `corpus.Rows` and the layers that a drafter taps. hidden: keep the final hidden state too."""
    one = Layout(len(rows), rows.tokens.shape[1], target.hidden_size, tuple(layers), hidden, 1)
    return dataclasses.replace(one, rows_per_shard=max(1, SHARD_BYTES // one.row_bytes))


# Reading.


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a store held of a batch's R rows: `held` [R] bool, and bfloat16 bits {name: [held rows, …] uint16}."""

    held: np.ndarray
    bits: dict


class Store:
    """The shards of one folder, opened and checked; `read` may be called from any thread."""

    def __init__(self, folder, layout, names, *, hidden):
        self.folder, self.layout = folder, layout
        self.tensors = dataclasses.replace(layout, hidden=hidden).tensors
        self.places = {name: fingerprint.header(folder / name) for name in names}

    def __len__(self):
        """How many rows are held."""
        return sum(stop - start for name, start, stop in self.layout.shards() if name in self.places)

    def read(self, indices):
        """The features of rows `indices` [R] of the corpus: Stored, or None where the store holds none of them."""
        shards = [shard_name(index // self.layout.rows_per_shard) for index in indices]
        held = np.array([name in self.places for name in shards], bool)
        if not held.any():
            return None
        bits = {name: np.empty((int(held.sum()), *shape), np.uint16) for name, shape in self.tensors.items()}
        for place, at in enumerate(np.flatnonzero(held)):
            self.read_row(shards[at], int(indices[at]) % self.layout.rows_per_shard, place, bits)
        return Stored(held, bits)

    def read_row(self, shard, row, place, bits):
        """Put a shard's row at `place` of bits."""
        path = self.folder / shard
        with open(path, "rb", buffering=0) as stream:
            for name, found in bits.items():
                start = self.places[shard][name][2] + row * found[place].nbytes
                if os.preadv(stream.fileno(), [memoryview(found[place]).cast("B")], start) != found[place].nbytes:
                    raise UserError(
                        f"{path}: ended before row {row}; it was changed while in use: delete it, run again"
                    )


def complete(target, tokens, documents, layers, stored=None):
    """The features of rows tokens, documents [R,T]: stored ones as they are, the others computed now.

    stored: what `Store.read` gave for these rows; None: all are computed. Returns `target.Forward`, of which `hidden`
    is None where the store does not keep it.
    """
    if stored is None:
        return target.forward_packed(tokens, documents, layers)
    found = unpacked({name: mx.array(bits) for name, bits in stored.bits.items()}, getattr(mx, target.dtype))
    if stored.held.all():
        return found
    missing = np.flatnonzero(~stored.held)
    rest = target.forward_packed(tokens[mx.array(missing)], documents[mx.array(missing)], layers)
    order = mx.array(np.argsort(np.concatenate([np.flatnonzero(stored.held), missing])))
    merged = [mx.concatenate(pair)[order] for pair in zip(found.taps, rest.taps)]
    hidden = None if found.hidden is None else mx.concatenate([found.hidden, rest.hidden])[order]
    return Forward(hidden, tuple(merged))


def unpacked(bits, dtype):
    """Forward of bfloat16 bits {name: [R,…] uint16}, in another dtype."""
    arrays = {name: value.view(mx.bfloat16).astype(dtype) for name, value in bits.items()}
    return Forward(arrays.get("hidden"), tuple(arrays["taps"][:, tap] for tap in range(arrays["taps"].shape[1])))


# Opening.


def open_store(folder, target, rows, layout):
    """The Store of `folder`, every shard's digest checked. Raises UserError for a stale, foreign or damaged one."""
    folder = pathlib.Path(folder)
    own, entries = examine(folder, target, rows, layout)
    return Store(folder, own, entries, hidden=layout.hidden)


def examine(folder, target, rows, layout):
    """(the store's own Layout, {shard name: manifest entry} of the shards that are there), all of it checked."""
    if not (folder / manifest.NAME).is_file():
        if folder.exists() and (not folder.is_dir() or manifest.listing(folder)):
            raise UserError(f"{folder}: holds something, but no {manifest.NAME} of features; {ELSEWHERE}")
        return layout, {}
    record = manifest.read(folder)
    own = check_layout(record, layout)
    manifest.match_target(record, target.identity(), remedy=ELSEWHERE)
    if record.data[0]["sha256"] != rows.sha256:
        made = record.data[0]["sha256"]
        raise UserError(f"{folder}: features of the rows {made}, but this run packs {rows.sha256}; {ELSEWHERE}")
    there = {name: record.files[name] for name, *_ in own.shards() if name in record.files and (folder / name).exists()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: check_shard(folder / name, there[name]), there))
    return own, there


def check_layout(record, layout):
    """The Layout that a manifest states. Raises UserError unless it holds what `layout` asks for."""
    if record.kind != KIND or record.extra.keys() != {field.name for field in dataclasses.fields(Layout)}:
        raise UserError(f"{record.folder}: a folder of kind {record.kind}, not of {KIND} as kept here; {ELSEWHERE}")
    own = Layout(**record.extra | {"layers": tuple(record.extra["layers"])})
    for name in ("row_tokens", "layers", "width"):
        made, wanted = getattr(own, name), getattr(layout, name)
        if made != wanted:
            raise UserError(f"{record.folder}: features with {name} {made}, but this run has {wanted}; {ELSEWHERE}")
    if layout.hidden and not own.hidden:
        raise UserError(f"{record.folder}: features without the final hidden state, which the loss needs; {ELSEWHERE}")
    return own


def check_shard(path, entry):
    """Raise UserError for a shard that is not what the manifest lists."""
    try:
        manifest.check_file(path, entry)
    except UserError as error:
        raise UserError(f"{error}, or delete it: filling the store then writes it anew") from error


# Writing.


def fill(
    folder, target, rows, layout, *, rows_at_once, limit=None, argv=(), say=print, progress=lambda rows, total: None
):
    """Write the shards that `folder` lacks and return its Store.

    rows: `corpus.Rows`; rows_at_once: rows of one forward; limit: bytes that the store may take, None: all rows are
    written. say(line): the size, before anything is written. progress(rows, total): rows just written, of so many to
    write. Raises UserError where the disk lacks room, for a store that is stale, foreign or damaged, and while another
    run writes it.
    """
    folder = pathlib.Path(folder)
    own, entries = examine(folder, target, rows, layout)
    missing = [shard for shard in own.shards(limit) if shard[0] not in entries]
    check_room(folder, own, missing, say)
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with sole_writer(folder):
            write(folder, target, rows, own, missing, entries, rows_at_once, argv, progress)
    return Store(folder, own, entries, hidden=layout.hidden)


def check_room(folder, layout, missing, say):
    """Say how large the store and what is to be written are; raise UserError where the disk has less room than that."""
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free, need = shutil.disk_usage(place).free, layout.row_bytes * sum(stop - start for _, start, stop in missing)
    tensors = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in layout.tensors.items())
    say(
        f"{folder}: {layout.rows:,} rows of bfloat16 {tensors} take {sized(layout.bytes)}; "
        f"{sized(need)} to write, {sized(free)} free"
    )
    if missing and need >= free:
        raise UserError(
            f"{folder}: {sized(need)} of features to write, but its disk has {sized(free)} free; free some space, "
            "choose another features.folder, or keep a part of them with features.mode=hybrid and features.max_gib"
        )


def sized(count):
    """Bytes in words."""
    power = min(max(0, int(math.log2(max(count, 1)) // 10)), 4)
    return f"{count / 1024**power:.3g} {['bytes', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


@contextlib.contextmanager
def sole_writer(folder):
    """Hold the folder's lock, and clear what an interrupted write left. Raises UserError where another run holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for leftover in folder.glob(f".*{manifest.PARTIAL}"):
            leftover.unlink()
        yield
    except BlockingIOError:
        raise UserError(
            f"{folder}: another run is writing it; wait for that, or name another features.folder"
        ) from None
    finally:
        os.close(handle)  # the lock goes with it, as it does with the process


def write(folder, target, rows, layout, missing, entries, rows_at_once, argv, progress):
    """Write shards [(name, start, stop)] and renew the manifest before the first and after each; entries grows."""
    record = {"target": target.identity(), "data": [{"name": "packed rows", "sha256": rows.sha256}], "argv": argv}
    record |= {"kind": KIND, "extra": dataclasses.asdict(layout), "known": entries}
    manifest.write(folder, **record)  # from here on the folder says what it is
    for name, start, stop in missing:
        arrays = computed(target, rows, layout, start, stop, rows_at_once)
        with manifest.atomic(folder / name) as stream:
            mx.save_safetensors(stream, arrays, metadata={"format": "mlx"})
        entries[name] = manifest.describe_file(folder / name)
        manifest.write(folder, **record)
        progress(stop - start, sum(stop - start for _, start, stop in missing))


def computed(target, rows, layout, start, stop, rows_at_once):
    """{name: [r,…] bfloat16} of rows start..stop."""
    parts = []
    for at in range(start, stop, rows_at_once):
        some = slice(at, min(at + rows_at_once, stop))
        forward = target.forward_packed(mx.array(rows.tokens[some]), mx.array(rows.documents[some]), layout.layers)
        kept = {"taps": mx.stack(forward.taps, axis=1)} | ({"hidden": forward.hidden} if layout.hidden else {})
        parts.append({name: value.astype(mx.bfloat16) for name, value in kept.items()})
        mx.eval(parts[-1])
    return {name: mx.concatenate([part[name] for part in parts]) for name in layout.tensors}
