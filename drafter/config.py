"""Typed configuration behind configs/: the only home of a default.

`compose` merges configs/ (Hydra groups target, drafter, data, loss, optimizer, trainer, tracking, experiment) with
overrides as typed on a command line, and checks every key and type against the dataclasses here: `Config` for a
drafter, `PretrainConfig` for a small target from scratch, which an experiment asks for with `kind: pretrain`.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import pathlib

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from drafter import limits
from kernels.errors import UserError

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"


@dataclasses.dataclass
class TargetConfig:
    """The frozen model: a shipped name, a folder, a .gguf file, a `pypi:` source or a hub id with @revision."""

    source: str = MISSING
    revision: str | None = None
    dtype: str | None = None  # float32 | bfloat16 | float16; None: float32 on CPU, bfloat16 elsewhere


@dataclasses.dataclass
class DrafterConfig:
    """Which kind of drafter, its block size, and a full drafter's shape; None means as the target is."""

    kind: str = "dflash"  # dflash | gated_lora, whose other options are under `adapter`
    num_hidden_layers: int = 5
    block_size: int = 16
    num_taps: int | None = None  # None: as many as layers
    target_layer_ids: list[int] | None = None  # None: spread evenly
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    mask_token_id: int | None = None  # None: a spare id of the tokenizer, chosen and recorded
    layer_types: list[str] | None = None  # full_attention | sliding_attention, one a layer
    sliding_window: int = 2048
    is_causal: bool | None = None  # None: sliding layers are causal inside the block, full ones are not
    markov_rank: int | None = None  # of a bias from the token before (DSpark: 256); None: none
    confidence_head: bool = False  # predict which proposals will be accepted


@dataclasses.dataclass
class AdapterConfig:
    """A gated LoRA and how it is trained; its block size is `drafter.block_size`."""

    rank: int = 16
    alpha: float | None = None  # None: 16 times the rank
    targets: list[str] = dataclasses.field(default_factory=lambda: ["attention", "mlp"])  # and delta, delta_gates
    noise: str = "random"  # random | mask: what a noise row holds
    causal: bool = True  # false: noise rows see their whole block, on pure-attention targets
    corruption: str = "all"  # all | rate (each block draws how many rows are noise) | none (next-token prediction)
    layout: str = "prefix"  # prefix: many blocks share one reading of a row | suffix: one block ends each row
    curriculum: list[int] | None = None  # block sizes up to drafter.block_size, an equal share of the steps each
    shuffled: bool = False  # judge each noise row by another's labels: a control


@dataclasses.dataclass
class DataConfig:
    """What is trained on; `kind`: synthesis (answers the target wrote), text (plain files) or dataset (a name)."""

    kind: str = "synthesis"
    sources: list[str] = dataclasses.field(default_factory=list)
    split: str = "train"  # of a dataset
    column: str = "text"  # of a dataset
    row_tokens: int = 512
    validation_fraction: float = 0.05
    max_documents: int | None = None
    allow_target_mismatch: bool = False


@dataclasses.dataclass
class FeaturesConfig:
    """Where the target's features of the training rows come from.

    online: computed in every step. cached: read from a store of all rows, which is filled first. hybrid: rows that are
    in the store are read, the others computed; the store is filled to max_gib first, and left as it is without that.
    """

    mode: str = "online"
    folder: str | None = None  # the store's; None: `features` beside the run, for all runs of that name
    max_gib: float | None = None  # hybrid: what the store may take


@dataclasses.dataclass
class LossConfig:
    """The loss of each supervised slot and the weights of the slots, by their names in drafter/losses.py."""

    name: str = "cross_entropy"
    weights: str = "exponential"
    gamma: float | None = None  # decay length of exponential weights; None: the paper's for the block size
    dpace_alpha: float = 0.5  # smoothing of dpace weights; the paper found 0.3 to 0.7 alike
    rows_per_chunk: int = 1024  # block rows scored at a time; bounds memory at rows × vocabulary


