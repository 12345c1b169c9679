"""Synthesis: batched answers are the target's own, and a run that stops anywhere continues to the same file.

Targets are small and random, in float32. R is 3 or 5 rows of a batch, the cap 19 or 23 tokens.
"""

import collections
import dataclasses
import errno
import gzip
import json
import math
import os

import mlx.core as mx
import numpy as np
import pytest
from disks import small_disk
from mlx_lm.models.cache import make_prompt_cache

import oracles
import tiny
from drafter import answers, manifest, synthesis
from drafter import target as targets
from drafter.conversations import Author, Recipe
from drafter.journal import Journal
from drafter.overlap import HeldOut
from drafter.prompts import Prompt
from kernels.errors import UserError

TEXT = "the river mill stood by old grain counted sacks while words model small add first second print def"
WORDS = TEXT.split()  # in the tokenizer's training text
CAP = 23
SHARD = "answers-00000.jsonl.gz"
TIE = 1e-4  # float32: two logits closer than this may change places when rows are computed together


def make_prompts(count, seed=0):
    """Different prompts of one to thirteen words."""
    draw = np.random.default_rng(seed)
    texts = [f"{n} " + " ".join(draw.choice(WORDS, draw.integers(1, 14))) for n in range(count)]
    return [Prompt(({"role": "user", "content": text},), "words") for text in texts]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(kind): a small target with a chat template, two of whose tokens end an answer."""

    def build(kind):
        folder = tiny.folder(kind, tmp_path_factory.getbasetemp(), chat_template=True)
        plain = targets.load(str(folder), dtype="float32")
        return dataclasses.replace(plain, tokenizer=Ending(plain.tokenizer, common_tokens(plain)))

    return build


class Ending:
    """A tokenizer with end-of-sequence ids of our choice, so that some answers stop and some reach the cap."""

    def __init__(self, tokenizer, ids):
        self.tokenizer = tokenizer
        self.eos_token_ids = ids

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def common_tokens(target):
    """Two ids that this target often writes, but seldom at once."""
    written = collections.Counter()
    for prompt in make_prompts(6, seed=5):
        written.update(greedy(target, prompt)[4:])
    return [token for token, _ in written.most_common(6)[4:]]


def greedy(target, prompt):
    """The oracle's answer, CAP tokens long: one prompt, token by token through mlx-lm's own cache, no end."""
    cache = make_prompt_cache(target.model)
    return oracles.greedy_stepwise(target.model, target.encode(list(prompt.messages)), CAP, cache)


@pytest.fixture(scope="module")
def llama(load):
    return load("llama")


def settings(**changes):
    """Arguments of a run; what a Recipe has goes into one."""
    names = {field.name for field in dataclasses.fields(Recipe)} & changes.keys()
    recipe = {"seed": 1, "max_tokens": CAP} | {name: changes.pop(name) for name in names}
    shared = {"data": [{"name": "words", "sha256": "0"}], "argv": ["--prompts", "words"], "batch_size": 5}
    return shared | {"recipe": Recipe(**recipe)} | changes


def author(target, **changes):
    """Who makes a run's jobs."""
    return Author(target, Recipe(seed=1, max_tokens=CAP, **changes), HeldOut(()))


def rows_of(folder, name="answers"):
    shards = sorted(folder.glob(f"{name}-*.jsonl.gz"))
    return [json.loads(line) for shard in shards for line in gzip.decompress(shard.read_bytes()).splitlines()]


def cut(tokens, eos_ids):
    """Tokens up to the first end of sequence, it included, and how the answer finished."""
    for place, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: place + 1], "stop"
    return tokens, "length"


