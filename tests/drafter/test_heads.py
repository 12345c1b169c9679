"""Heads: against NumPy, training form against decoding form, and what a drafter is without them.

R rows, N blocks, B block, K slots, D hidden, V vocabulary, r rank.
"""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import checkpoint, dflash, heads, manifest
from kernels.errors import UserError
from oracles import distribution

RANK, K, V, D = 7, 5, 37, 11
FLOAT32 = 1e-4  # logits of size 10 from hidden states good to 5e-5


@pytest.fixture(scope="module")
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def headed(llama, tiny_config, random_drafter):
    """A random drafter with both heads, one of its layers sliding."""
    layers = {"num_hidden_layers": 2, "layer_types": (dflash.SLIDING, dflash.FULL), "sliding_window": 9}
    return random_drafter(tiny_config(llama, **layers, markov_rank=RANK, confidence_head=True))


@pytest.fixture
def markov():
    """A MarkovHead of V ids whose weights are of size 1, and its (W1, W2) in float64."""
    head = heads.MarkovHead(V, RANK)
    head.update({name: {"weight": mx.random.normal((V, RANK), key=mx.random.key(seed))}
                 for seed, name in enumerate(("markov_w1", "markov_w2"))})  # fmt: skip
    return head, *(np.array(layer.weight, np.float64) for layer in (head.markov_w1, head.markov_w2))


# Alone.


def test_the_markov_bias_is_w2_times_the_row_of_the_token_before(markov):
    head, w1, w2 = markov
    generator = np.random.default_rng(1)
    logits, previous = generator.normal(size=(2, 3, V)), generator.integers(0, V, (2, 3))
    found = np.array(head(mx.array(logits, mx.float32), mx.array(previous)))
    for at in np.ndindex(2, 3):
        np.testing.assert_allclose(found[at], logits[at] + w2 @ w1[previous[at]], atol=1e-5)


def test_slots_are_chosen_left_to_right_each_after_the_one_before(markov):
    head, w1, w2 = markov
    generator = np.random.default_rng(2)
    logits, pending = generator.normal(size=(2, 3, K, V)), generator.integers(0, V, (2, 3))
    found = heads.left_to_right(head, mx.array(logits, mx.float32), mx.array(pending))
    for at in np.ndindex(2, 3):
        before = pending[at]
        for k in range(K):
            biased = logits[at][k] + w2 @ w1[before]
            np.testing.assert_allclose(np.array(found.logits)[at][k], biased, atol=1e-5)
            before = biased.argmax()
            assert np.array(found.tokens)[at][k] == before
    base = logits.argmax(-1)
    assert (np.array(found.tokens) != base).mean() > 0.5  # the bias matters here


def test_without_a_markov_head_every_slot_is_the_argmax():
    logits = mx.random.normal((2, K, V), key=mx.random.key(3))
    found = heads.left_to_right(None, logits, mx.array([4, 5]))
    assert found.tokens.tolist() == np.array(logits).argmax(-1).tolist()
    assert found.logits is logits


def test_a_sampled_block_was_drawn_from_the_distribution_that_it_reports(markov):
    """Pairs of the first two slots: what 40,000 draws count, against the product of the two reported q."""
    head = markov[0]
    small = heads.MarkovHead(5, RANK)
    small.update({name: {"weight": 0.7 * head[name]["weight"][:5]} for name in ("markov_w1", "markov_w2")})
    base, count, keys = mx.random.normal((2, 5), key=mx.random.key(4)), 40000, iter(mx.random.split(mx.random.key(5)))
    draws = heads.left_to_right(
        small,
        mx.broadcast_to(base, (count, 2, 5)),
        mx.full(count, 3),
        lambda logits: mx.random.categorical(logits, key=next(keys)),
    )
    tokens, logits = np.array(draws.tokens), np.array(draws.logits, np.float64)
    seconds = []
    for first in range(5):
        own = np.flatnonzero(tokens[:, 0] == first)
        assert len(own) > 100
        assert (logits[own, 1] == logits[own[0], 1]).all()  # one distribution after each first token
        q = distribution(logits[0, 0])[first] * distribution(logits[own[0], 1])
        share = np.bincount(tokens[own, 1], minlength=5) / count
        np.testing.assert_allclose(share, q, atol=5 * np.sqrt(0.25 / count))
        seconds.append(distribution(logits[own[0], 1]))
    assert np.ptp(seconds, axis=0).max() > 0.2  # they do differ by the first


