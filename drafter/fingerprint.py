"""The fingerprint of a model: BLAKE2b-256 over its sorted (name, shape, dtype, bytes).

`of_folder` reads the parameters as stored, before any choice of compute dtype, so that one checkpoint run in bf16 on a
GPU and in float32 on a CPU is one target. `of_arrays` reads live arrays; before and after training it proves that
nothing moved. Quantising, fine-tuning, merging or editing changes either.
"""

import hashlib
import json
import os
import pathlib

import mlx.core as mx

from kernels.errors import UserError

CHUNK = 1 << 24  # bytes hashed at a time; bounds memory, does not change the digest


def of_arrays(arrays):
    """The fingerprint, as hex, of {name: mx.array} (any dtype; evaluated here)."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(arrays):
        value = mx.contiguous(arrays[name])
        label(digest, name, value.shape, str(value.dtype).removeprefix("mlx.core."))
        digest.update(memoryview(value.reshape(-1).view(mx.uint8)) if value.size else b"")
    return digest.hexdigest()


def label(digest, name, shape, dtype):
    """Feed one parameter's name, shape and dtype, unambiguously."""
    digest.update(json.dumps([name, list(shape), dtype]).encode())


def of_folder(folder, cache=None):
    """The fingerprint, as hex, of the model*.safetensors in `folder`, without loading them into memory.

    cache: a JSON file that remembers digests by each file's path, size and modification time, or None.
    Raises UserError for a file that is not safetensors.
    """
    files = sorted(pathlib.Path(folder).resolve().glob("model*.safetensors"))
    key = json.dumps([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
    known = remembered(cache)
    if key not in known:
        known = remembered(cache) | {key: of_files(files)}
        remember(cache, known)
    return known[key]


def of_files(files):
    """The fingerprint over the tensors of several safetensors files taken together."""
    tensors = {name: (file, entry) for file in files for name, entry in header(file).items()}
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(tensors):
        file, (dtype, shape, start, end) = tensors[name]
        label(digest, name, shape, dtype)
        with open(file, "rb") as stream:
            stream.seek(start)
            for at in range(start, end, CHUNK):
                digest.update(stream.read(min(CHUNK, end - at)))
    return digest.hexdigest()


def header(file):
    """The tensors of a safetensors file: {name: (dtype, shape, first byte, byte after the last)}."""
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if length > size - 8:
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            found = {
                n: (e["dtype"], e["shape"], *(8 + length + at for at in e["data_offsets"])) for n, e in entries.items()
            }
            if any(not 0 <= start <= end <= size for _, _, start, end in found.values()):
                raise ValueError(f"it places tensors outside its {size} bytes")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: not a whole safetensors file ({error}); copy or download it again") from error
    return found


def remembered(cache):
    """The digests a cache file knows; none when it is missing or damaged."""
    try:
        known = json.loads(pathlib.Path(cache).read_text()) if cache else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def remember(cache, known):
    """Keep digests for the next run; a cache that cannot be written only costs time."""
    if cache is None:
        return
    try:
        cache = pathlib.Path(cache)
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_name(f"{cache.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(known))
        os.replace(partial, cache)
    except OSError:
        return
