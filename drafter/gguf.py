"""GGUF tensors and tokenizer to a model folder that mlx-lm loads.

Dimension letters: D hidden, H heads, V vocabulary. Supported: architecture `llama` (SmolLM2 among them) with the
byte-level BPE tokenizer that GGUF calls `gpt2`. Tensor names follow the GGUF specification's `blk.N.*` scheme
(ggml-org, docs/gguf.md); the row order of q and k is ggml's interleaved rotary layout and is undone here.
"""

import pathlib
import re

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from drafter import fingerprint, manifest
from kernels.errors import UserError

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GROUP = 32  # values that share a scale in ggml's Q4 and Q8 blocks
BITS = {8: 4, 4: 8}  # values packed in one uint32 -> bits of each
CONTROL, USER_DEFINED = 3, 4  # GGUF token types of special tokens, and of whole words that are never split
PRE_TOKENIZERS = ("smollm", "gpt-2")  # what `tokenizer.ggml.pre` may say: digits one by one, or GPT-2's pattern alone
INSTEAD = "Convert the original checkpoint with mlx_lm.convert and name that folder instead"
REQUIRED = (
    *("llama." + key for key in ("embedding_length", "feed_forward_length", "block_count", "context_length")),
    *("llama.attention." + key for key in ("head_count", "layer_norm_rms_epsilon")),
    *("tokenizer.ggml." + key for key in ("tokens", "merges", "token_type", "bos_token_id", "eos_token_id")),
)