def test_preceding_tokens_are_the_pending_one_and_all_but_the_last():
    found = heads.preceding(mx.array([9, 8]), mx.array([[1, 2, 3], [4, 5, 6]]))
    assert found.tolist() == [[9, 1, 2], [8, 4, 5]]


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_a_linear_reading_that_teaches_nothing(markov, with_markov):
    head, w1, _ = markov
    before = head if with_markov else None
    reader = heads.ConfidenceHead(D + RANK * with_markov)
    hidden, previous = mx.random.normal((2, K, D), key=mx.random.key(6)), mx.array([[1, 2, 3, 4, 5], [9, 9, 0, 36, 1]])
    features = np.array(hidden, np.float64)
    if with_markov:
        features = np.concatenate([features, w1[np.array(previous)]], axis=-1)
    weight, bias = (np.array(value, np.float64) for value in (reader.proj.weight, reader.proj.bias))
    found = reader(hidden, before, previous)
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), features @ weight[0] + bias[0], atol=1e-5)
    assert mx.all(mx.grad(lambda hidden: mx.sum(reader(hidden, before, previous)))(hidden) == 0).item()
    if with_markov:
        slopes = nn.value_and_grad(head, lambda head: mx.sum(reader(hidden, head, previous)))(head)[1]
        assert all(mx.all(slope == 0).item() for _, slope in tree_flatten(slopes))


# In a drafter.


def text_of(length, seed=2):
    return np.random.default_rng(seed).integers(5, tiny.VOCABULARY, length)


def drawn_in_decoding_form(drafter, target, tokens, anchor, choose):
    """`heads.Drawn` and confidence scores [K] of the block at `anchor`, its context extended row by row."""
    cache = drafter.make_cache()
    taps = target.forward(mx.array(tokens[:anchor])[None], taps=drafter.config.target_layer_ids).taps
    context = drafter.fuse(taps)
    for row in range(anchor):
        drafter.extend(cache, context[:, row : row + 1])
    pending = mx.array(int(tokens[anchor]))
    hidden = drafter.draft(cache, drafter.noise(target, pending[None, None], drafter.config.block_size))[0, 1:]
    drawn = drafter.propose(target, hidden, pending, choose)
    return drawn, drafter.confidence(hidden, heads.preceding(pending, drawn.tokens))


@pytest.mark.parametrize("sampled", [False, True])
def test_the_training_form_scores_what_the_decoding_form_drew(llama, headed, sampled):
    """Teacher-forced on the tokens that were drafted, training sees the very logits that they were drafted from."""
    tokens, B = text_of(23), headed.config.block_size
    positions, keys = np.array([[1, 9, 17]]), iter(mx.random.split(mx.random.key(8), 3 * B))
    choose = (lambda logits: mx.random.categorical(logits, key=next(keys))) if sampled else heads.greedy
    documents = mx.ones((1, 23), mx.int32)
    taps = llama.forward_packed(mx.array(tokens)[None], documents, headed.config.target_layer_ids).taps
    rows = headed.noise(llama, mx.array(tokens[positions[0]])[:, None], B)[None]
    blocks = headed.blocks(headed.fuse(taps), rows, mx.array(positions), documents)[0]
    for n, anchor in enumerate(positions[0]):
        drawn, confidence = drawn_in_decoding_form(headed, llama, tokens, anchor, choose)
        previous = mx.array([int(tokens[anchor]), *drawn.tokens.tolist()[:-1]])
        logits = headed.score(llama, blocks[n, 1:], previous, differentiable=True)
        np.testing.assert_allclose(np.array(logits), np.array(drawn.logits), atol=FLOAT32, rtol=0)
        scores = headed.confidence(blocks[n, 1:], previous)
        np.testing.assert_allclose(np.array(scores), np.array(confidence), atol=FLOAT32, rtol=0)
        if not sampled:
            assert drawn.tokens.tolist() == np.array(logits).argmax(-1).tolist()


def test_new_heads_change_nothing_yet(llama, tiny_config):
    plain, headed = (
        dflash.initialise(dflash.DFlash(tiny_config(llama, **own)), llama, 3)
        for own in ({}, {"markov_rank": RANK, "confidence_head": True})
    )
    own = dict(tree_flatten(plain.parameters()))
    for name, value in tree_flatten(headed.parameters()):
        if name in own:
            np.testing.assert_array_equal(np.array(value), np.array(own[name]))
    hidden, pending = mx.random.normal((4, 96), key=mx.random.key(1)), mx.array(17)
    one, other = (drafter.propose(llama, hidden, pending) for drafter in (plain, headed))
    np.testing.assert_array_equal(np.array(one.logits), np.array(other.logits))
    assert headed.confidence(hidden, one.tokens).tolist() == [0] * 4  # a sigmoid of 0: even odds
    assert mx.abs(headed.markov_head.markov_w1.weight).max().item() > 0  # or W2 would get no gradient


