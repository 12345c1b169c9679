"""Drafters on disk: atomic save, exact resume, verified load.

A run folder holds config.yaml, metrics.jsonl, manifest.json and its steps; `latest` and `best` are links to steps:

    step-N/config.json, model.safetensors   the drafter, in the released DFlash layout
    step-N/training/                        optimizer and master weights, and state.json: what resuming needs
    step-N/manifest.json                    digests and the target it was trained for
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from drafter import dflash, fingerprint, heads, manifest
from kernels.errors import UserError

WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A drafter ready to draft, and what a result records of it."""

    drafter: nn.Module
    folder: pathlib.Path
    sha256: str
    kind: str
    mismatch: dict | None  # {"trained_for", "used_with"} fingerprints, where the target is another one


def save_drafter(folder, drafter):
    """Write config.json and model.safetensors in the released layout into `folder`."""
    save_arrays(folder / WEIGHTS, dict(tree_flatten(drafter.parameters())))
    manifest.write_json(folder / "config.json", drafter.config.to_json())


def save_quantised(source, folder, bits, group_size=64):
    """Write the drafter of checkpoint folder `source` into `folder`, its matrices affine-quantised to `bits`."""
    config = manifest.read_json(source / "config.json")
    weights = read_weights(source, config.get("quantization"))
    weights = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    save_arrays(folder / WEIGHTS, quantised(weights, bits, group_size))
    manifest.write_json(folder / "config.json", config | {"quantization": {"bits": bits, "group_size": group_size}})


def save_arrays(path, arrays):
    """Write {name: array} as safetensors, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with manifest.atomic(path) as stream:
        mx.save_safetensors(stream, arrays, metadata={"format": "mlx"})


def quantised(weights, bits, group_size):
    """{name: array} with every matrix replaced by its packed weight, scales and biases."""
    packed = {}
    for name, value in weights.items():
        if value.ndim < 2:
            packed[name] = value
            continue
        if value.shape[-1] % group_size:
            raise UserError(
                f"{name} has rows of {value.shape[-1]}, not a multiple of {group_size}: it cannot be quantised"
            )
        stem = name.removesuffix(".weight")
        packed[name], packed[f"{stem}.scales"], packed[f"{stem}.biases"] = mx.quantize(value, group_size, bits)
    return packed


def expanded(weights, bits, group_size):
    """The inverse of `quantised`, up to rounding."""
    dense = {name: value for name, value in weights.items() if not name.endswith((".scales", ".biases"))}
    for name, value in dense.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in weights:
            parts = (weights[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            dense[name] = mx.dequantize(value, *parts, group_size=group_size, bits=bits)
    return dense


def save_step(run, step, drafter, arrays, state, **record):
    """Write runs/NAME/RUN/step-N whole, then point `latest` at it; returns the folder.

    arrays: `Trainer.state()`; state: a small dict that comes back on resume; record: what `manifest.write` takes.
    """
    folder, partial = run / f"step-{step}", run / f".step-{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "training").mkdir(parents=True)
    try:
        save_drafter(partial, drafter)
        save_arrays(partial / "training" / "state.safetensors", arrays)
        manifest.write_json(partial / "training" / "state.json", state | {"step": step})
        manifest.write(partial, kind="checkpoint", **record)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    point(run, "latest", step)
    return folder


def point(run, name, step):
    """Make the link `name` point at step-N, atomically."""
    fresh = run / f".{name}.partial"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(f"step-{step}")
    os.replace(fresh, run / name)


def prune(run, keep):
    """Remove all but the newest `keep` steps and the one that `best` points at."""
    best = os.readlink(run / "best") if (run / "best").is_symlink() else None
    for step in steps_of(run)[:-keep]:
        if f"step-{step}" != best:
            shutil.rmtree(run / f"step-{step}")


def steps_of(run):
    """The numbers of the steps a run folder holds, ascending."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in run.iterdir())
    return sorted(int(match[1]) for match in found if match)


def newest_whole(run):
    """The newest step folder of a run whose manifest verifies, or None."""
    for step in reversed(steps_of(run) if run.is_dir() else []):
        try:
            manifest.verify(run / f"step-{step}")
            return run / f"step-{step}"
        except UserError:
            continue
    return None


def load_training(folder):
    """(arrays, state) of a step folder, as `save_step` was given them."""
    state = json.loads((folder / "training" / "state.json").read_text())
    return mx.load(str(folder / "training" / "state.safetensors")), state


