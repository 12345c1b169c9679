"""Variants of a target: each is the arithmetic it says, a target of its own, and names its parent."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import manifest, variants
from drafter import target as targets
from kernels.errors import UserError

TEXTS = ["the river ran past the old mill and the miller counted sacks of grain " * 3]
TOWARDS, AWAY = ["the river ran", "the old mill stood"], ["def add(first, second):", "print(add(1, 2))"]
PLAN = {"steps": 6, "rank": 3, "learning_rate": 3e-3, "rows": 2, "row_tokens": 11, "seed": 5}


@pytest.fixture
def folder(tmp_path):
    return tiny.folder("llama", tmp_path, chat_template=True)


@pytest.fixture
def parent(folder):
    return variants.open_parent(str(folder), dtype="float32")


def weights(target):
    """{name: float64 array} of a target's parameters now."""
    return {name: np.array(value, np.float64) for name, value in tree_flatten(target.model.parameters())}


def prompt_logits(target, text="the river"):
    return np.array(target.model(mx.array([target.encode(text)])))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_variant_is_another_target_with_the_same_tokenizer(parent, tmp_path, bits):
    identity, before = parent.identity(), weights(parent)
    record = variants.quantised(parent, bits=bits, group_size=32)
    fingerprint = variants.save(parent, tmp_path / "made", record, parent=identity, argv=["quantised"])
    made = targets.load(str(tmp_path / "made"), dtype="float32")
    assert made.fingerprint == fingerprint != identity["fingerprint"]
    assert (made.tokenizer_sha256, made.template_sha256) == (identity["tokenizer_sha256"], identity["template_sha256"])
    name = "model.layers.1.mlp.down_proj"
    stored = dict(tree_flatten(made.model.parameters()))
    parts = [stored[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    error = np.abs(np.array(mx.dequantize(*parts, 32, bits)) - before[f"{name}.weight"]).max()
    step = np.abs(np.array(parts[1])).max()  # MLX moves a group's ends so that 0 is stored exactly: a step, not half
    assert 0 < error <= 1.01 * step


def test_the_manifest_names_the_parent_and_verifies(parent, tmp_path):
    identity = parent.identity()
    record = variants.quantised(parent, bits=4, group_size=32)
    variants.save(parent, tmp_path / "made", record, parent=identity, argv=["quantised", "--bits", "4"])
    found = manifest.verify(tmp_path / "made")
    assert found.kind == "variant" and found.extra["parent"] == identity and found.extra["bits"] == 4
    assert variants.parent_of(tmp_path / "made") == identity
    assert variants.parent_of(identity["source"]) is None
    with pytest.raises(UserError, match="already there"):
        variants.save(parent, tmp_path / "made", record, parent=identity)


def test_a_fine_tune_lowers_the_loss_and_is_all_in_the_weights(parent, tmp_path):
    identity, before = parent.identity(), weights(parent)
    record = variants.tuned(parent, TEXTS, **PLAN)
    assert record["last_loss"] < record["first_loss"]
    after = weights(parent)
    assert after.keys() == before.keys()  # no adapter is left
    change = after["model.layers.1.self_attn.q_proj.weight"] - before["model.layers.1.self_attn.q_proj.weight"]
    assert np.linalg.matrix_rank(change, tol=1e-4 * np.abs(change).max() * len(change)) == PLAN["rank"]
    np.testing.assert_array_equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    tuned = prompt_logits(parent)
    variants.save(parent, tmp_path / "made", record, parent=identity)
    made = targets.load(str(tmp_path / "made"), dtype="float32")
    np.testing.assert_array_equal(prompt_logits(made), tuned)


def test_a_fine_tune_is_the_same_again(folder):
    one, other = (variants.open_parent(str(folder), dtype="float32") for _ in range(2))
    assert variants.tuned(one, TEXTS, **PLAN) == variants.tuned(other, TEXTS, **PLAN)


def test_a_merge_lies_on_the_line_between(parent, tmp_path):
    other = targets.load(str(tiny.folder("llama", tmp_path, seed=2)), dtype="float32")
    ours, theirs = weights(parent), weights(other)
    record = variants.merged(parent, other, share=0.25)
    assert record["with"] == other.identity()
    for name, value in weights(parent).items():
        np.testing.assert_allclose(value, 0.75 * ours[name] + 0.25 * theirs[name], rtol=0, atol=1e-6)


def test_a_merge_of_two_shapes_names_the_tensor(parent, tmp_path):
    other = targets.load(str(tiny.folder("llama", tmp_path, intermediate_size=128)), dtype="float32")
    with pytest.raises(UserError, match=r"mlp\.down_proj\.weight is \(96, 160\) in .*\(96, 128\)"):
        variants.merged(parent, other, share=0.5)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "lfm2"])
