"""The store of features: what is read is what the target computes, and what is not ours is refused in one line.

R rows, T tokens, D hidden. A shard here holds 3 rows of 31 tokens; the store 11 rows, so the last shard holds 2.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open

import tiny
from drafter import config as configuration
from drafter import corpus, dflash, features, manifest, objective, trainer
from drafter.documents import Document
from kernels.errors import UserError

T, LAYERS, PER_SHARD, AT_ONCE, B = 31, (0, 2), 3, 2, 4
SHARDS = [(0, 3), (3, 6), (6, 9), (9, 11)]
ROUNDING = 2.0**-8  # half a unit in the last of the 8 bits that bfloat16 keeps of a number


def packed(length=T, seed=4):
    """Eleven rows of a document and a half."""
    generator, numbered = np.random.default_rng(seed), []
    for number in range(1, 12):
        for size in (length - 9, 9 - number % 3):
            tokens = generator.integers(5, tiny.VOCABULARY, size).astype(np.int32)
            numbered.append((len(numbered) + 1, Document(str(len(numbered)), tokens, np.arange(size) >= 2)))
    return corpus.pack(numbered, "train", length, 0, ())


@pytest.fixture(scope="module")
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def rows():
    made = packed()
    assert len(made) == 11
    return made


def layout(target, rows, hidden=False, layers=LAYERS):
    return dataclasses.replace(features.layout_of(target, rows, layers, hidden), rows_per_shard=PER_SHARD)


def fill(folder, target, rows, hidden=False, say=lambda line: None, **options):
    return features.fill(folder, target, rows, layout(target, rows, hidden), rows_at_once=AT_ONCE, say=say, **options)


@pytest.fixture(scope="module")
def full(llama, rows, tmp_path_factory):
    """The folder of a full store with the final hidden state."""
    folder = tmp_path_factory.mktemp("features") / "store"
    fill(folder, llama, rows, hidden=True)
    return folder


@pytest.fixture
def copy(full, tmp_path):
    return pathlib.Path(shutil.copytree(full, tmp_path / "store"))


def opened(folder, target, rows, hidden=False):
    return features.open_store(folder, target, rows, layout(target, rows, hidden))


def refusal(call, *given, **options):
    """The one line with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*given, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read.


def of_row(target, rows, row):
    """(taps [n,T,D], hidden [T,D]) of a row, each document alone through mlx-lm's own model; padding is left 0."""
    taps = np.zeros((len(LAYERS), T, target.hidden_size), np.float32)
    hidden = np.zeros((T, target.hidden_size), np.float32)
    for document in np.unique(rows.documents[row][rows.documents[row] > 0]):
        places = np.flatnonzero(rows.documents[row] == document)
        states = target.model.model.embed_tokens(mx.array(rows.tokens[row][places])[None])
        for index, layer in enumerate(target.model.layers):
            states = layer(states, "causal", None)
            if index in LAYERS:
                taps[LAYERS.index(index), places] = np.array(states[0])
        hidden[places] = np.array(target.model.model.norm(states)[0])
    return taps, hidden


