"""The drafter: layout, configuration, and its training form against its decoding form and against NumPy.

R rows, T context rows, N blocks, B block, D hidden, H query heads, G key/value heads, d head dimension.
"""

import dataclasses
import json
import types

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import config as configuration
from drafter import dflash
from kernels.errors import UserError

FULL, SLIDING = dflash.FULL, dflash.SLIDING
FLOAT32 = 5e-5  # hidden states after a norm are of size 1; three layers of differently ordered sums
LAYERS = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding": {"layer_types": (SLIDING,) * 3, "sliding_window": 9},
    "sliding, not causal": {"layer_types": (SLIDING,) * 3, "sliding_window": 9, "is_causal": False},
    "window below the block": {"layer_types": (SLIDING,) * 3, "sliding_window": 2},
    "mixed": {"layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 7},
}


@pytest.fixture
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture(params=LAYERS)
def drafter(request, llama, tiny_config, random_drafter):
    """A random drafter of each kind of layer."""
    return random_drafter(tiny_config(llama, **LAYERS[request.param]))


def text_of(length, seed=2):
    return np.random.default_rng(seed).integers(5, tiny.VOCABULARY, length)


def context_of(drafter, target, tokens):
    """Fused context rows [1,T,D] of one sequence."""
    return drafter.fuse(target.forward(mx.array(tokens)[None], taps=drafter.config.target_layer_ids).taps)


def decode_form(drafter, target, tokens, anchor):
    """Hidden [B,D] of the block at `anchor` the way decoding makes it: rows before the anchor, committed in pieces."""
    cache, at = drafter.make_cache(), 0
    rows = context_of(drafter, target, tokens) if anchor else None
    for size in (anchor // 2, 1, anchor):
        piece = min(size, anchor - at)
        if piece:
            drafter.extend(cache, rows[:, at : at + piece])
        at += piece
    assert cache.offset == anchor
    block = drafter.noise(target, mx.array([[int(tokens[anchor])]]), drafter.config.block_size)
    return np.array(drafter.draft(cache, block)[0])


def training_form(drafter, target, tokens, positions, documents=None):
    """Hidden [R,N,B,D] of blocks at positions [R,N] in rows of tokens [R,T]."""
    R, N = positions.shape
    documents = mx.array(np.ones_like(tokens) if documents is None else documents)
    taps = target.forward_packed(mx.array(tokens), documents, drafter.config.target_layer_ids).taps
    pending = np.take_along_axis(tokens, positions, axis=1).reshape(R * N, 1)
    B = drafter.config.block_size
    rows = drafter.noise(target, mx.array(pending), B).reshape(R, N, B, -1)
    return np.array(drafter.blocks(drafter.fuse(taps), rows, mx.array(positions), documents))


# Layout.


def test_tensors_are_the_published_ones(llama, tiny_config):
    config = tiny_config(llama)
    D, M, d, H, G, n = 96, 128, 24, 4, 2, 2
    expected = {"fc.weight": (D, n * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(3):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (D,),
            f"layers.{i}.post_attention_layernorm.weight": (D,),
            f"layers.{i}.self_attn.q_proj.weight": (H * d, D),
            f"layers.{i}.self_attn.k_proj.weight": (G * d, D),
            f"layers.{i}.self_attn.v_proj.weight": (G * d, D),
            f"layers.{i}.self_attn.o_proj.weight": (D, H * d),
            f"layers.{i}.self_attn.q_norm.weight": (d,),
            f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (M, D),
            f"layers.{i}.mlp.up_proj.weight": (M, D),
            f"layers.{i}.mlp.down_proj.weight": (D, M),
        }
    drafter = dflash.DFlash(config)
    assert {name: value.shape for name, value in tree_flatten(drafter.parameters())} == expected
    assert dflash.parameter_count(drafter) == sum(int(np.prod(shape)) for shape in expected.values())


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-4B, as released
        (32, 5, (1, 8, 15, 22, 29)),  # Qwen3.5-4B, as released
        (40, 5, (1, 10, 19, 28, 37)),  # Qwen3.5-35B-A3B, as released
        (64, 5, (1, 16, 31, 46, 61)),  # Qwen3.6-27B, as released
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 round to the even neighbour
        (36, 1, (18,)),
        (31, 1, (15,)),
    ],
)
def test_default_taps_are_the_released_checkpoints(layers, count, taps):
    assert dflash.default_taps(layers, count) == taps


