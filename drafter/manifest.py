"""Digests, provenance and atomic writes: what lets a folder of results answer for itself.

Every folder that a command writes to keep holds one `manifest.json`:

    {"schema": "foredraft.manifest/1",
     "kind":          what the folder is: "checkpoint", "run", "synthesis", "release", …
     "files":         {name relative to the folder: {"sha256", "bytes"}}, every file but this one and SHA256SUMS
     "target":        {"source", "fingerprint", "tokenizer_sha256", "template_sha256", "dtype"}
     "config_digest": SHA-256 of the resolved configuration, or null
     "data":          [{"name", "sha256"}], what the content was made from
     "extra":         figures of the kind, such as a synthesis run's counts
     "commit", "dirty", "source_digest", "versions", "device", "blas", "argv", "created":  see `provenance`}

A subfolder with a manifest of its own answers for itself and is not listed by the folder above it.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import secrets
import subprocess

from kernels import backend
from kernels.errors import UserError

SCHEMA = "foredraft.manifest/1"
NAME = "manifest.json"
SUMS = "SHA256SUMS"  # derived from the manifest's folder, this file included, so the manifest cannot list it
PARTIAL = ".partial"
UNLISTED = {NAME, SUMS, ".DS_Store"}

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "drafter", "decode", "scripts")
ABSOLUTE = re.compile(r"(?<![^\s=,\[('\"])/[^\s,\])'\"]+")  # a path from the root: alone, in a list, or after =
PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "transformers", "numpy", "datasets")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One manifest.json as read; `folder` is where it lies, the other fields are the schema's."""

    folder: pathlib.Path
    kind: str
    files: dict
    target: dict
    config_digest: str | None
    data: list
    extra: dict
    commit: str | None
    dirty: bool | None
    source_digest: str
    versions: dict
    device: object
    blas: object
    argv: list
    created: str

    @property
    def bytes(self):
        """The size of the listed files together."""
        return sum(entry["bytes"] for entry in self.files.values())


def sha256_file(path):
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic(path, mode="wb"):
    """Write a whole file or none: yields a stream on a temporary file beside `path`, then fsyncs and renames it.

    mode: "wb" or "w" (UTF-8). Raises UserError where `path` is a folder or a device. On any failure the temporary file
    is removed and `path` is as it was; an OSError names `path`, since writing to an open stream names no file (a full
    disk, for one).
    """
    path = pathlib.Path(path)
    if path.is_symlink():
        path = path.resolve()  # what the link names is written, and the link stays one
    refuse_special(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename, error.filename2 = str(path), None
        raise


def refuse_special(path):
    """Raise UserError where `path` is no place for a file: renaming onto /dev/null, say, would replace the device."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; name a new file, or one that may be overwritten")


def sync_folder(folder):
    """Make a rename inside `folder` survive a power cut, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path, value):
    """Write `value` as JSON, whole or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    with atomic(path, "w") as stream:
        stream.write(text + "\n")


def read_json(path):
    """The decoded JSON object of a file; UserError where it is damaged."""
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); restore the file or write the folder again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: found {type(value).__name__}, expected a JSON object; restore the file")
    return value


def provenance(argv):
    """What produced a file: {commit, dirty, source_digest, versions, device, blas, argv, created}.

    argv: the command's arguments as they were typed, but for this machine's folders (`unplaced`). Commit and dirty come
    from git; outside a checkout the commit is the variable FOREDRAFT_COMMIT's, and dirty is None (unknown).
    `source_digest` names the code either way.
    """
    commit, dirty = git_state()
    machine = backend.describe()
    return {
        "commit": commit,
        "dirty": dirty,
        "source_digest": source_digest(),
        "versions": versions(),
        "device": {key: machine.get(key) for key in ("device", "device_name", "reason", "tf32")},
        "blas": {key: machine["blas"][key] for key in ("name", "reason")},  # its path is this machine's own affair
        "argv": unplaced([str(word) for word in argv]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def unplaced(value):
    """Text, or a tree of it in lists and dicts, without this machine's folders; whatever else is there stays as it is.

    Of an absolute path, wherever in a text it stands, what is within the checkout or the home folder is told from
    there, and of any other only the last name.
    """
    if isinstance(value, dict):
        return {key: unplaced(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [unplaced(each) for each in value]
    return ABSOLUTE.sub(lambda found: told(pathlib.PurePath(found[0])), value) if isinstance(value, str) else value


def told(path):
    """An absolute path as it may be published."""
    for place, mark in ((ROOT, ""), (pathlib.Path.home(), "~/")):
        if path.is_relative_to(place):
            return f"{mark}{path.relative_to(place)}"
    return f"…/{path.name}"


def git_state(root=ROOT):
    """(commit, dirty) of the checkout at `root`; (FOREDRAFT_COMMIT or None, None) where `root` is no checkout."""
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = git(root, "rev-parse", "HEAD").strip()
            return commit, bool(git(root, "status", "--porcelain", "--untracked-files=no").strip())
    return os.environ.get("FOREDRAFT_COMMIT") or None, None


def git(root, *words):
    """The standard output of one git command in `root`."""
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def source_digest(root=ROOT):
    """The SHA-256 over (path, bytes) of every Python source of the rooms, in path order; needs no git."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def versions():
    """The versions of Python and of the installed packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def listing(folder):
    """The names that a manifest of `folder` answers for: its files, and those of subfolders without a manifest."""
    names = []
    for path in sorted(pathlib.Path(folder).iterdir()):
        if path.is_dir():
            if not path.is_symlink() and not (path / NAME).exists():
                names += [f"{path.name}/{name}" for name in listing(path)]
        elif path.name not in UNLISTED and not path.name.endswith(PARTIAL):
            names.append(path.name)
    return names


def write(folder, *, kind, target, data=(), config_digest=None, argv=(), extra=None, known=None):
    """Write the manifest of everything now in `folder` and return its path; fields as in the module's docstring.

    known: {name: entry} of files that need no reading again.
    """
    folder, known = pathlib.Path(folder), known or {}
    files = {name: known.get(name) or describe_file(folder / name) for name in listing(folder)}
    content = {"schema": SCHEMA, "kind": kind, "files": files, "target": target, "config_digest": config_digest}
    write_json(folder / NAME, content | {"data": list(data), "extra": extra or {}} | provenance(argv))
    return folder / NAME


def describe_file(path):
    """A file's manifest entry."""
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def read(folder):
    """The Manifest of `folder`, its schema checked but no digest. Raises UserError where there is none to use."""
    path = pathlib.Path(folder) / NAME
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: not found; expected the manifest of a checkpoint or synthesis folder") from None
    except NotADirectoryError:
        raise UserError(f"{folder}: found a file, expected a folder with a {NAME}") from None
    fault = schema_fault(content)
    if fault:
        raise UserError(f"{path}: {fault}; restore the file or write the folder again")
    return Manifest(path.parent, **{field: content[field] for field in FIELDS})


