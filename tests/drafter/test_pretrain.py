"""Pretraining: a stream that keeps documents apart, a schedule that ends with its time, and a run that can be split."""

import dataclasses
import json
import types

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from drafter import checkpoint, config, hybrid, library, manifest, pretrain, scratch
from drafter import target as targets
from drafter.prompts import read_prompts
from kernels.errors import UserError

TOLERANCE = 2e-5  # relative, float32: chunks in packed rows against a loop over each document alone

LINES = [f"def step_{i}(value, other={i * 7}):\n    return value * {i} + other  # the {i}th\n\n\n" for i in range(40)]
TRAIN = [library.Text(f"{i}.py", "".join(LINES[i : i + 9])) for i in range(5)]
HELD_OUT = [library.Text("held.py", "".join(LINES[30:38]) + "class A:\n    " + "pass;" * 50 + "\n    x = 1\n")]
STEPS = 6


@pytest.fixture(scope="module")
def settings():
    """A run that takes seconds."""
    overrides = {
        "model.hidden_size": 24, "model.intermediate_size": 40, "model.num_hidden_layers": 3,
        "model.full_attention_interval": 3, "model.num_attention_heads": 3, "model.num_key_value_heads": 1,
        "model.head_dim": 16, "model.linear_key_head_dim": 32, "model.linear_value_head_dim": 8,
        "model.vocab_size": 280, "model.max_position_embeddings": 64, "text.row_tokens": 21,
        "trainer.steps": STEPS, "trainer.rows_per_step": 5, "trainer.validate_every": 4, "trainer.validation_rows": 3,
        "trainer.samples": 2, "trainer.sample_tokens": 5, "trainer.dropout": 0.2,
    }  # fmt: skip
    return config.compose(["+experiment=reference_hybrid", *(f"{key}={value}" for key, value in overrides.items())])


@pytest.fixture(autouse=True)
def small_library(monkeypatch):
    """The standard library, for these tests: five files to train on and one held out."""
    monkeypatch.setattr(library, "read", lambda sources, limit: library.Library(TRAIN, HELD_OUT, "3.0"))


@pytest.fixture(scope="module")
def tokenizer():
    return scratch.train_tokenizer([text.text for text in TRAIN], 280)


@pytest.fixture(scope="module")
def stream(tokenizer):
    return pretrain.make_stream(TRAIN, tokenizer)


class Log(list):
    """What a run logged."""

    __call__ = list.append

    def flush(self):
        """Nothing is held back."""


