"""Small random targets that are real: a folder with config, weights and tokenizer, as mlx-lm and transformers load it.

Every dimension differs, so a transposed axis cannot go unseen; head dimension 32 and widths divisible by 32 let the
caches and the weights be quantised. Weights are wide enough that greedy text varies (tests assert it), and the head is
silent on special tokens and on bytes that are not ASCII, so that greedy text is text and ends only where a test says.
"""

import functools
import hashlib
import importlib
import json
import math
import pathlib

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 311
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|spare|>"]
TEXT = [
    "the river ran past the old mill and the mill stood by the river while the miller counted sacks of grain",
    "def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n",
    "a small model may write small words, and then the other words after them, and the rest of the words there",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPES = {
    "llama": {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen2": {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3": {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "gemma3_text": {
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "query_pre_attn_scalar": 32, "sliding_window": 11, "sliding_window_pattern": 3, "rope_local_base_freq": 1e4,
    },
    "gemma3": {},  # gemma3_text inside a `language_model`
    "gemma2": {
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "query_pre_attn_scalar": 32, "attn_logit_softcapping": 9.0, "final_logit_softcapping": 1.5,
    },
    "granite": {
        "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": False,
        "mlp_bias": False, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
    },
    "cohere": {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "logit_scale": 0.25},
    "lfm2": {
        "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1, "norm_eps": 1e-6,
        "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": False, "conv_L_cache": 3,
        "block_dim": 96, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5": {
        "num_hidden_layers": 5, "full_attention_interval": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
        "linear_value_head_dim": 48, "linear_conv_kernel_dim": 4,
        "rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "qwen3_next": {
        "num_hidden_layers": 4, "full_attention_interval": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 32, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "num_experts": 5,
        "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [], "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128, "norm_topk_prob": True,
    },
}  # fmt: skip
ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma2": "Gemma2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere": "CohereForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def folder(kind, tmp, *, seed=1, chat_template=False, gain=2.0, **overrides):
    """Write a random target of `kind` below `tmp` once and return its folder.

    kind       llama, qwen2, qwen3, gemma3_text (sliding window 11, shorter than any prompt worth testing), gemma3 (the
               same inside a wrapper), gemma2, granite, cohere (scaled embeddings and logits), lfm2 (short
               convolutions whose state cannot be trimmed), qwen3_5 or qwen3_next (gated-delta layers between those of
               full attention; the second with experts in every other layer)
    seed       of the weights
    gain       standard deviation of a projection is gain / sqrt(inputs)
    overrides  keys of config.json
    """
    config = configuration(kind, **overrides)
    name = hashlib.sha256(json.dumps([config, seed, chat_template, gain], sort_keys=True).encode()).hexdigest()[:12]
    path = pathlib.Path(tmp) / f"{kind}-{name}"
    if not (path / "model.safetensors").exists():
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=2))
        write_tokenizer(path, chat_template)
        mx.save_safetensors(str(path / "model.safetensors"), weights(config, seed, gain), {"format": "mlx"})
    return path


def configuration(kind, **overrides):
    """The config.json of a small target of `kind`."""
    if kind == "gemma3":
        inner = configuration("gemma3_text", **overrides)
        outer = ("vocab_size", "bos_token_id", "eos_token_id")
        named = {"model_type": kind, "architectures": [ARCHITECTURE[kind]], "text_config": inner}
        return named | {key: inner[key] for key in outer}
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURE[kind]],
        "hidden_size": 96,
        "intermediate_size": 160,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index("<|endoftext|>"),
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        **SHAPES[kind],
        **overrides,
    }


def weights(config, seed, gain):
    """Random float32 parameters {name: array} under the names of mlx-lm's own model of this config."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    shapes = tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters())
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    drawn = {name: draw(value.shape, key, gain) for (name, value), key in zip(shapes, keys, strict=True)}
    for (name, value), key in zip(drawn.items(), keys):
        if name.endswith(("A_log", "dt_bias", "conv1d.weight")) and "linear_attn" in name:
            drawn[name] = draw_recurrent(name, value.shape, key)
        if name.endswith("lm_head.weight"):
            drawn[name] = value * mx.array(spoken() + [0.0] * (len(value) - VOCABULARY))[:, None]
    return drawn


@functools.cache
def spoken():
    """1.0 for the ids whose text is printable ASCII, 0.0 for the others: a list of VOCABULARY numbers."""
    texts = [tokenizer().decode([token]) for token in range(VOCABULARY)]
    return [1.0 if text and text.isascii() and text.isprintable() else 0.0 for text in texts]


def draw(shape, key, gain):
    """One parameter: norm weights and biases small around their neutral value, matrices gain / sqrt(inputs)."""
    if len(shape) == 1:
        return 0.3 * mx.random.normal(shape, key=key) + 0.8
    return gain / math.sqrt(shape[-1]) * mx.random.normal(shape, key=key)


def draw_recurrent(name, shape, key):
    """A gated-delta layer's own parameters: gates that keep from a tenth to nearly all, taps of one scale."""
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(0.5, 4.0, shape, key=key))
    return 0.5 * mx.random.normal(shape, key=key) - (2.0 if name.endswith("dt_bias") else 0.0)


@functools.cache
def tokenizer():
    """A byte-level BPE of VOCABULARY ids, special tokens first, trained on the few lines above."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(TEXT, trainer)
    assert built.get_vocab_size() == VOCABULARY, built.get_vocab_size()
    return built


def write_tokenizer(path, chat_template=False):
    """The tokenizer's files as transformers reads them."""
    tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        **({"chat_template": TEMPLATE} if chat_template else {}),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def quantised(path, tmp, *, bits=4, group_size=32):
    """The folder of a target's quantised conversion by mlx-lm, made below `tmp` once."""
    from mlx_lm.convert import convert

    out = pathlib.Path(tmp) / f"{path.name}-{bits}bit"
    if not out.exists():
        convert(str(path), mlx_path=str(out), quantize=True, q_bits=bits, q_group_size=group_size)
    return out