def convert(path, folder, *, dtype="float32"):
    """Write the GGUF file at `path` as an mlx-lm model folder in `dtype`; returns the folder.

    Quantised tensors are expanded exactly (scale·q + bias in float32) before they are cast. `source.json` in the
    folder records the file's SHA-256, the fingerprint of its tensors as stored (the same whatever `dtype` is), and the
    fingerprint of what was written, by which a later load knows the conversion is intact.
    Raises UserError for a file that is not GGUF, or an architecture or tokenizer that is not supported.
    """
    path, folder = pathlib.Path(path), pathlib.Path(folder)
    tensors, metadata = read(path)
    config = config_of(tensors, metadata)
    weights = expand(tensors, config, getattr(mx, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    with manifest.atomic(folder / "model.safetensors") as file:
        mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    write_tokenizer(metadata, folder)
    manifest.write_json(folder / "config.json", config | {"torch_dtype": dtype})
    record = {
        "file": path.name,
        "sha256": manifest.sha256_file(path),
        "fingerprint": fingerprint.of_arrays(tensors),
        "converted": fingerprint.of_folder(folder),
    }
    manifest.write_json(folder / "source.json", record)  # last: its presence says that the folder is whole
    return folder


def read(path):
    """The tensors {name: array} and metadata of a GGUF file; refuses what this module cannot convert."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise UserError(f"{path}: not a GGUF file (it begins with {magic!r}, expected b'GGUF')")
        tensors, metadata = mx.load(str(path), return_metadata=True, format="gguf")
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged or unsupported GGUF ({error}); fetch the file again") from error
    found = (metadata.get("general.architecture"), metadata.get("tokenizer.ggml.model"))
    if found != ("llama", "gpt2"):
        raise UserError(
            f"{path}: GGUF of architecture {found[0]!r} with tokenizer {found[1]!r}; only llama with gpt2 (byte-level"
            f" BPE) is read. {INSTEAD}"
        )
    check(path, tensors, metadata)
    return tensors, metadata


def check(path, tensors, metadata):
    """Refuse a file that is incomplete, or that would be converted to a subtly different model."""
    missing = [key for key in REQUIRED if key not in metadata]
    if missing:
        raise UserError(f"{path}: GGUF metadata lacks {', '.join(missing)}; fetch or convert the file again")
    config = config_of({}, metadata)
    turned = number(metadata, "llama.rope.dimension_count", config["head_dim"])
    rules = [
        ("tokenizer.ggml.pre", metadata.get("tokenizer.ggml.pre"), PRE_TOKENIZERS),
        ("llama.rope.scaling.type", metadata.get("llama.rope.scaling.type", "none"), ("none",)),
        ("llama.rope.dimension_count", turned, (config["head_dim"],)),
    ]
    for key, found, expected in rules:
        if found not in expected:
            raise UserError(f"{path}: {key} is {found!r}; only {', '.join(map(repr, expected))} is read. {INSTEAD}")
    for name in sorted(tensors):
        stem, _, part = name.rpartition(".")
        if part not in ("weight", "scales", "biases") or place(stem) is None:
            raise UserError(f"{path}: tensor {name} has no place in a plain llama model. {INSTEAD}")


def number(metadata, key, default=None):
    """A number of the metadata as Python has it."""
    found = metadata.get(key, default)
    return found.item() if isinstance(found, mx.array) else found


def config_of(tensors, metadata):
    """The config.json (as a dict) of a llama GGUF."""

    def value(key, default=None):
        return number(metadata, f"llama.{key}", default)

    heads = value("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", value("embedding_length") // heads),
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as a rounded float32
        "rope_theta": value("rope.freq_base", 10000.0),
        "max_position_embeddings": value("context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def expand(tensors, config, dtype):
    """GGUF tensors to {mlx-lm name: array of `dtype`}; packed weights are unpacked, q and k rows put in HF order."""
    weights = {}
    for stem in sorted(name.removesuffix(".weight") for name in tensors if name.endswith(".weight")):
        value = dense(tensors, stem)
        if stem.endswith("attn_q"):
            value = half_split(value, config["num_attention_heads"])
        if stem.endswith("attn_k"):
            value = half_split(value, config["num_key_value_heads"])
        weights[place(stem) + ".weight"] = value.astype(dtype)
    return weights


def dense(tensors, stem):
    """One weight in float32, [out, in] or [D]; packed ones are scale·q + bias over groups of 32."""
    value, scales = tensors[f"{stem}.weight"], tensors.get(f"{stem}.scales")
    if scales is None:
        return value.astype(mx.float32)
    per_word = scales.shape[-1] * GROUP // value.shape[-1]
    biases = tensors[f"{stem}.biases"]
    return mx.dequantize(
        value, scales.astype(mx.float32), biases.astype(mx.float32), group_size=GROUP, bits=BITS[per_word]
    )


def half_split(value, heads):
    """Rows of a q or k weight [H·d, D] from ggml's interleaved rotary pairs to HF's two halves of each head."""
    rows, columns = value.shape
    pairs = value.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def place(stem):
    """`blk.7.attn_q` -> `model.layers.7.self_attn.q_proj`; None for what a llama model does not have."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    table, key = (LAYER_NAMES, layer[2]) if layer else (TOP_NAMES, stem)
    if key not in table:
        return None
    return f"model.layers.{layer[1]}.{table[key]}" if layer else table[key]


def write_tokenizer(metadata, folder):
    """Rebuild the byte-level BPE tokenizer as tokenizer.json and tokenizer_config.json (chat template included)."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if metadata.get("tokenizer.ggml.pre") == "smollm":  # digits one by one, then GPT-2's pattern
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds) if kind == CONTROL]
    whole = [token for token, kind in zip(tokens, kinds) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])
    if number(metadata, "tokenizer.ggml.add_bos_token", False):
        first = number(metadata, "tokenizer.ggml.bos_token_id")
        begin = tokens[first]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, first)]
        )
    with manifest.atomic(folder / "tokenizer.json") as file:
        file.write(tokenizer.to_str().encode())
    manifest.write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, tokens, control))


def tokenizer_config(metadata, tokens, control):
    """The Hugging Face tokenizer_config.json (as a dict) that goes with the rebuilt tokenizer."""

    def special(role):
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index.item()]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special("bos"),
        "eos_token": special("eos"),
        "pad_token": special("padding"),
        "unk_token": special("unknown"),
        "additional_special_tokens": control,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