def run(settings, folder, stopping=lambda done: False, **changes):
    """Train in `folder`; returns (Pretraining, its log, steps done, whether the schedule ended)."""
    folder.mkdir(exist_ok=True)
    log = Log()
    whole = pretrain.Pretraining(dataclasses.replace(settings, **changes), folder)
    done, ended = whole.train(["words"], log, lambda: stopping(log[-1]["step"] if log else 0))
    return whole, log, done, ended


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """(Pretraining, log, report) of a finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "read", lambda sources, limit: library.Library(TRAIN, HELD_OUT, "3.0"))
        whole, log, done, ended = run(settings, tmp_path_factory.mktemp("runs") / "one")
    assert (done, ended) == (STEPS, True)
    return whole, log, whole.finish(["words"], say=lambda line: None)


# The stream and its rows.


def test_a_stream_is_its_documents_between_ends(stream, tokenizer):
    expected, ids = [], []
    for number, text in enumerate(TRAIN, 1):
        piece = [0, *tokenizer.encode(text.text).ids]
        expected += piece
        ids += [number] * len(piece)
    assert stream.tokens.tolist() == [*expected, 0]
    assert stream.documents.tolist() == [*ids, len(TRAIN) + 1]
    assert stream.bytes == sum(len(text.text) for text in TRAIN)


def test_an_epoch_holds_every_window_once_and_labels_are_what_follows():
    numbers = np.arange(523, dtype=np.int32)  # tokens that tell their place
    feed = pretrain.Feed(pretrain.Stream(numbers, numbers // 100, 523), rows_per_step=4, row_tokens=13, seed=2)
    epochs = []
    for epoch in range(2):
        batches = [feed(epoch * feed.steps_per_epoch + step) for step in range(feed.steps_per_epoch)]
        rows = np.concatenate([np.array(batch.tokens) for batch in batches])
        starts = rows[:, 0]
        assert (rows == starts[:, None] + np.arange(14)).all()
        assert len(set(starts.tolist())) == len(starts) == 36  # 39 windows of 13 fit, and 4 rows make a step
        assert len(set((starts % 13).tolist())) == 1  # tiles of one shift
        assert (np.concatenate([np.array(batch.documents) for batch in batches]) == rows[:, :-1] // 100).all()
        epochs.append(starts.tolist())
    assert epochs[0] != epochs[1] and epochs[0][0] % 13 != epochs[1][0] % 13
    other = pretrain.Feed(feed.stream, 4, 13, seed=2)
    assert mx.array_equal(other(3).tokens, feed(3).tokens).item() and other(3).seed == feed(3).seed != feed(4).seed


def test_too_little_text_is_refused(stream):
    with pytest.raises(UserError, match=r"tokens on one side of the split, expected 4000 or more"):
        pretrain.Feed(stream, 4, 2000, seed=0)
    assert pretrain.Feed(stream, 10**6, 13, seed=0)(5).tokens.shape[0] == (len(stream.tokens) - 13) // 13


def test_the_objective_is_the_loss_of_each_document_alone(stream, settings):
    model = scratch.build(settings.model, seed=1)
    places = np.flatnonzero(np.diff(stream.documents))[:3] - 11  # rows that hold an end and what is before and after
    batch = pretrain.Feed(stream, 3, 21, seed=0).cut(places)
    loss, weight = pretrain.NextToken()(model, batch)
    expected = 0.0
    with hybrid.detached(model):  # mlx-lm's own layers, a loop over time
        for tokens, documents in zip(np.array(batch.tokens), np.array(batch.documents)):
            for number in np.unique(documents):
                at = np.flatnonzero(documents == number)
                logits = np.array(model(mx.array(tokens[at][None])))[0].astype(np.float64)
                chosen = logits[np.arange(len(at)), tokens[at + 1]]
                expected += (np.log(np.exp(logits).sum(-1)) - chosen).sum()
    assert len(np.unique(np.array(batch.documents))) > 3
    assert weight.item() == 3 * 21
    assert abs(loss.item() - expected) <= TOLERANCE * expected


# The schedule.


@pytest.fixture
def at(monkeypatch):
    """at(seconds): set the clock."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: now.seconds)

    def set_clock(seconds):
        now.seconds = 100.0 + seconds

    return set_clock


def clock(spent=0.0, **changes):
    return pretrain.Clock(config.PretrainTrainerConfig(**({"steps": 200, "minutes": 2.0} | changes)), spent)


def test_the_schedule_follows_steps_or_time_whichever_is_further(at):
    one = clock()
    at(30)  # a quarter of two minutes
    assert [one.place(done) for done in (0, 49, 50, 51, 120)] == [50, 50, 50, 51, 120]
    at(119.9)
    assert one.place(3) == 199
    at(120)
    assert one.place(3) == one.steps == 200
    assert clock(minutes=None).place(7) == 7


def test_time_spent_before_a_resume_counts(at):
    one = clock(spent=60.0)
    assert one.place(0) == 100
    at(60)
    assert one.place(0) == 200


def test_saves_are_due_by_the_clock(at):
    one = clock(save_minutes=0.5)
    at(29)
    assert not one.due()
    at(31)
    assert one.due() and not one.due()
    at(60)
    assert not one.due()
    at(61)
    assert one.due()


def test_a_run_out_of_time_ends_its_schedule_with_a_learning_rate_near_zero(settings, tmp_path, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: next(ticks) * 1.0)
    limited = dataclasses.replace(settings.trainer, steps=1000, minutes=0.5, validate_every=1000)
    _, log, done, ended = run(settings, tmp_path / "run", trainer=limited)
    rates = [line["learning_rate"] for line in log if "loss" in line]
    assert ended and 5 <= done == len(rates) < 31
    assert rates[-1] < 0.02 * max(rates) and rates[1:] == sorted(rates[1:], reverse=True)
    assert [line["step"] for line in log if pretrain.METRIC in line] == [done]


