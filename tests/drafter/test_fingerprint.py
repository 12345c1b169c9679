"""Fingerprints: the bytes of every parameter and nothing else decide them; damaged files are named.

The oracle hashes NumPy arrays by hand, and the files are written by hand, byte for byte.
"""

import hashlib
import json
import os
import pathlib

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import fingerprint
from kernels.errors import UserError

NAMES = {"float32": "F32", "float16": "F16", "uint32": "U32", "int64": "I64", "bool": "BOOL"}


def arrays():
    """Parameters of every kind: several dtypes, a scalar, an empty one, names whose order differs from their making."""
    rng = np.random.default_rng(5)
    return {
        "model.z": rng.standard_normal((3, 7)).astype(np.float32),
        "model.a": rng.standard_normal((11,)).astype(np.float16),
        "lm_head.weight": rng.integers(0, 2**32, (2, 5), dtype=np.uint32),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
        "flags": np.array([True, False, True]),
    }


def by_hand(found, names):
    """BLAKE2b-256 over sorted (name, shape, dtype, bytes); names maps NumPy's dtypes to those that are hashed."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(found):
        value = found[name]
        shape = ", ".join(str(length) for length in value.shape)
        digest.update(f'["{name}", [{shape}], "{names[str(value.dtype)]}"]'.encode() + value.tobytes())
    return digest.hexdigest()


def write(path, found, order=None, metadata=None):
    """A safetensors file, its tensors laid out in `order`."""
    header, body = ({"__metadata__": metadata} if metadata else {}), b""
    for name in order or list(found):
        value = found[name]
        end = len(body) + value.nbytes
        header[name] = {"dtype": NAMES[str(value.dtype)], "shape": value.shape, "data_offsets": [len(body), end]}
        body += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.fixture
def folder(tmp_path):
    """A model folder of one file, by hand."""
    write(tmp_path / "model.safetensors", arrays())
    return tmp_path


# --- what decides it


def test_a_folder_hashes_as_by_hand(folder):
    assert fingerprint.of_folder(folder) == by_hand(arrays(), NAMES)


def test_live_arrays_hash_as_by_hand():
    live = {name: mx.array(value) for name, value in arrays().items()}
    assert fingerprint.of_arrays(live) == by_hand(arrays(), {name: name for name in NAMES})


def test_live_bfloat16_hashes_its_two_bytes():
    values = np.array([1.0, -2.5, 3.0], np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)  # exact: these values have short mantissas
    expected = hashlib.blake2b(b'["w", [3], "bfloat16"]' + upper.tobytes(), digest_size=32).hexdigest()
    assert fingerprint.of_arrays({"w": mx.array(values).astype(mx.bfloat16)}) == expected


def test_a_strided_view_hashes_as_its_copy():
    values = mx.arange(35, dtype=mx.float32).reshape(5, 7)
    assert fingerprint.of_arrays({"w": values.T}) == fingerprint.of_arrays({"w": mx.array(np.array(values).T.copy())})


def test_layout_shards_and_metadata_do_not_matter(folder, tmp_path):
    found = arrays()
    whole = fingerprint.of_folder(folder)
    other = tmp_path / "other"
    other.mkdir()
    write(other / "model.safetensors", found, order=sorted(found), metadata={"format": "pt"})
    assert fingerprint.of_folder(other) == whole
    (other / "model.safetensors").unlink()
    names = list(found)
    for part, chosen in enumerate((names[3:], names[:3])):
        write(other / f"model-0000{part}-of-00002.safetensors", {name: found[name] for name in chosen})
    assert fingerprint.of_folder(other) == whole


def test_other_safetensors_beside_the_model_do_not_matter(folder):
    whole = fingerprint.of_folder(folder)
    write(folder / "adapters.safetensors", {"x": np.ones(3, np.float32)})
    assert fingerprint.of_folder(folder) == whole


def flip_byte(found):
    found["model.z"].view(np.uint8)[2, 13] ^= 1


def rename(found):
    found["model.y"] = found.pop("model.z")


def reshape(found):
    found["model.z"] = found["model.z"].reshape(7, 3)


def retype(found):
    found["model.z"] = found["model.z"].view(np.uint32)


def swap(found):
    found["model.z"], found["scalar"] = found["scalar"], found["model.z"]


def drop_empty(found):
    del found["empty"]


@pytest.mark.parametrize("change", [flip_byte, rename, reshape, retype, swap, drop_empty])
def test_any_change_of_byte_name_shape_dtype_or_place_changes_it(change, tmp_path):
    found = arrays()
    change(found)
    write(tmp_path / "model.safetensors", found)
    assert fingerprint.of_folder(tmp_path) != by_hand(arrays(), NAMES)
    live = {name: mx.array(value) for name, value in found.items()}
    assert fingerprint.of_arrays(live) != fingerprint.of_arrays({n: mx.array(v) for n, v in arrays().items()})


def test_the_size_of_a_read_does_not_matter(folder, monkeypatch):
    whole = fingerprint.of_folder(folder)
    monkeypatch.setattr(fingerprint, "CHUNK", 5)
    assert fingerprint.of_folder(folder) == whole


def test_mlx_stored_weights_and_their_quantisation_are_two_fingerprints(tmp_path):
    path = tiny.folder("llama", tmp_path)
    stored = mx.load(str(path / "model.safetensors"))
    expected = by_hand({name: np.array(value) for name, value in stored.items()}, NAMES)
    assert fingerprint.of_folder(path) == expected
    assert fingerprint.of_folder(tiny.quantised(path, tmp_path)) != expected


def test_evaluating_a_model_leaves_its_live_fingerprint(tmp_path):
    model, _ = mlx_lm.load(str(tiny.folder("llama", tmp_path)))
    before = fingerprint.of_arrays(dict(tree_flatten(model.parameters())))
    mx.eval(model(mx.array([[5, 6, 7]])))
    assert fingerprint.of_arrays(dict(tree_flatten(model.parameters()))) == before


# --- damaged files


def claim_long_header(data):
    return (10**9).to_bytes(8, "little") + data[8:]


def end_early(data):
    return data[:-1]


def break_json(data):
    return data[:9] + b"\xff" + data[10:]


def point_before(data):
    return data.replace(b'"data_offsets": [0, ', b'"data_offsets": [-9, ', 1)


def lose_offsets(data):
    return data.replace(b'"data_offsets"', b'"data_offsetz"', 1)


@pytest.mark.parametrize(
    "damage",
    [claim_long_header, end_early, break_json, point_before, lose_offsets, lambda data: b"", lambda data: b"<html>"],
)
def test_a_damaged_file_is_refused_by_name(folder, damage):
    file = folder / "model.safetensors"
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    with pytest.raises(
        UserError, match=r"model\.safetensors: not a whole safetensors file .*; copy or download it again"
    ):
        fingerprint.of_folder(folder)


# --- the cache


@pytest.fixture
def reads(monkeypatch):
    """How often files were really hashed."""
    counted, real = [], fingerprint.of_files
    monkeypatch.setattr(fingerprint, "of_files", lambda files: counted.append(1) or real(files))
    return counted


def test_a_cached_fingerprint_is_not_read_again(folder, tmp_path, reads):
    cache = tmp_path / "deep" / "cache.json"
    first = fingerprint.of_folder(folder, cache)
    assert fingerprint.of_folder(folder, cache) == first == by_hand(arrays(), NAMES)
    assert len(reads) == 1
    assert sorted(path.name for path in cache.parent.iterdir()) == ["cache.json"]


def test_a_cache_entry_of_an_older_file_is_not_used(folder, tmp_path, reads):
    cache = tmp_path / "cache.json"
    fingerprint.of_folder(folder, cache)
    found = arrays()
    flip_byte(found)
    file = folder / "model.safetensors"
    before = file.stat()
    write(file, found)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert file.stat().st_size == before.st_size
    assert fingerprint.of_folder(folder, cache) == by_hand(found, NAMES)
    assert len(reads) == 2


def test_two_folders_share_a_cache_without_sharing_entries(folder, tmp_path, reads):
    other = tmp_path / "other"
    other.mkdir()
    found = arrays()
    rename(found)
    write(other / "model.safetensors", found)
    cache = tmp_path / "cache.json"
    for _ in range(2):
        assert fingerprint.of_folder(folder, cache) == by_hand(arrays(), NAMES)
        assert fingerprint.of_folder(other, cache) == by_hand(found, NAMES)
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null"])
def test_a_damaged_cache_is_as_good_as_none(folder, tmp_path, content):
    cache = tmp_path / "cache.json"
    cache.write_text(content)
    assert fingerprint.of_folder(folder, cache) == by_hand(arrays(), NAMES)
    assert list(json.loads(cache.read_text()).values()) == [by_hand(arrays(), NAMES)]


def test_a_cache_that_cannot_be_written_only_costs_time(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert fingerprint.of_folder(folder, tmp_path / "file" / "cache.json") == by_hand(arrays(), NAMES)


def test_a_relative_path_finds_the_entry_of_the_absolute_one(folder, tmp_path, reads, monkeypatch):
    cache = tmp_path / "cache.json"
    fingerprint.of_folder(folder, cache)
    monkeypatch.chdir(folder)
    fingerprint.of_folder(pathlib.Path("."), cache)
    assert len(reads) == 1