FIELDS = {
    "kind": str,
    "files": dict,
    "target": dict,
    "config_digest": (str, type(None)),
    "data": list,
    "extra": dict,
    "commit": (str, type(None)),
    "dirty": (bool, type(None)),
    "source_digest": str,
    "versions": dict,
    "device": object,
    "blas": object,
    "argv": list,
    "created": str,
}


def schema_fault(content):
    """What is wrong with a decoded manifest, in words, or None."""
    if content.get("schema") != SCHEMA:
        return f"found schema {content.get('schema')!r}, expected {SCHEMA!r}"
    for field, kind in FIELDS.items():
        if field not in content or not isinstance(content[field], kind):
            return f"found {field}={str(content.get(field))[:60]}, expected the schema's type"
    if not all(isinstance(entry, dict) and {"name", "sha256"} <= entry.keys() for entry in content["data"]):
        return "found data without name and sha256, expected both in every entry"
    for name, entry in content["files"].items():
        if not inside(name):
            return f"found the file name {name!r}, expected one inside the folder"
        if not isinstance(entry, dict) or [type(entry.get(key)) for key in ("sha256", "bytes")] != [str, int]:
            return f"found {str(entry)[:60]} for {name}, expected sha256 and bytes"
    return None


def inside(name):
    """Whether a listed name is relative and stays inside its folder."""
    path = pathlib.PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def verify(folder):
    """Check every digest of `folder` and return its Manifest.

    Raises UserError naming the first file that is missing, changed or unexpected.
    """
    manifest = read(folder)
    for name, entry in manifest.files.items():
        check_file(manifest.folder / name, entry)
    for name in listing(manifest.folder):
        if name not in manifest.files:
            raise UserError(f"{manifest.folder / name}: unexpected file, not listed in {NAME}; remove it")
    return manifest


def check_file(path, entry):
    """Raise UserError unless the file is there with the listed size and digest."""
    if not path.is_file():
        raise UserError(f"{path}: missing file, listed in {NAME}; restore it or fetch the folder again")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(f"{path}: changed file: {size} bytes found, {entry['bytes']} expected; restore it")
    digest = sha256_file(path)
    if digest != entry["sha256"]:
        raise UserError(f"{path}: changed file: sha256 {digest} found, {entry['sha256']} expected; restore it")


def match_target(manifest, identity, *, remedy):
    """Raise UserError unless the manifest's target is `identity`: same weights, tokenizer and chat template.

    identity: `Target.identity()`; remedy: the next step to print. Source and dtype may differ.
    """
    for field in ("fingerprint", "tokenizer_sha256", "template_sha256"):
        made, given = manifest.target.get(field), identity.get(field)
        if made != given:
            raise UserError(
                f"{manifest.folder}: made with the target {field} {made} ({manifest.target.get('source')}), "
                f"but this target's is {given} ({identity.get('source')}); {remedy}"
            )
