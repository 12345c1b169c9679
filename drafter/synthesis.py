"""Answers that the target itself writes: the text a drafter learns to predict.

A synthesis folder holds
    answers-00000.jsonl.gz, …    one answer a line: {"id", "conversation", "turn", "source", "messages", "answer",
                                 "prompt_tokens", "answer_tokens", "finish", "temperature"}. Training uses the token
                                 ids, since tokenising text again is lossy; an answer that finished ("stop") ends in
                                 its end-of-sequence id, one cut at the cap ("length") does not.
    left_out-00000.jsonl.gz, …   turns that a run came to and did not answer: {"id", "conversation", "turn"} and why
    prompts-00000.jsonl.gz, …    the prompts that the target wrote: {"id", "text", "fault"}, refused ones included
    settings.json                what must not change when the run is continued
    manifest.json                digests, target, counts: input = written + skipped + failed + remaining
While it runs, whole lines are appended (see `journal`); a run that stops, for whatever reason, continues from there.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
import time

from drafter import manifest, questions
from drafter.answers import answer
from drafter.conversations import Author, Ledger
from drafter.documents import shards_digest
from drafter.journal import Journal
from drafter.overlap import HeldOut, first_of_each, normalise
from drafter.prompts import make_prompt, system_turn
from kernels.errors import UserError

SETTINGS = "settings.json"
FLUSH_SECONDS = 5  # a crash loses at most this much work (assumed)
SHARD_ROWS = 10_000  # rows to a file: about 5 MB packed (assumed)
BUCKET = 8  # prompts are sorted by length within 8 batches, so that a run cut short still saw a fair sample
SELF = "self-prompts"  # the source of prompts that the target wrote


@dataclasses.dataclass
class Counts:
    """What became of the prompts; skipped and failed are counted by reason."""

    input: int = 0
    written: int = 0
    remaining: int = 0
    answer_tokens: int = 0
    skipped: dict = dataclasses.field(default_factory=dict)
    failed: dict = dataclasses.field(default_factory=dict)


def plan(author, prompts):
    """What there is to do: (jobs, Counter of why the other prompts are skipped)."""
    jobs, skipped = {}, collections.Counter()
    for prompt in prompts:
        job = author.answer_job(prompt)
        reason = "duplicate" if job.id in jobs else author.fault(job)
        if reason:
            skipped[reason] += 1
        else:
            jobs[job.id] = job
    return list(jobs.values()), skipped


def batching_order(jobs, batch_size):
    """Jobs sorted by prompt length within windows of BUCKET batches: less padding, and still a fair sample."""
    window = BUCKET * batch_size
    parts = [jobs[start : start + window] for start in range(0, len(jobs), window)]
    return [job for part in parts for job in sorted(part, key=lambda job: len(job.tokens))]


class Folder:
    """A synthesis folder: its three journals, and whether it ended in a manifest."""

    def __init__(self, path, shard_rows):
        self.path = pathlib.Path(path)
        self.answers, self.left_out, self.prompts = (
            Journal(self.path, name, shard_rows) for name in ("answers", "left_out", "prompts")
        )

    def enter(self, settings):
        """Make the folder, or check the one that is there; UserError where it is damaged or of another run."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path}: found a file, expected a folder to write to; choose another --out")
        self.path.mkdir(parents=True, exist_ok=True)
        check_settings(self.path / SETTINGS, settings)
        if self.complete:
            manifest.verify(self.path)

    @property
    def complete(self):
        """Whether the folder ended in a manifest, whatever remained to be answered."""
        return (self.path / manifest.NAME).exists()

    def rows(self):
        """Every turn's row, answered or not."""
        yield from self.answers.read()
        yield from self.left_out.read()

    def begin(self, *journals):
        """Make journals ones that rows can be appended to, with no manifest to contradict them."""
        (self.path / manifest.NAME).unlink(missing_ok=True)
        for journal in journals:
            journal.begin()

    def pack(self):
        """Pack what rows were appended to."""
        for journal in (self.answers, self.left_out, self.prompts):
            if journal.path.exists():
                journal.pack()


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


