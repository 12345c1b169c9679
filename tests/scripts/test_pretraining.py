"""scripts/train.py with a target from scratch: what it prints, writes, continues and refuses."""

import json
import os
import pathlib
import shutil
import sys
import sysconfig
import types

import pytest
import train

import edge
from drafter import library, manifest, prompts

FILES = ("bisect", "heapq", "fnmatch", "keyword", "glob", "getopt")  # of the library; the last two are held out
SETTINGS = {
    "run": "one", "text.row_tokens": 32,
    "model.hidden_size": 24, "model.intermediate_size": 40, "model.num_hidden_layers": 3,
    "model.full_attention_interval": 3, "model.num_attention_heads": 3, "model.num_key_value_heads": 1,
    "model.head_dim": 16, "model.linear_key_head_dim": 32, "model.linear_value_head_dim": 8, "model.vocab_size": 330,
    "trainer.steps": 4, "trainer.rows_per_step": 3, "trainer.validate_every": 2, "trainer.validation_rows": 3,
    "trainer.samples": 2, "trainer.sample_tokens": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_library(monkeypatch, tmp_path_factory):
    """A standard library of FILES alone."""
    folder = tmp_path_factory.mktemp("library")
    for name in FILES:
        shutil.copy(pathlib.Path(sysconfig.get_path("stdlib")) / f"{name}.py", folder)
    monkeypatch.setattr(library, "sysconfig", types.SimpleNamespace(get_path=lambda name: str(folder)))


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """command(**changes): run it as a shell would: (exit code, closing line, standard output before it, errors)."""

    def call(*flags, **changes):
        overrides = SETTINGS | {"out": tmp_path / "runs"} | {k.replace("__", "."): v for k, v in changes.items()}
        words = [f"{key}={value}" for key, value in overrides.items()]
        monkeypatch.setattr(sys, "argv", ["train.py", "+experiment=reference_hybrid", *words, *flags])
        with pytest.raises(SystemExit) as leaving:
            edge.run(train.main)
        out, err = capsys.readouterr()
        *before, last = out.rstrip("\n").split("\n")
        return leaving.value.code, json.loads(last), "\n".join(before), err

    return call


def test_a_dry_run_prints_everything_and_writes_nothing(command, tmp_path):
    code, closing, card, _ = command("--dry-run")
    assert (code, closing["status"], closing["out"]) == (0, "done", None)
    for fact in ("parameters", "BLAS", "4 files", "96 tokens each", "an epoch", "vocab_size: 330", "kind: pretrain"):
        assert fact in card
    assert not list(tmp_path.iterdir())


def test_a_run_writes_its_files_and_closes_with_its_report(command, tmp_path):
    code, closing, card, err = command()
    run = tmp_path / "runs" / "reference_hybrid" / "one"
    assert (code, closing["status"], closing["out"], closing["steps"]) == (0, "done", str(run), 4), err[-2000:]
    names = {"config.yaml", "metrics.jsonl", "manifest.json", "tokenizer.json", "tokenizer_config.json", "hybrid"}
    assert {path.name for path in run.iterdir()} == names | {"latest", "best", "step-2", "step-4"}
    assert os.readlink(run / "latest") == "step-4"
    for folder in (run, run / "step-4", run / "hybrid"):
        manifest.verify(folder)
    assert closing["bits_per_byte"] > 0 and closing["samples"]["count"] == 2
    assert str(run) in card and card.count("bits a held-out byte") == 2
    assert len(prompts.read_prompts(run / "hybrid" / "passages.jsonl.gz")) > 2

    code, closing, *_ = command()
    assert code == 2 and "holds a run already" in closing["error"]
    assert command(resume="auto", report_minutes=1e-9)[1]["samples"] is None
    assert command(resume="auto", report_minutes=9)[1]["samples"]["count"] == 2
    code, closing, *_ = command(resume="auto", trainer__seed=1)
    assert code == 2 and "begun with another trainer" in closing["error"]


def test_an_interrupt_saves_and_the_same_command_continues(command, tmp_path, monkeypatch):
    original = train.PretrainSession.__init__

    def interrupted(self, *given):
        original(self, *given)
        self.stop = True  # what a signal does

    monkeypatch.setattr(train.PretrainSession, "__init__", interrupted)
    code, closing, card, _ = command()
    assert (code, closing["status"], closing["steps"]) == (130, "interrupted", 1)
    assert "run=one and resume=auto" in card
    monkeypatch.setattr(train.PretrainSession, "__init__", original)
    code, closing, *_ = command(resume="auto")
    assert (code, closing["steps"]) == (0, 4)
    lines = (tmp_path / "runs" / "reference_hybrid" / "one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trainer__minuts": 3}, "unknown configuration key 'trainer.minuts'; did you mean 'trainer.minutes'?"),
        ({"trainer__walk_tokens": 3}, "unknown configuration key 'trainer.walk_tokens'"),
        ({"target__source": "smollm2"}, "unknown configuration key 'target.source'"),
        ({"trainer__minutes": 0}, "trainer.minutes is 0"),
        ({"text__sources": "[none.py]"}, "none.py not found"),
        ({"model__vocab_size": 90000}, "model.vocab_size is 90000; expected at most"),
        ({"text__row_tokens": 4096, "text__max_files": 1}, "tokens on one side of the split"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(command, tmp_path, changes, named):
    code, closing, _, err = command(**changes)
    assert (code, closing["status"]) == (2, "refused")
    assert named in closing["error"] and "Traceback" not in err
    assert not (tmp_path / "runs").exists()
