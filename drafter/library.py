"""Python's standard library as text: what is read, what is held out, and passages of it to continue.

Every machine that runs this has that text (licence PSF-2.0). What a training run reads depends on the Python version,
so manifests carry digests; which side of the split a source lies on depends on its name alone, so that nothing held out
on one version is trained on with another.
"""

import dataclasses
import hashlib
import pathlib
import platform
import re
import sysconfig
import tokenize

from drafter.corpus import position
from kernels.errors import UserError

HELD_OUT_SHARE = 0.1  # of the top-level names (assumed)
# Not the library proper (packages installed beside it, tests, demonstrations), written by a program (tables of code
# pages, of topics, of this machine's build), or gone from the newer versions.
LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip", "__phello__"),
    *("encodings", "pydoc_data", "msilib", "lib2to3", "distutils", "lib-dynload", "__pycache__"),
}
PASSAGE = (200, 400)  # characters of a passage, cut at a line end
START = re.compile(r"^(?:@.*\n)*(?:async def|def|class) ", re.MULTILINE)  # where a top-level definition begins


@dataclasses.dataclass(frozen=True)
class Text:
    """One file: its name relative to where it was found, with forward slashes, and what it says."""

    name: str
    text: str

    @property
    def held_out(self):
        """Whether it lies on the held-out side, by the family its name belongs to."""
        return position("held out", family(self.name)) < HELD_OUT_SHARE


@dataclasses.dataclass(frozen=True)
class Library:
    """The two sides of the split, as Texts in the order of their names; `version` is Python's."""

    train: list
    held_out: list
    version: str

    def digests(self):
        """What a manifest records of the two sides: [{"name", "sha256"}]."""
        sides = {"training": self.train, "held out": self.held_out}
        return [{"name": f"Python {self.version} library, {side}", "sha256": digest(sides[side])} for side in sides]


def family(name):
    """What decides the side of a file: its top-level name, without what a move between versions or a C twin adds.

    `decimal.py` and `_pydecimal.py` are one, `zipfile.py` and `zipfile/__init__.py`, and the two path modules, which
    hold the same functions.
    """
    top = name.split("/")[0].removesuffix(".py").lower()
    top = top.removeprefix("_py").lstrip("_")
    twins = {"ntpath": "posixpath", "sre_parse": "re", "sre_compile": "re", "sre_constants": "re"}
    return twins.get(top, top)


def read(sources=(), max_files=None):
    """The standard library and `sources` (UTF-8 files, or folders of .py files), split; returns Library.

    max_files: keep that many files of each side, drawn by hash. Sources are split by their names too, so that a copy of
    the library does not bring the held-out side into the training side. Raises UserError naming what cannot be read.
    """
    texts = read_folder(pathlib.Path(sysconfig.get_path("stdlib")))
    for source in sources:
        path = pathlib.Path(source)
        if not path.exists():
            raise UserError(f"text.sources: {path} not found; expected a UTF-8 file or a folder of .py files")
        texts += read_folder(path) if path.is_dir() else [read_file(path, path.name)]
    sides = {side: [text for text in texts if text.held_out == side] for side in (False, True)}
    train, held_out = (draw(sides[side], max_files) for side in (False, True))
    return Library(train, held_out, platform.python_version())


def read_folder(folder):
    """Every .py file at or below a folder that is not LEFT_OUT, in the order of their names."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    texts = [read_file(folder / name, name) for name in names if wanted(name)]
    return [text for text in texts if text.text.strip()]


def wanted(name):
    """Whether a file of the library is text to train on."""
    parts = name.split("/")
    built_here = parts[0].startswith("config-") or parts[-1].startswith("_sysconfigdata")
    return not built_here and not LEFT_OUT.intersection(parts)


def read_file(path, name):
    """One file as Text; a .py file in the encoding it declares, any other in UTF-8."""
    try:
        with tokenize.open(path) if path.suffix == ".py" else open(path, encoding="utf-8") as stream:
            return Text(name, stream.read())
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"{path}: not text in its encoding ({error}); convert it to UTF-8, or leave it out") from None


def draw(texts, limit):
    """At most `limit` texts, in their order; which ones is drawn by a hash of their names."""
    if limit is None or len(texts) <= limit:
        return texts
    chosen = sorted(texts, key=lambda text: position("chosen", text.name))[:limit]
    return [text for text in texts if text in chosen]


def digest(texts):
    """SHA-256 over the names and the bytes of texts."""
    total = hashlib.sha256()
    for text in texts:
        content = text.text.encode()
        total.update(f"{text.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def passages(texts, count):
    """At most `count` passages as rows of a prompt set: {"question_id": FILE:LINE, "category", "prompt"}, sorted.

    A passage begins at a top-level definition and ends at a line end (left off, since a tokenizer joins it to the
    indentation that follows). Files take turns: each gives its first by hash before any gives a second.
    """
    ranked = []
    for text in texts:
        rows = sorted(passages_of(text), key=lambda row: position("passage", row["question_id"]))
        ranked += [(rank, position("turn", row["question_id"]), row) for rank, row in enumerate(rows)]
    chosen = [row for *_, row in sorted(ranked, key=lambda entry: entry[:2])[:count]]
    return sorted(chosen, key=lambda row: (row["question_id"].split(":")[0], int(row["question_id"].split(":")[1])))


def passages_of(text):
    """Every passage of one text."""
    shortest, longest = PASSAGE
    rows = []
    for match in START.finditer(text.text):
        cut = text.text[match.start() : match.start() + longest + 1].rpartition("\n")[0].rstrip()
        if len(cut) >= shortest:
            line = text.text.count("\n", 0, match.start()) + 1
            rows.append({"question_id": f"{text.name}:{line}", "category": "python", "prompt": cut})
    return rows