def make_settings(target, recipe, data, system):
    """What settings.json holds, as JSON gives it back."""
    identity = target.identity()
    settings = {name: identity[name] for name in identity if name != "source"}
    return settings | json.loads(json.dumps({"prompts": data, "system": system} | dataclasses.asdict(recipe)))


def check_recipe(target, recipe):
    """Raise UserError for a recipe that the target's chat template cannot follow."""
    raw = target.raw_reason()
    if raw and recipe.turns > 1:
        raise UserError(f"{raw}, so no user's turn can follow an answer; leave --turns at 1")
    template = str(target.tokenizer.chat_template)
    for name in recipe.template_options:
        if raw or not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(f"--template-option {name}: {raw or 'the chat template does not use it'}; leave it out")


def thinking(target, options):
    """Whether answers begin by thinking: "on" or "off", or None where the chat template knows no such mode."""
    template = str(target.tokenizer.chat_template)
    name = next((name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template)), None)
    if target.raw_reason() or name is None:
        return None
    return "on" if options.get(name, target.tokenizer.has_thinking) else "off"  # the tokenizer's own default


def run(
    target,
    prompts,
    folder,
    *,
    recipe,
    data,
    argv,
    batch_size,
    self_prompts=0,
    system=None,
    held_out=(),
    minutes=None,
    shard_rows=SHARD_ROWS,
    progress=lambda stage, done, tokens, total: None,
):
    """Answer prompts into a synthesis folder, continuing what is there; returns its Counts.

    prompts: list of Prompt; data: [{"name", "sha256"}], what they came from. self_prompts: how many more the target
    writes itself first, behind the `system` turn if there is one; no answer is begun before all are there.
    held_out: texts of evaluation prompts; no prompt that overlaps with one is answered. minutes: feed no prompt after
    that long. progress: called after every step with what is written, how many there are, the tokens this step
    generated, and how many are expected.
    """
    check_recipe(target, recipe)
    author = Author(target, recipe, HeldOut(held_out))
    jobs, skipped = plan(author, prompts)
    if not self_prompts:
        refuse_nothing(jobs, skipped)
    place = Folder(folder, shard_rows)
    place.enter(make_settings(target, recipe, data, system))
    stop = time.monotonic() + 60 * minutes if minutes else float("inf")
    batching = {"batch_size": batch_size, "seed": recipe.seed, "feed": lambda: time.monotonic() < stop}
    unwritten = 0
    if self_prompts:
        unwritten = write_prompts(author, place, self_prompts, system, batching, progress)
        found, faults = ([], {}) if unwritten else choose_prompts(place, self_prompts, system)
        jobs, again = plan(author, [*prompts, *found])
        skipped = again + collections.Counter(faults)
        data = [*data, {"name": SELF, "sha256": shards_digest(place.prompts.shards)}]
        if not unwritten:
            refuse_nothing(jobs, skipped)
    ledger = Ledger(author, place.rows())
    if not unwritten:
        write_answers(author, place, jobs, ledger, batching, progress)
    counts = count(jobs, ledger, skipped, len(prompts) + self_prompts, self_prompts if unwritten else 0)
    if not place.complete:
        place.pack()
        extra = dataclasses.asdict(counts) | {
            "template_options": recipe.template_options,
            "thinking": thinking(target, recipe.template_options),
        }
        manifest.write(folder, kind="synthesis", target=target.identity(), data=data, argv=argv, extra=extra)
    return counts


def refuse_nothing(jobs, skipped):
    """Raise UserError where no prompt is left to answer."""
    if not jobs:
        reasons = ", ".join(f"{number} {reason}" for reason, number in skipped.items()) or "none given"
        raise UserError(f"no prompt is left to answer ({reasons}); give other prompts")


def count(jobs, ledger, skipped, given, unchosen):
    """The Counts of a run: `given` prompts, those of an earlier, larger call, and the user turns that followed.

    unchosen: prompts of which nothing is decided, since the target has not written all of them.
    """
    first, planned = ledger.first_turns(), {job.id for job in jobs}
    later = len(ledger.known) - len(first) + len(ledger.open)
    return Counts(
        input=given + len(first - planned) + later,
        written=ledger.written,
        remaining=len(planned - first) + len(ledger.open) + unchosen,
        answer_tokens=ledger.answer_tokens,
        skipped=dict(skipped + ledger.skipped),
        failed=dict(ledger.failed),
    )


