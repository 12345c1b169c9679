"""Small targets and drafters for the drafter's tests."""

import dataclasses

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import tiny
from drafter import dflash
from drafter import target as targets


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """load(kind, seed=1, dtype="float32"): a small random target, loaded once."""
    loaded = {}

    def load(kind="llama", seed=1, dtype="float32"):
        if (kind, seed, dtype) not in loaded:
            folder = tiny.folder(kind, tmp_path_factory.getbasetemp(), seed=seed, gain=2.0)
            loaded[kind, seed, dtype] = targets.load(str(folder), dtype=dtype)
        return loaded[kind, seed, dtype]

    return load


@pytest.fixture(scope="session")
def tiny_config():
    """make(target, **changes): a DFlashConfig whose dimensions all differ."""

    def make(target, **changes):
        config = dflash.DFlashConfig(
            hidden_size=target.hidden_size,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            vocab_size=target.vocab_size,
            rms_norm_eps=1e-5,
            rope_theta=2e3,
            max_position_embeddings=512,
            block_size=5,
            mask_token_id=tiny.SPECIAL.index("<|spare|>"),
            target_layer_ids=(0, 2),
            num_target_layers=target.num_layers,
            layer_types=(dflash.FULL,) * 3,
        )
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture(scope="session")
def random_drafter():
    """make(config, seed=0): a drafter whose every weight, norms included, is random and far from its neutral value."""

    def make(config, seed=0):
        drafter = dflash.DFlash(config)
        names = tree_flatten(drafter.parameters())
        keys = mx.random.split(mx.random.key(seed), len(names))
        drafter.update(tree_unflatten([(name, tiny.draw(v.shape, key, 2.0)) for (name, v), key in zip(names, keys)]))
        mx.eval(drafter.parameters())
        return drafter

    return make
