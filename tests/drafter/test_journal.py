"""Journal: rows survive whatever happens between any two of its steps, and packed bytes depend on the rows alone."""

import gzip
import json
import os
import pathlib
import shutil

import pytest

from drafter.journal import Journal

ROWS = [{"id": f"{n * 7 % 23:04}", "text": "é" * n} for n in range(23)]


def packed(folder, rows, size=5):
    """A journal of rows, packed."""
    journal = Journal(folder, "answers", size)
    journal.begin()
    journal.append(rows)
    journal.pack()
    return journal


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_packed_rows_are_in_the_order_of_their_ids_whatever_order_they_came_in(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, rows in zip(folders, (ROWS, ROWS[::-1])):
        folder.mkdir()
        packed(folder, rows)
    assert contents(folders[0]) == contents(folders[1])
    files = sorted(folders[0].iterdir())
    assert [path.name for path in files] == [f"answers-0000{n}.jsonl.gz" for n in range(5)]
    lines = [gzip.decompress(path.read_bytes()).decode().splitlines() for path in files]
    assert [len(part) for part in lines] == [5, 5, 5, 5, 3]
    assert [json.loads(line) for part in lines for line in part] == sorted(ROWS, key=lambda row: row["id"])
    assert list(Journal(folders[0], "answers", 5).read()) == sorted(ROWS, key=lambda row: row["id"])


def test_a_journal_that_is_begun_again_goes_on_from_its_shards(tmp_path):
    (tmp_path / "whole").mkdir()
    packed(tmp_path / "whole", ROWS)
    (tmp_path / "parts").mkdir()
    packed(tmp_path / "parts", ROWS[:11])
    packed(tmp_path / "parts", ROWS[11:])
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


class Killed(BaseException):
    """Stands for a signal."""


def kill_at(monkeypatch, moment):
    """Let the file operation number `moment` of what follows be the last, which is not done."""
    count = iter(range(10**6))
    for owner, name in ((pathlib.Path, "unlink"), (os, "replace")):
        real = getattr(owner, name)

        def counted(*args, real=real, **kwargs):
            if next(count) == moment:
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("moment", range(11))
def test_a_kill_between_any_two_steps_loses_no_row_and_doubles_none(tmp_path, monkeypatch, moment):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    packed(first, ROWS[:12])
    shutil.copytree(first, second)
    packed(second, ROWS[12:])
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        journal = Journal(first, "answers", 5)
        with pytest.raises(Killed):  # one file to unpack to, three to drop, five to pack to, one to drop: 10 steps
            journal.begin()
            journal.append(ROWS[12:])
            journal.pack()
            raise Killed
    known = {row["id"] for row in Journal(first, "answers", 5).read()}
    assert known >= {row["id"] for row in ROWS[:12]}
    journal = Journal(first, "answers", 5)
    journal.begin()
    journal.append([row for row in ROWS if row["id"] not in known])
    journal.pack()
    kept = {name: data for name, data in contents(first).items() if not name.endswith(".partial")}
    assert kept == contents(second)


@pytest.mark.parametrize("torn", [b"", b'{"id": "x"', b'{"id": "\xc3', b"{" * 9000])
def test_a_line_without_end_is_dropped(tmp_path, torn):
    journal = Journal(tmp_path, "answers", 5)
    journal.append(ROWS[:3])
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + torn)
    assert list(journal.read()) == ROWS[:3]
    assert journal.path.read_bytes() == whole


def test_a_file_of_one_torn_line_is_empty(tmp_path):
    (tmp_path / "answers.jsonl").write_bytes(b'{"id"')
    assert list(Journal(tmp_path, "answers", 5).read()) == []