def test_config_survives_a_round_trip_through_json(llama, tiny_config):
    for changes in LAYERS.values():
        config = tiny_config(llama, **changes, input_embedding_scale=9.5, output_multiplier=0.25)
        assert dflash.DFlashConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def released(**changes):
    """A config.json as the released Qwen3.5 drafters write it."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "dtype": "bfloat16",
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 248320, "rope_theta": 1e7,
        "max_position_embeddings": 262144, "num_target_layers": 32, "block_size": 16, "use_sliding_window": False,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
        **changes,
    }  # fmt: skip


def test_a_released_config_reads_as_what_it_says():
    config = dflash.DFlashConfig.from_json(released())
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (16, 248070, 1e7)
    assert config.target_layer_ids == (1, 8, 15, 22, 29)
    assert config.layer_types == (FULL,) * 5
    assert config.rope_scaling is None
    written = json.loads(json.dumps(config.to_json()))
    for key in released().keys() - {"dtype", "use_sliding_window"}:
        assert written[key] == released()[key], key


def test_a_nested_block_size_and_rope_parameters_are_read():
    nested = released(dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 2], "block_size": 10})
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    for key in ("block_size", "rope_theta"):
        del nested[key]
    config = dflash.DFlashConfig.from_json(nested)
    assert (config.block_size, config.rope_theta, config.rope_scaling) == (10, 5e5, None)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_scaled_positions_are_honoured_under_either_name(key, llama, tiny_config):
    scaling = {key: "linear", "factor": 4.0}
    config = dflash.DFlashConfig.from_json(released(rope_scaling=scaling))
    assert config.rope_scaling == scaling
    small = dataclasses.replace(tiny_config(llama), rope_scaling=scaling)
    x = mx.random.normal((1, 1, 9, 24), key=mx.random.key(1))
    plain, scaled = (dflash.DFlash(c)._rope for c in (tiny_config(llama), small))
    assert mx.allclose(scaled(x)[:, :, 4], plain(x[:, :, 4:5], offset=1)[:, :, 0], atol=1e-5).item()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"layer_types": (FULL,)}, "layer_types names 1"),
        ({"layer_types": (FULL, FULL, "linear_attention")}, "linear_attention"),
        ({"layer_types": (FULL, FULL, SLIDING)}, "sliding_window"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (0, 3)}, "the target's 3 layers"),
        ({"target_layer_ids": (-1,)}, "the target's 3 layers"),
        ({"mask_token_id": tiny.VOCABULARY}, "mask_token_id 311"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
    ],
)
def test_a_shape_that_cannot_draft_is_refused_by_name(llama, tiny_config, changes, named):
    with pytest.raises(UserError, match="DFlash drafter") as refusal:
        tiny_config(llama, **changes)
    assert named in str(refusal.value)


def test_a_drafter_takes_its_targets_shape_where_nothing_is_said(llama):
    options = configuration.DrafterConfig(num_hidden_layers=2, block_size=7, num_taps=1)
    config = dflash.config_for(llama, options)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (96, 160, tiny.VOCABULARY)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-6, 1e4, 512)
    assert (config.target_layer_ids, config.num_target_layers, config.block_size) == ((1,), 3, 7)
    assert config.mask_token_id == llama.spare_id()[0]
    assert (config.layer_types, config.sliding_window, config.input_embedding_scale) == ((FULL,) * 2, None, None)


def test_what_is_said_is_taken(llama):
    options = configuration.DrafterConfig(
        num_hidden_layers=2, block_size=6, target_layer_ids=[2, 0], intermediate_size=64, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, rope_theta=77.0, mask_token_id=9, layer_types=[FULL, SLIDING],
        sliding_window=13, is_causal=False,
    )  # fmt: skip
    config = dflash.config_for(llama, options)
    for field in dataclasses.fields(options):
        found = getattr(config, field.name, None)
        if field.name not in ("kind", "num_taps"):
            expected = getattr(options, field.name)
            assert found == (tuple(expected) if isinstance(expected, list) else expected), field.name


# Published sizes, composed from the shipped experiments against a stand-in for the target's configuration.


def hub_target(**settings):
    """What `config_for` asks of a target, without weights."""
    return types.SimpleNamespace(
        settings=settings,
        hidden_size=settings["hidden_size"],
        vocab_size=settings["vocab_size"],
        num_layers=settings["num_hidden_layers"],
        max_length=settings["max_position_embeddings"],
        embedding_scale=1.0,
    )


QWEN3_4B = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_5_4B = {
    "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e7},
    "vocab_size": 248320, "max_position_embeddings": 262144,
}  # fmt: skip


@pytest.mark.parametrize(
    ("experiment", "settings", "mask", "taps", "theta"),
    [
        ("dflash_qwen3_4b", QWEN3_4B, 151669, (1, 9, 17, 25, 33), 1e6),
        ("dflash_qwen3_5_4b", QWEN3_5_4B, 248070, (1, 8, 15, 22, 29), 1e7),
    ],
)
def test_the_shipped_recipes_have_the_released_shape(experiment, settings, mask, taps, theta):
    options = configuration.compose([f"+experiment={experiment}"]).drafter
    config = dflash.config_for(hub_target(**settings), options)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, mask, taps)
    assert (config.num_hidden_layers, config.intermediate_size, config.rope_theta) == (5, 9728, theta)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    drafter = dflash.DFlash(config)  # lazy: no array is made
    shapes = dict(tree_flatten(drafter.parameters()))
    assert len(shapes) == 5 * 11 + 3
    D, M, Q, KV, layers = 2560, 9728, 32 * 128, 8 * 128, 5
    by_hand = layers * (2 * D * Q + 2 * D * KV + 3 * D * M + 2 * D + 2 * 128) + len(taps) * D * D + 2 * D
    assert dflash.parameter_count(drafter) == by_hand == 537_427_200


def test_six_layers_and_eight_taps_have_the_released_count():
    """The six-layer release for Qwen3.5-4B has 69 tensors and 634,425,856 parameters, which an MLP of 9216 gives."""
    config = dflash.DFlashConfig.from_json(
        released(
            num_hidden_layers=6,
            intermediate_size=9216,
            dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
        )
    )
    drafter = dflash.DFlash(config)
    assert len(tree_flatten(drafter.parameters())) == 69
    assert dflash.parameter_count(drafter) == 634_425_856


# One block, two forms.


def test_the_training_form_is_the_decoding_form(llama, drafter):
    tokens = text_of(31)
    positions = np.array([[0, 1, 4, 13, 14, 26, 30]])  # the last blocks reach past the row's end
    found = training_form(drafter, llama, tokens[None], positions)
    for n, anchor in enumerate(positions[0]):
        expected = decode_form(drafter, llama, tokens, anchor)
        np.testing.assert_allclose(found[0, n], expected, atol=FLOAT32, rtol=0, err_msg=f"anchor {anchor}")


def test_packed_documents_draft_as_if_each_were_alone(llama, tiny_config, random_drafter):
    """Positions count within the packed row, but rotary attention sees only distances."""
    drafter = random_drafter(tiny_config(llama, **LAYERS["mixed"]))
    first, second = text_of(11, seed=3), text_of(14, seed=4)
    tokens = np.concatenate([first, second, np.zeros(4, int)])[None]
    documents = np.repeat([[7, 2, 0]], [11, 14, 4], axis=1)
    found = training_form(drafter, llama, tokens, np.array([[6, 10, 11, 19, 23]]), documents)[0]
    for n, (text, anchor) in enumerate([(first, 6), (first, 10), (second, 0), (second, 8), (second, 12)]):
        np.testing.assert_allclose(found[n], decode_form(drafter, llama, text, anchor), atol=FLOAT32, rtol=0)


def test_gemmas_scaled_embedding_reaches_both_forms(tiny_target, tiny_config, random_drafter):
    gemma = tiny_target("gemma3_text")
    options = configuration.DrafterConfig(num_hidden_layers=2, block_size=4)
    scale = dflash.config_for(gemma, options).input_embedding_scale
    assert scale == pytest.approx(96**0.5, rel=2e-3)
    assert dflash.config_for(gemma, options).to_json()["dflash_config"]["input_embedding_scale"] == scale
    drafter = random_drafter(tiny_config(gemma, input_embedding_scale=scale))
    block = drafter.noise(gemma, mx.array([[17]]), 5)
    table = np.array(gemma.backbone.embed_tokens.weight)
    expected = table[[17] + [tiny.SPECIAL.index("<|spare|>")] * 4] * 96**0.5
    np.testing.assert_allclose(np.array(block[0]), expected, rtol=5e-3, atol=1e-6)
    tokens = text_of(21)
    found = training_form(drafter, gemma, tokens[None], np.array([[5, 19]]))
    for n, anchor in enumerate((5, 19)):
        np.testing.assert_allclose(found[0, n], decode_form(drafter, gemma, tokens, anchor), atol=FLOAT32, rtol=0)


def test_a_checkpoints_own_scale_wins_over_the_targets(tiny_target, tiny_config, random_drafter):
    gemma = tiny_target("gemma3_text")
    drafter = random_drafter(tiny_config(gemma, input_embedding_scale=1.0))
    table = np.array(gemma.backbone.embed_tokens.weight)
    found = np.array(drafter.embed(gemma, mx.array([[17, 4]]))[0])
    np.testing.assert_allclose(found, table[[17, 4]], rtol=5e-3, atol=1e-6)


# What a block must not see.


def test_context_at_or_after_the_anchor_has_no_influence(llama, drafter):
    anchor, T, B, D = 13, 24, drafter.config.block_size, 96
    context = mx.random.normal((1, T, D), key=mx.random.key(1))
    rows = mx.random.normal((1, 2, B, D), key=mx.random.key(2))
    positions, documents = mx.array([[anchor, 20]]), mx.ones((1, T), mx.int32)

    def hidden(context, rows):
        return np.array(drafter.blocks(context, rows, positions, documents)[0, 0])

    later = context * (mx.arange(T) < anchor)[:, None] + 50 * (mx.arange(T) >= anchor)[:, None]
    np.testing.assert_array_equal(hidden(later, rows), hidden(context, rows))
    other = mx.concatenate([rows[:, :1], 3 * rows[:, 1:]], axis=1)
    np.testing.assert_array_equal(hidden(context, other), hidden(context, rows))
    near = context * (mx.arange(T) != anchor - 1)[:, None]
    assert np.abs(hidden(near, rows) - hidden(context, rows)).max() > 1e-2  # the row before the anchor does matter


def test_another_document_in_the_row_has_no_influence(llama, drafter):
    T, B, D = 24, drafter.config.block_size, 96
    context = mx.random.normal((1, T, D), key=mx.random.key(1))
    rows = mx.random.normal((1, 1, B, D), key=mx.random.key(2))
    documents = mx.array(np.repeat([[4, 9, 6]], [8, 10, 6], axis=1))
    outside = context * 7 * (documents != 9)[..., None] + context * (documents == 9)[..., None]
    one, other = (drafter.blocks(given, rows, mx.array([[12]]), documents) for given in (context, outside))
    np.testing.assert_array_equal(np.array(one), np.array(other))


def test_a_draft_leaves_the_cache_as_it_was(llama, drafter):
    tokens, cache = text_of(20), drafter.make_cache()
    drafter.extend(cache, context_of(drafter, llama, tokens))
    before = [np.array(array) for layer in cache.layers for array in layer.keys_and_values()]
    block = drafter.noise(llama, mx.array([[21]]), 5)
    first, second = np.array(drafter.draft(cache, block)), np.array(drafter.draft(cache, block))
    np.testing.assert_array_equal(first, second)
    assert cache.offset == 20
    for one, array in zip(before, (a for layer in cache.layers for a in layer.keys_and_values()), strict=True):
        np.testing.assert_array_equal(one, np.array(array))


# The same in NumPy.


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, position, theta):
    """Rotary position of one head's vector [d]: pairs (i, i + d/2) turn by position / theta^(2i/d)."""
    half = len(x) // 2
    angle = position / theta ** (np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])