# On disk.


def saved(folder, drafter, target):
    checkpoint.save_drafter(folder, drafter)
    manifest.write(folder, kind="checkpoint", target=target.identity(), argv=[])
    return checkpoint.load_drafter(folder, target)


def test_heads_come_back_under_dsparks_names(llama, headed, tmp_path):
    found = saved(tmp_path, headed, llama).drafter
    assert found.config == headed.config
    expected = dict(tree_flatten(headed.parameters()))
    for name, value in tree_flatten(found.parameters()):
        np.testing.assert_array_equal(np.array(value), np.array(expected[name]))
    shapes = {name: value.shape for name, value in mx.load(str(tmp_path / "model.safetensors")).items()}
    assert {name: shape for name, shape in shapes.items() if name.startswith(heads.NAMES)} == {
        "markov_head.markov_w1.weight": (tiny.VOCABULARY, RANK),
        "markov_head.markov_w2.weight": (tiny.VOCABULARY, RANK),
        "confidence_head.proj.weight": (1, 96 + RANK),
        "confidence_head.proj.bias": (1,),
    }


def test_a_dflash_loader_is_told_and_a_drafter_without_heads_is_written_as_ever(llama, headed, tiny_config):
    written = json.loads(json.dumps(headed.config.to_json()))
    assert written["architectures"] == ["ForedraftHeadsDraftModel"]
    assert written["foredraft_heads"] == {"markov_rank": RANK, "confidence_head": True}
    assert dflash.DFlashConfig.from_json(written) == headed.config
    plain = tiny_config(llama).to_json()
    assert plain["architectures"] == ["DFlashDraftModel"]
    assert not any("markov" in key or "head" in key.split("_")[-1:] for key in (*plain, *plain["dflash_config"]))
    assert "foredraft_heads" not in plain


def test_a_dspark_checkpoint_is_not_taken_for_one_of_ours(llama, headed, tmp_path):
    """Its slots predict one token further, and its configuration names its heads at the top level."""
    saved(tmp_path, headed, llama)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["foredraft_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"markov_rank": RANK, "confidence_head": True}))
    with pytest.raises(UserError, match="unexpected confidence_head"):
        (tmp_path / "manifest.json").unlink()
        checkpoint.load_drafter(tmp_path, llama, allow_mismatch=True)


def test_quantised_heads_load(llama, tiny_config, random_drafter, tmp_path):
    drafter = random_drafter(tiny_config(llama, markov_rank=32, confidence_head=True))
    saved(tmp_path / "dense", drafter, llama)
    checkpoint.save_quantised(tmp_path / "dense", tmp_path / "small", 8, 32)
    manifest.write(tmp_path / "small", kind="release", target=llama.identity(), argv=[])
    found = checkpoint.load_drafter(tmp_path / "small", llama).drafter.markov_head.markov_w2.weight
    np.testing.assert_allclose(np.array(found), np.array(drafter.markov_head.markov_w2.weight), atol=0.05)


def test_a_drafter_without_heads_can_be_given_them(llama, tiny_config, random_drafter, tmp_path):
    loaded = saved(tmp_path, random_drafter(tiny_config(llama)), llama)
    headed = random_drafter(tiny_config(llama, markov_rank=RANK), seed=9)
    first = np.array(headed.markov_head.markov_w1.weight)
    checkpoint.copy_weights(loaded, headed)
    np.testing.assert_array_equal(np.array(headed.markov_head.markov_w1.weight), first)
    np.testing.assert_array_equal(np.array(headed.fc.weight), np.array(loaded.drafter.fc.weight))


def test_heads_are_not_dropped_unasked(llama, headed, tiny_config, random_drafter, tmp_path):
    loaded = saved(tmp_path, headed, llama)
    plain = random_drafter(tiny_config(llama, num_hidden_layers=2, layer_types=("full_attention",) * 2))
    with pytest.raises(UserError, match="unexpected confidence_head"):
        checkpoint.copy_weights(loaded, plain)


def test_a_rank_that_is_none_is_refused(llama, tiny_config):
    with pytest.raises(UserError, match="markov_rank is 0"):
        tiny_config(llama, markov_rank=0)
