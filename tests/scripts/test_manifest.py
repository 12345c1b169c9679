"""scripts/manifest.py at its edge: exit 1 for a wrong digest, 2 for a bad path, and releases that check out."""

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest
from disks import read_only_disk, small_disk

import edge
from drafter import manifest as manifests
from drafter.documents import Source, read_source

SPEC = importlib.util.spec_from_file_location("manifest_command", edge.ROOT / "scripts" / "manifest.py")
SCRIPT = importlib.util.module_from_spec(SPEC)  # by path: `import manifest` could find either of the two
SPEC.loader.exec_module(SCRIPT)

TARGET = {"source": "tiny", "fingerprint": "f1", "tokenizer_sha256": "t1", "template_sha256": "c1", "dtype": "x"}
GOOD = '{"id": "a", "prompt_tokens": [5], "answer_tokens": [6, 2]}\n'
CONFIG = {"dflash_config": {"block_size": 7, "target_layer_ids": [1, 3]}, "hidden_size": 96}


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command as a shell would: (exit code, closing line, standard output before it)."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["manifest.py", *map(str, argv)])
        with pytest.raises(SystemExit) as leaving:
            edge.run(SCRIPT.main)
        *before, last = capsys.readouterr().out.rstrip("\n").split("\n")
        return leaving.value.code, json.loads(last), "\n".join(before)

    return call


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A runs folder: a synthesis, and a training run with two steps of which step-9 is the best."""
    runs = tmp_path / "runs"
    answers = runs / "synthesis" / "words"
    answers.mkdir(parents=True)
    (answers / "answers.jsonl").write_text(GOOD)
    manifests.write(answers, kind="synthesis", target=TARGET, extra={"written": 1})
    run = runs / "small" / "a"
    for step in (4, 9):
        folder = run / f"step-{step}"
        (folder / "training").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").write_bytes(bytes([step]) * 1234)
        (folder / "training" / "state.safetensors").write_bytes(b"optimizer")
        data = [{"name": "words/answers.jsonl", "sha256": "d1"}]
        manifests.write(folder, kind="checkpoint", target=TARGET, data=data, config_digest="c9", argv=["+experiment=a"])
    (run / "best").symlink_to("step-9")
    rows = [{"step": 9, "loss": 1.5}, {"step": 9, "validation": {"walked_tau": 2.5}}, {"step": 10, "loss": 7}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifests.write(run, kind="run", target=TARGET)
    monkeypatch.setattr(SCRIPT, "RUNS", runs)
    return runs


def test_everything_under_runs_verifies(command, runs):
    code, closing, shown = command("verify", "--all")
    assert (code, closing) == (0, {"status": "done", "out": None, "manifests": 4, "failed": []})
    assert shown.count("ok ") == 4
    assert command("verify", runs / "small")[1]["manifests"] == 3
    assert command("verify", runs / "small" / "a" / "best")[1]["manifests"] == 1


@pytest.mark.parametrize("change", ["byte", "missing", "unexpected", "manifest"])
def test_a_wrong_folder_fails_by_name_and_the_others_are_still_checked(command, runs, change):
    folder = runs / "small" / "a" / "step-4"
    if change == "byte":
        (folder / "model.safetensors").write_bytes(b"\x04" * 1233 + b"\x05")
    elif change == "missing":
        (folder / "config.json").unlink()
    elif change == "unexpected":
        (folder / "notes.txt").write_text("x")
    else:
        (folder / "manifest.json").write_text("{")
    named = {"byte": "model.safetensors: changed", "missing": "config.json: missing", "unexpected": "notes.txt: unexp"}
    code, closing, shown = command("verify", "--all")
    assert (code, closing["status"], closing["manifests"]) == (1, "failed", 4)
    assert [path.endswith("small/a/step-4") for path in closing["failed"]] == [True]
    assert named.get(change, "manifest.json: not valid JSON") in shown
    assert shown.count("ok ") == 3


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["verify", "nowhere"], "nowhere: not found"),
        (["verify", "file"], "file: found a file; expected a folder"),
        (["verify", "empty"], "empty: no manifest.json at or below it"),
        (["verify"], "expected either a PATH or --all"),
        (["verify", "empty", "--all"], "expected either a PATH or --all"),
        (["verify", "--al"], "did you mean --all?"),
        (["list", "nowhere"], "nowhere: not found"),
        (["release", "nowhere", "--out", "new"], "nowhere: not found"),
        (["release", "empty", "--out", "new"], "empty: holds no config.json"),
        (["release", "empty"], "the following arguments are required: --out"),
        (["publish"], "invalid choice: 'publish'"),
        ([], "required: command"),
    ],
)
def test_a_bad_path_or_option_is_one_line(command, runs, tmp_path, monkeypatch, argv, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    code, closing, _ = command(*argv)
    assert (code, closing["status"]) == (2, "refused")
    assert named in closing["error"]
    assert not (tmp_path / "new").exists()


def test_the_list_shows_path_kind_target_size_and_state(command, runs):
    (runs / "synthesis" / "words" / "answers.jsonl").write_text(GOOD.replace("6", "7"))
    code, closing, shown = command("list")
    assert (code, closing["failed"]) == (1, 1)
    lines = {line.split()[0].rsplit("runs/", 1)[-1]: line.split()[1:] for line in shown.splitlines()[1:]}
    assert lines["synthesis/words"] == ["synthesis", "0.00", "MB", "no", "tiny"]
    assert lines["small/a/step-9"] == ["checkpoint", "0.00", "MB", "yes", "tiny"]
    assert lines["small/a"][0] == "run"


# Releases.


@pytest.mark.parametrize("path", ["small/a", "small/a/step-9", "small/a/best"])
def test_a_released_drafter_is_its_best_step_without_the_optimizer(command, runs, tmp_path, path):
    out = tmp_path / "new" / "drafter"
    code, closing, _ = command("release", runs / path, "--out", out)
    assert (code, closing["status"], closing["out"]) == (0, "done", str(out))
    expected = {"README.md", "SHA256SUMS", "config.json", "manifest.json", "model.safetensors"}
    assert {file.name for file in out.iterdir()} == expected == set(closing["files"])
    assert (out / "model.safetensors").read_bytes() == b"\x09" * 1234
    record = manifests.verify(out)
    assert (record.kind, record.target, record.config_digest) == ("release", TARGET, "c9")
    assert [file.name for file in out.parent.iterdir()] == ["drafter"]


def test_the_card_states_target_configuration_figures_data_and_check(command, runs, tmp_path):
    command("release", runs / "small" / "a", "--out", tmp_path / "drafter")
    card = (tmp_path / "drafter" / "README.md").read_text()
    facts = ["# drafter", "f1", "up to 6 tokens", "| dflash_config.target_layer_ids | [1, 3] |", "| loss | 1.5 |"]
    facts += ["| validation.walked_tau | 2.5 |", "| words/answers.jsonl | d1 |", "+experiment=a", "shasum -a 256 -c"]
    assert [fact for fact in facts if fact not in card] == []
    assert "| loss | 7 |" not in card, "that is another step's"


def test_a_release_released_again_still_says_what_it_was_made_from(command, runs, tmp_path):
    step = runs / "small" / "a" / "step-9"
    manifests.write(step, kind="checkpoint", target=TARGET, argv=["+experiment=a", "out=/elsewhere/runs"])
    command("release", step, "--out", tmp_path / "first")
    command("release", tmp_path / "first", "--out", tmp_path / "second")
    first, second = (manifests.verify(tmp_path / name) for name in ("first", "second"))
    assert first.extra["released"] == second.extra["released"]
    assert first.extra["released"]["kind"] == "checkpoint"
    for name in ("first", "second"):
        assert "| arguments | +experiment=a out=…/runs |" in (tmp_path / name / "README.md").read_text()


def test_the_checksums_are_accepted_and_refuse_a_changed_byte(command, runs, tmp_path):
    out = tmp_path / "drafter"
    command("release", runs / "small" / "a", "--out", out)
    check = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    passed = subprocess.run(check, cwd=out, capture_output=True, text=True)
    assert passed.returncode == 0, passed.stderr
    assert passed.stdout.count(": OK") == 4
    (out / "README.md").write_text("changed")
    assert subprocess.run(check, cwd=out, capture_output=True).returncode != 0


def test_released_answers_can_be_trained_on(command, runs, tmp_path):
    answers = runs / "synthesis" / "words"
    (answers / "answers.jsonl").rename(answers / "answers.jsonl.gz")
    (answers / "answers.jsonl.gz").write_bytes(gzip.compress(GOOD.encode()))
    manifests.write(answers, kind="synthesis", target=TARGET, extra={"written": 1})
    assert command("release", answers, "--out", tmp_path / "words")[0] == 0
    target = type("Target", (), {"vocab_size": 311, "identity": lambda self: TARGET})()
    assert len(read_source(Source(str(tmp_path / "words")), target).documents) == 1
    assert "# words" in (tmp_path / "words" / "README.md").read_text()
    assert command("release", tmp_path / "words", "--out", tmp_path / "again")[0] == 0


def test_a_changed_checkpoint_is_not_released(command, runs, tmp_path):
    (runs / "small" / "a" / "step-9" / "model.safetensors").write_bytes(b"\x08" * 1234)
    code, closing, _ = command("release", runs / "small" / "a", "--out", tmp_path / "new")
    assert (code, closing["status"]) == (1, "failed")
    assert "model.safetensors: changed file" in closing["error"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_release_overwrites_nothing(command, runs, tmp_path, kind):
    out = tmp_path / "new"
    out.mkdir() if kind == "folder" else out.write_text("mine")
    if kind == "folder":
        (out / "thesis.tex").write_text("mine")
    code, closing, _ = command("release", runs / "small" / "a", "--out", out)
    assert code == 2
    assert "already there and not empty" in closing["error"]
    assert (out if kind == "file" else out / "thesis.tex").read_text() == "mine"


def test_an_empty_folder_may_be_released_into(command, runs, tmp_path):
    (tmp_path / "new").mkdir()
    assert command("release", runs / "small" / "a", "--out", tmp_path / "new")[0] == 0


def test_a_full_or_read_only_disk_leaves_no_release(command, runs, tmp_path):
    with small_disk(tmp_path / "full") as disk:
        (disk / "ballast").write_bytes(b"x" * 120 * 1024)
        code, closing, _ = command("release", runs / "small" / "a", "--out", disk / "new")
        assert code == 2
        assert "new: no space left on device; free some space" in closing["error"]
        assert [path.name for path in disk.iterdir()] == ["ballast"]
    with read_only_disk(tmp_path / "ro") as disk:
        code, closing, _ = command("release", runs / "small" / "a", "--out", disk / "new")
        assert code == 2
        assert "read-only file system" in closing["error"]