def resolve(path):
    """The checkpoint folder that a person means.

    path: a checkpoint folder or a .safetensors file in one; a run folder, of which the best step is meant; or a folder
    of runs, of which the newest is. Raises UserError.
    """
    path = pathlib.Path(path).expanduser()
    if path.suffix == ".safetensors" and path.is_file():
        path = path.parent
    if not path.exists():
        raise UserError(f"drafter {path}: not found; expected a checkpoint folder, a run folder or a .safetensors file")
    runs = sorted(config.parent for config in path.glob("*/config.yaml")) if path.is_dir() else []
    places = [place for run in [path, *reversed(runs)] for place in (run / "best", run / "latest")]
    for folder in (path, *places):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder.resolve() if folder is not path else folder
    raise UserError(f"drafter {path}: holds no config.json with weights, and no best or latest step; name a checkpoint")


def load_drafter(path, target, *, allow_mismatch=False):
    """Load and verify a drafter for `target`; returns Loaded.

    Refuses, by name, a changed or missing file, weights that do not fit the configuration, and a target or tokenizer it
    was not trained for. allow_mismatch: use it all the same (recorded), also where it came without a manifest.
    """
    folder = resolve(path)
    mismatch = check_target(folder, target, allow_mismatch)
    config_json = manifest.read_json(folder / "config.json")
    drafter = build(folder, config_json, target)
    weights = read_weights(folder, config_json.get("quantization"))
    check_weights(folder, dict(tree_flatten(drafter.parameters())), weights)
    drafter.load_weights([(name, value.astype(getattr(mx, target.dtype))) for name, value in weights.items()])
    drafter.eval()
    mx.eval(drafter.parameters())
    return Loaded(drafter, folder, manifest.sha256_file(weight_files(folder)[0]), "dflash", mismatch)


def copy_weights(loaded, drafter):
    """Start `drafter` from a loaded one's weights; refuses shapes that differ, naming them. For warm starts.

    Heads that only `drafter` has keep their first weights: a drafter without any can be given them.
    """
    weights, own = (dict(tree_flatten(one.parameters())) for one in (loaded.drafter, drafter))
    expected = {name: value for name, value in own.items() if name in weights or not name.startswith(heads.NAMES)}
    check_weights(loaded.folder, expected, weights)
    drafter.load_weights(list(weights.items()), strict=False)


def check_target(folder, target, allow_mismatch):
    """Verify the folder's manifest and compare its target; returns Loaded's `mismatch`. Raises UserError."""
    if not (folder / manifest.NAME).is_file():
        if allow_mismatch:
            return {"trained_for": None, "used_with": target.fingerprint}
        raise UserError(
            f"drafter {folder}: no {manifest.NAME}, so neither its files nor its target can be checked; "
            "pass --allow-target-mismatch to use it all the same"
        )
    record = manifest.verify(folder)
    if not allow_mismatch:
        remedy = "train one for it, or pass --allow-target-mismatch"
        manifest.match_target(record, target.identity(), remedy=remedy)
    trained = record.target.get("fingerprint")
    return None if trained == target.fingerprint else {"trained_for": trained, "used_with": target.fingerprint}


def build(folder, config_json, target):
    """A drafter of the checkpoint's shape, its weights not loaded yet. Raises UserError for one that cannot be."""
    try:
        return dflash.DFlash(read_config(config_json, folder, target))
    except UserError:
        raise
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder}/config.json: not a DFlash drafter's ({type(error).__name__} {reason}); restore or mend it"
        ) from error


def read_config(config_json, folder, target):
    """The DFlashConfig of a checkpoint, checked against the target's shape."""
    config = dflash.DFlashConfig.from_json(config_json)
    pairs = [
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ]
    for name, found, expected in pairs:
        if found != expected:
            raise UserError(f"{folder}/config.json: {name} is {found}, but target {target.source} has {expected}")
    return config


def weight_files(folder):
    """The safetensors of a checkpoint folder, sorted."""
    return sorted(folder.glob("*.safetensors"))


def read_weights(folder, quantization):
    """{name: array} of a checkpoint, expanded where it is quantised. Raises UserError for a damaged file."""
    weights = {}
    for file in weight_files(folder):
        fingerprint.header(file)
        weights |= mx.load(str(file))
    if not quantization:
        return weights
    try:
        return expanded(weights, **quantization)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{folder}/config.json: quantization {quantization} does not fit its weights ({error})"
        ) from error


def check_weights(folder, expected, found):
    """Refuse weights whose names or shapes are not the configuration's, listing the first differences."""
    lines = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    lines += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    lines += [
        f"{name} is {found[name].shape}, not {expected[name].shape}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise UserError(f"drafter {folder}: weights do not fit its config.json: {'; '.join(lines[:3])}{more}")
