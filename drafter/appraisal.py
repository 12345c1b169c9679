"""What a small target trained on source text is worth: bits per held-out byte, and what it writes by itself.

R rows, T tokens a row, n tokens of a text.
"""

import collections
import io
import math
import time
import tokenize
import warnings

import mlx.core as mx
import numpy as np

from drafter import answers, ngram
from drafter.library import passages
from drafter.scratch import END_ID

NGRAM_ORDER = 5
TEMPERATURE = 0.8
ROWS = 32  # scored at once: at 512 tokens and 3,072 ids, 0.2 GB of logits
RULE = (
    "prefix and continuation together, cut after the last line end, are read by Python's tokenize without an error; a"
    " bracket or a triple-quoted string that is open at the cut is none, as long as a statement was completed after the"
    " prefix's last line"
)
CUT_ERRORS = ("EOF in multi-line", "unterminated triple-quoted")  # as Python 3.11, and 3.12 and later, word them


class OutOfTime(Exception):
    """The time for the report is spent."""


def report(target, library, settings, row_tokens, *, seconds=math.inf, say=print):
    """(report, samples): bits per byte beside the n-gram's, and continuations of held-out passages.

    settings: a `config.PretrainTrainerConfig`. seconds: what does not fit is None. say: told what is being done.
    """
    stop = time.monotonic() + seconds
    documents = [text.text.encode() for text in library.held_out]
    size = sum(map(len, documents))
    found = {"held_out_bytes": size, "bits_per_byte": None, "tokens": None}
    found |= {f"ngram_{NGRAM_ORDER}_bits_per_byte": None, "samples": None}
    written = None
    try:
        say("report       continuations of held-out passages")
        written = continuations(target, library.held_out, settings, stop)
        found["samples"] = summary(written, settings)
        say("report       bits per byte of the held-out text")
        bits, tokens = text_bits(target, library.held_out, row_tokens, stop)
        found |= {"bits_per_byte": round(bits / size, 5), "tokens": tokens}
        say(f"report       byte n-gram of order {NGRAM_ORDER}")
        baseline = ngram.fit([text.text.encode() for text in library.train], NGRAM_ORDER)
        found[f"ngram_{NGRAM_ORDER}_bits_per_byte"] = round(baseline.bits(documents) / size, 5)
    except OutOfTime:
        say("report       out of time; the same command with resume=auto finishes it")
    return found, written


def check_time(stop):
    """Raise OutOfTime once `stop` (of time.monotonic) has passed."""
    if time.monotonic() > stop:
        raise OutOfTime


# Bits per byte.


def text_bits(target, texts, row_tokens, stop=math.inf):
    """(bits, tokens) in which a target encodes texts, ends not counted; every token sees at least T/2 before it.

    A text is read behind an END token in windows of T = row_tokens that move by T/2; the first scores all of its
    tokens, the others their second half.
    """
    rows = [row for text in texts for row in windows(target.tokenizer.encode(text.text), row_tokens)]
    bits = 0.0
    for start in range(0, len(rows), ROWS):
        check_time(stop)
        bits += row_bits(target, rows[start : start + ROWS])
    return bits, sum(int(scored.sum()) for *_, scored in rows)


def windows(ids, T):
    """Rows (tokens [T], labels [T], scored [T] bool) over ids: each label is scored once."""
    text = np.array([END_ID, *ids], np.int32)
    rows, done = [], 0  # labels scored so far
    while done < len(ids):
        start = max(0, done - T // 2)
        piece = text[start : start + T + 1]
        pad = T + 1 - len(piece)
        places = start + np.arange(T)  # label at place p is text[p + 1]
        scored = (places >= done) & (places < len(ids))
        piece = np.pad(piece, (0, pad))
        rows.append((piece[:-1], piece[1:], scored))
        done = start + T
    return rows


def row_bits(target, rows):
    """Bits of the scored labels of rows."""
    tokens, labels, scored = (mx.array(np.stack(part)) for part in zip(*rows))
    logits = target.score(target.forward(tokens).hidden).astype(mx.float32)
    chosen = mx.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nats = mx.where(scored, mx.logsumexp(logits, axis=-1) - chosen, 0.0)
    return nats.sum().item() / math.log(2)


# Samples.


def continuations(target, texts, settings, stop=math.inf):
    """What a target writes after passages of texts: [{"id", "prefix", "continuation", "tokenizes"}].

    All of settings.samples are written at once, at TEMPERATURE, settings.sample_tokens each unless it ends the text.
    """
    rows = passages(texts, settings.samples)
    length = settings.sample_tokens
    jobs = [
        answers.Job(row["question_id"], row, list(target.tokenizer.encode(row["prompt"])), TEMPERATURE, length)
        for row in rows
    ]
    written = answers.answer(
        target,
        collections.deque(jobs),
        batch_size=len(jobs),
        seed=settings.seed,
        observe=lambda tokens: check_time(stop),
    )
    found = {job.id: tokens[:-1] if finish == "stop" else tokens for job, tokens, finish in written}
    texts_of = {row["question_id"]: (row["prompt"], target.tokenizer.decode(found[row["question_id"]])) for row in rows}
    return [
        {"id": name, "prefix": prefix, "continuation": text, "tokenizes": tokenizes(prefix, text)}
        for name, (prefix, text) in texts_of.items()
    ]


def summary(written, settings):
    """How many samples pass, and by which rule."""
    passed = sum(row["tokenizes"] for row in written)
    shape = {"temperature": TEMPERATURE, "tokens": settings.sample_tokens, "count": len(written)}
    return shape | {"pass_tokenize": passed, "rule": RULE}


def tokenizes(prefix, continuation):
    """Whether Python's tokenize reads a continuation behind its prefix, by RULE; the prefix has no line end."""
    source, last = prefix + continuation, 0  # last: the line in which a statement was last completed
    readline = io.StringIO(source[: source.rfind("\n") + 1]).readline
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes and numbers that a later Python refuses
            for token in tokenize.generate_tokens(readline):
                if token.type == tokenize.ERRORTOKEN:  # until Python 3.11 it was no exception
                    return False
                last = token.end[0] if token.type == tokenize.NEWLINE else last
    except tokenize.TokenError as error:
        if not any(words in str(error) for words in CUT_ERRORS):
            return False
    except SyntaxError:  # IndentationError: a dedent to no outer level
        return False
    return last > prefix.count("\n") + 1