@dataclasses.dataclass
class OptimizerConfig:
    """AdamW with warm-up and cosine decay to zero (DFlash, appendix A.1), or a constant rate after the warm-up."""

    learning_rate: float = 6e-4
    schedule: str = "cosine"  # cosine | constant
    warmup_fraction: float = 0.04
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0


@dataclasses.dataclass
class TrainerConfig:
    """The loop: how long, how much at a time, and how often it looks and saves."""

    steps: int = 1000
    rows_per_step: int = 8
    anchors_per_row: int = 64  # blocks, shared out evenly over the documents of a packed row
    seed: int = 0
    validate_every: int = 200
    validation_rows: int = 16
    walk_documents: int = 16  # held-out documents on which walked tau is measured
    walk_tokens: int = 128  # answer tokens of each that are walked: the cap stated with that tau
    save_every: int = 500
    keep: int = 2  # steps kept besides the best


@dataclasses.dataclass
class TrackingConfig:
    """Weights & Biases, when asked for; offline unless WANDB_API_KEY is set. JSONL metrics are always written."""

    wandb: bool = False
    project: str = "foredraft"


@dataclasses.dataclass
class Config:
    """One training run, whole."""

    name: str = MISSING
    run: str | None = None  # the run's folder under runs/NAME; None: its date and time
    out: str = "runs"
    resume: str = "never"  # never | auto: continue the run's newest whole step
    init_from: str | None = None  # warm start from this drafter's weights
    target: TargetConfig = dataclasses.field(default_factory=TargetConfig)
    drafter: DrafterConfig = dataclasses.field(default_factory=DrafterConfig)
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    features: FeaturesConfig = dataclasses.field(default_factory=FeaturesConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)


@dataclasses.dataclass
class ModelConfig:
    """The shape of a small target of the Qwen3.5 architecture, under the names of its config.json."""

    hidden_size: int = 192
    intermediate_size: int = 368
    num_hidden_layers: int = 8
    full_attention_interval: int = 4  # every 4th layer attends, the others are gated-delta layers
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 48
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    vocab_size: int = 3072
    max_position_embeddings: int = 4096


@dataclasses.dataclass
class TextConfig:
    """What a target is pretrained on: Python's standard library, and files or folders besides."""

    sources: list[str] = dataclasses.field(default_factory=list)  # UTF-8 files, or folders of .py files
    row_tokens: int = 512
    max_files: int | None = None  # use that many files of each side of the split, drawn by hash


@dataclasses.dataclass
class PretrainTrainerConfig:
    """The loop: it ends after `steps` or `minutes`, whichever comes first, and the schedule ends with it."""

    steps: int = 4000
    minutes: float | None = None  # of training; None: no limit
    rows_per_step: int = 32
    dropout: float = 0.1  # of what each branch adds to the residual stream: the text is read many times
    seed: int = 0
    validate_every: int = 200
    validation_rows: int = 64
    save_minutes: float = 1.0  # a step is saved at least that often
    keep: int = 2  # steps kept besides the best
    samples: int = 40  # continuations written for the report
    sample_tokens: int = 128


@dataclasses.dataclass
class PretrainConfig:
    """The training of a small target from scratch, whole."""

    name: str = MISSING
    kind: str = "pretrain"
    run: str | None = None  # the run's folder under runs/NAME; None: its date and time
    out: str = "runs"
    resume: str = "never"  # never | auto: continue the run's newest whole step
    report_minutes: float | None = None  # for the report at the end; what does not fit is left out. None: no limit
    dtype: str | None = None  # float32 | bfloat16 | float16; None: float32 on CPU, bfloat16 elsewhere
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    trainer: PretrainTrainerConfig = dataclasses.field(default_factory=PretrainTrainerConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)


SCHEMAS = {"config": Config, "pretrain": PretrainConfig}  # by the primary file in configs/
NOT_TRAINING = ("run", "out", "resume", "report_minutes", "tracking")  # keys that leave the trained weights as they are


