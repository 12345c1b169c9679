"""Random streams keyed by (seed, stream name, step), so that one use of chance never disturbs another.

A draw depends on its key alone: evaluating more often, resuming, or adding a stream changes no other stream.
"""

import hashlib

import mlx.core as mx
import numpy as np


def key_number(seed, stream, step):
    """A 64-bit number that stands for (seed, stream, step); BLAKE2b, so equal on every machine."""
    text = f"{int(seed)}/{stream}/{int(step)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def key(seed, stream, step):
    """An MLX random key for (seed, stream name, step): pass it as `key=` to mx.random functions."""
    return mx.random.key(key_number(seed, stream, step))


def numpy_rng(seed, stream, step):
    """A NumPy generator for (seed, stream name, step)."""
    return np.random.default_rng(key_number(seed, stream, step))