def test_an_ablated_direction_is_gone_from_every_layer(kind, tmp_path):
    target = variants.open_parent(str(tiny.folder(kind, tmp_path)), dtype="float32")
    layer = 1
    outputs = lambda text: np.array(target.forward(mx.array([target.encode(text)]), taps=(layer,)).taps[0][0, -1])
    means = [np.mean([outputs(text) for text in texts], axis=0, dtype=np.float64) for texts in (TOWARDS, AWAY)]
    direction = (means[0] - means[1]) / np.linalg.norm(means[0] - means[1])
    record = variants.ablated(target, TOWARDS, AWAY, layer=layer)
    taps = target.forward(mx.array([target.encode("a small model")]), taps=tuple(range(target.num_layers))).taps
    for tap in taps:
        rows = np.array(tap[0], np.float64)
        assert np.abs(rows @ direction).max() < 1e-4 * np.linalg.norm(rows, axis=-1).max()
    assert record["layer"] == layer and record["left"] < 1e-4


def test_only_the_direction_is_taken_out(parent):
    before = weights(parent)
    variants.ablated(parent, TOWARDS, AWAY)
    after = weights(parent)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.2.self_attn.o_proj.weight"):
        assert np.linalg.matrix_rank(after[name] - before[name], tol=1e-4) == 1
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"):
        np.testing.assert_array_equal(after[name], before[name])


@pytest.mark.parametrize(
    ("towards", "away", "layer", "words"),
    [(TOWARDS, TOWARDS, None, "same mean activation"), (TOWARDS, AWAY, 3, "layer 3: .*layers 0 to 2")],
)
def test_a_direction_that_cannot_be_told_is_refused(parent, towards, away, layer, words):
    with pytest.raises(UserError, match=words):
        variants.ablated(parent, towards, away, layer=layer)


def test_norms_after_the_writers_bring_the_direction_back_and_that_is_noticed(tmp_path):
    target = variants.open_parent(str(tiny.folder("gemma2", tmp_path)), dtype="float32")
    with pytest.raises(UserError, match="still lies along the direction"):
        variants.ablated(target, TOWARDS, AWAY)


def test_a_quantised_parent_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="quantised already"):
        variants.open_parent(str(tiny.quantised(folder, tmp_path)), dtype="float32")


def test_groups_wider_than_every_row_are_refused(tmp_path):
    narrow = tiny.folder("llama", tmp_path, num_attention_heads=3, num_key_value_heads=1)  # rows of 96 and 160
    parent = variants.open_parent(str(narrow), dtype="float32")
    with pytest.raises(UserError, match="whole groups of 128"):
        variants.quantised(parent, bits=4, group_size=128)


def test_a_failed_save_leaves_nothing(parent, tmp_path, monkeypatch):
    identity = parent.identity()
    monkeypatch.setattr(shutil, "copyfile", lambda *given: (_ for _ in ()).throw(OSError(28, "full")))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError):
        variants.save(parent, tmp_path / "made", {"recipe": "none"}, parent=identity)
    assert sorted(tmp_path.iterdir()) == before


def test_the_record_is_plain_json(parent, tmp_path):
    record = variants.ablated(parent, TOWARDS, AWAY)
    variants.save(parent, tmp_path / "made", record, parent=parent.identity())
    assert json.loads((tmp_path / "made" / "manifest.json").read_text())["extra"]["recipe"] == "ablated"
