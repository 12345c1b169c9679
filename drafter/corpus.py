"""Rows of tokens.  (draft header; completed below)"""

import gzip
import json

from kernels.errors import UserError


def records(path):
    """Yield (line number, object) for every line of a JSONL file, plain or .gz. Raises UserError naming a bad line."""
    opener = gzip.open if str(path).endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, decode_line(path, number, line)
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: unreadable after line {number} ({error}); fetch or write the file again") from None
    if number == 0:
        raise UserError(f"{path}: empty file; expected one JSON object a line")


def decode_line(path, number, line):
    """One line's JSON object."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} line {number}: not JSON ({error}); expected one JSON object a line") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} line {number}: found {type(value).__name__}, expected a JSON object")
    return value
