"""Shapes without weights: targets of a published model's size with random weights, for costs and never for acceptance.

A name is `shape:NAME`, or `shape:NAME@4bit` for affinely quantised weights (group size 64).
"""

import importlib
import re

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from drafter import hybrid
from drafter.target import Target, cast, find_backbone
from kernels.errors import UserError

PREFIX = "shape:"
GROUP_SIZE = 64
SHAPES = {  # config.json of the models they are named after, from their published pages
    "qwen3_5_4b": {
        "model_type": "qwen3_5", "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "max_position_embeddings": 262144, "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "smollm2_135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "vocab_size": 49152,
        "rope_theta": 1e5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip


def build(name, dtype="bfloat16", **overrides):
    """The Target of a shape's name, its weights drawn as MLX initialises them; it has no tokenizer and no fingerprint.

    overrides: keys of its configuration, for a smaller one. Raises UserError for a name that is not known.
    """
    found = re.fullmatch(rf"{PREFIX}(\w+?)(?:@([248])bit)?", name)
    if not found or found[1] not in SHAPES:
        known = ", ".join(PREFIX + shape for shape in SHAPES)
        raise UserError(f"target {name}: not a shape; expected one of {known}, with @4bit or @8bit where quantised")
    config = {**SHAPES[found[1]], **overrides}
    model = draw(config, dtype, found[2] and int(found[2]))
    backbone = find_backbone(model, None)
    return Target(
        model=model, tokenizer=None, config=config, path=None, source=name, dtype=dtype, fingerprint=None,
        tokenizer_sha256=None, template_sha256=None, backbone=backbone, hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
    )  # fmt: skip


def draw(config, dtype, bits):
    """The model, frozen and attached, its weights in memory."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    cast(model, getattr(mx, dtype))
    if bits:
        nn.quantize(model, group_size=GROUP_SIZE, bits=bits)
    mx.eval(model.parameters())
    model.freeze()
    model.eval()
    hybrid.attach(model)
    return model


def weight_bytes(target):
    """Bytes of the target's parameters, each of which a step reads once."""
    return sum(value.nbytes for _, value in tree_flatten(target.model.parameters()))
