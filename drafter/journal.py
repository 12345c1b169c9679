"""Rows on disk that survive a kill at any moment: appended while a run works, packed into shards when it ends.

While it works, NAME.jsonl holds every row, in the order in which they came. At the end the rows lie in
NAME-00000.jsonl.gz, NAME-00001.jsonl.gz, …, in the order of their ids, so that the same rows are the same bytes however
they came. Of the two, NAME.jsonl is the truth while it exists: it is made whole before the shards go, and goes after
they are whole.
"""

import errno
import gzip
import json
import os
import pathlib

from drafter import manifest
from drafter.documents import records


class Journal:
    """The rows called `name` in a folder. Every row is a dict whose first key is "id", unique in the journal."""

    def __init__(self, folder, name, shard_rows):
        self.folder, self.name, self.shard_rows = pathlib.Path(folder), name, shard_rows
        self.path = self.folder / f"{name}.jsonl"

    @property
    def shards(self):
        """The packed files there are, in order."""
        return sorted(self.folder.glob(f"{self.name}-?????.jsonl.gz"))

    def read(self):
        """Yield the rows in the order in which they lie, whatever a kill left half written dropped first."""
        drop_torn_line(self.path)
        for path in [self.path] if self.path.exists() else self.shards:
            if path.stat().st_size:
                yield from (row for _, row in records(path))

    def begin(self):
        """Make the journal one that rows can be appended to, with no shards to contradict it."""
        if not self.path.exists():
            with manifest.atomic(self.path) as sink:
                for shard in self.shards:
                    sink.write(gzip.decompress(shard.read_bytes()))
        for shard in self.shards:
            shard.unlink()

    def append(self, rows):
        """Append rows as whole lines; when that fails, the file keeps its earlier length."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        with open(self.path, "ab", buffering=0) as stream:
            start = stream.tell()
            try:
                written = stream.write(lines)
                if written != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(stream.fileno())
            except BaseException as error:
                stream.truncate(start)
                if isinstance(error, OSError):
                    error.filename = str(self.path)
                raise

    def pack(self):
        """Compress the rows in the order of their ids, `shard_rows` to a file, and drop NAME.jsonl."""
        with open(self.path, "rb") as source:
            places = line_places(source)
            for number, start in enumerate(range(0, len(places), self.shard_rows)):
                path = self.folder / f"{self.name}-{number:05}.jsonl.gz"
                write_shard(path, source, places[start : start + self.shard_rows])
        self.path.unlink()


def line_places(source):
    """(line's beginning, offset) of every line of a stream, sorted: lines begin with their ids."""
    places, offset = [], 0
    for line in source:
        places.append((line[:64], offset))
        offset += len(line)
    return sorted(places)


def write_shard(path, source, places):
    """Compress the lines of `source` at `places`, with no time and no name: the same rows, the same bytes."""
    with manifest.atomic(path) as stream, gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as sink:
        for _, offset in places:
            source.seek(offset)
            sink.write(source.readline())


def drop_torn_line(path):
    """Cut off what follows the last line end: the remains of a write that was interrupted."""
    if path.exists():
        with open(path, "rb+") as stream:
            size = end = stream.seek(0, os.SEEK_END)
            while end and read_at(stream, end - 1) != b"\n":
                end -= 1
            if end < size:
                stream.truncate(end)


def read_at(stream, place):
    """The byte at a place of a stream."""
    stream.seek(place)
    return stream.read(1)
