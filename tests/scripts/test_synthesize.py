"""scripts/synthesize.py at its edge: what it prints, writes and refuses; a refusal leaves nothing behind."""

import gzip
import json
import os
import sys

import pytest
import synthesize
from disks import read_only_disk, small_disk

import edge
import tiny
from drafter import manifest as manifests

CAP = 9


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command as a shell would: (exit code, closing line, standard output before it, errors)."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["synthesize.py", *map(str, argv)])
        with pytest.raises(SystemExit) as leaving:
            edge.run(synthesize.main)
        out, err = capsys.readouterr()
        *before, last = out.rstrip("\n").split("\n")
        return leaving.value.code, json.loads(last), "\n".join(before), err

    return call


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.folder("llama", tmp_path_factory.mktemp("target"), chat_template=True)


@pytest.fixture
def prompts(tmp_path):
    """A file of five prompts, one of them twice."""
    path = tmp_path / "words.txt"
    path.write_text("the river\nthe old mill\nadd small words\nprint second\nthe river\nwhile\n")
    return path


def rows_of(folder):
    """The answers of a finished run."""
    shards = sorted(folder.glob("answers-*.jsonl.gz"))
    return [json.loads(line) for shard in shards for line in gzip.decompress(shard.read_bytes()).splitlines()]


def arguments(target, prompts, out, *more):
    return ("--target", target, "--prompts", prompts, "--out", out, "--max-tokens", CAP, "--batch-size", 3, *more)


def test_a_run_prints_its_card_and_closes_with_its_counts(command, target, prompts, tmp_path):
    out = tmp_path / "run"
    code, closing, card, progress = command(*arguments(target, prompts, out))
    assert code == 0
    rows = rows_of(out)
    assert closing["status"] == "done"
    assert closing["out"] == str(out)
    assert (closing["input"], closing["written"], closing["skipped"]) == (6, len(rows), {"duplicate": 1})
    assert closing["input"] == closing["written"] + 1 + sum(closing["failed"].values())
    assert closing["answer_tokens"] == sum(len(row["answer_tokens"]) for row in rows)
    assert closing["tok_s"] > 0
    record = manifests.verify(out)
    for fact in (record.target["fingerprint"][:16], "cpu", "6 of 6", f"up to {CAP} tokens", str(out), "chat template"):
        assert fact in card
    assert "tok/s" in progress
    assert record.argv[:2] == ["--target", str(target)]
    assert record.data == [{"name": "words.txt", "sha256": manifests.sha256_file(prompts)}]


def test_the_same_command_again_changes_nothing(command, target, prompts, tmp_path):
    first = command(*arguments(target, prompts, tmp_path / "run"))[1]
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    code, second, *_ = command(*arguments(target, prompts, tmp_path / "run"))
    assert code == 0
    assert second == first | {"tok_s": None}
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_shipped_evaluation_prompts_are_left_out(command, target, tmp_path):
    suite = edge.ROOT / "decode" / "lab" / "prompts" / "suite.jsonl"
    lines = suite.read_text(encoding="utf-8").splitlines()[:3]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([*lines, '{"prompt": "the river ran"}']) + "\n")
    code, closing, *_ = command(*arguments(target, path, tmp_path / "run"))
    assert code == 0
    assert closing["skipped"] == {"evaluation prompt": 3}
    (tmp_path / "held.jsonl").write_text('{"prompt": "The  river ran"}\n')
    code, closing, *_ = command(*arguments(target, path, tmp_path / "other", "--held-out", tmp_path / "held.jsonl"))
    assert closing["skipped"]["evaluation prompt"] == 1


