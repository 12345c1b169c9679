"""A target from nothing: its size, first weights, vocabulary, and a folder that everyone reads alike."""

import math

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten

from drafter import config, scratch
from drafter import target as targets

OPTIONS = config.ModelConfig(
    hidden_size=40, intermediate_size=56, num_hidden_layers=4, full_attention_interval=4, num_attention_heads=3,
    num_key_value_heads=1, head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=16, vocab_size=300, max_position_embeddings=512,
)  # fmt: skip
TEXTS = [
    "def add(first, second):\n    return first + second\n\n\nprint(add(12, 345))\n" * 3,
    "naïve café → ok\r\n\t# 2024\n",
]


@pytest.fixture(scope="module")
def model():
    return scratch.build(OPTIONS, seed=3)


@pytest.fixture(scope="module")
def tokenizer():
    return scratch.train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("scratch")
    scratch.write_model(path, model.config, dict(tree_flatten(model.parameters())))
    scratch.write_tokenizer(path, tokenizer)
    return path


def test_the_reference_target_stays_under_four_million_parameters_and_its_layers_alternate():
    found = scratch.build(config.compose(["+experiment=reference_hybrid"]).model, seed=0)
    assert 3_500_000 < scratch.parameter_count(found) <= 4_000_000
    assert [layer.is_linear for layer in found.layers] == [True, True, True, False] * 2


def test_first_weights_depend_on_the_seed_and_the_name_alone(model):
    first, again, other = (dict(tree_flatten(scratch.build(OPTIONS, seed).parameters())) for seed in (3, 3, 4))
    assert all(mx.array_equal(value, again[name]).item() for name, value in first.items())
    moved = [name for name, value in first.items() if not mx.array_equal(value, other[name]).item()]
    assert set(first) - set(moved) == {name for name in first if "norm" in name}


def test_first_weights_have_the_stated_scales(model):
    weights = dict(tree_flatten(model.parameters()))
    for name, value in weights.items():
        value = np.array(value)
        if name.endswith("A_log"):
            assert np.all((np.exp(value) >= 1) & (np.exp(value) <= 16))
        elif name.endswith("dt_bias"):
            step = np.log1p(np.exp(value))
            assert np.all((step >= 1e-3 * 0.999) & (step <= 0.1 * 1.001))
        elif "norm" in name:
            assert np.all(value == 1)
        else:
            inputs = 4 if name.endswith("conv1d.weight") else value.shape[-1]
            back = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            expected = 1 / math.sqrt(inputs * (2 * 4 if back else 1))
            assert abs(value.std() / expected - 1) < 4 / math.sqrt(2 * value.size), name


def test_dropout_keeps_the_mean_and_rests_in_evaluation():
    dropped = scratch.build(OPTIONS, seed=3, dropout=0.25)
    module = dropped.layers[0].mlp.down_proj
    rows = mx.random.normal((900, 56), key=mx.random.key(1))
    dropped.eval()
    whole = module(rows)
    assert mx.array_equal(whole, rows @ module.weight.T).item()
    dropped.train()
    mx.random.seed(5)
    found = module(rows)
    share = (found == 0).mean().item()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / found.size)
    np.testing.assert_allclose(np.array(found)[np.array(found) != 0], np.array(whole / 0.75)[np.array(found) != 0])
    mx.random.seed(5)
    assert mx.array_equal(found, module(rows)).item()


# The vocabulary.


def test_ids_are_the_end_then_text_then_the_mask(tokenizer):
    assert tokenizer.get_vocab_size() == 300
    assert (tokenizer.token_to_id(scratch.END), tokenizer.token_to_id(scratch.MASK)) == (0, 299)
    ids = {token for text in TEXTS for token in tokenizer.encode(text).ids}
    assert ids and not ids & {0, 299}


@pytest.mark.parametrize("text", [*TEXTS, "x = 3.14159e-10  \n\n\n\ty\x00\x7f", "𝔘𝔫𝔦 \u3000 ﬁ"])
def test_every_text_comes_back_and_digits_stand_alone(tokenizer, text):
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert all(len(token) == 1 for token in encoded.tokens if any(letter.isdigit() for letter in token))


def test_merges_are_learned(tokenizer):
    assert len(tokenizer.encode(TEXTS[0]).ids) < len(TEXTS[0]) / 2


def test_a_folder_is_read_by_transformers_as_it_was_trained(folder, tokenizer):
    read = mlx_lm.utils.load_tokenizer(folder)
    for text in TEXTS:
        assert list(read.encode(text)) == tokenizer.encode(text).ids
    assert (set(read.eos_token_ids), read.mask_token_id) == ({0}, 299)
    assert scratch.read_tokenizer(folder).to_str() == tokenizer.to_str()


# The folder.


def test_a_folder_is_a_target_of_the_weights_in_bfloat16(folder, model):
    stored = mx.load(str(folder / "model.safetensors"))
    assert {str(value.dtype) for name, value in stored.items() if not name.endswith("A_log")} == {"mlx.core.bfloat16"}
    target = targets.load(folder, dtype="float32")
    assert target.spare_id() == (299, "the tokenizer's mask token")
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.max_length) == (4, 40, 300, 512)
    loaded = dict(tree_flatten(target.model.parameters()))
    for name, value in tree_flatten(model.parameters()):
        kept = value if name.endswith("A_log") else value.astype(mx.bfloat16).astype(mx.float32)
        assert mx.array_equal(loaded[name], kept).item(), name