def numpy_draft(config, weights, context, block):
    """Hidden [B,D] after the final norm, from fused context [n,D] and embedded block [B,D], in float64 loops."""
    n, d, eps = len(context), config.head_dim, config.rms_norm_eps
    hidden = block
    for i, kind in enumerate(config.layer_types):
        w = {name.removeprefix(f"layers.{i}."): v for name, v in weights.items() if name.startswith(f"layers.{i}.")}
        normed = norm(hidden, w["input_layernorm.weight"], eps)
        rows = np.concatenate([context, normed])
        keys = (rows @ w["self_attn.k_proj.weight"].T).reshape(len(rows), -1, d)
        values = (rows @ w["self_attn.v_proj.weight"].T).reshape(len(rows), -1, d)
        queries = (normed @ w["self_attn.q_proj.weight"].T).reshape(len(block), -1, d)
        mixed = np.zeros_like(queries)
        slides = kind == "sliding_attention"
        causal = slides if config.is_causal is None else config.is_causal
        for j, h in np.ndindex(queries.shape[:2]):
            g = h // (config.num_attention_heads // config.num_key_value_heads)
            query = rotate(norm(queries[j, h], w["self_attn.q_norm.weight"], eps), n + j, config.rope_theta)
            seen = [t for t in range(n) if not slides or n + j - t < config.sliding_window]
            seen += [n + k for k in range(len(block)) if k <= j or not causal]
            key = [rotate(norm(keys[t, g], w["self_attn.k_norm.weight"], eps), t, config.rope_theta) for t in seen]
            scores = np.array([query @ k for k in key]) / np.sqrt(d)
            weight = np.exp(scores - scores.max())
            mixed[j, h] = (weight / weight.sum()) @ values[seen, g]
        hidden = hidden + mixed.reshape(len(block), -1) @ w["self_attn.o_proj.weight"].T
        normed = norm(hidden, w["post_attention_layernorm.weight"], eps)
        gate = normed @ w["mlp.gate_proj.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (normed @ w["mlp.up_proj.weight"].T)
        hidden = hidden + gated @ w["mlp.down_proj.weight"].T
    return norm(hidden, weights["norm.weight"], eps)


def test_a_draft_is_the_papers_formula_in_numpy(llama, drafter):
    config, tokens, anchor = drafter.config, text_of(19), 15
    weights = {name: np.array(value, np.float64) for name, value in tree_flatten(drafter.parameters())}
    outputs = llama.forward(mx.array(tokens)[None], taps=(0, 2)).taps
    taps = np.concatenate([np.array(tap[0, :anchor], np.float64) for tap in outputs], axis=-1)
    context = norm(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"], config.rms_norm_eps)
    table = np.array(llama.model.model.embed_tokens.weight, np.float64)
    block = table[[tokens[anchor], *[config.mask_token_id] * 4]]
    expected = numpy_draft(config, weights, context, block)
    np.testing.assert_allclose(decode_form(drafter, llama, tokens, anchor), expected, atol=FLOAT32, rtol=0)


# First weights.


def test_first_weights_depend_on_the_seed_and_the_name_alone(llama, tiny_config):
    def first(seed, **changes):
        drafter = dflash.initialise(dflash.DFlash(tiny_config(llama, **changes)), llama, seed)
        return {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}

    one, again, other, deeper = first(3), first(3), first(4), first(3, num_hidden_layers=4, layer_types=(FULL,) * 4)
    for name, value in one.items():
        np.testing.assert_array_equal(value, again[name])
        if value.ndim == 2:
            assert not np.array_equal(value, other[name])
    np.testing.assert_array_equal(one["layers.1.mlp.up_proj.weight"], deeper["layers.1.mlp.up_proj.weight"])


def test_first_scores_are_near_uniform(llama, tiny_config):
    drafter = dflash.initialise(dflash.DFlash(tiny_config(llama)), llama, 0)
    hidden = training_form(drafter, llama, text_of(30)[None], np.array([[3, 9, 20]]))
    scores = np.array(llama.score(mx.array(hidden)))
    assert 0.3 < scores.std() < 1.5
