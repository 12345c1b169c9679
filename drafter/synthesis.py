"""Answers that the target itself writes: the text a drafter learns to predict.

A synthesis folder holds
    answers.jsonl.gz   one answer a line: {"id", "source", "messages", "answer", "prompt_tokens", "answer_tokens",
                       "finish", "temperature"}. Training uses the token ids, since tokenising text again is lossy;
                       an answer that finished ("stop") ends in its end-of-sequence id, one cut at the cap ("length")
                       does not.
    settings.json      what must not change when the run is resumed
    manifest.json      digests, target, counts: input = written + skipped + failed + remaining
While it runs, whole lines are appended to answers.jsonl; a run that stops, for whatever reason, continues from there.
"""

import dataclasses
import errno
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import time

from drafter import manifest
from drafter.answers import Job, answer, random_keys
from drafter.documents import records
from drafter.prompts import normalise
from kernels.errors import UserError

ANSWERS, WORKING, SETTINGS = "answers.jsonl.gz", "answers.jsonl", "settings.json"
FLUSH_SECONDS = 5  # a crash loses at most this much work (assumed)
BUCKET = 8  # prompts are sorted by length within 8 batches, so that a run cut short still saw a fair sample


@dataclasses.dataclass
class Counts:
    """What became of the prompts; skipped and failed are counted by reason."""

    input: int = 0
    written: int = 0
    remaining: int = 0
    answer_tokens: int = 0
    skipped: dict = dataclasses.field(default_factory=dict)
    failed: dict = dataclasses.field(default_factory=dict)


def plan(target, prompts, *, temperatures, max_tokens, seed, held_out=()):
    """What a run is to do: (Counts with `input` and `skipped`, jobs).

    held_out: texts of evaluation prompts, never answered. temperatures: shared out evenly over the prompts by `seed`.
    """
    counts = Counts(input=len(prompts))
    held = {normalise(text) for text in held_out}
    jobs = {}
    for prompt in prompts:
        job = make_job(target, prompt, temperatures, seed)
        reason = skip_reason(job, jobs, held, target.max_length, max_tokens)
        if reason:
            counts.skipped[reason] = counts.skipped.get(reason, 0) + 1
        else:
            jobs[job.id] = job
    return counts, list(jobs.values())


def make_job(target, prompt, temperatures, seed):
    """Encode a prompt through the target's chat template and choose its temperature."""
    turn = int(hashlib.sha256(f"{seed}:temperature:{prompt.id}".encode()).hexdigest(), 16) % len(temperatures)
    return Job(prompt.id, prompt, list(target.encode(list(prompt.messages))), temperatures[turn])


def skip_reason(job, jobs, held, max_length, max_tokens):
    """Why a job is not to be answered, or None."""
    if normalise(job.prompt.text) in held:
        return "evaluation prompt"
    if job.id in jobs:
        return "duplicate"
    if max_length and len(job.tokens) + max_tokens > max_length:
        return "longer than the context"
    return None


def batching_order(jobs, batch_size):
    """Jobs sorted by prompt length within windows of BUCKET batches: less padding, and still a fair sample."""
    window = BUCKET * batch_size
    parts = [jobs[start : start + window] for start in range(0, len(jobs), window)]
    return [job for part in parts for job in sorted(part, key=lambda job: len(job.tokens))]


class Journal:
    """The answers of a run on disk: whole lines appended to answers.jsonl, packed when the run ends."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.path = self.folder / WORKING
        self.packed = self.folder / ANSWERS

    def read(self, settings):
        """The answers already there, as {id: how many tokens}; UserError where they are damaged or of another run."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder}: found a file, expected a folder to write to; choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        check_settings(self.folder / SETTINGS, settings)
        if self.complete:
            manifest.verify(self.folder)
        drop_torn_line(self.path)
        found = next((path for path in (self.path, self.packed) if path.exists() and path.stat().st_size), None)
        return {row["id"]: len(row["answer_tokens"]) for _, row in records(found)} if found else {}

    @property
    def complete(self):
        """Whether the folder ended in a manifest, whatever remained to be answered."""
        return (self.folder / manifest.NAME).exists()

    def begin(self):
        """Make the folder one that answers can be appended to: unpacked, and with no manifest to contradict."""
        (self.folder / manifest.NAME).unlink(missing_ok=True)
        if self.packed.exists() and not self.path.exists():
            with gzip.open(self.packed) as source, manifest.atomic(self.path) as sink:
                shutil.copyfileobj(source, sink)

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
        """Compress the answers, in the order of their ids so that batching leaves no trace, and drop answers.jsonl."""
        lines = sorted(self.path.read_bytes().splitlines(keepends=True)) if self.path.exists() else []
        with manifest.atomic(self.packed) as stream:
            stream.write(gzip.compress(b"".join(lines), mtime=0))  # no time in it: the same answers, the same bytes
        self.path.unlink(missing_ok=True)


