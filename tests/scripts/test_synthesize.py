"""scripts/synthesize.py at its edge: what it prints, writes and refuses; a refusal leaves nothing behind."""

import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import synthesize
from disks import read_only_disk, small_disk

import edge
import tiny
from drafter import manifest as manifests

CAP = 9


@pytest.fixture
def command(run_script):
    return functools.partial(run_script, "synthesize.py", synthesize.main)


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
    assert record.argv[:2] == ["--target", f"…/{target.name}"]
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
        (["--template-option", "thinking"], "--template-option: invalid"),
        (["--template-option", "thinking=false"], "--template-option thinking: the chat template does not use it"),
        (["--user-temperature", "inf"], "--user-temperature: invalid"),
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


def test_nothing_to_answer_is_one_line(command, target, tmp_path):
    code, closing, *_ = command("--target", target, "--out", tmp_path / "run")
    assert (code, closing["status"]) == (2, "refused")
    assert "give --prompts, or --self-prompts" in closing["error"]


def test_a_dataset_and_the_target_itself_give_prompts(command, tmp_path):
    folder = tiny.folder("llama", tmp_path)
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.jsonl").write_text('{"question": "the river"}\n{"question": null}\n')
    more = ("--self-prompts", 6, "--user-temperature", 0.3, "--script", "latin", "--shard-rows", 2)
    code, closing, card, _ = command(*arguments(folder, f"hf:{tmp_path / 'table'}", tmp_path / "run", *more))
    assert code == 0
    assert "2 of 2, and 6 the target writes" in card
    assert closing["input"] == 8 == closing["written"] + sum(closing["skipped"].values())
    assert closing["skipped"]["no text"] == 1
    record = manifests.verify(tmp_path / "run")
    assert [entry["name"] for entry in record.data] == ["table", "self-prompts"]
    assert len([name for name in record.files if name.startswith("answers-")]) == -(-closing["written"] // 2) > 1
    assert {row["source"] for row in rows_of(tmp_path / "run")} == {"table", "self-prompts"}


# Kills.

DRIVER = """
import sys, time
sys.path.insert(0, {scripts!r})
import edge, synthesize
synthesize.prepare()
from drafter import journal, synthesis
def slowly(*arguments, real=journal.write_shard):
    real(*arguments)
    time.sleep(0.2)
journal.write_shard = slowly
synthesis.FLUSH_SECONDS = 0
edge.run(synthesize.main)
"""


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


MOMENTS = {
    "while the target writes prompts": lambda out: lines(out / "prompts.jsonl") >= 3,
    "while the prompts are packed": lambda out: (out / "prompts-00001.jsonl.gz").exists(),
    "while it answers": lambda out: lines(out / "answers.jsonl") >= 9,
    "while the answers are packed": lambda out: (out / "answers-00001.jsonl.gz").exists(),
}


def start(argv):
    """The command in a process of its own, which flushes every row and packs slowly."""
    code = DRIVER.format(scripts=str(edge.ROOT / "scripts"))
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_run_killed_again_and_again_loses_nothing_and_doubles_nothing(tmp_path):
    """One run, killed by the system at four moments one after another, ends in the bytes of a run left alone."""
    ends = [tiny.SPECIAL.index("<|im_end|>"), *(tiny.tokenizer().token_to_id(letter) for letter in "jkvwxyzJKVWXYZ)")]
    folder = tiny.folder("llama", tmp_path, chat_template=True, eos_token_id=ends)
    (tmp_path / "words.txt").write_text("".join(f"the mill {n} ran\n" for n in range(12)))
    more = ("--self-prompts", 40, "--turns", 2, "--user-temperature", 0.4, "--temperature", "0,0.6", "--shard-rows", 8)
    killed = []
    for moment in MOMENTS.values():
        process = start(arguments(folder, tmp_path / "words.txt", tmp_path / "killed", *more))
        while process.poll() is None and not moment(tmp_path / "killed"):
            time.sleep(0.005)
        process.kill()
        process.communicate()
        killed.append(process.returncode)
        assert not (tmp_path / "killed" / "manifest.json").exists()
    assert killed == [-signal.SIGKILL] * len(MOMENTS)
    closings = []
    for out in (tmp_path / "killed", tmp_path / "whole"):
        process = start(arguments(folder, tmp_path / "words.txt", out, *more))
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        closings.append(json.loads(output.splitlines()[-1]))
        manifests.verify(out)
    names = ("input", "written", "remaining", "answer_tokens", "skipped", "failed")
    first, second = ({name: closing[name] for name in names} for closing in closings)
    assert first == second
    assert first["written"] > 16
    contents = [
        {path.name: path.read_bytes() for path in out.glob("*.gz")} for out in (tmp_path / "killed", tmp_path / "whole")
    ]
    assert contents[0] == contents[1]
    ids = [row["id"] for row in rows_of(tmp_path / "killed")]
    assert len(ids) == len(set(ids)) == first["written"]
    assert not list((tmp_path / "killed").glob("*.jsonl"))


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
