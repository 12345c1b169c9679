"""Pretraining of a small hybrid target from scratch: the stream it reads, the loop, and the folder it ends as.

R rows, T tokens a row, n tokens of the stream.

A run folder holds config.yaml, metrics.jsonl and steps as a drafter's run does, the tokenizer, and, at the end,
`hybrid/`: a model folder with samples.json, report.json and passages.jsonl.gz, prompts from the training side for a
drafter's answers.
"""

import dataclasses
import gzip
import json
import math
import time

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from drafter import appraisal, checkpoint, config, hybrid, library, manifest, packed, rng, scratch, trainer
from drafter import target as targets
from kernels.errors import UserError

PASSAGES = 4000  # prompts for a drafter's answers (assumed: at 256 tokens each, as much again as the library holds)
FOLDER = "hybrid"  # the name that the target bears from then on
METRIC = "validation_bits_per_byte"


@dataclasses.dataclass(frozen=True)
class Stream:
    """Documents one after another, an END token before each and after the last: tokens and document ids [n] int32."""

    tokens: np.ndarray
    documents: np.ndarray
    bytes: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of a stream: tokens [R,T+1], of which the last are labels only, and document ids [R,T]; int32.

    seed: of the draws that a step makes on the batch.
    """

    tokens: mx.array
    documents: mx.array
    seed: int = 0


def make_stream(texts, tokenizer):
    """The Stream of Texts under a `tokenizers.Tokenizer`."""
    encoded = tokenizer.encode_batch([text.text for text in texts])
    pieces = [np.array([scratch.END_ID, *one.ids], np.int32) for one in encoded]
    ids = np.repeat(np.arange(1, len(pieces) + 1, dtype=np.int32), [len(piece) for piece in pieces])
    ends = np.array([scratch.END_ID], np.int32), np.array([len(pieces) + 1], np.int32)
    size = sum(len(text.text.encode()) for text in texts)
    return Stream(np.concatenate([*pieces, ends[0]]), np.append(ids, ends[1]), size)


class Feed:
    """The batch of any step: windows that tile the stream, shifted and shuffled anew each epoch.

    A step's batch depends on (stream, seed, step) alone, so a resumed run sees what the unsplit one would have.
    """

    def __init__(self, stream, rows_per_step, row_tokens, seed):
        self.stream, self.row_tokens, self.seed = stream, row_tokens, seed
        self.windows = (len(stream.tokens) - row_tokens) // row_tokens  # whatever the shift, all lie inside
        if self.windows < 1:
            raise UserError(
                f"text: {len(stream.tokens)} tokens on one side of the split, expected {2 * row_tokens} or more; "
                "give more text.sources, or a smaller text.row_tokens"
            )
        self.rows = min(rows_per_step, self.windows)
        self.steps_per_epoch = self.windows // self.rows

    def __call__(self, step):
        """The Batch of 0-based `step`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        draw = rng.numpy_rng(self.seed, "rows", epoch)
        starts = draw.integers(self.row_tokens) + self.row_tokens * draw.permutation(self.windows)
        drawn = rng.key_number(self.seed, "dropout", step)
        return dataclasses.replace(self.cut(starts[index * self.rows :][: self.rows]), seed=drawn)

    def cut(self, starts):
        """The Batch whose rows begin at `starts` [R]."""
        places = starts[:, None] + np.arange(self.row_tokens + 1)
        return Batch(mx.array(self.stream.tokens[places]), mx.array(self.stream.documents[places[:, :-1]]))

    def fixed(self, rows):
        """A Batch of at most `rows` rows, spread evenly over the stream: for validation."""
        count = min(rows, self.windows)
        return self.cut(self.row_tokens * (np.arange(count) * self.windows // count))


class NextToken:
    """The objective: Σ cross-entropy (nats) of the next token over a batch, and how many tokens that is."""

    def prepare(self, model, batch):
        """The batch, MLX's global random state set to its seed: what a step drops depends on nothing before it."""
        mx.random.seed(batch.seed)
        return batch

    def __call__(self, model, batch):
        """(loss, weight) of a batch, differentiable in the model's parameters. No document sees another."""
        caches = packed.caches(hybrid.make_cache(model), batch.documents)
        logits = model(batch.tokens[:, :-1], cache=caches).astype(mx.float32)
        loss = nn.losses.cross_entropy(logits, batch.tokens[:, 1:], reduction="sum")
        return loss, mx.array(batch.documents.size, mx.float32)


class Clock:
    """How long a run has trained, over all its parts, and where in the schedule that puts the next step."""

    def __init__(self, settings, spent):
        self.steps = settings.steps
        self.limit = 60 * settings.minutes if settings.minutes else math.inf
        self.interval = 60 * settings.save_minutes
        self.start = time.monotonic() - spent
        self.saved = spent

    def seconds(self):
        """Seconds of training so far."""
        return time.monotonic() - self.start

    def place(self, done):
        """The next step's place among `steps`: what was done, or the share of time spent where that is further.

        So the learning rate has fallen to nothing when the time is up, however fast the machine is.
        """
        return min(self.steps, max(done, int(self.steps * self.seconds() / self.limit)))

    def due(self):
        """Whether it is time to save again; True starts the next interval."""
        late = self.seconds() - self.saved >= self.interval
        self.saved = self.seconds() if late else self.saved
        return late


def fit(loop, feed, clock, settings, *, done, evaluate, save, log, stopping):
    """Train until the schedule ends or `stopping()`; returns (steps done, whether the schedule ended).

    loop: a `trainer.Trainer`; done: steps taken before. evaluate() -> figures, every settings.validate_every steps and
    at the end. save(done, figures or None): after every evaluation, when the clock says so, and when stopping.
    """
    place, stop, batch = clock.place(done), False, feed(done)
    while place < clock.steps and not stop:
        launched = loop.launch(place, batch)
        batch = feed(done + 1)  # while the device works
        record = loop.finish(launched)
        done, place = done + 1, clock.place(done + 1)
        rate = round(batch.documents.size / record.seconds)
        log(dataclasses.asdict(record) | {"step": done, "tokens_per_second": rate})
        stop = stopping()
        due = done % settings.validate_every == 0 or place == clock.steps
        figures = evaluate() if due else None
        if figures:
            log({"step": done, **figures})
        if figures or stop or clock.due():
            save(done, figures)
    return done, place == clock.steps


class Pretraining:
    """One run of one `config.PretrainConfig`: text and model first, then `train`, then `finish`."""

    def __init__(self, settings, run):
        self.settings, self.run = settings, run
        self.library = library.read(settings.text.sources, settings.text.max_files)
        continuing = settings.resume == "auto" and (run / "tokenizer.json").is_file()
        texts = (text.text for text in self.library.train)
        vocabulary = settings.model.vocab_size
        self.tokenizer = scratch.read_tokenizer(run) if continuing else scratch.train_tokenizer(texts, vocabulary)
        if self.tokenizer.get_vocab_size() != vocabulary:
            raise UserError(
                f"model.vocab_size is {vocabulary}; expected at most {self.tokenizer.get_vocab_size()}: "
                "the text holds no more pairs to merge"
            )
        self.model = scratch.build(settings.model, settings.trainer.seed, settings.trainer.dropout)
        size = settings.trainer.rows_per_step, settings.text.row_tokens, settings.trainer.seed
        self.feed, self.held = (
            Feed(make_stream(side, self.tokenizer), *size) for side in (self.library.train, self.library.held_out)
        )
        self.dtype = settings.dtype or ("float32" if mx.default_device() == mx.cpu else "bfloat16")
        self.best = {}
        self.newest = checkpoint.newest_whole(run) if settings.resume == "auto" else None
        self.done = checkpoint.load_training(self.newest)[1]["step"] if self.newest else 0

    def facts(self):
        """What the opening card says of it: {name: text}."""
        train, held = self.feed.stream, self.held.stream
        settings = self.settings.trainer
        limit = f" or {settings.minutes:g} minutes" if settings.minutes else ""
        tokens = self.feed.rows * self.feed.row_tokens
        return {
            "model": f"Qwen3.5 architecture, {scratch.parameter_count(self.model):,} parameters, {self.dtype}",
            "data": f"{len(self.library.train)} files, {train.bytes:,} bytes, {len(train.tokens):,} tokens  "
            f"sha256 {library.digest(self.library.train)[:16]}…",
            "held out": f"{len(self.library.held_out)} files, {held.bytes:,} bytes, {len(held.tokens):,} tokens",
            "steps": f"{settings.steps:,}{limit}, {tokens:,} tokens each, {self.feed.steps_per_epoch} an epoch  "
            f"config {config.digest(self.settings)[:16]}…",
        }

    def train(self, argv, log, stopping):
        """Take the steps that remain; returns (steps done, whether the schedule ended)."""
        settings = self.settings.trainer
        if not (self.run / "tokenizer.json").is_file():
            scratch.write_tokenizer(self.run, self.tokenizer)
        loop = trainer.Trainer(self.model, NextToken(), self.settings.optimizer, settings.steps, self.dtype)
        clock = Clock(settings, self.restore(loop))
        batch = self.held.fixed(settings.validation_rows)

        return fit(
            loop,
            self.feed,
            clock,
            settings,
            done=self.done,
            evaluate=lambda: self.validate(batch),
            save=lambda done, figures: self.save(loop, clock, done, figures, argv, log),
            log=log,
            stopping=stopping,
        )

    def restore(self, loop):
        """Continue from the newest whole step when asked; returns the seconds that its steps took."""
        if self.newest is None:
            return 0.0
        arrays, state = checkpoint.load_training(self.newest)
        loop.restore(arrays)
        self.best = state["best"]
        return state["seconds"]

    def validate(self, batch):
        """Bits per byte on a few held-out rows, the stream's mean token length taken for theirs."""
        self.model.eval()
        loss, weight = NextToken()(self.model, batch)
        self.model.train()
        held = self.held.stream
        tokens_per_byte = len(held.tokens) / held.bytes
        return {METRIC: round((loss / weight).item() / math.log(2) * tokens_per_byte, 5)}

    def save(self, loop, clock, done, figures, argv, log):
        """Save a step, point `best` at it where it is the best yet, drop old steps, and renew the run's manifest."""
        better = bool(figures) and figures[METRIC] <= self.best.get(METRIC, math.inf)
        if better:
            self.best = {"step": done, **figures}
        record = self.record(argv) | {"extra": {"step": done, **(figures or {})}}
        state = {"best": self.best, "seconds": clock.seconds()}
        checkpoint.save_step(self.run, done, self.model, loop.state(), state, **record)
        if better:
            checkpoint.point(self.run, "best", done)
        checkpoint.prune(self.run, self.settings.trainer.keep)
        log.flush()  # the manifest answers for metrics.jsonl too
        manifest.write(self.run, kind="run", **record)

    def record(self, argv):
        """What every manifest of the run says."""
        data, digest = self.library.digests(), config.digest(self.settings)
        return {"target": {"source": self.settings.name}, "config_digest": digest, "data": data, "argv": argv}

    def finish(self, argv, say=print):
        """Write the best step as a model folder with its samples, report and manifest; returns the report."""
        folder, settings = self.run / FOLDER, self.settings
        folder.mkdir(exist_ok=True)
        arrays, state = checkpoint.load_training((self.run / "best").resolve())
        prefix = "parameters."
        weights = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        scratch.write_model(folder, self.model.config, weights)
        scratch.write_tokenizer(folder, self.tokenizer)
        self.write_passages(folder / "passages.jsonl.gz")
        target = targets.load(folder, dtype=self.dtype)
        self.check_tokenizer(target)
        record = self.record(argv) | {"kind": "pretrain", "target": target.identity()}
        manifest.write(folder, **record)  # should the report be cut short, the weights answer for themselves
        limit = 60 * settings.report_minutes if settings.report_minutes else math.inf
        found, written = appraisal.report(
            target, self.library, settings.trainer, settings.text.row_tokens, seconds=limit, say=say
        )
        found = {"parameters": scratch.parameter_count(self.model), **self.trained(state), **found}
        manifest.write_json(folder / "report.json", found)
        (folder / "samples.json").unlink(missing_ok=True)  # an earlier report's
        if written:
            manifest.write_json(folder / "samples.json", {"rule": appraisal.RULE, "samples": written})
        manifest.write(folder, **record, extra=found)
        return found

    def write_passages(self, path):
        """Write the prompts for a drafter's answers: PASSAGES of the training side."""
        rows = library.passages(self.library.train, PASSAGES)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with manifest.atomic(path) as stream:
            stream.write(gzip.compress(lines.encode(), mtime=0))  # no time in it: the same text, the same bytes

    def check_tokenizer(self, target):
        """Refuse a tokenizer that came back from the folder as another one than the model was trained with."""
        text = self.library.held_out[0].text
        if list(target.tokenizer.encode(text)) != self.tokenizer.encode(text).ids:
            raise UserError(
                f"{target.path}: the installed transformers reads its tokenizer otherwise than it was trained; "
                "install the version that pyproject.toml names"
            )

    def trained(self, state):
        """What the report says of the training behind a step's state."""
        tokens = state["step"] * self.feed.rows * self.feed.row_tokens
        epochs = round(state["step"] / self.feed.steps_per_epoch, 2)
        return {
            "step": state["step"],
            "seconds": round(state["seconds"], 1),
            "trained_tokens": tokens,
            "epochs": epochs,
        }