def check_settings(path, settings):
    """Write the settings of a new run; for one being continued, raise UserError naming the first that differs."""
    if not path.exists():
        if any(path.parent.iterdir()):
            raise UserError(f"{path.parent}: found files but no {path.name}, so no synthesis run; choose another --out")
        manifest.write_json(path, settings)
        return
    begun = manifest.read_json(path)
    for name, value in settings.items():
        if begun.get(name) != value:
            raise UserError(
                f"{path}: the run begun here has {name}={begun.get(name)}, this one {value}; "
                "give the same, or choose another --out"
            )


def drop_torn_line(path):
    """Cut off what follows the last line end: the remains of a write that was interrupted."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def make_row(target, job, tokens, finish):
    """One line of answers.jsonl."""
    text = target.tokenizer.decode(tokens[:-1] if finish == "stop" else tokens)
    return {
        "id": job.id,
        "source": job.prompt.source,
        "messages": list(job.prompt.messages),
        "answer": text,
        "prompt_tokens": job.tokens,
        "answer_tokens": tokens,
        "finish": finish,
        "temperature": job.temperature,
    }


def run(
    target,
    prompts,
    folder,
    *,
    data,
    argv,
    seed,
    temperatures,
    max_tokens,
    batch_size,
    held_out=(),
    minutes=None,
    progress=lambda answered, tokens, total: None,
):
    """Answer prompts into a synthesis folder, continuing what is there; returns its Counts.

    prompts: list of Prompt; data: [{"name", "sha256"}], the files they came from. held_out: evaluation prompts, left
    out. minutes: feed no prompt after that long. progress: called after every step with the answers there are, the
    tokens this step generated, and the answers expected.
    """
    counts, jobs = plan(target, prompts, temperatures=temperatures, max_tokens=max_tokens, seed=seed, held_out=held_out)
    if not jobs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.skipped.items()) or "none given"
        raise UserError(f"no prompt is left to answer ({reasons}); give other prompts")
    identity = target.identity()
    settings = {name: identity[name] for name in identity if name != "source"}
    settings |= {"prompts": data, "seed": seed, "temperatures": list(temperatures), "max_tokens": max_tokens}
    journal = Journal(folder)
    answered = journal.read(settings)
    waiting = batching_order([job for job in jobs if job.id not in answered], batch_size)
    counts.input += len(answered.keys() - {job.id for job in jobs})  # prompts of an earlier, larger call
    counts.written, counts.answer_tokens = len(answered), sum(answered.values())
    if journal.complete and not waiting:
        return counts
    expected = len(answered) + len(waiting)
    stop = time.monotonic() + 60 * minutes if minutes else float("inf")
    answering = answer(
        target,
        waiting,
        batch_size=batch_size,
        max_tokens=max_tokens,
        keys=random_keys(seed, f"synthesis after {len(answered)}"),
        feed=lambda: time.monotonic() < stop,
        observe=lambda tokens: progress(counts.written, tokens, expected),
    )
    journal.begin()
    record(target, answering, journal, counts)
    counts.remaining = expected - counts.written - sum(counts.failed.values())
    journal.pack()
    manifest.write(folder, kind="synthesis", target=identity, data=data, argv=argv, extra=dataclasses.asdict(counts))
    return counts


def record(target, answering, journal, counts):
    """Append answers to the journal as they come, in batches, keeping the counts."""
    rows, flushed = [], time.monotonic()
    try:
        for job, tokens, finish in answering:
            if finish == "stop" and len(tokens) == 1:
                counts.failed["empty answer"] = counts.failed.get("empty answer", 0) + 1
                continue
            rows.append(make_row(target, job, tokens, finish))
            counts.written += 1
            counts.answer_tokens += len(tokens)
            if time.monotonic() - flushed > FLUSH_SECONDS:
                journal.append(rows)
                rows, flushed = [], time.monotonic()
    finally:
        if rows:
            journal.append(rows)
