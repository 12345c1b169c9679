"""scripts/train.py at its edge: what it prints, writes, continues and refuses; a refusal leaves nothing behind."""

import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest
import train
import yaml
from disks import read_only_disk, small_disk

import edge
import tiny
from drafter import checkpoint, features
from drafter import manifest as manifests
from drafter import target as targets

STEPS = 6
SETTINGS = {
    "name": "small", "run": "one",
    "drafter.num_hidden_layers": 1, "drafter.block_size": 4, "drafter.intermediate_size": 64,
    "data.kind": "text", "data.row_tokens": 32, "data.validation_fraction": 0.2,
    "loss.rows_per_chunk": 64,
    "trainer.steps": STEPS, "trainer.rows_per_step": 2, "trainer.anchors_per_row": 4,
    "trainer.validate_every": 4, "trainer.validation_rows": 2, "trainer.save_every": 3,
    "trainer.walk_documents": 2, "trainer.walk_tokens": 7,
}  # fmt: skip


@pytest.fixture
def command(run_script):
    return lambda argv: run_script("train.py", train.main, *argv)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of about 700 tokens, no two rows of which are alike."""
    words = " ".join(tiny.TEXT).split()
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(np.random.default_rng(1).choice(words, 300)))
    return path


@pytest.fixture
def arguments(target, text, tmp_path):
    """make(**overrides): KEY=VALUE words of a small run; a value of None leaves the key out."""
    own = {"target.source": target, "data.sources": f"[{text}]", "out": tmp_path / "runs"}

    def make(**changes):
        return words(own | {key.replace("__", "."): value for key, value in changes.items()})

    return make


def words(changes):
    """SETTINGS and changes as a command line."""
    return [f"{key}={value}" for key, value in (SETTINGS | changes).items() if value is not None]


@pytest.fixture(scope="module")
def trained_once(target, text, tmp_path_factory):
    """(runs folder, closing figures) of the small run, made once."""
    out = tmp_path_factory.mktemp("once") / "runs"
    argv = words({"target.source": target, "data.sources": f"[{text}]", "out": out, "trainer.keep": 3})
    return out, train.main(argv)


@pytest.fixture
def finished(trained_once, tmp_path):
    """finished(name): a copy of the small run, finished, under tmp_path/name: its folder."""

    def copy(name="runs"):
        shutil.copytree(trained_once[0], tmp_path / name, symlinks=True)
        return tmp_path / name / "small" / "one"

    return copy


@pytest.fixture(scope="module")
def synthesis(target, tmp_path_factory):
    """make(name, **identity): a folder of answers as synthesize.py leaves it; identity: changes to the target's."""

    def make(name, **identity):
        folder = tmp_path_factory.mktemp("synthesis") / name
        folder.mkdir()
        generator = np.random.default_rng(2)
        rows = [
            {"id": f"p{i}", "prompt_tokens": [1, 5 + i, 9], "answer_tokens": generator.integers(5, 300, 19).tolist()}
            for i in range(12)
        ]
        (folder / "answers.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
        known = targets.load(str(target)).identity() | identity
        manifests.write(folder, kind="synthesis", target=known, argv=[])
        return folder

    return make


def metrics(run):
    """The lines of metrics.jsonl without their times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("time", "seconds")} for line in lines]


def assert_same_step(one, other):
    """Two step folders hold the same weights and the same optimizer, bit for bit."""
    for name in ("model.safetensors", "training/state.safetensors"):
        mine, theirs = (mx.load(str(folder / name)) for folder in (one, other))
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert mx.array_equal(value, theirs[key]).item(), f"{name}: {key}"


# A run.


def test_a_dry_run_prints_everything_and_writes_nothing(command, arguments, tmp_path, target):
    before = sorted(tmp_path.rglob("*"))
    code, closing, card, _ = command([*arguments(), "--dry-run"])
    assert (code, closing["status"], closing["out"]) == (0, "done", None)
    D, M, Q, KV, taps = 96, 64, 4 * 32, 2 * 32, 1
    assert closing["parameters"] == 2 * D * Q + 2 * D * KV + 3 * D * M + 2 * D + 2 * 32 + taps * D * D + 2 * D
    assert f"{closing['parameters']:,} parameters" in card
    assert closing["memory_bytes"] > 16 * closing["parameters"]
    for fact in ("GiB", targets.load(str(target)).fingerprint[:16], "BLAS", "documents", "row_tokens: 32", "epochs"):
        assert fact in card
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_writes_its_files_and_closes_with_its_best(command, arguments, tmp_path, target):
    code, closing, card, _ = command(arguments())
    run = tmp_path / "runs" / "small" / "one"
    assert (code, closing["status"], closing["out"], closing["steps"]) == (0, "done", str(run), STEPS)
    assert closing["best"]["step"] in (4, 6)
    names = {"config.yaml", "metrics.jsonl", "manifest.json", "latest", "best", "step-4", "step-6"}
    assert {path.name for path in run.iterdir()} - {"step-3"} == names
    assert os.readlink(run / "latest") == "step-6"
    assert os.readlink(run / "best") == f"step-{closing['best']['step']}"

    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 6]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 6]
    assert closing["best"] == {"step": closing["best"]["step"], **next(
        {k: v for k, v in line.items() if k != "step"} for line in lines
        if "walked_tau" in line and line["step"] == closing["best"]["step"]
    )}  # fmt: skip
    for line in lines:
        if "walked_tau" in line:
            assert line["walked_tau"] >= 1
            assert len(line["agreement"]) == 3

    assert manifests.verify(run).kind == "run"
    record = manifests.verify(run / "step-6")
    assert (record.kind, record.extra["step"], record.argv) == ("checkpoint", 6, manifests.unplaced(arguments()))
    assert record.data[0] == {"name": "text.txt", "sha256": manifests.sha256_file(pathlib.Path(arguments_text(run)))}
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["steps"] == STEPS
    loaded = checkpoint.load_drafter(run, targets.load(str(target)))
    assert loaded.drafter.config.block_size == 4
    assert str(run) in card
    assert card.count("walked τ") == 2


def arguments_text(run):
    """The one data source in a run's recorded configuration."""
    return yaml.safe_load((run / "config.yaml").read_text())["data"]["sources"][0]


def test_the_same_command_trains_the_same_weights_and_another_seed_others(command, arguments, tmp_path):
    for run, seed in (("one", 0), ("two", 0), ("three", 1)):
        assert command(arguments(run=run, trainer__seed=seed, trainer__steps=3))[0] == 0
    folders = [tmp_path / "runs" / "small" / run / "step-3" for run in ("one", "two", "three")]
    assert_same_step(*folders[:2])
    with pytest.raises(AssertionError):
        assert_same_step(folders[0], folders[2])


def test_answers_train_a_drafter_and_are_recorded(command, arguments, synthesis, tmp_path):
    folder = synthesis("mine")
    argv = arguments(data__kind="synthesis", data__sources=f"[{folder}]", trainer__steps=2)
    code, closing, *_ = command(argv)
    assert code == 0
    record = manifests.verify(tmp_path / "runs" / "small" / "one" / "step-2")
    assert record.data[0]["sha256"] == manifests.sha256_file(folder / "answers.jsonl.gz")


def test_a_warm_start_begins_with_the_given_weights_and_is_recorded(command, arguments, finished, tmp_path):
    first = finished("earlier") / "step-6"
    still = {"optimizer__learning_rate": 1e-30, "trainer__steps": 1}
    assert command(arguments(run="two", init_from=first, trainer__seed=5, **still))[0] == 0
    second = tmp_path / "runs" / "small" / "two" / "step-1"
    one, two = (mx.load(str(folder / "model.safetensors")) for folder in (first, second))
    assert all(mx.array_equal(value, two[name]).item() for name, value in one.items())
    digest = manifests.sha256_file(first / "model.safetensors")
    assert manifests.read(second).extra["init_from"] == {"sha256": digest, "target_mismatch": None}
    lines = [json.loads(line) for line in (second.parent / "metrics.jsonl").read_text().splitlines()]
    begun, ended = (next(line for line in lines if line["step"] == step and "walked_tau" in line) for step in (0, 1))
    assert begun["walked_tau"] == ended["walked_tau"] and begun["validation_loss"] == ended["validation_loss"]


# Features.


def test_features_are_stored_once_for_all_runs_of_a_name_and_trained_from(command, arguments, tmp_path):
    small = {"trainer__steps": 3, "features__mode": "cached"}
    code, closing, card, _ = command(arguments(**small))
    assert (code, closing["steps"]) == (0, 3)
    size = 32 * 96 * 2
    rows = int(re.search(r"documents in (\d+) rows", card)[1])
    assert f"{rows} rows of bfloat16 taps 1×32×96 take {rows * size / 2**10:.3g} KiB" in card
    assert f"{rows} rows are read, 0 computed" in card
    folder = tmp_path / "runs" / "small" / "features"
    record, before = manifests.verify(folder), (folder / "shard-00000.safetensors").stat().st_mtime_ns
    assert (record.kind, record.argv) == ("features", manifests.unplaced(arguments(**small)))
    code, _, card, _ = command(arguments(run="two", **small))
    assert code == 0
    assert "0 bytes to write" in card
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == before
    assert_same_step(*(tmp_path / "runs" / "small" / run / "step-3" for run in ("one", "two")))
    assert command(arguments(run="three", trainer__steps=3))[0] == 0  # online: the taps are not rounded
    losses = [[line["loss"] for line in metrics(folder.parent / run) if "loss" in line] for run in ("one", "three")]
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
    assert losses[0] != losses[1]


def test_a_hybrid_reads_what_fits_and_computes_the_rest(command, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 4 * 32 * 96 * 2)
    limit = 9 * 32 * 96 * 2 / 2**30  # two shards of four rows, and no third
    small = {"trainer__steps": 2, "features__mode": "hybrid", "features__folder": tmp_path / "mine"}
    code, closing, *_ = command(arguments(**small))
    assert code == 2
    assert "holds no features yet; say with features.max_gib" in closing["error"]
    code, _, card, _ = command(arguments(features__max_gib=limit, **small))
    assert code == 0
    assert "8 rows are read" in card
    assert "8 rows are read" in command(arguments(run="two", **small))[2]  # nothing is added without max_gib
    code, closing, *_ = command(arguments(run="three", trainer__seed=3, **small))  # packs other rows
    assert code == 2
    assert f"{tmp_path / 'mine'}: features of the rows" in closing["error"]


# Interrupts.


def test_an_interrupt_saves_and_a_resumed_run_ends_in_the_same_weights(command, arguments, tmp_path):
    slow = {"trainer__steps": 24, "trainer__save_every": 2, "trainer__validate_every": 12}
    argv = arguments(run="broken", **slow)
    process = subprocess.Popen(
        [sys.executable, "scripts/train.py", *argv], cwd=edge.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    run, deadline = tmp_path / "runs" / "small" / "broken", time.monotonic() + 120
    while not (run / "latest").is_symlink() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    closing = json.loads(out.decode().splitlines()[-1])
    assert (process.returncode, closing["status"]) == (130, "interrupted"), err.decode()[-2000:]
    assert 2 <= closing["steps"] < 24
    assert "resume=auto" in out.decode()
    assert os.readlink(run / "latest") == f"step-{closing['steps']}"
    manifests.verify(run)

    code, resumed, card, _ = command([*argv, "resume=auto"])
    assert (code, resumed["status"], resumed["steps"]) == (0, "done", 24)
    assert f"step-{closing['steps']}" in card
    assert command(arguments(run="whole", **slow))[0] == 0
    whole = tmp_path / "runs" / "small" / "whole"
    assert_same_step(run / "step-24", whole / "step-24")
    assert metrics(run) == metrics(whole)
    state, expected = (checkpoint.load_training(folder / "step-24")[1] for folder in (run, whole))
    assert state == expected


def test_a_damaged_newest_step_is_passed_over_and_its_lines_are_not_logged_twice(command, arguments, finished):
    run = finished()
    whole = metrics(run)
    reference = mx.load(str(run / "step-6" / "training" / "state.safetensors"))
    mx.eval(reference)
    os.truncate(run / "step-6" / "training" / "state.safetensors", 99)
    code, closing, card, _ = command(arguments(trainer__keep=3, resume="auto"))
    assert (code, closing["steps"]) == (0, STEPS)
    assert "step-4" in card
    assert metrics(run) == whole
    found = mx.load(str(run / "step-6" / "training" / "state.safetensors"))
    assert all(mx.array_equal(value, found[name]).item() for name, value in reference.items())


def test_a_finished_run_resumes_to_itself(command, arguments, finished, trained_once):
    run = finished()
    code, again, *_ = command(arguments(run=None, trainer__keep=3, resume="auto"))  # the newest run of that name
    assert (code, again) == (0, trained_once[1] | {"out": str(run)})


def test_a_run_is_not_overwritten_nor_continued_as_another(command, arguments, finished):
    finished()
    code, closing, *_ = command(arguments(trainer__keep=3))
    assert (code, closing["status"]) == (2, "refused")
    assert "holds a run already; continue it with resume=auto" in closing["error"]
    code, closing, *_ = command(arguments(trainer__keep=3, resume="auto", optimizer__learning_rate=0.5))
    assert code == 2
    assert "begun with another optimizer" in closing["error"]


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(command, arguments, tmp_path):
    code, closing, *_ = command(arguments(optimizer__learning_rate=1e38, optimizer__warmup_fraction=0))
    assert (code, closing["status"]) == (2, "refused")
    assert "step 2: loss nan" in closing["error"]
    assert "no step was saved yet" in closing["error"]
    assert not list((tmp_path / "runs" / "small" / "one").glob("step-*"))
    code, closing, *_ = command(arguments(trainer__steps=1))  # nothing was kept, so the name is free again
    assert (code, closing["steps"]) == (0, 1)


# Refusals.


def refused(command, argv, tmp_path, *, left=()):
    """The error of a command that is refused in one line and leaves only `left` under runs."""
    code, closing, _, err = command(argv)
    assert (code, closing["status"]) == (2, "refused")
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [f"error: {closing['error']}"]
    assert "Traceback" not in err
    found = {path.name for path in (tmp_path / "runs").rglob("*") if not path.is_dir()}
    assert found == set(left)
    return closing["error"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trainer__step": 3}, "unknown configuration key 'trainer.step'; did you mean 'trainer.steps'?"),
        ({"lr": 3}, "unknown configuration key 'lr'"),
        ({"trainer__steps": "many"}, "trainer.steps"),
        ({"trainer__steps": 0}, "trainer.steps is 0"),
        ({"trainer__walk_documents": 0}, "trainer.walk_documents is 0"),
        ({"trainer__walk_tokens": 1}, "trainer.walk_tokens is 1"),
        ({"trainer__validation_rows": 0}, "trainer.validation_rows is 0"),
        ({"data__max_documents": 0}, "data.max_documents is 0"),
        ({"drafter__block_size": 0}, "drafter.block_size is 0; expected at least 2"),
        ({"drafter__block_size": 1}, "drafter.block_size is 1; expected at least 2"),
        ({"drafter__target_layer_ids": "[0,9]"}, "[0, 9]"),
        ({"drafter__target_layer_ids": "[]"}, "target_layer_ids"),
        ({"drafter__layer_types": "[linear_attention]"}, "linear_attention"),
        ({"drafter__mask_token_id": 311}, "mask_token_id 311 is outside the vocabulary"),
        ({"drafter__num_key_value_heads": 3}, "multiple"),
        ({"drafter__num_attention_heads": 0}, "num_attention_heads"),
        ({"data__sources": "[none.txt]"}, "none.txt: not found"),
        ({"data__sources": "[]"}, "data.sources"),
        ({"data__kind": "texts"}, "data.kind is 'texts'"),
        ({"target__source": "./none"}, "none"),
        ({"target__source": "smollm3"}, "smollm3"),
        ({"target__dtype": "int8"}, "int8"),
        ({"init_from": "none"}, "drafter none: not found"),
        ({"resume": "yes"}, "resume"),
        ({"loss__name": "mse"}, "loss.name is 'mse'"),
        ({"features__mode": "disk"}, "features.mode is 'disk'"),
        ({"features__mode": "hybrid", "features__max_gib": 0}, "features.max_gib is 0"),
        ({"features__mode": "cached", "features__max_gib": 3}, "features.max_gib is 3.0; expected none without"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(command, arguments, tmp_path, changes, named):
    assert named in refused(command, arguments(**changes), tmp_path)


def test_an_unknown_experiment_or_option_is_one_line(command, arguments, tmp_path):
    error = refused(command, ["+experiment=quickstar", *arguments()], tmp_path)
    assert "did you mean 'quickstart'?" in error
    assert "did you mean --dry-run?" in refused(command, [*arguments(), "--dryrun"], tmp_path)
    assert "expected KEY=VALUE" in refused(command, [*arguments(), "steps"], tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty file"),
        (b" \n", "empty file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a", "no answer tokens within 32 tokens"),
        (b"the mill by the river", "held-out"),
    ],
)
def test_text_that_cannot_be_trained_on_is_one_line(command, arguments, tmp_path, content, named):
    (tmp_path / "bad.txt").write_bytes(content)
    error = refused(command, arguments(data__sources=f"[{tmp_path / 'bad.txt'}]"), tmp_path)
    assert named in error
    assert "bad.txt" in error


def answers(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return f"[{path}]"


ONE = {"prompt_tokens": [7, 8], "answer_tokens": [2]}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "empty file"),
        (['{"prompt_tok'], "line 1: not JSON"),
        ([{"prompt": "a"}], "line 1: prompt_tokens is no list of token ids"),
        ([{"prompt_tokens": [311], "answer_tokens": [2]}], "token 311 found, expected 0 to 310"),
        ([ONE, ONE | {"prompt_tokens": [9]}, ONE | {"prompt_tokens": [3]}], "two answer tokens"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_one_line(command, arguments, tmp_path, rows, named):
    sources = answers(tmp_path / "answers.jsonl", *rows)
    assert named in refused(command, arguments(data__kind="synthesis", data__sources=sources), tmp_path)


def test_answers_of_another_target_are_refused_unless_allowed(command, arguments, synthesis, tmp_path):
    argv = arguments(data__kind="synthesis", data__sources=f"[{synthesis('other', fingerprint='0' * 64)}]")
    error = refused(command, argv, tmp_path)
    assert "0" * 64 in error
    assert "data.allow_target_mismatch=true" in error
    assert command([*argv, "data.allow_target_mismatch=true", "--dry-run"])[0] == 0


def test_a_changed_synthesis_is_named(command, arguments, synthesis, tmp_path):
    folder = synthesis("changed")
    with open(folder / "answers.jsonl.gz", "ab") as stream:
        stream.write(b"x")
    error = refused(command, arguments(data__kind="synthesis", data__sources=f"[{folder}]"), tmp_path)
    assert f"{folder / 'answers.jsonl.gz'}: changed file" in error


def test_a_damaged_warm_start_is_named(command, arguments, finished, tmp_path):
    step = finished("earlier") / "step-6"
    os.truncate(step / "model.safetensors", 1000)
    error = refused(command, arguments(init_from=step), tmp_path)
    assert f"{step / 'model.safetensors'}: changed file" in error
    (step / "manifest.json").unlink()
    assert str(step / "model.safetensors") in refused(command, arguments(init_from=step), tmp_path)


def test_a_warm_start_of_another_shape_is_named(command, arguments, finished, tmp_path):
    step = finished("earlier") / "step-6"
    error = refused(command, arguments(init_from=step, drafter__intermediate_size=32), tmp_path)
    assert "mlp.down_proj.weight is (96, 64), not (96, 32)" in error


def test_a_damaged_target_is_named(command, arguments, tmp_path):
    folder = tiny.folder("llama", tmp_path, seed=5)
    os.truncate(folder / "model.safetensors", 1000)
    assert str(folder / "model.safetensors") in refused(command, arguments(target__source=folder), tmp_path)


def test_a_target_with_recurrent_layers_is_refused(command, arguments, tmp_path):
    folder = tiny.folder("lfm2", tmp_path)
    error = refused(command, arguments(target__source=folder), tmp_path)
    assert "cannot be trained by this version" in error


@pytest.mark.parametrize("out", ["/proc/none", "file"])
def test_a_place_that_cannot_be_written_to_is_one_line(command, arguments, tmp_path, out):
    (tmp_path / "file").write_text("x")
    error = refused(command, arguments(out=out if out.startswith("/") else tmp_path / out), tmp_path)
    assert str(out) in error


def test_a_read_only_out_is_one_line(command, arguments, tmp_path):
    with read_only_disk(tmp_path / "disk") as disk:
        error = refused(command, arguments(out=disk), tmp_path)
    assert "read-only file system; choose a place" in error


def test_a_full_disk_leaves_a_run_that_can_be_continued(command, arguments, tmp_path):
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        (disk / "ballast").write_bytes(b"x" * 7800 * 1024)
        code, closing, *_ = command(arguments(out=disk))
        assert code == 2
        assert "no space left on device; free some space" in closing["error"]
        left = {path.name for path in (disk / "small" / "one").iterdir()}
        assert left == {"config.yaml", "metrics.jsonl"}
        (disk / "ballast").unlink()
        code, closing, *_ = command(arguments(out=disk, resume="auto"))
        assert (code, closing["steps"]) == (0, STEPS)
        manifests.verify(disk / "small" / "one" / "step-6")


def test_weights_and_biases_records_a_run_offline(command, arguments, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert command(arguments(tracking__wandb="true", trainer__steps=2))[0] == 0
    run = tmp_path / "runs" / "small" / "one"
    assert list(run.parent.glob("wandb/offline-run-*"))
    manifests.verify(run)
