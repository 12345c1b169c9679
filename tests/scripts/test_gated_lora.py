"""A gated LoRA by the commands: trained, continued, measured against plain decoding, released, and used by itself."""

import json
import sys

import manifest as manifest_command
import mlx.core as mx
import numpy as np
import pytest
import spec_decode
import train
from mlx.utils import tree_flatten

import edge
import tiny
from drafter import checkpoint
from drafter import target as targets

pytestmark = pytest.mark.usefixtures("quiet")
STEPS = 6
SETTINGS = {
    "name": "small", "drafter.kind": "gated_lora", "drafter.block_size": 4, "adapter.rank": 3,
    "data.kind": "text", "data.row_tokens": 32, "data.validation_fraction": 0.2,
    "loss.name": "total_variation", "loss.weights": "uniform", "loss.rows_per_chunk": 64,
    "trainer.steps": STEPS, "trainer.rows_per_step": 2, "trainer.anchors_per_row": 4,
    "trainer.validate_every": 6, "trainer.validation_rows": 2, "trainer.save_every": 3,
    "trainer.walk_documents": 2, "trainer.walk_tokens": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: folder} of a small target of pure attention, and of a hybrid."""
    tmp = tmp_path_factory.mktemp("targets")
    return {kind: tiny.folder(kind, tmp, chat_template=True) for kind in ("llama", "qwen3_5")}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of about 700 tokens, no two rows of which are alike."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(np.random.default_rng(1).choice(" ".join(tiny.TEXT).split(), 300)))
    return path


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a script's main as a shell would: (exit code, closing line, standard output before it)."""

    def call(main, argv):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, argv)])
        with pytest.raises(SystemExit) as leaving:
            edge.run(main)
        out, err = capsys.readouterr()
        *before, last = out.rstrip("\n").split("\n")
        return leaving.value.code, json.loads(last), "\n".join(before) + err

    return call


@pytest.fixture
def trained(command, folders, text, tmp_path):
    """make(kind, run, **changes): the closing line of a run; changes are KEY=VALUE with __ for the dot."""

    def make(kind, run, *extra, **changes):
        own = {"target.source": folders[kind], "data.sources": f"[{text}]", "out": tmp_path / "runs", "run": run}
        own = SETTINGS | own | {key.replace("__", "."): value for key, value in changes.items()}
        code, closing, said = command(train.main, [*(f"{key}={value}" for key, value in own.items()), *extra])
        assert code == 0, said
        return closing

    return make


def weights(folder, target):
    """{name: NumPy array} of a checkpoint's adapter."""
    loaded = checkpoint.load_drafter(folder, target)
    return {name: np.array(value) for name, value in tree_flatten(loaded.drafter.parameters())}


@pytest.mark.parametrize(("kind", "layout"), [("llama", "suffix"), ("qwen3_5", "prefix")])
def test_a_run_is_trained_continued_to_the_same_bits_and_measured(trained, command, folders, tmp_path, kind, layout):
    changes = {"adapter__layout": layout, "adapter__curriculum": "[2,4]", "optimizer__learning_rate": 0.01}
    whole = trained(kind, "whole", **changes)
    assert whole["status"] == "done"
    assert whole["best"]["walked_tau"] >= 2
    assert whole["best"]["walked_tokens_per_forward"] == pytest.approx(whole["best"]["walked_tau"] / 2, abs=1e-3)
    run = tmp_path / "runs" / "small" / "whole"
    target = targets.load(str(folders[kind]), dtype="float32")
    final = weights(run / f"step-{STEPS}", target)
    assert max(np.abs(value).max() for name, value in final.items() if name.endswith("lora_b")) > 1e-3

    if kind == "llama":
        for name in ("latest", "best"):
            (run / name).unlink()
        (run / f"step-{STEPS}").rename(tmp_path / "aside")
        assert trained(kind, "whole", resume="auto", **changes)["status"] == "done"
        assert all(np.array_equal(value, final[name]) for name, value in weights(run, target).items())

    out = tmp_path / "result.json"
    asked = ["ksweep", "--target", folders[kind], "--adapter", run, "--dtype", "float32", "--limit", 2, "--repeats", 1]
    sizes = (1, 4) if kind == "llama" else (4,)
    asked += ["--max-tokens", 9, "--warmup", 0, "--block-sizes", ",".join(map(str, sizes)), "--out", out]
    kept = command(spec_decode.main, [*asked, "--changes", "keep", "--tie-guard", 1])
    assert kept[0] == 2
    assert "draft without keep" in kept[1]["error"]
    asked += ["--changes", "keep,refine2"]
    code, closing, said = command(spec_decode.main, asked)
    assert code == 0, said
    result = json.loads(out.read_text())
    arms = {arm["name"]: arm for arm in result["arms"] if arm["kind"] == "gated_lora"}
    assert list(arms) == [f"gated_lora-{B}{way}" for B in sizes for way in ("", "-keep", "-refine2")]
    assert all(arm["identical"] == 2 and not any(arm["divergences"].values()) for arm in arms.values())
    assert arms["gated_lora-4-refine2"]["tokens_per_forward"] < arms["gated_lora-4"]["tokens_per_forward"]
    assert result["drafter"]["kind"] == "gated_lora"
    assert closing["best"] in arms