def floats(bits):
    """float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_a_row_comes_back_as_the_targets_own_features_rounded(llama, rows, full):
    store = opened(full, llama, rows, hidden=True)
    asked = np.array([10, 0, 4, 9])
    found = store.read(asked)
    assert found.held.tolist() == [True] * 4
    assert found.bits["taps"].shape == (4, len(LAYERS), T, llama.hidden_size)
    for place, row in enumerate(asked):
        taps, hidden = of_row(llama, rows, row)
        real = rows.documents[row] > 0
        for name, expected in (("taps", taps[:, real]), ("hidden", hidden[real])):
            bits = found.bits[name][place]
            got = floats(bits[:, real] if name == "taps" else bits[real])
            np.testing.assert_allclose(got, expected, rtol=ROUNDING, atol=5e-5 * np.abs(expected).max())


def test_a_shard_is_plain_safetensors_and_the_manifest_answers_for_it(llama, rows, full):
    record = manifest.verify(full)
    assert (record.kind, record.target["fingerprint"]) == ("features", llama.fingerprint)
    assert record.data == [{"name": "packed rows", "sha256": rows.sha256}]
    assert record.extra["layers"] == list(LAYERS)
    assert sorted(record.files) == [f"shard-{index:05d}.safetensors" for index in range(4)]
    for name, (start, stop) in zip(sorted(record.files), SHARDS):
        with safe_open(full / name, "np") as shard:
            assert shard.get_slice("taps").get_shape() == [stop - start, len(LAYERS), T, llama.hidden_size]
            assert shard.get_slice("hidden").get_dtype() == "BF16"


def test_the_hidden_state_is_kept_and_read_only_when_asked_for(llama, rows, full, tmp_path):
    assert fill(tmp_path / "bare", llama, rows).read(np.array([1])).bits.keys() == {"taps"}
    assert opened(full, llama, rows, hidden=False).read(np.array([1])).bits.keys() == {"taps"}
    line = refusal(opened, tmp_path / "bare", llama, rows, hidden=True)
    assert "without the final hidden state, which the loss needs" in line


@pytest.mark.parametrize("hidden", [False, True])
def test_stored_and_computed_rows_are_merged_in_their_places(llama, rows, tmp_path, hidden):
    one = layout(llama, rows, hidden)
    store = fill(tmp_path / "part", llama, rows, hidden=hidden, limit=2 * PER_SHARD * one.row_bytes + 1)
    assert (len(store), store.read(np.array([6, 10]))) == (6, None)
    asked = np.array([7, 5, 10, 0, 2])
    batch = corpus.select(rows, asked)
    given = llama, mx.array(batch.tokens), mx.array(batch.documents), LAYERS
    stored = store.read(asked)
    assert stored.held.tolist() == [False, True, False, True, True]
    found, online = features.complete(*given, stored), features.complete(*given)
    assert (found.hidden is None) == (not hidden)
    pairs = [*zip(found.taps, online.taps), *([(found.hidden, online.hidden)] if hidden else [])]
    for got, expected in pairs:
        np.testing.assert_array_equal(np.array(got[mx.array([0, 2])]), np.array(expected[mx.array([0, 2])]))
        rounded = expected.astype(mx.bfloat16).astype(mx.float32)
        np.testing.assert_allclose(np.array(got), np.array(rounded), rtol=ROUNDING, atol=1e-5)
        assert not np.array_equal(np.array(got), np.array(expected))


# Training from it.


def losses(target, rows, tiny_config, store, steps=5):
    """(loss of each step, final weights) of a short training."""
    shape = tiny_config(target, num_hidden_layers=1, layer_types=("full_attention",), block_size=B)
    drafter = dflash.initialise(dflash.DFlash(shape), target, 0)
    goal = objective.Objective(target, "cross_entropy", B, rows_per_chunk=64)
    options = configuration.OptimizerConfig(learning_rate=1e-2)
    loop = trainer.Trainer(drafter, goal, options, steps, target.dtype)
    feed = objective.Feed(rows, rows_per_step=AT_ONCE, block_size=B, per_row=3, seed=8, store=store)
    found = [loop.step(number, feed(number)).loss for number in range(steps)]
    return np.array(found), {name: np.array(value) for name, value in tree_flatten(loop.parameters)}


def test_a_bfloat16_target_trains_bit_for_bit_as_online(tiny_target, tiny_config, rows, tmp_path):
    target = tiny_target("llama", dtype="bfloat16")
    stores = {
        "online": None,
        "cached": fill(tmp_path / "all", target, rows),
        "hybrid": fill(tmp_path / "some", target, rows, limit=6 * layout(target, rows).row_bytes),
    }
    found = {name: losses(target, rows, tiny_config, store) for name, store in stores.items()}
    for name in ("cached", "hybrid"):
        np.testing.assert_array_equal(found[name][0], found["online"][0])
        for key, value in found["online"][1].items():
            np.testing.assert_array_equal(found[name][1][key], value)


def test_a_float32_target_trains_as_online_up_to_the_taps_rounding(llama, tiny_config, rows, tmp_path):
    """Taps are off by at most 2⁻⁸ of themselves; the loss of five steps moves by less than that, and it does move."""
    online, weights = losses(llama, rows, tiny_config, None)
    cached, others = losses(llama, rows, tiny_config, fill(tmp_path / "all", llama, rows))
    np.testing.assert_allclose(cached, online, rtol=ROUNDING)
    assert (cached != online).all()
    for name, value in weights.items():  # Adam moves a weight whose gradient is rounding either way, by a rate a step
        assert np.abs(others[name] - value).mean() < 0.05 * 5e-2, name


# Room.


def test_the_size_is_said_before_anything_is_written_and_is_what_the_disk_then_holds(llama, rows, tmp_path):
    said = []

    def say(line):
        assert not (tmp_path / "store").exists()
        said.append(line)

    expected = 11 * (len(LAYERS) + 1) * T * llama.hidden_size * 2
    fill(tmp_path / "store", llama, rows, hidden=True, say=say)
    assert f"take {expected / 2**10:.3g} KiB; {expected / 2**10:.3g} KiB to write" in said[0]
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store").glob("shard-*"))
    assert 0 <= on_disk - expected < 4 * 400  # four headers


def test_a_disk_without_room_is_refused_before_anything_is_written(llama, rows, tmp_path, monkeypatch):
    need = layout(llama, rows).bytes
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=need))
    line = refusal(fill, tmp_path / "store", llama, rows)
    assert f"{need / 2**10:.3g} KiB of features to write, but its disk has {need / 2**10:.3g} KiB free" in line
    assert not (tmp_path / "store").exists()
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=need + 1))
    assert len(fill(tmp_path / "store", llama, rows)) == 11
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=0))
    assert len(fill(tmp_path / "store", llama, rows)) == 11  # nothing is left to write


# Refusals.


def test_a_foreign_store_is_refused_by_name(tiny_target, llama, rows, copy):
    other = tiny_target("llama", seed=2)
    line = refusal(opened, copy, other, rows)
    assert llama.fingerprint in line and other.fingerprint in line and "features.folder" in line
    moved = packed(seed=5)
    line = refusal(opened, copy, llama, moved)
    assert rows.sha256 in line and moved.sha256 in line
    assert "row_tokens 31, but this run has 33" in refusal(opened, copy, llama, packed(length=33))
    line = refusal(features.open_store, copy, llama, rows, layout(llama, rows, layers=(0, 1)))
    assert "layers (0, 2), but this run has (0, 1)" in line
    line = refusal(fill, copy, other, rows)
    assert other.fingerprint in line


@pytest.mark.parametrize("change", ["flipped", "cut"])
def test_a_damaged_shard_is_refused_and_written_anew_once_deleted(llama, rows, copy, full, change):
    shard = copy / "shard-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content if change == "flipped" else content[:-1])
    for call in (opened, fill):
        line = refusal(call, copy, llama, rows)
        assert f"{shard}: changed file" in line and "delete it" in line
    shard.unlink()
    assert len(opened(copy, llama, rows)) == 8
    assert len(fill(copy, llama, rows)) == 11
    assert shard.read_bytes() == (full / shard.name).read_bytes()


def test_a_folder_of_something_else_is_refused(llama, rows, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert "holds something, but no manifest.json of features" in refusal(fill, folder, llama, rows)
    manifest.write(folder, kind="synthesis", target=llama.identity(), argv=[])
    assert "of kind synthesis" in refusal(fill, folder, llama, rows)
    assert [path.name for path in sorted(folder.iterdir())] == ["manifest.json", "notes.txt"]


def test_a_second_writer_is_refused_while_the_first_writes(llama, rows, tmp_path):
    refused = []

    def meanwhile(written, total):
        assert total == 11
        refused.append(refusal(fill, tmp_path / "store", llama, rows) if not refused else "")

    fill(tmp_path / "store", llama, rows, progress=meanwhile)
    assert "another run is writing it" in refused[0]
    assert len(refused) == 4


# Killed.

WRITER = """
import os, signal, sys
from kernels import backend
backend.load()
import mlx.core as mx
sys.path[:0] = ["tests/drafter"]
import test_features as tests
from drafter import target as targets

