"""The training step's cost on a tiny drafter: what is compared is one step, and what is counted is what it says."""

import dataclasses
import json
import math
import sys

import mlx.core as mx
import numpy as np
import pytest
import time_training
from mlx.utils import tree_flatten

import decode.lab
from decode.lab import record, report
from decode.lab import training_cost as costs
from drafter import config, shapes

SHAPE = costs.Shape(rows=2, row_tokens=37, blocks=3, rows_per_chunk=7)
DRAFTER = config.DrafterConfig(
    num_hidden_layers=2, block_size=5, num_taps=3, intermediate_size=40, head_dim=24, mask_token_id=3
)
SMALL = {
    "num_hidden_layers": 6, "hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 211, "rope_theta": 3e3,
}  # fmt: skip


@pytest.fixture
def setup():
    target = shapes.build("shape:smollm2_135m", dtype="float32", **SMALL)
    return costs.set_up(target, DRAFTER, SHAPE, 20)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_the_plain_pytorch_step_is_ours(setup, torch):
    """Loss and weights of three clipped steps with decay, in float32."""
    options = dataclasses.replace(setup.options, weight_decay=0.1, warmup_fraction=0.2, max_gradient_norm=0.5)
    setup = dataclasses.replace(setup, options=options)
    ours, plain = costs.arms(setup, ("foredraft", "torch"))[0]
    for number in range(3):
        assert ours.run(number, 1) == pytest.approx(plain.run(number, 1), rel=1e-5)
    first = dict(tree_flatten(setup.drafter.parameters()))
    for name, value in tree_flatten(ours.trainer.parameters):
        other = plain.plain.weights[name].detach().numpy()
        np.testing.assert_allclose(np.array(value), other, atol=1e-5, rtol=0, err_msg=name)
        moved = np.abs(np.array(value) - np.array(first[name])).mean()
        assert moved > 1e-4, name  # so a step that was not taken, or taken without a sign, would be seen


def test_the_mask_of_the_plain_step_is_the_rule(torch):
    from decode.lab import plain_torch

    positions, documents = torch.tensor([[2, 5]]), torch.tensor([[1, 1, 1, 1, 2, 2, 2]])
    seen = plain_torch.mask(positions, documents, 2)[0, 0].int().tolist()
    assert seen == [
        [1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1],
    ]