# Prompts.


def write_prompts(author, place, number, system, batching, progress):
    """Let the target write prompts 0 to number − 1, continuing those that are there; returns how many are missing."""
    names = {f"{index:08}" for index in range(number)} - {row["id"] for row in place.prompts.read()}
    done = number - len(names)
    if names:
        place.begin(place.prompts)
        with Appending() as appending:
            observe = lambda tokens: progress("prompts", done, tokens, number)
            for row in written_prompts(author, sorted(names), system, batching, observe):
                appending.add(place.prompts, row)
                done += 1
    if place.prompts.path.exists():
        place.prompts.pack()
    return number - done


def written_prompts(author, names, system, batching, observe):
    """Yield the rows of prompts that the target writes, as they are finished."""
    target, asking, seed = author.target, author.recipe.asking, author.recipe.seed
    begin = functools.partial(questions.opening, target, system_turn(system), author.recipe.template_options)
    openings = {text: begin(text) for text in asking.beginnings}
    opened = {name: openings[questions.beginning(asking, name, seed)] for name in names}
    jobs = [questions.question_job(target, f"prompt {name}", name, opened[name], asking, seed) for name in names]
    for job, tokens, finish in answer(target, collections.deque(jobs), observe=observe, **batching):
        text, fault = questions.read_question(target, opened[job.subject], tokens, finish, asking)
        yield {"id": job.subject, "text": text, "fault": fault}


def choose_prompts(place, number, system):
    """(prompts, Counter of why others are none) among those the target wrote, in their order.

    Of duplicates and near duplicates the first is kept, so that writing more prompts changes no earlier choice.
    """
    rows = sorted((row for row in place.prompts.read() if int(row["id"]) < number), key=lambda row: row["id"])
    faults = collections.Counter(row["fault"] for row in rows if row["fault"])
    texts = [row["text"] for row in rows if not row["fault"]]
    first = {}
    for text in texts:
        first.setdefault(normalise(text), text)
    different = list(first.values())
    keep = first_of_each(different)
    faults["duplicate"] += len(texts) - len(different)
    faults["near duplicate"] += len(different) - sum(keep)
    return [make_prompt(text, SELF, system) for text, kept in zip(different, keep) if kept], +faults


# Answers.


def write_answers(author, place, jobs, ledger, batching, progress):
    """Answer jobs that have no row yet, and go on with conversations that are open, adding to the ledger."""
    following = [author.follow(row) for row in list(ledger.open.values())]
    waiting = batching_order([job for job in jobs if (job.id, 1) not in ledger.known], batching["batch_size"])
    waiting = collections.deque([job for _, job in following if job] + waiting)
    if not waiting and not following:
        return
    expected = len(ledger.known) + len(waiting)
    place.begin(place.answers, place.left_out)
    with Appending() as appending:

        def settle(row):
            """Record a turn's row, and go on from it."""
            appending.add(place.answers if "answer_tokens" in row else place.left_out, row)
            ledger.add(row)
            if author.goes_on(row):
                end, job = author.follow(row)
                if job:
                    waiting.appendleft(job)
                else:
                    settle(end)

        for end in (end for end, _ in following if end):
            settle(end)
        observe = lambda tokens: progress("answers", ledger.written, tokens, expected)
        for job, tokens, finish in answer(author.target, waiting, observe=observe, **batching):
            row, next_job = author.read(job, tokens, finish)
            if row:
                settle(row)
            else:
                waiting.appendleft(next_job)


class Appending:
    """Rows on their way to journals: written together every FLUSH_SECONDS and, whatever happens, at the end."""

    def __init__(self):
        self.rows, self.flushed = collections.defaultdict(list), time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.flush()

    def add(self, journal, row):
        self.rows[journal].append(row)
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self):
        """Append the rows that wait."""
        for journal in list(self.rows):
            journal.append(self.rows.pop(journal))
        self.flushed = time.monotonic()
