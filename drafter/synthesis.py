"""Answers that the target itself writes: the text a drafter learns to predict.

Dimension letters: R rows of the running batch, V vocabulary.

A synthesis folder holds
    answers.jsonl.gz   one answer a line: {"id", "source", "messages", "answer", "prompt_tokens", "answer_tokens",
                       "finish", "temperature"}. Training uses the token ids, since tokenising text again is lossy;
                       an answer that finished ("stop") ends in its end-of-sequence id, one cut at the cap ("length")
                       does not.
    settings.json      what must not change when the run is resumed
    manifest.json      digests, target, counts: input = written + skipped + failed + remaining
While it runs, whole lines are appended to answers.jsonl; a run that stops, for whatever reason, continues from there.
"""

import collections
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import time

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch

from drafter import manifest, rng
from drafter.corpus import records
from drafter.prompts import Prompt, normalise
from kernels.errors import UserError

ANSWERS, WORKING, SETTINGS = "answers.jsonl.gz", "answers.jsonl", "settings.json"
IDLE_SHARE = 8  # rows/8 may idle before the batch is re-packed (assumed: half of that is lost, 6 % of the arithmetic)
PREFILL_SHARE = 4  # prompts are prefilled rows/4 at a time (assumed; bounds the memory of the attention scores)
FLUSH_SECONDS = 5  # a crash loses at most this much work (assumed)
BUCKET = 8  # prompts are sorted by length within 8 batches, so that a run cut short still saw a fair sample


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt ready to be answered: its token ids and its temperature."""

    id: str
    prompt: Prompt
    tokens: list
    temperature: float


@dataclasses.dataclass
class Counts:
    """What became of the prompts; skipped and failed are counted by reason."""

    input: int = 0
    written: int = 0
    remaining: int = 0
    answer_tokens: int = 0
    skipped: dict = dataclasses.field(default_factory=dict)
    failed: dict = dataclasses.field(default_factory=dict)

    def figures(self):
        """As a manifest records them."""
        return dataclasses.asdict(self)


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


class Temperature:
    """A sampler that a batch can apply to all its rows at once; temperature 0 is greedy.

    Sampling is in float32: bfloat16 noise has too few values to draw from 49,000 tokens by.
    """

    def __init__(self, value, keys):
        self.value = value
        self.keys = keys

    def __call__(self, logits):
        """Token ids [R] from logits or log-probabilities [R, V]."""
        return draw_tokens(logits, None if self.value == 0 else mx.array([[self.value]] * len(logits)), self.keys)


def draw_tokens(logits, temperatures, keys):
    """Token ids [R] from logits [R, V]; temperatures [R, 1], 0 for greedy rows, or None when every row is greedy."""
    greedy = mx.argmax(logits, axis=-1)
    if temperatures is None:
        return greedy
    scaled = logits.astype(mx.float32) / mx.maximum(temperatures, 1e-6)
    return mx.where(temperatures[:, 0] > 0, mx.random.categorical(scaled, key=next(keys)), greedy)


class AnswerBatch(GenerationBatch):
    """mlx-lm's generation batch without the work that synthesis has no use for.

    Upstream splits every step's log-probabilities into R arrays (measured on two CPU cores: 22 ms a step at R = 1024,
    before any arithmetic), samples row by row when samplers differ, and copies every cache whenever one row finishes.
    Here a step takes the argmax of the raw logits or samples all rows in one call, and finished rows idle until R/8
    of them can be dropped together. `next` reports finished rows only: (uid, answer tokens, finish).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.answers = [[] for _ in self.uids]
        self.finished = [False] * len(self.uids)
        self.eos_ids = frozenset()
        self.temperatures = None

    def extend(self, batch):
        super().extend(batch)
        self.answers += [[] for _ in batch.uids]
        self.finished += [False] * len(batch.uids)
        self._forget()

    def filter(self, keep):
        super().filter(keep)
        self.answers = [self.answers[row] for row in keep]
        self.finished = [self.finished[row] for row in keep]
        self._forget()

    def _forget(self):
        """Drop what upstream keeps for its responses; renew the rows' temperatures [R, 1]."""
        self._current_logprobs, self._next_logprobs = [], [None] * len(self.uids)
        values = [sampler.value for sampler in self.samplers]
        self.temperatures = mx.array(values)[:, None] if any(values) else None

    def _step(self):
        """Start the next step and return the tokens of this one."""
        self._current_tokens = self._next_tokens
        logits = self.model(self._current_tokens[:, None], cache=self.prompt_cache)[:, -1]
        self._next_tokens = draw_tokens(logits, self.temperatures, self.fallback_sampler.keys)
        mx.async_eval(self._next_tokens)
        return self._current_tokens.tolist()

    def next(self):
        done = []
        for row, token in enumerate(self._step() if self.uids else []):
            if self.finished[row]:
                continue
            self.answers[row].append(token)
            stopped = token in self.eos_ids
            if stopped or len(self.answers[row]) >= self.max_tokens[row]:
                self.finished[row] = True
                done.append((self.uids[row], self.answers[row], "stop" if stopped else "length"))
        idle = sum(self.finished)
        if idle * IDLE_SHARE >= len(self.uids) and idle:
            self.filter([row for row, finished in enumerate(self.finished) if not finished])
        return done


