"""Documents: what a source holds, as token ids and the part of them that the loss covers.

A document is one conversation or one text. The loss covers what the target wrote (the answer tokens, the final
end-of-sequence id included), or every token of plain text.
"""

import dataclasses
import fnmatch
import gzip
import hashlib
import json
import pathlib
import zlib

import numpy as np

from drafter import manifest
from kernels.errors import UserError

KINDS = ("synthesis", "text", "dataset")
BUILDERS = {".json": "json", ".jsonl": "json", ".gz": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
DATA_ERRORS = (OSError, ValueError, LookupError, RuntimeError)  # what `datasets` raises for a bad name, split or net


@dataclasses.dataclass(frozen=True)
class Source:
    """Where documents come from.

    kind "synthesis": a folder of `scripts/synthesize.py`, or a .jsonl file (plain or .gz) of its rows.
    kind "text": a UTF-8 file, one document.
    kind "dataset": a file or whatever else `datasets.load_dataset` takes; `split` may be a slice ("train[:1000]"),
    and `column` holds text, or a conversation as a list of {"role", "content"}.
    """

    name: str
    kind: str = "synthesis"
    split: str = "train"
    column: str = "text"


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids [n] int32 and which of them the loss covers [n] bool; `key` decides the side of the split."""

    key: str
    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class Read:
    """The documents of one source and the SHA-256 of what they were read from."""

    name: str
    sha256: str
    documents: list


def read_source(source, target, allow_mismatch=False):
    """Read one Source. Raises UserError naming the file or dataset, and the line or row if any."""
    path = pathlib.Path(source.name)
    if source.kind not in KINDS:
        raise UserError(f"{source.name}: unknown kind {source.kind!r}, expected one of {', '.join(KINDS)}")
    if source.kind == "dataset":
        return read_dataset(source, target)
    if not path.exists():
        raise UserError(f"{path}: not found; expected {'a text file' if source.kind == 'text' else 'answers (.jsonl)'}")
    return read_text(path, target) if source.kind == "text" else read_synthesis(path, target, allow_mismatch)


def read_synthesis(path, target, allow_mismatch):
    """Read answers; those in a folder with a manifest are verified, and their target compared."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or ((folder / manifest.NAME).is_file() and path.name in manifest.read(folder).files):
        record = manifest.verify(folder)
        shards = sorted(name for name in record.files if fnmatch.fnmatch(name, "answers*.jsonl*"))
        if not shards:
            raise UserError(f"{folder}: found a folder of kind {record.kind!r}, expected one with answers (.jsonl.gz)")
        if not allow_mismatch:
            remedy = "synthesize answers with this target, or set data.allow_target_mismatch=true"
            manifest.match_target(record, target.identity(), remedy=remedy)
    paths = [folder / name for name in shards] if path.is_dir() else [path]
    documents = [
        answer_document(f"{path} line {line}", record, target.vocab_size)
        for path in paths
        for line, record in records(path)
    ]
    name = paths[0].name if len(paths) == 1 else f"answers, {len(paths)} shards"
    return Read(f"{folder.resolve().name}/{name}", shards_digest(paths), documents)


def shards_digest(paths):
    """The SHA-256 of a file, or over those of several."""
    digests = [manifest.sha256_file(path) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def read_text(path, target):
    """Read a text file as one document."""
    text = decode_text(path)
    if not text.strip():
        raise UserError(f"{path}: empty file; expected text")
    return Read(path.name, manifest.sha256_file(path), [text_document(text, target)])


def read_dataset(source, target):
    """Read one split of a dataset; its digest is over the decoded column, since a dataset has many forms on disk."""
    table = load_table(source.name, source.split)
    digest, documents = hashlib.sha256(), []
    for number, record in enumerate(table):
        documents.append(decode_record(f"dataset {source.name} row {number}", record, source.column, target))
        digest.update(json.dumps(record.get(source.column), sort_keys=True, default=str).encode() + b"\n")
    return Read(f"{source.name}[{source.split}]", digest.hexdigest(), documents)


def load_table(name, split, subset=None):
    """One split of a file or of whatever else `datasets.load_dataset` takes; subset: a dataset's configuration."""
    import datasets

    path = pathlib.Path(name)
    try:
        if path.is_file():
            files = {split.split("[")[0]: str(path)}
            return datasets.load_dataset(BUILDERS[path.suffix], data_files=files, split=split)
        return datasets.load_dataset(name, subset, split=split)
    except DATA_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"dataset {name}: cannot be loaded ({reason}); check its name and split") from None


def decode_text(path):
    """The text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None


def records(path):
    """Yield (line number, object) for every line of a JSONL file, plain or .gz. Raises UserError naming a bad line."""
    opener = gzip.open if str(path).endswith(".gz") else open
    number = found = 0
    try:
        with opener(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    found += 1
                    yield number, decode_line(path, number, line)
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: unreadable after line {number} ({error}); fetch or write the file again") from None
    if not found:
        raise UserError(f"{path}: empty file; expected one JSON object a line")


def decode_line(path, number, line):
    """One line's JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} line {number}: not JSON ({error}); expected one JSON object a line") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} line {number}: found {type(value).__name__}, expected a JSON object")
    return value


def decode_record(place, record, column, target):
    """The Document of one dataset row: the text or the conversation in `column`."""
    value = record.get(column)
    if isinstance(value, str) and value.strip():
        return text_document(value, target)
    if isinstance(value, list) and value:
        return chat_document(place, value, target)
    fields = ", ".join(sorted(record))
    raise UserError(f"{place}: no text in {column!r} (found {fields}); name the column that holds text or messages")


def answer_document(place, record, vocab_size):
    """A synthesised row: the prompt's tokens and the answer's, the loss over the latter."""
    prompt, answer = record.get("prompt_tokens"), record.get("answer_tokens")
    for name, ids in (("prompt_tokens", prompt), ("answer_tokens", answer)):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise UserError(f"{place}: {name} is no list of token ids; expected a row of scripts/synthesize.py")
    if not answer:
        raise UserError(f"{place}: no answer tokens; remove the row")
    ids = prompt + answer
    wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size]
    if wrong:
        raise UserError(f"{place}: token {wrong[0]} found, expected 0 to {vocab_size - 1}; is it for another target?")
    key = str(record.get("conversation") or record.get("id") or content_key(prompt))  # a conversation is not split
    return Document(key, np.array(ids, np.int32), np.arange(len(ids)) >= len(prompt))


def text_document(text, target):
    """Plain text: every token under the loss."""
    ids = np.array(target.tokenizer.encode(text), np.int32)
    return Document(content_key(text), ids, np.ones(len(ids), bool))


def chat_document(place, messages, target):
    """A conversation in text: the loss over its last turn, which must be the assistant's, and the end that follows."""
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant" or not last.get("content") or len(messages) < 2:
        raise UserError(f"{place}: no answer in its last message; expected role 'assistant' with content")
    prompt = list(target.encode(messages[:-1]))
    answer = list(target.tokenizer.encode(last["content"], add_special_tokens=False)) + [target.tokenizer.eos_token_id]
    ids = np.array(prompt + answer, np.int32)
    return Document(content_key(messages[:-1]), ids, np.arange(len(ids)) >= len(prompt))


def content_key(content):
    """A digest of what was asked, or of a text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
