"""Manifests: what is written verifies, every kind of change is named, and a failed write leaves nothing."""

import errno
import hashlib
import json
import os
import pathlib
import stat
import subprocess

import pytest
from disks import small_disk

from drafter import manifest
from kernels.errors import UserError

TARGET = {"source": "here", "fingerprint": "f" * 64, "tokenizer_sha256": "a", "template_sha256": None, "dtype": "x"}


@pytest.fixture
def folder(tmp_path):
    """A folder of two files, one of them in a subfolder, with its manifest."""
    (tmp_path / "part").mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 7)
    (tmp_path / "part" / "notes.txt").write_text("eleven words would be too many for this small file")
    manifest.write(
        tmp_path,
        kind="checkpoint",
        target=TARGET,
        data=[{"name": "d", "sha256": "e"}],
        config_digest="c" * 64,
        argv=["--steps", 5],
        extra={"step": 5},
    )
    return tmp_path


def edit(folder, change):
    """Rewrite a folder's manifest.json after `change(decoded)`."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_manifest_lists_every_file_with_its_digest_and_size(folder):
    content = json.loads((folder / "manifest.json").read_text())
    expected = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for name in ("part/notes.txt", "weights.bin")
        for data in [(folder / name).read_bytes()]
    }
    assert content["files"] == expected
    assert content["argv"] == ["--steps", "5"]
    assert {"mlx", "mlx-lm", "numpy", "python"} <= content["versions"].keys()
    record = manifest.verify(folder)
    assert (record.kind, record.target, record.extra) == ("checkpoint", TARGET, {"step": 5})
    assert record.bytes == sum(entry["bytes"] for entry in expected.values())


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        (["--out", f"{manifest.ROOT}/runs/a/b"], ["--out", "runs/a/b"]),
        ([f"out={pathlib.Path.home()}/runs"], ["out=~/runs"]),
        (["data.sources=[/data/mine/one,/data/mine/two]"], ["data.sources=[…/one,…/two]"]),
        (["release", "/scratch/h200", "--bits", "4"], ["release", "…/h200", "--bits", "4"]),
        (["a/b", "1/2", "https://x/y", "hf:org/name:train", "either / or", "~/runs", "../x"], None),
        ({"one": ["/a/b", 3, None], "two": {"three": "/a/c"}}, {"one": ["…/b", 3, None], "two": {"three": "…/c"}}),
    ],
)
def test_what_is_recorded_names_no_folder_of_this_machine(typed, recorded):
    assert manifest.unplaced(typed) == (recorded or typed)


def test_arguments_are_recorded_without_this_machines_folders(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"1")
    manifest.write(tmp_path, kind="checkpoint", target=TARGET, argv=["out=/elsewhere/runs", 7])
    assert json.loads((tmp_path / "manifest.json").read_text())["argv"] == ["out=…/runs", "7"]


def flip(folder):
    data = bytearray((folder / "weights.bin").read_bytes())
    data[100] ^= 1
    (folder / "weights.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (flip, r"weights\.bin: changed file: sha256"),
        (lambda folder: os.truncate(folder / "weights.bin", 9), r"weights\.bin: changed file: 9 bytes found, 1792"),
        (lambda folder: (folder / "part" / "notes.txt").unlink(), r"part/notes\.txt: missing file"),
        (lambda folder: (folder / "more.txt").write_text("x"), r"more\.txt: unexpected file"),
        (lambda folder: (folder / "part" / "more.txt").write_text("x"), r"part/more\.txt: unexpected file"),
        (lambda folder: edit(folder, lambda content: content["files"].pop("weights.bin")), r"weights\.bin: unexpected"),
    ],
    ids=["byte", "truncated", "missing", "unexpected", "unexpected_below", "unlisted"],
)
def test_verify_names_what_is_wrong(folder, change, named):
    change(folder)
    with pytest.raises(UserError, match=named):
        manifest.verify(folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not valid JSON"),
        ("\x00\x01", "not valid JSON"),
        ("[1, 2]", "found list, expected a JSON object"),
        ('{"schema": "other/1"}', "found schema 'other/1'"),
        ('{"schema": "foredraft.manifest/1", "kind": 3}', "found kind=3"),
    ],
)
def test_an_absurd_manifest_is_refused_by_name(folder, text, named):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=rf"manifest\.json: .*{named}"):
        manifest.verify(folder)


@pytest.mark.parametrize("name", ["../other", "/etc/hostname", "a/../../b", "", ".", "a\\b"])
def test_a_name_outside_the_folder_is_refused(folder, name):
    edit(folder, lambda content: content["files"].update({name: {"sha256": "0", "bytes": 1}}))
    with pytest.raises(UserError, match="expected one inside the folder"):
        manifest.read(folder)


@pytest.mark.parametrize("entry", [None, {}, {"sha256": 3, "bytes": 1}, {"sha256": "0", "bytes": "1"}, {"sha256": "0"}])
def test_an_entry_without_digest_or_size_is_refused(folder, entry):
    edit(folder, lambda content: content["files"].update({"weights.bin": entry}))
    with pytest.raises(UserError, match=r"weights\.bin, expected sha256 and bytes"):
        manifest.read(folder)


@pytest.mark.parametrize("field", ["files", "target", "data", "commit", "versions", "argv", "extra", "created"])
def test_a_missing_field_is_refused(folder, field):
    edit(folder, lambda content: content.pop(field))
    with pytest.raises(UserError, match=f"found {field}="):
        manifest.read(folder)


def test_no_manifest_and_no_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json: not found"):
        manifest.read(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="found a file, expected a folder"):
        manifest.read(tmp_path / "file")


def test_a_subfolder_with_a_manifest_answers_for_itself(folder):
    inner = folder / "step-3"
    inner.mkdir()
    (inner / "weights.bin").write_bytes(b"x")
    manifest.write(inner, kind="checkpoint", target=TARGET)
    (folder / "latest").symlink_to("step-3")
    manifest.verify(folder)
    (inner / "weights.bin").write_bytes(b"y")
    manifest.verify(folder)
    with pytest.raises(UserError, match=r"step-3/weights\.bin"):
        manifest.verify(inner)


def test_leftovers_of_a_killed_write_and_of_the_finder_do_not_count(folder):
    (folder / ".weights.bin.0a1b.partial").write_bytes(b"half")
    (folder / ".DS_Store").write_bytes(b"finder")
    manifest.verify(folder)


# Atomic writes.


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_an_atomic_write_replaces_the_file_whole(tmp_path, mode):
    path = tmp_path / "file"
    path.write_text("old")
    with manifest.atomic(path, mode) as stream:
        stream.write("né" if mode == "w" else "né".encode())
        assert path.read_text() == "old"
    assert path.read_text(encoding="utf-8") == "né"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(failure), manifest.atomic(path) as stream:
        stream.write(b"new")
        raise failure
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_refuses_to_sync_is_named_with_the_file(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"file\.json") as caught:
        manifest.write_json(tmp_path / "file.json", {"a": 1})
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(OSError, match=r"big\.bin") as caught, manifest.atomic(disk / "big.bin") as stream:
            stream.write(b"x" * (1 << 20))
        assert caught.value.errno == errno.ENOSPC
        assert list(disk.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        manifest.write_json(tmp_path / "none" / "file.json", {})
    assert caught.value.filename == str(tmp_path / "none" / "file.json")


def test_json_that_is_no_json_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest.write_json(tmp_path / "file.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


# Provenance.


def test_the_source_digest_follows_the_python_sources_alone(tmp_path):
    for room in ("kernels", "drafter", "decode/lab", "scripts"):
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room / "a.py").write_text(f"room = {room!r}\n")
    first = manifest.source_digest(tmp_path)
    (tmp_path / "drafter" / "notes.md").write_text("not code")
    (tmp_path / "other.py").write_text("not in a room")
    assert manifest.source_digest(tmp_path) == first
    (tmp_path / "decode/lab/a.py").rename(tmp_path / "decode/lab/b.py")
    renamed = manifest.source_digest(tmp_path)
    (tmp_path / "decode/lab/b.py").write_text("room = 'changed'\n")
    assert len({first, renamed, manifest.source_digest(tmp_path)}) == 3


def test_the_commit_is_git_s_and_dirty_means_a_tracked_change(tmp_path):
    def run(*words):
        command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run("init", "-q")
    (tmp_path / "a.py").write_text("a = 1\n")
    run("add", "a.py")
    run("commit", "-qm", "first")
    head = run("rev-parse", "HEAD").strip()
    (tmp_path / "untracked").write_text("x")
    assert manifest.git_state(tmp_path) == (head, False)
    (tmp_path / "a.py").write_text("a = 2\n")
    assert manifest.git_state(tmp_path) == (head, True)


def test_outside_a_checkout_the_commit_is_the_variable_s(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_COMMIT", "abc123")
    assert manifest.git_state(tmp_path) == ("abc123", None)
    monkeypatch.delenv("FOREDRAFT_COMMIT")
    assert manifest.git_state(tmp_path) == (None, None)


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer_sha256", "template_sha256"])
def test_another_target_is_refused_naming_both_digests(folder, field):
    record = manifest.read(folder)
    manifest.match_target(record, TARGET | {"source": "elsewhere", "dtype": "bfloat16"}, remedy="train again")
    with pytest.raises(UserError, match=rf"{field} {TARGET[field]} .*is other .*train again"):
        manifest.match_target(record, TARGET | {field: "other"}, remedy="train again")


def test_a_device_is_never_replaced_by_a_file(tmp_path):
    device = tmp_path / "null"
    os.mkfifo(device)
    with pytest.raises(UserError, match=f"{device}: not a regular file"):
        manifest.write_json(device, {})
    assert stat.S_ISFIFO(device.stat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    manifest.write_json(tmp_path / "link.json", {"new": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"new": 1}