# A run.


def test_a_run_learns_and_logs(finished):
    whole, log, report = finished
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.1
    figures = {line["step"]: line[pretrain.METRIC] for line in log if pretrain.METRIC in line}
    assert list(figures) == [4, 6]
    assert whole.best == {"step": report["step"], pretrain.METRIC: min(figures.values())}
    assert all(line["tokens_per_second"] > 0 for line in log if "loss" in line)


def test_a_split_run_ends_in_the_same_weights(finished, settings, tmp_path):
    folder = tmp_path / "split"
    _, _, done, ended = run(settings, folder, stopping=lambda step: step == 2)
    assert (done, ended) == (2, False)
    again, log, done, ended = run(settings, folder, resume="auto")
    assert (again.done, done, ended) == (2, STEPS, True)
    assert [line["step"] for line in log if "loss" in line] == [3, 4, 5, 6]
    assert again.best == finished[0].best
    for name in ("model.safetensors", "training/state.safetensors"):
        mine, theirs = (mx.load(str(path / f"step-{STEPS}" / name)) for path in (folder, finished[0].run))
        assert mine.keys() == theirs.keys()
        assert all(mx.array_equal(value, theirs[key]).item() for key, value in mine.items())


def test_a_finished_run_resumes_to_its_report(finished, settings):
    again, log, done, ended = run(settings, finished[0].run, resume="auto")
    assert (done, ended, log) == (STEPS, True, [])
    assert again.finish(["words"], say=lambda line: None) == finished[2]


def test_the_target_is_the_best_steps_master_weights_in_bfloat16(finished):
    whole, _, report = finished
    folder = whole.run / "hybrid"
    arrays, _ = checkpoint.load_training(whole.run / f"step-{report['step']}")
    stored = mx.load(str(folder / "model.safetensors"))
    assert len(stored) == len(tree_flatten(whole.model.parameters()))
    for name, value in stored.items():
        master = arrays[f"parameters.{name}"]
        assert mx.array_equal(value, master if name.endswith("A_log") else master.astype(mx.bfloat16)).item()


def test_the_target_answers_for_itself_and_loads(finished):
    whole, _, report = finished
    record = manifest.verify(whole.run / "hybrid")
    target = targets.load(whole.run / "hybrid")
    assert (record.kind, record.target, record.argv) == ("pretrain", target.identity(), ["words"])
    assert record.data == whole.library.digests()
    assert set(record.files) == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("samples.json", "report.json", "passages.jsonl.gz"),
    }
    assert json.loads((whole.run / "hybrid" / "report.json").read_text()) == report == record.extra
    assert report["trained_tokens"] == report["step"] * 5 * 21
    assert report["parameters"] == sum(value.size for _, value in tree_flatten(target.model.parameters()))
    assert 0 < report["bits_per_byte"] < 8 and 0 < report["ngram_5_bits_per_byte"] < 8
    assert manifest.verify(whole.run).kind == "run"


def test_passages_of_the_training_side_are_prompts_for_a_drafters_answers(finished):
    texts = [prompt.text for prompt in read_prompts(finished[0].run / "hybrid" / "passages.jsonl.gz")]
    assert texts and all(any(text in file.text for file in TRAIN) for text in texts)


def test_a_vocabulary_larger_than_the_text_can_fill_is_refused(settings, tmp_path):
    model = dataclasses.replace(settings.model, vocab_size=5000)
    with pytest.raises(UserError, match="model.vocab_size is 5000; expected at most"):
        pretrain.Pretraining(dataclasses.replace(settings, model=model), tmp_path)


def test_a_tokenizer_that_comes_back_otherwise_is_refused(finished, monkeypatch):
    whole, *_ = finished
    target = targets.load(whole.run / "hybrid")
    monkeypatch.setattr(whole, "tokenizer", scratch.train_tokenizer(["other words " * 9], 270))
    with pytest.raises(UserError, match="reads its tokenizer otherwise"):
        whole.check_tokenizer(target)