def compose(overrides):
    """The Config or PretrainConfig of command-line overrides such as ["+experiment=quickstart", "trainer.steps=50"].

    Raises UserError for an unknown experiment, group, key or a value of the wrong type, naming the nearest.
    """
    primary = primary_file(overrides)
    schema = SCHEMAS[primary]
    for override in overrides:
        check_override(override, schema)
    ConfigStore.instance().store(f"{primary}_schema", schema)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra_compose(primary, overrides)
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise UserError(f"configuration lacks {', '.join(missing)}; add it, for example {missing[0]}=VALUE")
        config = OmegaConf.to_object(composed)
    except (OmegaConfBaseException, HydraException) as error:
        raise UserError(explained(error, schema)) from error
    check(config)
    return config


def primary_file(overrides):
    """Which of SCHEMAS the overrides mean: `pretrain` where their experiment's file says so, else `config`."""
    named = [override.partition("=")[2] for override in overrides if override.startswith("+experiment=")]
    files = [CONFIGS / "experiment" / f"{name}.yaml" for name in named]
    kinds = {OmegaConf.load(file).get("kind", "config") for file in files if file.is_file()}
    return "pretrain" if "pretrain" in kinds else "config"


def explained(error, schema):
    """One line for what Hydra or OmegaConf refused: the unknown key, or the first error under theirs that has a key."""
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    keyed = next((one for one in chain if getattr(one, "full_key", None)), error)
    key = getattr(keyed, "full_key", None) or getattr(keyed, "override", None)
    if isinstance(keyed, (ConfigAttributeError, ConfigKeyError)):
        return unknown_key(key, schema)
    reason = " ".join(line.strip() for line in str(keyed).splitlines() if not line.startswith("    "))
    return f"configuration: {f'{key}: ' if key else ''}{reason}"


def check_override(override, schema):
    """Refuse an override that is not KEY=VALUE, names an unknown experiment, or an unknown key."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r}: expected KEY=VALUE, such as trainer.steps=100 or +experiment=quickstart")
    if key == "experiment":
        raise UserError(f"{override!r}: an experiment is added, not changed; write +{override}")
    key = key.lstrip("+")
    if key == "experiment":
        choices = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
        if value not in choices:
            raise UserError(f"experiment {value!r} does not exist; {nearest(value, choices)}expected one of {choices}")
    elif "@" not in key and not (CONFIGS / key).is_dir() and key not in known_keys(schema):
        raise UserError(unknown_key(key, schema))


@functools.cache
def known_keys(schema):
    """Every dotted key of a schema."""
    structured = OmegaConf.structured(schema)
    groups = {f.name for f in dataclasses.fields(schema) if OmegaConf.is_dict(OmegaConf.select(structured, f.name))}
    inner = {f"{group}.{key}" for group in groups for key in structured[group]}
    return inner | {f.name for f in dataclasses.fields(schema)} - groups


def unknown_key(key, schema):
    """The line for a key that a schema does not have."""
    near = nearest(key, known_keys(schema))
    return f"unknown configuration key {key!r}; {near}known keys are those of drafter/config.py"


def nearest(found, known):
    """`did you mean …? ` for the nearest known name, or nothing."""
    tails = {name.rsplit(".", 1)[-1]: name for name in sorted(known, reverse=True)}
    near = difflib.get_close_matches(found, sorted(known), 1) or [
        tails[tail] for tail in difflib.get_close_matches(found.rsplit(".", 1)[-1], sorted(tails), 1)
    ]
    return f"did you mean {near[0]!r}? " if near else ""


def check(config):
    """Refuse values that no run could use, naming key, value and what is expected."""
    own = limits.pretraining if isinstance(config, PretrainConfig) else limits.drafting
    for key, holds, expected in limits.shared(config) + own(config):
        if not holds:
            raise UserError(f"{key} is {OmegaConf.select(OmegaConf.structured(config), key)!r}; expected {expected}")


def resolved(config):
    """The configuration as plain nested dicts."""
    return dataclasses.asdict(config)


def digest(config):
    """SHA-256 over what decides the trained weights: all but where, whether resumed, and tracking."""
    kept = {key: value for key, value in resolved(config).items() if key not in NOT_TRAINING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