def make_generator(target, batch_size, keys):
    """mlx-lm's continuous batching over `batch_size` rows, with AnswerBatch as its running batch."""
    generator = BatchGenerator(
        target.model,
        sampler=Temperature(0.0, keys),
        completion_batch_size=batch_size,
        prefill_batch_size=max(1, batch_size // PREFILL_SHARE),
    )
    batch = AnswerBatch.empty(target.model, generator.sampler)
    batch.eos_ids = frozenset(target.eos_ids)
    generator._generation_batch = batch
    return generator


def random_keys(seed, stream):
    """An endless stream of sampling keys."""
    step = 0
    while True:
        yield rng.key(seed, stream, step)
        step += 1


def answer(target, jobs, *, batch_size, max_tokens, keys, feed=lambda: True, observe=lambda tokens: None):
    """Yield (job, answer tokens, finish) in the order in which answers finish.

    feed: called before prompts are added; False ends the run once the answers begun are finished (dropping those
    would favour short answers). observe: called after every step with the number of tokens it generated. keys: sampling keys, one used a step.
    """
    waiting = collections.deque(jobs)
    running = {}
    samplers = {value: Temperature(value, keys) for value in {job.temperature for job in jobs}}
    with contextlib.closing(make_generator(target, batch_size, keys)) as generator:
        while running or waiting:
            if waiting and not feed():
                waiting.clear()
            batch = [waiting.popleft() for _ in range(min(batch_size - len(running), len(waiting)))]
            running |= zip(insert(generator, batch, samplers, max_tokens), batch, strict=True)
            for uid, tokens, finish in generator.next()[1]:
                yield running.pop(uid), tokens, finish
            observe(len(running))


def insert(generator, jobs, samplers, max_tokens):
    """Queue jobs in a generator; returns their uids."""
    if not jobs:
        return []
    tokens = [job.tokens for job in jobs]
    return generator.insert(tokens, [max_tokens] * len(jobs), samplers=[samplers[job.temperature] for job in jobs])


def batching_order(jobs, batch_size):
    """Jobs sorted by prompt length within windows of BUCKET batches: less padding, and still a fair sample."""
    window = BUCKET * batch_size
    parts = [jobs[start : start + window] for start in range(0, len(jobs), window)]
    return [job for part in parts for job in sorted(part, key=lambda job: len(job.tokens))]


# The folder.


class Journal:
    """The answers of a run on disk: whole lines appended to answers.jsonl, packed when the run ends."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.path = self.folder / WORKING
        self.packed = self.folder / ANSWERS

    def open(self, settings):
        """Start a run or continue one with the same settings; returns the rows already answered, as (id, tokens)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        check_settings(self.folder / SETTINGS, settings)
        if self.packed.exists() and not self.path.exists():
            with gzip.open(self.packed) as source, manifest.atomic(self.path) as sink:
                shutil.copyfileobj(source, sink)
        drop_torn_line(self.path)
        if not self.path.exists() or self.path.stat().st_size == 0:
            return {}
        return {row["id"]: len(row["answer_tokens"]) for _, row in records(self.path)}

    def append(self, rows):
        """Append rows as whole lines; when the disk refuses, the file keeps its earlier length."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        with open(self.path, "ab", buffering=0) as stream:
            start = stream.tell()
            try:
                written = stream.write(lines)
                if written != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                os.fsync(stream.fileno())
            except OSError as error:
                stream.truncate(start)
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
        manifest.write_json(path, settings)
        return
    earlier = manifest.read_json(path)
    for name, value in settings.items():
        if earlier.get(name) != value:
            raise UserError(
                f"{path}: the run begun here has {name}={earlier.get(name)}, this one {value}; "
                "give the same, or choose another --out"
            )


def drop_torn_line(path):
    """Cut off what follows the last line end: the remains of a write that was interrupted."""
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


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
    journal = Journal(folder)
    answered = journal.open(
        {"target": target.identity(), "prompts": data, "seed": seed}
        | {"temperatures": list(temperatures), "max_tokens": max_tokens}
    )
    waiting = batching_order([job for job in jobs if job.id not in answered], batch_size)
    counts.input += len(answered.keys() - {job.id for job in jobs})  # prompts of an earlier, larger call
    counts.written, counts.answer_tokens = len(answered), sum(answered.values())
    expected = len(answered) + len(waiting)
    stop = time.monotonic() + 60 * minutes if minutes else float("inf")
    answers = answer(
        target,
        waiting,
        batch_size=batch_size,
        max_tokens=max_tokens,
        keys=random_keys(seed, f"synthesis after {len(answered)}"),
        feed=lambda: time.monotonic() < stop,
        observe=lambda tokens: progress(counts.written, tokens, expected),
    )
    record(target, answers, journal, counts)
    counts.remaining = expected - counts.written - sum(counts.failed.values())
    journal.pack()
    manifest.write(folder, kind="synthesis", target=target.identity(), data=data, argv=argv, extra=counts.figures())
    return counts


def record(target, answers, journal, counts):
    """Append answers to the journal as they come, in batches, keeping the counts."""
    rows, flushed = [], time.monotonic()
    try:
        for job, tokens, finish in answers:
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
        journal.append(rows)
