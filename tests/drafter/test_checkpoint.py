"""Drafters on disk: round trips, what a path means, crashes, and what is refused by name."""

import json
import os
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from drafter import checkpoint, dflash, manifest
from kernels.errors import UserError

ARRAYS = {"parameters.norm.weight": [1.5, -2.0], "optimizer.step": [7.0]}


@pytest.fixture(scope="module")
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(llama, tiny_config, random_drafter):
    """Two layers, one of them sliding; every matrix's inputs divide by 32 so that it can be quantised."""
    config = tiny_config(llama, num_hidden_layers=2, layer_types=(dflash.FULL, dflash.SLIDING), sliding_window=9)
    return random_drafter(config)


def weights_of(drafter):
    return {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}


def save(run, step, drafter, target, **changes):
    """A step as training saves it; changes: of the target's identity."""
    record = {"target": target.identity() | changes, "config_digest": None, "data": [], "argv": ["a=1"]}
    arrays = {name: mx.array(value) for name, value in ARRAYS.items()}
    return checkpoint.save_step(run, step, drafter, arrays, {"best": {"step": 3}}, **record)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def step(run, drafter, llama):
    """One saved step."""
    return save(run, 4, drafter, llama)


# Round trips.


def test_a_drafter_comes_back_as_it_was_saved(step, drafter, llama):
    loaded = checkpoint.load_drafter(step, llama)
    assert (loaded.drafter.config, loaded.kind, loaded.mismatch) == (drafter.config, "dflash", None)
    assert (loaded.folder, loaded.sha256) == (step, manifest.sha256_file(step / "model.safetensors"))
    expected = weights_of(drafter)
    assert weights_of(loaded.drafter).keys() == expected.keys()
    for name, value in weights_of(loaded.drafter).items():
        np.testing.assert_array_equal(value, expected[name])


def test_training_state_comes_back_as_it_was_saved(step):
    arrays, state = checkpoint.load_training(step)
    assert {name: value.tolist() for name, value in arrays.items()} == ARRAYS
    assert state == {"best": {"step": 3}, "step": 4}