def test_a_release_is_narrow_describes_itself_and_can_be_used_alone(trained, command, folders, tmp_path):
    trained("llama", "one", trainer__steps=3)
    run, out = tmp_path / "runs" / "small" / "one", tmp_path / "released"
    assert command(manifest_command.main, ["release", run, "--bits", 16, "--out", out])[0] == 0
    card = (out / "README.md").read_text()
    assert "A gated LoRA for" in card
    assert "proposes\n4 tokens" in card
    alone = tmp_path / "adapter.safetensors"
    alone.write_bytes((out / "model.safetensors").read_bytes())
    assert {str(value.dtype) for value in mx.load(str(alone)).values()} == {"mlx.core.bfloat16"}
    for path in (out, alone):
        asked = [
            "generate",
            "--target",
            folders["llama"],
            "--adapter",
            path,
            "--prompt",
            "the river",
            "--max-tokens",
            5,
        ]
        code, closing, said = command(spec_decode.main, asked)
        assert code == 0, said
        assert closing["tau"] >= 1
    code, _, said = command(manifest_command.main, ["release", run, "--bits", 8, "--out", tmp_path / "eight"])
    assert code == 2
    assert "16 bits" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter__kind": "lora"}, "dflash or gated_lora"),
        ({"adapter__curriculum": "[4,2]"}, "4 the last"),
        ({"adapter__curriculum": "[1,4]"}, "sizes from 2"),
        ({"adapter__layout": "suffix", "adapter__causal": "false"}, "prefix where adapter.causal is false"),
        ({"adapter__corruption": "half"}, "all, rate or none"),
        ({"adapter__targets": "[delta]"}, "no linear layer 'delta'"),
        ({"features__mode": "cached"}, "online for a gated LoRA"),
        ({"drafter__markov_rank": "4"}, "none for a gated LoRA"),
        ({"drafter__confidence_head": "true"}, "false for a gated LoRA"),
    ],
)
def test_a_configuration_that_cannot_run_is_one_line(command, folders, text, tmp_path, changes, message):
    own = {"target.source": folders["llama"], "data.sources": f"[{text}]", "out": tmp_path / "runs", "run": "bad"}
    own = SETTINGS | own | {key.replace("__", "."): value for key, value in changes.items()}
    code, closing, said = command(train.main, [f"{key}={value}" for key, value in own.items()])
    assert code == 2
    assert message in said
    assert not (tmp_path / "runs").exists()


def test_a_drafter_is_taken_to_other_weights_and_refused_where_only_a_full_one_will_do(
    trained, command, folders, tmp_path
):
    trained("llama", "one", trainer__steps=2)
    run, out = tmp_path / "runs" / "small" / "one", tmp_path / "result.json"
    asked = ["--target", folders["llama"], "--adapter", run, "--dtype", "float32", "--smoke", "--out", out]
    other = tiny.folder("llama", tmp_path, chat_template=True, seed=9)
    code, closing, said = command(spec_decode.main, ["decompose", *asked, "--variant", other, "--block-size", 5])
    assert code == 0, said
    arms = json.loads(out.read_text())["arms"]
    assert [arm["name"] for arm in arms if arm["kind"] == "gated_lora"] == ["gated_lora-5"] * 2
    assert all(arm["identical"] == arm["prompts"] for arm in arms if arm["kind"] == "gated_lora")
    for name in ("controls", "adaptive", "staged"):
        code, closing, said = command(spec_decode.main, [name, *asked])
        assert code == 2
        assert f"{name} takes a full drafter" in closing["error"]


def test_layouts_are_measured_on_the_same_windows(command, folders, tmp_path):
    out = tmp_path / "layouts.json"
    asked = ["layouts", "--target", folders["qwen3_5"], "--window", 40, "--rows", 2, "--anchors", "3,8", "--rank", 2]
    code, closing, said = command(spec_decode.main, [*asked, "--rounds", 2, "--out", out])
    assert code == 0, said
    found = json.loads(out.read_text())["layouts"]
    assert list(found) == ["suffix", "prefix-3", "prefix-8"] == list(closing["over_suffix"])
    assert found["suffix"]["supervised_rows"] == 2 * 3
    assert found["prefix-3"]["supervised_rows"] > 2 * 2 * 3
    assert found["suffix"]["over_suffix"] == 1
    for one in found.values():
        assert one["rows_per_second"] == pytest.approx(one["supervised_rows"] / one["step_seconds"])
    code, again, shown = command(spec_decode.main, ["report", out, "--out", tmp_path / "tables"])
    assert code == 0 and again["changed"] == {} and "prefix-8" in shown