def margin(target, tokens):
    """The gap between the two largest logits after `tokens`."""
    top = np.sort(np.array(target.model(mx.array([tokens]))[0, -1]))[-2:]
    return top[1] - top[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_batched_greedy_answers_are_those_of_one_prompt_alone(load, tmp_path, kind):
    target, prompts = load(kind), make_prompts(12)
    counts = synthesis.run(target, prompts, tmp_path / "run", **settings())
    rows = {row["id"]: row for row in rows_of(tmp_path / "run")}
    finishes = collections.Counter()
    for prompt in prompts:
        expected, finish = cut(greedy(target, prompt), target.eos_ids)
        if len(expected) == 1 and finish == "stop":
            assert prompt.id not in rows
            continue
        row = rows[prompt.id]
        assert row["prompt_tokens"] == target.encode(list(prompt.messages))
        if row["answer_tokens"] != expected:
            same = next(n for n, pair in enumerate(zip(row["answer_tokens"], expected)) if pair[0] != pair[1])
            assert margin(target, row["prompt_tokens"] + expected[:same]) < TIE, "no tie explains the difference"
            continue
        assert row["finish"] == finish
        finishes[finish] += 1
        assert row["answer"] == target.tokenizer.decode(expected[:-1] if finish == "stop" else expected)
        assert row["messages"] == list(prompt.messages)
        assert (row["source"], row["temperature"]) == ("words", 0.0)
    assert min(finishes["stop"], finishes["length"]) >= 2, "the test must see both ends"
    assert counts.written == len(rows)
    assert counts.answer_tokens == sum(len(row["answer_tokens"]) for row in rows.values())


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_batch_size_leaves_no_trace(llama, tmp_path, batch_size):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, size in zip(folders, (5, batch_size)):
        synthesis.run(llama, make_prompts(11), folder, **settings(batch_size=size, max_tokens=19))
    assert rows_of(folders[0]) == rows_of(folders[1])


def test_counts_account_for_every_prompt(llama, tmp_path):
    prompts = make_prompts(8)
    long = Prompt(({"role": "user", "content": "grain " * 600},), "words")
    given = [*prompts, prompts[2], long]
    held_out = [f"  {prompts[5].text.upper()}\n"]
    counts = synthesis.run(llama, given, tmp_path / "run", **settings(held_out=held_out))
    assert counts.skipped == {"duplicate": 1, "evaluation prompt": 1, "longer than the context": 1}
    assert counts.input == 10 == counts.written + sum(counts.skipped.values()) + sum(counts.failed.values())
    ids = {row["id"] for row in rows_of(tmp_path / "run")}
    assert prompts[5].id not in ids
    record = manifest.verify(tmp_path / "run")
    assert (record.kind, record.target) == ("synthesis", llama.identity())
    assert record.extra == dataclasses.asdict(counts) | {"template_options": {}, "thinking": None}


# Sampling.


def test_sampled_rows_follow_their_temperature_and_greedy_rows_do_not_move():
    logits = mx.array([[0.3, 1.1, -0.7, 0.9, 0.0]])
    draws = 6000
    rows = mx.array([row for row in range(3 * draws) if row % 3])
    temperatures = mx.array([[0.5], [2.0]] * draws)
    keys = mx.array([[7, number] for number in range(2 * draws)], mx.uint32)  # as tokens of one answer have them
    drawn = answers.draw_tokens(mx.repeat(logits, 3 * draws, 0), (rows, temperatures, keys))
    drawn = np.array(drawn).reshape(draws, 3)
    assert set(drawn[:, 0]) == {1}
    for row, temperature in ((1, 0.5), (2, 2.0)):
        weights = [math.exp(value / temperature) for value in logits[0].tolist()]
        for token, weight in enumerate(weights):
            share = weight / sum(weights)
            deviation = math.sqrt(share * (1 - share) / draws)
            assert abs(np.mean(drawn[:, row] == token) - share) < 4.5 * deviation


def test_a_mix_of_temperatures_leaves_the_greedy_answers_alone(llama, tmp_path):
    prompts = make_prompts(16)
    mixed = synthesis.run(llama, prompts, tmp_path / "mix", **settings(temperatures=(0.0, 0.8)))
    synthesis.run(llama, prompts, tmp_path / "greedy", **settings())
    greedy_rows = {row["id"]: row for row in rows_of(tmp_path / "greedy")}
    groups = collections.defaultdict(list)
    for row in rows_of(tmp_path / "mix"):
        groups[row["temperature"]].append(row == greedy_rows[row["id"]])
    assert all(groups[0.0])
    assert not all(groups[0.8])
    assert min(map(len, groups.values())) >= 3
    assert mixed.written == sum(map(len, groups.values()))


def test_temperatures_are_a_prompt_s_own(llama):
    prompts = make_prompts(400)
    mixed = author(llama, temperatures=(0.0, 0.7))
    jobs, _ = synthesis.plan(mixed, prompts)
    fewer, _ = synthesis.plan(mixed, prompts[::-1][:50])
    chosen = {job.id: job.temperature for job in jobs}
    assert all(chosen[job.id] == job.temperature for job in fewer)
    assert 150 < sum(job.temperature > 0 for job in jobs) < 250  # 200 expected, standard deviation 10


# Stopping and continuing.


class Killed(BaseException):
    """Stands for a signal."""


def stop_after(steps):
    """A progress callback that ends the run at its step `steps`."""
    seen = iter(range(steps))

    def progress(*_):
        if next(seen, None) is None:
            raise Killed

    return progress


@pytest.fixture(scope="module")
def whole(llama, tmp_path_factory):
    """The folder of an uninterrupted run over 14 prompts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    synthesis.run(llama, make_prompts(14), folder, **settings())
    return folder


@pytest.mark.parametrize("steps", [(0,), (9,), (30,), (12, 7, 11)])
def test_an_interrupted_run_continues_to_the_same_answers(llama, whole, tmp_path, steps):
    for count in steps:
        with pytest.raises(Killed):
            synthesis.run(llama, make_prompts(14), tmp_path, **settings(progress=stop_after(count)))
        assert not (tmp_path / "manifest.json").exists()
    synthesis.run(llama, make_prompts(14), tmp_path, **settings())
    assert (tmp_path / SHARD).read_bytes() == (whole / SHARD).read_bytes()
    assert manifest.verify(tmp_path).extra == manifest.verify(whole).extra
    assert sorted(path.name for path in tmp_path.iterdir()) == [SHARD, "manifest.json", "settings.json"]


def test_a_torn_last_line_is_answered_again(llama, whole, tmp_path):
    with pytest.raises(Killed):
        synthesis.run(llama, make_prompts(14), tmp_path, **settings(progress=stop_after(40)))
    working = tmp_path / "answers.jsonl"
    lines = working.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 2
    working.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    synthesis.run(llama, make_prompts(14), tmp_path, **settings())
    assert (tmp_path / SHARD).read_bytes() == (whole / SHARD).read_bytes()


@pytest.mark.parametrize("kept", [(SHARD,), (SHARD, "answers.jsonl"), ("answers.jsonl",)])
def test_a_run_killed_while_it_was_closing_is_closed_again(llama, whole, tmp_path, kept):
    packed = (whole / SHARD).read_bytes()
    content = {SHARD: packed, "answers.jsonl": gzip.decompress(packed)}
    for name in kept:
        (tmp_path / name).write_bytes(content[name])
    (tmp_path / "settings.json").write_bytes((whole / "settings.json").read_bytes())
    synthesis.run(llama, make_prompts(14), tmp_path, **settings())
    assert manifest.verify(tmp_path).files == manifest.verify(whole).files


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(llama, whole, tmp_path):
    lines = gzip.decompress((whole / SHARD).read_bytes()).splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_bytes(lines[0] + b'{"id": \n' + lines[1])
    (tmp_path / "settings.json").write_bytes((whole / "settings.json").read_bytes())
    with pytest.raises(UserError, match=r"answers\.jsonl line 2: not JSON"):
        synthesis.run(llama, make_prompts(14), tmp_path, **settings())


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_adds_to_it(llama, whole, tmp_path):
    first = synthesis.run(llama, make_prompts(14)[:9], tmp_path, **settings())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert synthesis.run(llama, make_prompts(14)[:9], tmp_path, **settings()) == first
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert synthesis.run(llama, make_prompts(14), tmp_path, **settings()).input == 14
    assert (tmp_path / SHARD).read_bytes() == (whole / SHARD).read_bytes()
    fewer = synthesis.run(llama, make_prompts(14)[:3], tmp_path, **settings())
    assert fewer.input == fewer.written + sum(fewer.failed.values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed=1, this one 2"),
        ({"max_tokens": 9}, "max_tokens=23, this one 9"),
        ({"temperatures": (0.5,)}, r"temperatures=\[0.0\], this one \[0.5\]"),
        ({"data": []}, "prompts=.*, this one"),
    ],
)
def test_a_run_is_not_continued_with_other_settings(llama, whole, change, named):
    with pytest.raises(UserError, match=rf"settings\.json: the run begun here has {named}.*choose another --out"):
        synthesis.run(llama, make_prompts(14), whole, **settings(**change))


def test_a_run_is_not_continued_by_another_target(load, whole):
    with pytest.raises(UserError, match=r"the run begun here has fingerprint="):
        synthesis.run(load("qwen3"), make_prompts(14), whole, **settings())


def test_a_changed_byte_is_found_before_anything_is_added(llama, tmp_path):
    synthesis.run(llama, make_prompts(6), tmp_path, **settings())
    data = bytearray((tmp_path / SHARD).read_bytes())
    data[40] ^= 1
    (tmp_path / SHARD).write_bytes(data)
    with pytest.raises(UserError, match=r"answers-00000\.jsonl\.gz: changed file"):
        synthesis.run(llama, make_prompts(14), tmp_path, **settings())


def test_a_folder_of_something_else_is_not_written_to(llama, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="found files but no settings.json"):
        synthesis.run(llama, make_prompts(2), tmp_path, **settings())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_time_limit_finishes_the_answers_begun_and_leaves_the_rest(llama, whole, tmp_path):
    clock = iter(range(10**6))  # a second a look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesis.time, "monotonic", lambda: float(next(clock)))
        early = synthesis.run(llama, make_prompts(14), tmp_path, **settings(minutes=0.5))
    assert early.remaining > 0
    assert early.input == early.written + early.remaining + sum(early.failed.values())
    assert early.written >= 5, "the first batch was begun, so it is finished"
    assert manifest.verify(tmp_path).extra["remaining"] == early.remaining
    synthesis.run(llama, make_prompts(14), tmp_path, **settings())
    assert (tmp_path / SHARD).read_bytes() == (whole / SHARD).read_bytes()


def test_a_batch_that_mlx_refuses_is_one_line_and_keeps_what_is_written(llama, whole, tmp_path, monkeypatch):
    steps, real = iter(range(10**6)), answers.BatchGenerator.next

    def refuse(generator):
        if next(steps) == 40:
            raise RuntimeError("cudaGraphAddKernelNode(\n&node) failed: invalid argument")
        return real(generator)

    with monkeypatch.context() as patch:
        patch.setattr(answers.BatchGenerator, "next", refuse)
        with pytest.raises(UserError, match=r"--batch-size 5: MLX refuses it \(cuda.* invalid argument\); what is"):
            synthesis.run(llama, make_prompts(14), tmp_path, **settings())
    assert (tmp_path / "answers.jsonl").read_bytes().count(b"\n") >= 3
    synthesis.run(llama, make_prompts(14), tmp_path, **settings(batch_size=2))
    assert (tmp_path / SHARD).read_bytes() == (whole / SHARD).read_bytes()


# Disks.


def test_a_failed_append_takes_back_what_it_wrote(tmp_path, monkeypatch):
    journal = Journal(tmp_path, "answers", 10)
    journal.append([{"id": "a"}])

    def refuse(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"answers\.jsonl"):
        journal.append([{"id": "b"}])
    assert journal.path.read_text() == '{"id": "a"}\n'


def test_a_full_disk_keeps_whole_lines(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        journal = Journal(disk, "answers", 10)
        with pytest.raises(OSError, match=r"answers\.jsonl") as caught:
            for n in range(1000):
                journal.append([{"id": str(n), "text": "x" * 999}])
        assert caught.value.errno == errno.ENOSPC
        lines = journal.path.read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == [str(n) for n in range(len(lines))]
        assert len(lines) > 50
