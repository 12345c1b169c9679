"""Targets of the decoding tests: small random ones of each architecture, and SmolLM2 in float32."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import tiny
from drafter import dflash
from drafter import target as targets


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """load(kind, bits=None): a small random target in float32, loaded once; bits quantises its weights."""
    loaded = {}

    def load(kind, bits=None):
        if (kind, bits) not in loaded:
            tmp = tmp_path_factory.getbasetemp()
            path = tiny.folder(kind, tmp)
            folder = tiny.quantised(path, tmp, bits=bits) if bits else path
            loaded[kind, bits] = targets.load(str(folder), dtype="float32")
        return loaded[kind, bits]

    return load


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32."""
    return targets.load("smollm2", dtype="float32")


@pytest.fixture(scope="session")
def smollm2_4bit(smollm2, tmp_path_factory):
    """The same, converted to 4 bits by mlx-lm."""
    return targets.load(str(tiny.quantised(smollm2.path, tmp_path_factory.getbasetemp())), dtype="float32")


@pytest.fixture(scope="session")
def prompt():
    """27 token ids, longer than the small gemma3's window of 11."""
    return np.random.default_rng(3).integers(5, tiny.VOCABULARY, 27).tolist()


@pytest.fixture(scope="session")
def tiny_drafter():
    """make(target, block_size): an untrained DFlash drafter for a small target, all its dimensions different."""

    def make(target, block_size=6, seed=0):
        config = dflash.DFlashConfig(
            hidden_size=target.hidden_size,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=target.vocab_size,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=512,
            block_size=block_size,
            mask_token_id=tiny.SPECIAL.index("<|spare|>"),
            target_layer_ids=(0, 2),
            num_target_layers=target.num_layers,
            layer_types=(dflash.FULL, dflash.SLIDING),
            sliding_window=7,
        )
        drafter = dflash.DFlash(config)
        names = tree_flatten(drafter.parameters())
        keys = mx.random.split(mx.random.key(seed), len(names))
        drawn = [(name, tiny.draw(value.shape, key, 2.0)) for (name, value), key in zip(names, keys, strict=True)]
        drafter.update(tree_unflatten(drawn))
        mx.eval(drafter.parameters())
        return drafter

    return make
