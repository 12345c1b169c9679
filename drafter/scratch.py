"""A small target of the Qwen3.5 architecture from nothing: its shape, first weights, tokenizer and model folder.

The folder is one that mlx-lm and `target.load` read: config.json, model.safetensors in bfloat16, tokenizer files.
"""

import dataclasses
import functools
import json
import math

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3_5
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from drafter import checkpoint, hybrid, manifest, rng

END, MASK = "<|endoftext|>", "<|mask|>"  # the first id and the last: ids between them are text
END_ID = 0
CONV_WIDTH = 4  # as Qwen3.5 has it
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
DECAY = (1.0, 16.0)  # A of the gates is drawn evenly from here, and
STEP = (1e-3, 1e-1)  # softplus(dt_bias) log-evenly from here, as Gated DeltaNet's own code does (arXiv 2412.06464)
# Where words begin: Qwen3.5's own pattern. Some versions of transformers apply it to every folder of this model type,
# whatever its tokenizer.json says, so no other would be read alike everywhere.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BACK = ("o_proj", "out_proj", "down_proj")  # projections whose output is added to the residual stream


@dataclasses.dataclass(frozen=True)
class Shape:
    """The config.json of a target; `options` is a `config.ModelConfig`."""

    options: object

    def to_json(self):
        """config.json (dict), under mlx-lm's names."""
        head = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True}
        tokens = {"bos_token_id": END_ID, "eos_token_id": END_ID}
        fixed = {"linear_conv_kernel_dim": CONV_WIDTH, "rms_norm_eps": 1e-6, "rope_parameters": dict(ROPE)}
        return head | dataclasses.asdict(self.options) | fixed | tokens


def build(options, seed, dropout=0.0):
    """An attached mlx-lm model in training mode with random weights.

    options: a `config.ModelConfig`. dropout: the share of what a branch adds to the residual stream that is left out
    while the model trains.
    """
    shape = Shape(options)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(shape.to_json()))
    model.config = shape
    hybrid.attach(model)
    initialise(model, seed)
    for name, module in model.named_modules():
        if dropout and name.endswith(BACK):
            module.__class__, module.dropout = dropping(type(module)), dropout
    model.train()
    return model


@functools.cache
def dropping(base):
    """The subclass of a module's class whose output loses a share of its values, the rest made larger for it.

    Which ones is drawn from MLX's global random state; in evaluation mode all stay.
    """

    def call(self, rows):
        found = base.__call__(self, rows)
        if not self.training:
            return found
        kept = mx.random.bernoulli(1 - self.dropout, found.shape)
        return mx.where(kept, found / (1 - self.dropout), 0).astype(found.dtype)

    return type(base.__name__, (base,), {"__call__": call})


def initialise(model, seed):
    """Draw every parameter by its name: matrices normal with deviation 1/√inputs, norms 1, gates as DECAY and STEP say.

    Projections back into the residual stream are smaller by √(2 × layers), so that its scale does not grow with depth.
    """
    shrink, weights_back = 1 / math.sqrt(2 * len(model.layers)), tuple(f"{name}.weight" for name in BACK)

    def draw(name, value):
        key = rng.key(seed, f"weights {name}", 0)
        if name.endswith("A_log"):
            return mx.log(mx.random.uniform(*DECAY, value.shape, key=key))
        if name.endswith("dt_bias"):
            return inverse_softplus(mx.exp(mx.random.uniform(*map(math.log, STEP), value.shape, key=key)))
        if value.ndim == 1:
            return mx.ones_like(value)
        inputs = value.shape[1] if name.endswith("conv1d.weight") else value.shape[-1]
        back = shrink if name.endswith(weights_back) else 1.0
        return back / math.sqrt(inputs) * mx.random.normal(value.shape, key=key)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())


def inverse_softplus(value):
    """x with log(1 + eˣ) = value, for values above 0."""
    return value + mx.log(-mx.expm1(-value))


def parameter_count(model):
    """How many numbers the model has; the tied embedding counts once."""
    return sum(value.size for _, value in tree_flatten(model.parameters()))


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE of `vocab_size` ids, fitted to texts (strings): END, bytes, merges, MASK. Digits stand alone.

    Fewer ids where the texts are too small to merge that far.
    """
    built = Tokenizer(models.BPE())
    built.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    fitting = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(texts, fitting)
    built.add_special_tokens([AddedToken(MASK, special=True, normalized=False)])
    return built


def write_tokenizer(folder, tokenizer):
    """tokenizer.json and tokenizer_config.json, as transformers reads them; no chat template: prompts are fed raw."""
    with manifest.atomic(folder / "tokenizer.json", "w") as stream:
        stream.write(tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokens = {"bos_token": END, "eos_token": END, "pad_token": END, "mask_token": MASK}
    manifest.write_json(folder / "tokenizer_config.json", settings | tokens)


def read_tokenizer(folder):
    """The tokenizer that `write_tokenizer` left."""
    return Tokenizer.from_str(json.dumps(manifest.read_json(folder / "tokenizer.json")))


def write_model(folder, shape, weights):
    """config.json and model.safetensors of {name: float32 array}: bfloat16, but for the gates' A_log, as mlx-lm stores.

    Names are those of mlx-lm's own conversions.
    """
    stored = {
        name: value if name.endswith("A_log") else value.astype(mx.bfloat16) for name, value in sorted(weights.items())
    }
    checkpoint.save_arrays(folder / checkpoint.WEIGHTS, stored)
    manifest.write_json(folder / "config.json", shape.to_json())