def test_a_compiled_step_is_the_step(setup):
    """One small piece; the other takes a C++ compiler minutes and is compared where the machine has a GPU."""
    arms = costs.arms(setup, ("foredraft", "foredraft update"))[0]
    assert arms[0].run(0, 2) == arms[1].run(0, 2)
    for one, other in zip(*(tree_flatten(arm.trainer.parameters) for arm in arms), strict=True):
        np.testing.assert_allclose(np.array(one[1]), np.array(other[1]), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_a_step_compiled_whole_is_the_step(setup):
    arms = costs.arms(setup, ("foredraft", "foredraft compiled"))[0]
    assert arms[0].run(0, 2) == pytest.approx(arms[1].run(0, 2), rel=1e-6)
    for one, other in zip(*(tree_flatten(arm.trainer.parameters) for arm in arms), strict=True):
        np.testing.assert_allclose(np.array(one[1]), np.array(other[1]), rtol=1e-5, atol=1e-6)


def test_without_pytorch_the_result_says_why(setup, monkeypatch):
    monkeypatch.delattr(decode.lab, "plain_torch", raising=False)  # as another test may have left it
    monkeypatch.delitem(sys.modules, "decode.lab.plain_torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    found = costs.measure(setup, SHAPE, ("foredraft", "torch"), 1, 1, 1)
    assert list(found["arms"]) == ["foredraft"]
    assert "PyTorch cannot be imported" in found["not_compared"]
    assert found["over_best"] == {}
    ((_, header, rows, notes),) = costs.tables(found)
    assert [len(row) for row in rows] == [len(header)] and "not compared: PyTorch cannot" in notes[-1]


def test_flop_are_those_of_the_products(setup):
    """Against a count over matrices: every trained one thrice for each row it meets, fc and head twice."""
    R, T, N, B, M = 2, 37, 3, 5, 24
    rows, context = R * N * B, R * T
    expected = {"layers": 0, "context": 0, "head": 2 * 2 * M * 211 * 96}
    for name, value in tree_flatten(setup.drafter.parameters()):
        if value.ndim == 2 and name == "fc.weight":
            expected["context"] += 2 * 2 * context * value.size
        elif value.ndim == 2:
            expected["layers"] += 3 * 2 * rows * value.size
            expected["context"] += 3 * 2 * context * value.size * (".k_proj" in name or ".v_proj" in name)
    found = costs.step_flops(setup.drafter.config, SHAPE, M)
    assert found.pop("attention") == 3 * 2 * 2 * 2 * rows * (T + B) * 6 * 24  # scores and mixing, in two layers
    assert found == expected


def test_every_block_fits_its_document_and_every_slot_counts(setup):
    drawn, documents = setup.batch.anchors, np.array(setup.batch.documents)
    assert drawn.supervised[:, :, 1:].all()
    assert not drawn.supervised[:, :, 0].any()
    for row, positions in enumerate(drawn.positions):
        for place in positions:
            assert len(set(documents[row, place : place + 5])) == 1
    assert set(documents[0]) == {1, 2}


def test_runs_alternate_and_each_begins_where_the_last_one_ended():
    calls, said = [], []

    class Arm:
        def __init__(self, name):
            self.name = name

        def run(self, first, count):
            calls.append((self.name, first, count))
            return 1.5

    found = costs.compare([Arm("a"), Arm("b")], 4, 2, 3, said.append)
    assert said == ["a: first step 0.0 s", "b: first step 0.0 s"]
    assert calls == [
        ("a", 0, 1), ("b", 0, 1), ("a", 1, 3), ("b", 1, 3), ("a", 4, 4), ("b", 4, 4), ("b", 8, 4), ("a", 8, 4),
    ]  # fmt: skip
    assert len(found["a"]["runs_s"]) == 2


def test_a_ratio_above_one_says_that_ours_is_faster():
    found = {"foredraft": {"runs_s": [2.0, 4.0, 5.0]}, "torch": {"runs_s": [4.0, 4.0, 20.0]}}
    assert costs.ratios(found, "foredraft")["torch"]["median"] == 2


def test_the_command_writes_a_result_and_closes_with_its_figures(tmp_path, monkeypatch, capsys):
    build = shapes.build
    monkeypatch.setattr(shapes, "build", lambda name, dtype: build(name, dtype, **SMALL))
    sizes = "--rows 1 --row-tokens 32 --blocks 2 --block-size 4 --layers 1 --rows-per-chunk 6 --steps 2 --rounds 2"
    closing = time_training.main([*sizes.split(), "--arms", "foredraft", "--out", str(tmp_path / "cost.json")])
    result = json.loads((tmp_path / "cost.json").read_text())
    found = result["training_cost"]
    assert (result["schema"], result["command"]) == ("foredraft.result/1", "training_cost")
    assert closing["status"] == "done"
    assert closing["tokens_s"] == found["arms"]["foredraft"]["tokens_s"]
    seconds = found["arms"]["foredraft"]["step_ms"] / 1e3
    assert found["arms"]["foredraft"]["tokens_s"] == pytest.approx(32 / seconds)
    assert found["arms"]["foredraft"]["block_tokens_s"] == pytest.approx(8 / seconds)
    assert found["arms"]["foredraft"]["supervised_slots_s"] == pytest.approx(6 / seconds)
    share = sum(found["flop_per_step"].values()) / seconds / found["peak_flop_s"]
    assert found["arms"]["foredraft"]["utilisation"] == pytest.approx(share)
    assert set(found["parts_ms"]) == {"target", "forward", "loss", "backward", "update"}
    assert "ms a step" in capsys.readouterr().out
    assert report.text(record.read(tmp_path / "cost.json")).count("foredraft") == 2  # its row, and in a note


@pytest.mark.parametrize("text", ["torch", "foredraft,foredraft", "foredraft,jax"])
def test_arms_that_are_none_are_refused(text):
    with pytest.raises(time_training.argparse.ArgumentTypeError, match=text):
        time_training.arm_names(text)


def test_the_peak_is_of_a_product_in_the_dtype(monkeypatch):
    monkeypatch.setitem(costs.PEAK_SIZE, "cpu", 64)
    seen = []
    monkeypatch.setattr(costs, "timed", lambda call: seen.append(call()) or 0.25)
    assert costs.peak("bfloat16") == 2 * 64**3 / 0.25
    assert (seen[0].shape, seen[0].dtype) == ((64, 64), mx.bfloat16)
    assert math.isfinite(mx.sum(seen[0]).item())
