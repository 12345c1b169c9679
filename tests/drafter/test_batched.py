"""One row of many sequences, fed with lent caches, beside each sequence alone with mlx-lm's plain caches."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

import tiny
from drafter import batched, hybrid
from drafter import target as targets

KINDS = ["llama", "qwen2", "qwen3", "gemma3_text", "granite", "cohere", "qwen3_5", "qwen3_next"]
LENGTHS = (3, 17, 59)  # prompts; the batch passes a multiple of ALIGNED on its way
STEPS = 9
TOLERANCE = 2e-5  # of float32 logits of size 1 to 10: sums in another order, two ways of padding


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """A tiny model as this project loads it."""
    folder = tiny.folder(request.param, tmp_path_factory.getbasetemp())
    return targets.load(str(folder), dtype="float32").model


def sequences(seed=3):
    """Token ids of each prompt and the STEPS that follow it."""
    generator = np.random.default_rng(seed)
    return [generator.integers(5, tiny.VOCABULARY, length + STEPS).tolist() for length in LENGTHS]


def alone(model, tokens, prompt):
    """Logits [STEPS,V] of one sequence fed token by token behind its prompt."""
    caches = make_prompt_cache(model)
    model(mx.array([tokens[:prompt]]), cache=caches)
    return mx.concatenate([model(mx.array([[token]]), cache=caches)[:, -1] for token in tokens[prompt:]])


def merged(model, tokens):
    """mlx-lm's batch caches of all prompts."""
    each = []
    for sequence, length in zip(tokens, LENGTHS):
        caches = make_prompt_cache(model)
        model(mx.array([sequence[:length]]), cache=caches)
        mx.eval([entry.state for entry in caches])
        each.append(caches)
    return [type(parts[0]).merge(list(parts)) for parts in zip(*each)]


def test_every_sequence_has_the_logits_that_it_has_alone(model):
    tokens = sequences()
    expected = [alone(model, sequence, length) for sequence, length in zip(tokens, LENGTHS)]
    caches, modules = merged(model, tokens), batched.attention_modules(model)
    for step in range(STEPS):
        if step == STEPS // 2:  # a sequence leaves, and the buffers end anywhere
            for entry in caches:
                entry.filter([0, 2])
            tokens, expected = tokens[::2], expected[::2]
        fed = mx.array([[sequence[step - STEPS]] for sequence in tokens])
        with batched.grouped(modules):
            logits = model(fed, cache=batched.lend(caches))[:, -1]
        for row, wanted in zip(logits, expected, strict=True):
            assert mx.abs(row - wanted[step]).max() < TOLERANCE * max(1, mx.abs(wanted[step]).max().item())


def test_keys_are_lent_in_whole_multiples_and_the_cache_is_what_it_was(model):
    caches = merged(model, sequences())
    entry = next((entry for entry in caches if type(entry) is BatchKVCache), None)
    assert entry is not None
    lent, idx = batched.lend([entry])[0], entry._idx
    rows = mx.random.normal((len(LENGTHS), *entry.keys.shape[1:2], 1, entry.keys.shape[-1]))
    mask = lent.make_mask(1)
    keys, values = lent.update_and_fetch(rows, rows + 1)
    assert keys.shape[2] == values.shape[2] == mask.shape[-1] == 64
    assert entry._idx == idx + 1
    assert mx.array_equal(keys[..., idx : idx + 1, :], rows)
    assert mx.array_equal(values[..., idx : idx + 1, :], rows + 1)
    assert mx.sum(mask, axis=-1).flatten().tolist() == [length + 1 for length in LENGTHS]


def test_every_layer_s_attention_is_found_and_nothing_else(model):
    attends = [layer.self_attn for layer in model.layers if hasattr(layer, "self_attn")]
    ours = [module for module in attends if hybrid.is_attached(module)]  # on a CPU, those of hybrids
    assert len(batched.attention_modules(model)) == len(attends) - len(ours)


def test_modules_are_given_back_whatever_happens(model):
    modules = batched.attention_modules(model)
    kinds, before = [type(module) for module in modules], base.scaled_dot_product_attention
    with pytest.raises(KeyError), batched.grouped(modules):
        assert all(type(module) is not kind for module, kind in zip(modules, kinds))
        raise KeyError
    assert [type(module) for module in modules] == kinds
    assert base.scaled_dot_product_attention is before
