"""The traps that others fell into: names, wheels, commands and model registries that clash or do not match.

Each check is one function that returns a Finding; scripts/doctor.py runs and prints them.
"""

import collections
import dataclasses
import importlib.metadata
import importlib.util
import json
import pathlib

import edge
from kernels import backend
from kernels.errors import UserError

ROOMS = ("drafter", "decode", "kernels")

# First mlx-lm release that carries each architecture: read from the file lists of its wheels on PyPI, 0.18.1 to 0.32.2.
KNOWN_SINCE = {
    "gemma3": "0.22.1",
    "gemma3_text": "0.22.0",
    "gemma3n": "0.25.3",
    "gemma4": "0.31.2",
    "glm4": "0.23.0",
    "glm4_moe": "0.26.2",
    "gpt_oss": "0.26.3",
    "lfm2": "0.26.1",
    "nemotron_h": "0.27.1",
    "olmo3": "0.28.2",
    "qwen3": "0.24.0",
    "qwen3_5": "0.30.7",
    "qwen3_5_moe": "0.30.7",
    "qwen3_moe": "0.24.0",
    "qwen3_next": "0.28.0",
    "smollm3": "0.26.0",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: level "ok", "warn" or "bad", what was found, and the next step unless all is well."""

    level: str
    text: str
    remedy: str = ""


def check_wheels():
    """One MLX backend wheel, of the front's version: they overwrite each other's libmlx."""
    front, wheels = backend.version_of("mlx"), backend.installed_wheels()
    if front is None:
        return Finding("bad", "mlx is not installed", "pip install -e . in this environment")
    if not wheels:
        return Finding("bad", f"mlx {front} without a backend wheel", f"pip install 'mlx[cpu]=={front}'")
    if len(wheels) > 1:
        other = [name for name in wheels if name != backend.serving_wheel()]
        remedy = f"pip uninstall -y THE-OTHER, then pip install --force-reinstall --no-deps THE-ONE=={front}"
        text = f"{', '.join(wheels)} are all installed, and {backend.serving_wheel()} lies over {', '.join(other)}"
        return Finding("bad", text, remedy)
    if backend.version_of(wheels[0]) != front:
        text = f"mlx is {front} and its backend {wheels[0]} is {backend.version_of(wheels[0])}"
        return Finding("bad", text, f"pip install --force-reinstall --no-deps {wheels[0]}=={front}")
    return Finding("ok", f"mlx and {wheels[0]} are both {front}")


def check_names():
    """Whether `drafter`, `decode` and `kernels` are this checkout's, and nobody else's who would miss them."""
    elsewhere = {name: where for name in ROOMS if edge.ROOT not in (where := origin(name)).parents}
    if elsewhere:
        text = "; ".join(f"`{name}` is imported from {where}" for name, where in elsewhere.items())
        return Finding("bad", f"{text}, not from {edge.ROOT}", "uninstall that package, or mend PYTHONPATH")
    owners = importlib.metadata.packages_distributions()
    others = {name: sorted(set(owners.get(name, ())) - {"foredraft"}) for name in ROOMS}
    clashes = "; ".join(f"`{name}` also belongs to {', '.join(them)}" for name, them in others.items() if them)
    if clashes:
        return Finding("bad", f"{clashes}; whoever imports it here gets ours", "pip uninstall it from this environment")
    return Finding("ok", "drafter, decode and kernels are this checkout's, and no other distribution's")


def origin(name):
    """Where an import of `name` would come from."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return pathlib.Path("nowhere")
    return pathlib.Path(spec.origin or next(iter(spec.submodule_search_locations))).resolve()


def check_transformers():
    """Transformers probes for another project's package called `kernels`: it must not take ours for that."""
    try:
        from transformers.utils.import_utils import is_kernels_available
    except ImportError as error:
        return Finding("bad", f"transformers cannot be imported: {error}", "pip install -e . in this environment")
    if is_kernels_available():
        remedy = "pip uninstall kernels; foredraft's own version stays below 0.18"
        return Finding("bad", "transformers takes this checkout's `kernels` for the hub's package", remedy)
    return Finding("ok", "transformers does not mistake our `kernels` for the hub's package")


def check_commands():
    """Console commands that two installed distributions both offer: the last one installed wins, silently."""
    owners = collections.defaultdict(set)
    for distribution in importlib.metadata.distributions():
        for entry in distribution.entry_points.select(group="console_scripts"):
            owners[entry.name].add(distribution.name.lower().replace("_", "-"))
    double = [f"`{name}` from {' and '.join(sorted(them))}" for name, them in sorted(owners.items()) if len(them) > 1]
    if double:
        return Finding("warn", f"offered twice: {'; '.join(double)}", "uninstall one, or run `python -m` by module")
    return Finding("ok", f"{len(owners)} console commands, each from one distribution")


def check_target(target):
    """Whether the installed mlx-lm has the architecture that this target's config.json names."""
    from mlx_lm import utils

    config = target_config(target)
    kind = config.get("model_type")
    if kind is None:
        return Finding("bad", f"{target}: config.json names no model_type", "copy the model's own config.json there")
    module = utils.MODEL_REMAPPING.get(kind, kind)
    installed = backend.version_of("mlx-lm")
    if importlib.util.find_spec(f"mlx_lm.models.{module}"):
        return Finding("ok", f"{target}: mlx-lm {installed} knows its architecture {kind}")
    since = f"at least {KNOWN_SINCE[kind]}" if kind in KNOWN_SINCE else f"newer than {installed}, if any knows it"
    return Finding("bad", f"{target}: mlx-lm {installed} does not know {kind!r}", f"pip install -U mlx-lm: {since}")


def target_config(target):
    """The configuration of a target, fetching of a hub id no more than that one file. Raises UserError."""
    from drafter import sources

    folder = pathlib.Path(target).expanduser()
    if sources.HUB_ID.fullmatch(target) and not folder.exists():
        file = hub_config(*target.partition("@")[::2])
    elif folder.is_dir():
        file = folder / "config.json"
    else:
        file = sources.locate(target, dtype="float32").folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder}: no config.json; expected a model folder as mlx-lm or the hub lays it out") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error}); copy it again from where the model came from") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: a {type(config).__name__}; expected an object with model_type in it; copy it again")
    return config


def hub_config(name, revision):
    """The path of a hub model's config.json in the local cache, fetched if need be. Raises UserError."""
    from huggingface_hub import hf_hub_download

    try:
        return pathlib.Path(hf_hub_download(name, "config.json", revision=revision or None))
    except (OSError, ValueError) as error:  # the hub's errors are all one or the other
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"target {name}: no folder here, and the hub gave no config.json ({reason}); check name and network"
        raise UserError(text) from None
