"""Which values of a configuration a run can use: rules as (key, whether its value holds, what is expected)."""

import dataclasses
import math
import re

from omegaconf import OmegaConf

from drafter import losses

FOLDER = re.compile(r"[\w-][\w.-]*")  # what may name a folder under runs/
POSITIVE = (
    *(f"drafter.{name}" for name in ("num_taps", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
    *("drafter.head_dim", "drafter.rope_theta", "drafter.sliding_window", "drafter.markov_rank", "data.max_documents"),
)  # keys that are None or above 0


def shared(config):
    """The rules of what every run has."""
    optimizer, trainer = config.optimizer, config.trainer
    return [
        ("optimizer.learning_rate", 0 < optimizer.learning_rate < math.inf, "above 0, and finite"),
        ("optimizer.schedule", optimizer.schedule in ("cosine", "constant"), "cosine or constant"),
        ("optimizer.beta1", 0 <= optimizer.beta1 < 1, "from 0 to below 1"),
        ("optimizer.beta2", 0 <= optimizer.beta2 < 1, "from 0 to below 1"),
        ("optimizer.weight_decay", 0 <= optimizer.weight_decay < math.inf, "0 or above, and finite"),
        ("optimizer.warmup_fraction", 0 <= optimizer.warmup_fraction < 1, "from 0 to below 1"),
        ("optimizer.max_gradient_norm", optimizer.max_gradient_norm > 0, "above 0"),
        ("trainer.steps", trainer.steps >= 1, "at least 1"),
        ("trainer.rows_per_step", trainer.rows_per_step >= 1, "at least 1"),
        ("trainer.validate_every", trainer.validate_every >= 1, "at least 1"),
        ("trainer.validation_rows", trainer.validation_rows >= 1, "at least 1"),
        ("trainer.keep", trainer.keep >= 1, "at least 1"),
        ("resume", config.resume in ("never", "auto"), "never or auto"),
        ("name", FOLDER.fullmatch(config.name) is not None, "letters, digits, '.', '_' and '-', no '.' first"),
        ("run", FOLDER.fullmatch(config.run or "run") is not None, "letters, digits, '.', '_' and '-', no '.' first"),
    ]


def drafting(config):
    """The rules of a drafter's run."""
    data, loss, features = config.data, config.loss, config.features
    rules = [
        ("drafter.block_size", config.drafter.block_size >= 2, "at least 2: the anchor and one mask row"),
        ("drafter.kind", config.drafter.kind in ("dflash", "gated_lora"), "dflash or gated_lora"),
        ("drafter.num_hidden_layers", config.drafter.num_hidden_layers >= 1, "at least 1"),
        ("drafter.head_dim", (config.drafter.head_dim or 2) % 2 == 0, "even: positions rotate pairs"),
        ("data.kind", data.kind in ("synthesis", "text", "dataset"), "synthesis, text or dataset"),
        ("data.sources", len(data.sources) > 0, "at least one file or name"),
        ("data.row_tokens", data.row_tokens >= 2 * config.drafter.block_size, "at least two blocks"),
        ("data.validation_fraction", 0 < data.validation_fraction < 1, "between 0 and 1"),
        ("features.mode", features.mode in ("online", "cached", "hybrid"), "online, cached or hybrid"),
        ("features.max_gib", features.max_gib is None or features.max_gib > 0, "above 0"),
        (
            "features.max_gib",
            features.max_gib is None or features.mode == "hybrid",
            "none without features.mode=hybrid",
        ),
        ("loss.name", loss.name in losses.LOSSES, f"one of {', '.join(losses.LOSSES)}"),
        ("loss.weights", loss.weights in losses.WEIGHTS, f"one of {', '.join(losses.WEIGHTS)}"),
        ("loss.gamma", loss.gamma is None or loss.gamma > 0, "above 0"),
        ("loss.gamma", loss.gamma is None or loss.weights == "exponential", "null unless loss.weights is exponential"),
        ("loss.dpace_alpha", 0 <= loss.dpace_alpha <= 1, "from 0 to 1"),
        ("loss.rows_per_chunk", loss.rows_per_chunk >= 1, "at least 1"),
        ("trainer.anchors_per_row", config.trainer.anchors_per_row >= 1, "at least 1"),
        ("trainer.walk_documents", config.trainer.walk_documents >= 1, "at least 1"),
        ("trainer.walk_tokens", config.trainer.walk_tokens >= 2, "at least 2: the first is not walked"),
        ("trainer.save_every", config.trainer.save_every >= 1, "at least 1"),
    ]
    for key in POSITIVE:
        value = OmegaConf.select(OmegaConf.structured(config), key)
        rules.append((key, value is None or value > 0, "above 0"))
    return rules + adapting(config)


def adapting(config):
    """The rules of a gated LoRA's run."""
    adapter, B = config.adapter, config.drafter.block_size
    sizes, full = adapter.curriculum or [B], config.drafter.kind == "dflash"
    return [
        (
            "features.mode",
            full or config.features.mode == "online",
            "online for a gated LoRA: no store keeps its states",
        ),
        (
            "drafter.markov_rank",
            full or config.drafter.markov_rank is None,
            "none for a gated LoRA, which has no heads",
        ),
        ("drafter.confidence_head", full or not config.drafter.confidence_head, "false for a gated LoRA"),
        ("adapter.rank", adapter.rank >= 1, "at least 1"),
        ("adapter.alpha", adapter.alpha is None or adapter.alpha > 0, "above 0"),
        ("adapter.targets", len(adapter.targets) > 0, "at least one of attention, mlp, delta, delta_gates"),
        ("adapter.noise", adapter.noise in ("random", "mask"), "random or mask"),
        ("adapter.corruption", adapter.corruption in ("all", "rate", "none"), "all, rate or none"),
        ("adapter.layout", adapter.layout in ("prefix", "suffix"), "prefix or suffix"),
        ("adapter.layout", adapter.causal or adapter.layout == "prefix", "prefix where adapter.causal is false"),
        ("adapter.curriculum", min(sizes) >= 2 and sizes[-1] == max(sizes) == B, f"sizes from 2 to {B}, {B} the last"),
    ]


def pretraining(config):
    """The rules of a pretraining run."""
    model, trainer = config.model, config.trainer
    Hk, Hv, interval = model.linear_num_key_heads, model.linear_num_value_heads, model.full_attention_interval
    rules = [(f"model.{key}", value >= 1, "at least 1") for key, value in dataclasses.asdict(model).items()]
    return [
        *rules,
        ("model.num_hidden_layers", model.num_hidden_layers >= interval > 1, "one full-attention layer, and others"),
        ("model.linear_num_value_heads", Hv % Hk == 0, "a multiple of model.linear_num_key_heads"),
        ("model.num_attention_heads", model.num_attention_heads % model.num_key_value_heads == 0, "whole groups"),
        ("model.head_dim", model.head_dim % 8 == 0, "a multiple of 8: positions rotate pairs in a quarter of it"),
        ("model.vocab_size", model.vocab_size >= 259, "at least 259: the bytes and three tokens more"),
        ("text.row_tokens", 2 <= config.text.row_tokens <= model.max_position_embeddings, "2 up to the model's length"),
        ("text.max_files", config.text.max_files is None or config.text.max_files >= 1, "above 0"),
        ("dtype", config.dtype in (None, "float32", "bfloat16", "float16"), "float32, bfloat16 or float16"),
        ("trainer.dropout", 0 <= trainer.dropout < 1, "from 0 to below 1"),
        ("trainer.minutes", trainer.minutes is None or trainer.minutes > 0, "above 0"),
        ("report_minutes", config.report_minutes is None or config.report_minutes > 0, "above 0"),
        ("trainer.save_minutes", trainer.save_minutes > 0, "above 0"),
        ("trainer.samples", trainer.samples >= 1, "at least 1"),
        ("trainer.sample_tokens", trainer.sample_tokens >= 1, "at least 1"),
    ]
