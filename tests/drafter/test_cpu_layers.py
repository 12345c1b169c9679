"""What reads a prompt in place of mlx-lm's modules computes what they compute, and leaves all else to them.

The oracle is mlx-lm's own class on the same weights; the arithmetic underneath is held to float64 in tests/kernels.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.utils import load_model

import tiny
from drafter import cpu_layers, hybrid

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's modules are mlx-lm's own")
TOLERANCE = 1e-5  # of the largest value, float32: MLX's exponential is right to 8 ulp, and sums have another order
GRADIENT = 1e-4  # of a parameter's largest gradient
PROMPT = 70  # rows, more than `exponential.LEAST_ROWS`
T = 150  # more than a block of queries


@pytest.fixture
def model(tmp_path_factory):
    """model(kind): a small hybrid of mlx-lm's, not attached; always a new one."""
    return lambda kind="qwen3_5": load_model(tiny.folder(kind, tmp_path_factory.getbasetemp()))[0]


def module_of(model, kind):
    """The first module of a class in FORWARDS."""
    return next(module for module in model.modules() if isinstance(module, kind))


def ids(seed, *shape):
    return mx.array(np.random.default_rng(seed).integers(5, tiny.VOCABULARY, shape))


def rows(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def close(found, expected, bound=TOLERANCE):
    found, expected = np.array(found), np.array(expected)
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max(), rtol=0)


def differs(one, other):
    return not mx.array_equal(one, other).item()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_prompt_has_mlx_lms_logits_and_caches(model, kind):
    made, tokens = model(kind), ids(1, 2, T)
    own, theirs = made.make_cache(), made.make_cache()
    for piece in (tokens[:, :80], tokens[:, 80:], ids(2, 2, 3)):
        expected = made(piece, cache=theirs)
        hybrid.attach(made)
        close(made(piece, cache=own), expected)
        hybrid.detach(made)
    for one, other in zip(own, theirs, strict=True):
        for mine, other_one in zip(one.state[:2], other.state[:2], strict=True):
            if isinstance(mine, mx.array):
                close(mine, other_one)


@pytest.mark.parametrize("kind", cpu_layers.FORWARDS)
def test_each_module_is_replaced_for_a_prompt_only(model, kind):
    module = module_of(model(), kind)
    size = {cpu_layers.Qwen3NextRMSNormGated: (6, 48)}.get(kind, (96,))
    for count in (1, 16, PROMPT):
        x = rows(3, 2, count, *size)
        more = {cpu_layers.Qwen3NextRMSNormGated: (rows(4, 2, count, *size),)}.get(kind, ())
        more = ("causal",) if kind is cpu_layers.Qwen3NextAttention and count > 1 else more
        expected = module(x, *more)
        module.__class__ = hybrid.through_kernels(kind)
        found = module(x, *more)
        module.__class__ = kind
        close(found, expected)
        assert differs(found, expected) == (count == PROMPT)


CACHES = {
    "none": lambda: None,
    "plain": KVCache,
    "quantised": lambda: QuantizedKVCache(group_size=32, bits=8),
    "window": lambda: RotatingKVCache(max_size=90, keep=4),
    "padded": lambda: BatchKVCache([0, 9]),
}


@pytest.mark.parametrize("cache", CACHES)
def test_attention_honours_every_cache_and_mask_of_mlx_lm(model, cache):
    module = module_of(model(), cpu_layers.Qwen3NextAttention)
    own, theirs = CACHES[cache](), CACHES[cache]()
    for seed in range(2):
        x = rows(seed, 2, PROMPT, 96)
        mask = create_attention_mask(x, theirs)
        expected = module(x, mask, theirs)
        module.__class__ = hybrid.through_kernels(cpu_layers.Qwen3NextAttention)
        found = module(x, mask, own)
        module.__class__ = cpu_layers.Qwen3NextAttention
        seen = slice(9, None) if cache == "padded" and not seed else slice(None)  # what pads sees nothing
        close(found[:, seen], expected[:, seen])
        assert own is None or mx.array_equal(mx.array(own.offset), mx.array(theirs.offset))


def test_gradients_through_a_prompt_in_training_are_mlx_lms(model):
    made, tokens = model(), ids(5, 1, PROMPT)
    made.train()

    def loss(model, tokens):
        return mx.mean(mx.sin(model(tokens)))

    expected = dict(tree_flatten(nn.value_and_grad(made, loss)(made, tokens)[1]))
    hybrid.attach(made)
    found = dict(tree_flatten(nn.value_and_grad(made, loss)(made, tokens)[1]))
    for name, gradient in expected.items():
        close(found[name], gradient, GRADIENT)


def test_a_gpus_modules_and_models_without_recurrent_layers_stay_mlx_lms(model, tmp_path_factory, monkeypatch):
    plain = load_model(tiny.folder("qwen3", tmp_path_factory.getbasetemp()))[0]
    hybrid.attach(plain)
    assert not any(map(hybrid.is_attached, plain.modules()))
    made = model()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    hybrid.attach(made)
    attached = list(filter(hybrid.is_attached, made.modules()))
    assert attached and all(map(hybrid.is_recurrent, attached))
