"""Shapes without weights: the published sizes, and a small one run as any target is."""

import importlib

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from drafter import shapes
from kernels.errors import UserError

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 301, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), [("qwen3_5_4b", 4_205_751_296), ("smollm2_135m", 134_515_008)])
def test_a_shape_has_the_published_number_of_parameters(name, parameters):
    config = shapes.SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))  # lazy: nothing is drawn
    assert sum(value.size for _, value in tree_flatten(model.parameters())) == parameters


@pytest.mark.parametrize("name", ["shape:qwen3_5_4b", "shape:qwen3_5_4b@8bit"])
def test_a_small_one_runs_as_any_target(name):
    target = shapes.build(name, dtype="float32", **SMALL | {"linear_value_head_dim": 32})
    caches = target.make_cache()
    logits = target.score(target.forward(mx.array([[3, 5, 8]]), caches).hidden)
    assert logits.shape == (1, 3, 301)
    assert target.identity() == {
        "source": name, "dtype": "float32", "fingerprint": None, "tokenizer_sha256": None, "template_sha256": None,
    }  # fmt: skip


def test_quantised_weights_are_counted_as_they_are_stored():
    dense, packed = (
        shapes.weight_bytes(shapes.build("shape:qwen3_5_4b" + bits, dtype="bfloat16", **SMALL | {"vocab_size": 640}))
        for bits in ("", "@4bit")
    )
    assert 0.25 < packed / dense < 0.45  # 4 bits and 32 for each group of 64, small ones left as they are


@pytest.mark.parametrize("name", ["shape:", "shape:llama", "shape:qwen3_5_4b@3bit", "qwen3_5_4b"])
def test_another_name_is_refused_with_the_known_ones(name):
    with pytest.raises(UserError, match="expected one of shape:qwen3_5_4b, shape:smollm2_135m"):
        shapes.build(name)