def test_a_step_holds_the_released_layout_and_answers_for_every_file(step, drafter):
    record = manifest.verify(step)
    names = {"config.json", "model.safetensors", "training/state.json", "training/state.safetensors"}
    assert (set(record.files), record.kind, record.argv) == (names, "checkpoint", ["a=1"])
    stored = mx.load(str(step / "model.safetensors"))
    assert stored.keys() == weights_of(drafter).keys()
    assert json.loads((step / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_a_drafter_is_loaded_in_the_targets_dtype(step, tiny_target):
    loaded = checkpoint.load_drafter(step, tiny_target("llama", dtype="bfloat16"))
    assert {value.dtype for _, value in tree_flatten(loaded.drafter.parameters())} == {mx.bfloat16}


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_a_quantised_drafter_is_within_a_level_of_the_dense_one(tmp_path, step, drafter, llama, bits):
    folder = tmp_path / "small"
    checkpoint.save_quantised(step, folder, bits, 32)
    manifest.write(folder, kind="release", target=llama.identity(), argv=[])
    stored = mx.load(str(folder / "model.safetensors"))
    assert json.loads((folder / "config.json").read_text())["quantization"] == {"bits": bits, "group_size": 32}
    found, expected = weights_of(checkpoint.load_drafter(folder, llama).drafter), weights_of(drafter)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.ndim == 1:
            np.testing.assert_allclose(found[name], value, rtol=2**-8)  # stored in bf16
            continue
        assert stored[name].dtype == mx.uint32
        groups = value.reshape(len(value), -1, 32)
        # 2^bits levels lie between a group's extremes, shifted so that zero is one of them: off by a level at most.
        # Weights, scale and offset are bf16: three roundings of 2^-9, each of something as large as the extremes.
        level = (groups.max(-1) - groups.min(-1)) / (2**bits - 1)
        bound = level + 3 * 2**-9 * (groups.max(-1) - groups.min(-1))
        error = np.abs(found[name].reshape(groups.shape) - groups).max(-1)
        assert (error <= bound).all(), name
        assert np.median(error) > 0.2 * level.mean()  # it was quantised


def test_a_quantised_drafter_can_be_quantised_further(tmp_path, step, llama):
    """A released 8-bit drafter can be released again in 4 bits: it is expanded first."""
    checkpoint.save_quantised(step, tmp_path / "eight", 8, 32)
    checkpoint.save_quantised(tmp_path / "eight", tmp_path / "four", 4, 32)
    manifest.write(tmp_path / "four", kind="release", target=llama.identity(), argv=[])
    found = weights_of(checkpoint.load_drafter(tmp_path / "four", llama).drafter)
    dense = weights_of(checkpoint.load_drafter(step, llama).drafter)
    for name, value in dense.items():
        assert np.abs(found[name] - value).max() < 0.2 * np.abs(value).max(), name


# What a path means.


def test_a_path_is_a_folder_a_runs_best_step_or_a_weight_file(run, drafter, llama):
    first, second = save(run, 2, drafter, llama), save(run, 11, drafter, llama)
    assert checkpoint.resolve(run) == second  # no best yet: the latest
    checkpoint.point(run, "best", 2)
    assert checkpoint.resolve(run) == first
    assert checkpoint.resolve(str(second)) == second
    assert checkpoint.resolve(second / "model.safetensors") == second
    assert checkpoint.resolve(run / "latest").resolve() == second


def test_a_path_that_is_no_drafter_is_refused_by_name(run, tmp_path):
    for path, named in (
        (tmp_path / "none", "not found"),
        (tmp_path / "none.safetensors", "not found"),
        (run, "no best or latest step"),
    ):
        with pytest.raises(UserError, match=named) as refusal:
            checkpoint.resolve(path)
        assert str(path) in str(refusal.value)


def test_latest_and_best_point_at_steps_and_pruning_keeps_them(run, drafter, llama):
    for number in (1, 2, 9, 10, 11):
        save(run, number, drafter, llama)
    checkpoint.point(run, "best", 2)
    assert (os.readlink(run / "latest"), os.readlink(run / "best")) == ("step-11", "step-2")
    assert checkpoint.steps_of(run) == [1, 2, 9, 10, 11]  # by number, not by spelling
    checkpoint.prune(run, 2)
    assert checkpoint.steps_of(run) == [2, 10, 11]


def test_saving_a_step_again_replaces_it(run, drafter, llama, random_drafter):
    save(run, 4, drafter, llama)
    other = random_drafter(drafter.config, seed=1)
    folder = save(run, 4, other, llama)
    found = weights_of(checkpoint.load_drafter(folder, llama).drafter)
    np.testing.assert_array_equal(found["fc.weight"], weights_of(other)["fc.weight"])


# Crashes and damage.


def test_a_damaged_newest_step_is_passed_over(run, drafter, llama):
    assert checkpoint.newest_whole(run) is None
    assert checkpoint.newest_whole(run / "none") is None
    first, second = save(run, 2, drafter, llama), save(run, 11, drafter, llama)
    assert checkpoint.newest_whole(run) == second
    os.truncate(second / "training" / "state.safetensors", 20)
    assert checkpoint.newest_whole(run) == first
    (first / "manifest.json").unlink()
    assert checkpoint.newest_whole(run) is None


@pytest.mark.parametrize("failing", ["save_drafter", "save_arrays"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_crash_while_saving_leaves_the_earlier_step_and_nothing_else(
    run, drafter, llama, monkeypatch, failing, error
):
    first = save(run, 2, drafter, llama)
    whole = getattr(checkpoint, failing)

    def crash(path, *args, **kwargs):
        whole(path, *args, **kwargs)  # it fails after it has written
        raise error

    monkeypatch.setattr(checkpoint, failing, crash)
    with pytest.raises(type(error)):
        save(run, 3, drafter, llama)
    monkeypatch.undo()
    assert sorted(path.name for path in run.iterdir()) == ["latest", "step-2"]
    assert os.readlink(run / "latest") == "step-2"
    assert checkpoint.newest_whole(run) == first


def test_what_a_killed_save_left_does_not_disturb_the_next(run, drafter, llama):
    """A kill leaves no chance to clean up: a partial folder stays, is no step, and is replaced."""
    (run / ".step-3.partial" / "training").mkdir(parents=True)
    (run / ".step-3.partial" / "model.safetensors").write_bytes(b"half")
    (run / ".latest.partial").symlink_to("step-1")
    assert checkpoint.steps_of(run) == []
    folder = save(run, 3, drafter, llama)
    manifest.verify(folder)
    assert sorted(path.name for path in run.iterdir()) == ["latest", "step-3"]


# Refusals.


def refusal(path, target, **options):
    with pytest.raises(UserError) as refused:
        checkpoint.load_drafter(path, target, **options)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "training/state.json"])
def test_a_changed_byte_is_named(step, llama, name):
    content = bytearray((step / name).read_bytes())
    content[len(content) // 2] ^= 1
    (step / name).write_bytes(content)
    assert f"{step / name}: changed file: sha256" in refusal(step, llama)


def test_a_missing_or_extra_file_is_named(step, llama):
    (step / "extra.txt").write_text("x")
    assert f"{step / 'extra.txt'}: unexpected file" in refusal(step, llama)
    (step / "extra.txt").unlink()
    (step / "training" / "state.json").unlink()
    assert f"{step / 'training' / 'state.json'}: missing file" in refusal(step, llama)
    (step / "model.safetensors").unlink()
    assert str(step) in refusal(step, llama)


def test_another_target_is_refused_naming_both_digests_unless_allowed(step, llama, tiny_target):
    other = tiny_target("llama", seed=2)
    text = refusal(step, other)
    assert llama.fingerprint in text
    assert other.fingerprint in text
    assert "--allow-target-mismatch" in text
    loaded = checkpoint.load_drafter(step, other, allow_mismatch=True)
    assert loaded.mismatch == {"trained_for": llama.fingerprint, "used_with": other.fingerprint}
    assert checkpoint.load_drafter(step, llama, allow_mismatch=True).mismatch is None


@pytest.mark.parametrize("field", ["tokenizer_sha256", "template_sha256"])
def test_another_tokenizer_or_template_is_refused(run, drafter, llama, field):
    folder = save(run, 5, drafter, llama, **{field: "0" * 64})
    text = refusal(folder, llama)
    assert field in text
    assert "0" * 64 in text
    assert checkpoint.load_drafter(folder, llama, allow_mismatch=True).drafter


def test_a_target_of_another_shape_is_refused_even_when_allowed(step, tiny_target):
    qwen = tiny_target("qwen3")
    assert "num_target_layers is 3, but target" in refusal(step, qwen, allow_mismatch=True)


def test_a_folder_without_a_manifest_is_refused_unless_allowed(step, llama):
    (step / "manifest.json").unlink()
    assert "no manifest.json" in refusal(step, llama)
    loaded = checkpoint.load_drafter(step, llama, allow_mismatch=True)
    assert loaded.mismatch == {"trained_for": None, "used_with": llama.fingerprint}


def foreign(step, tmp_path, change):
    """A copy of a step without a manifest, its weights changed in place."""
    folder = tmp_path / "foreign"
    shutil.copytree(step, folder)
    (folder / "manifest.json").unlink()
    weights = dict(mx.load(str(step / "model.safetensors")))
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def test_weights_that_do_not_fit_are_named_three_at_a_time(step, llama, tmp_path):
    def change(weights):
        for name in ("fc.weight", "norm.weight"):
            del weights[name]
        weights["lm_head.weight"] = mx.zeros((3, 5))
        weights["hidden_norm.weight"] = mx.zeros((7,))
        weights["layers.0.mlp.up_proj.weight"] = weights["layers.0.mlp.up_proj.weight"].T

    text = refusal(foreign(step, tmp_path, change), llama, allow_mismatch=True)
    assert "missing fc.weight; missing norm.weight; unexpected lm_head.weight and 2 more" in text


def test_a_shape_that_does_not_fit_is_named_with_both(step, llama, tmp_path):
    def change(weights):
        weights["fc.weight"] = weights["fc.weight"].T

    text = refusal(foreign(step, tmp_path, change), llama, allow_mismatch=True)
    assert "fc.weight is (192, 96), not (96, 192)" in text


def test_a_truncated_weight_file_is_named(step, llama, tmp_path):
    folder = foreign(step, tmp_path, lambda weights: None)
    os.truncate(folder / "model.safetensors", 1000)
    assert str(folder / "model.safetensors") in refusal(folder, llama, allow_mismatch=True)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "config.json: not valid JSON"),
        ("{}", "config.json: not a DFlash drafter's"),
        ('{"num_hidden_layers": 2, "dflash_config": {"target_layer_ids": [0]}}', "config.json: not a DFlash drafter's"),
        ('{"num_hidden_layers": 2, "dflash_config": {"target_layer_ids": 3}}', "config.json: not a DFlash drafter's"),
    ],
)
def test_a_config_of_something_else_is_named(step, llama, tmp_path, content, named):
    folder = foreign(step, tmp_path, lambda weights: None)
    (folder / "config.json").write_text(content)
    assert named in refusal(folder, llama, allow_mismatch=True)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 0},
        {"head_dim": None},
        {"num_attention_heads": 1e30},
        {"rms_norm_eps": "x"},
        {"quantization": {"x": 1}},
        {"quantization": 5},
        {"rope_scaling": {"rope_type": "nope"}},
    ],
)
def test_a_config_that_no_drafter_can_have_is_one_line(step, llama, tmp_path, change):
    folder = foreign(step, tmp_path, lambda weights: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert f"{folder}/config.json" in refusal(folder, llama, allow_mismatch=True)


# Warm starts.


def test_a_warm_start_copies_weights_and_refuses_another_shape(step, drafter, llama, tiny_config, random_drafter):
    loaded = checkpoint.load_drafter(step, llama)
    same = random_drafter(drafter.config, seed=9)
    checkpoint.copy_weights(loaded, same)
    for name, value in weights_of(same).items():
        np.testing.assert_array_equal(value, weights_of(drafter)[name])
    deeper = random_drafter(tiny_config(llama))
    with pytest.raises(UserError, match="missing layers.2"):
        checkpoint.copy_weights(loaded, deeper)