moment, folder, where = sys.argv[1:]
counts = {}

def watch(name, module, attribute, after=False):
    original = getattr(module, attribute)
    def call(*given, **options):
        if not after:
            tick(name)
        found = original(*given, **options)
        if after:
            tick(name)
        return found
    setattr(module, attribute, call)

def tick(name):
    counts[name] = counts.get(name, 0) + 1
    if moment == f"{name} == {counts[name]}":
        os.kill(os.getpid(), signal.SIGKILL)

target, rows = targets.load(where, dtype="float32"), tests.packed()
watch("mkdir", tests.pathlib.Path, "mkdir", after=True)
watch("save", mx, "save_safetensors", after=True)  # written, not yet synced nor renamed
watch("replace", os, "replace")
watch("replaced", os, "replace", after=True)
tests.fill(tests.pathlib.Path(folder), target, rows, hidden=True)
"""


def killed(moment, folder, target):
    """Run WRITER in a process of its own, which kills itself at a moment; returns the process, ended."""
    paths = os.pathsep.join([os.getcwd(), "tests", os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", WRITER, moment, str(folder), str(target.path)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip


def kept(folder):
    """{shard: (inode, time of its last change)} of the shards that a store's manifest lists."""
    if not (folder / "manifest.json").exists():
        return {}
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in listed}


# 4 shards: renames 1, 3, 5, … are manifests', 2, 4, … shards'
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("mkdir == 1", marks=pytest.mark.slow),
        "save == 2",
        pytest.param("replace == 4", marks=pytest.mark.slow),
        "replaced == 6",
        pytest.param("replaced == 9", marks=pytest.mark.slow),
    ],
)
def test_a_killed_writer_loses_and_repeats_nothing(llama, rows, full, tmp_path, moment):
    folder = tmp_path / "store"
    ended = killed(moment, folder, llama)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    listed = {"mkdir == 1": 0, "save == 2": 1, "replace == 4": 1, "replaced == 6": 2, "replaced == 9": 4}[moment]
    before = kept(folder)
    assert len(before) == listed
    assert len(opened(folder, llama, rows, hidden=True)) == sum(stop - start for start, stop in SHARDS[:listed])
    assert len(fill(folder, llama, rows, hidden=True)) == 11
    assert {name: kept(folder)[name] for name in before} == before  # none was written again
    assert {path.name for path in folder.iterdir()} == {path.name for path in full.iterdir()}
    for path in full.glob("shard-*"):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    manifest.verify(folder)