def test_templates_limits_temperatures_and_system_turns_are_applied(command, target, tmp_path):
    (tmp_path / "f.yaml").write_text("families: {f: {phrasings: ['{n} mills'], slots: {n: [1, 2, 3, 4, 5, 6, 7]}}}\n")
    more = ("--count", 7, "--limit", 6, "--temperature", "0,0.7", "--system", "old", "--seed", 3)
    code, closing, *_ = command(*arguments(target, tmp_path / "f.yaml", tmp_path / "run", *more))
    assert code == 0
    assert closing["input"] == 6
    rows = rows_of(tmp_path / "run")
    assert {row["temperature"] for row in rows} == {0.0, 0.7}
    assert all(row["messages"][0] == {"role": "system", "content": "old"} for row in rows)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-token", "3"], "unrecognized arguments: --max-token 3; did you mean --max-tokens?"),
        (["--max-tokens", "0"], "--max-tokens: invalid"),
        (["--batch-size", "-2"], "--batch-size: invalid"),
        (["--temperature", "0,warm"], "--temperature: invalid"),
        (["--temperature", "-1"], "--temperature: "),
        (["--minutes", "nan"], "--minutes: invalid"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--held-out", "none.jsonl"], "--held-out none.jsonl: not found"),
        (["--target", "smollm3"], "smollm3"),
        (["--target", "./none"], "none"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(command, target, prompts, tmp_path, argv, named):
    code, closing, _, err = command(*arguments(target, prompts, tmp_path / "run", *argv))
    assert (code, closing["status"]) == (2, "refused")
    assert named in closing["error"]
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [f"error: {closing['error']}"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("none.jsonl", None, "none.jsonl: prompt file not found"),
        ("empty.jsonl", "", "empty.jsonl: empty file"),
        ("empty.txt", "\n", "empty.txt: no prompts found"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prom', "bad.jsonl line 2: not JSON"),
        ("long.txt", "grain " * 600, "no prompt is left to answer (1 longer than the context)"),
    ],
)
def test_prompts_that_cannot_be_answered_are_one_line(command, target, tmp_path, name, content, named):
    if content is not None:
        (tmp_path / name).write_text(content)
    code, closing, *_ = command(*arguments(target, tmp_path / name, tmp_path / "run"))
    assert (code, closing["status"]) == (2, "refused")
    assert named in closing["error"]
    assert not (tmp_path / "run").exists()


def test_a_corrupt_target_is_one_line(command, prompts, tmp_path):
    folder = tiny.folder("llama", tmp_path, chat_template=True, seed=5)
    os.truncate(folder / "model.safetensors", 1000)
    code, closing, *_ = command(*arguments(folder, prompts, tmp_path / "run"))
    assert (code, closing["status"]) == (2, "refused")
    assert "model.safetensors" in closing["error"]
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_target_is_not_continued(command, target, prompts, tmp_path):
    command(*arguments(target, prompts, tmp_path / "run"))
    other = tiny.folder("llama", tmp_path, chat_template=True, seed=6)
    code, closing, *_ = command(*arguments(other, prompts, tmp_path / "run"))
    assert code == 2
    assert "the run begun here has fingerprint=" in closing["error"]
    manifests.verify(tmp_path / "run")


def test_an_out_that_is_a_file_is_one_line(command, target, prompts, tmp_path):
    (tmp_path / "file").write_text("x")
    code, closing, *_ = command(*arguments(target, prompts, tmp_path / "file"))
    assert code == 2
    assert "found a file, expected a folder" in closing["error"]


def test_a_read_only_out_is_one_line(command, target, prompts, tmp_path):
    with read_only_disk(tmp_path / "disk") as disk:
        code, closing, *_ = command(*arguments(target, prompts, disk / "run"))
    assert code == 2
    assert "read-only file system; choose a place" in closing["error"]


def test_a_full_disk_leaves_a_run_that_can_be_continued(command, target, prompts, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        (disk / "ballast").write_bytes(b"x" * 120 * 1024)
        code, closing, *_ = command(*arguments(target, prompts, disk / "run"))
        assert code == 2
        assert "no space left on device; free some space" in closing["error"]
        left = {path.name for path in (disk / "run").iterdir()}
        assert left <= {"settings.json", "answers.jsonl", "left_out.jsonl"}
        (disk / "ballast").unlink()
        code, closing, *_ = command(*arguments(target, prompts, disk / "run"))
        assert code == 0
        manifests.verify(disk / "run")
