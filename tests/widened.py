"""A real small target with a planted width effect: its logits are bfloat16, and several rows swap near ties.

Where a forward of more than one row finds its two greatest logits at most `REACH` ULPs apart, it swaps them: an effect
of several ULPs, as wide and narrow products show it, but at known places.
"""

import dataclasses
import math

import mlx.core as mx
import numpy as np

from drafter.target import Target

REACH = 3  # ULPs


class Widened(Target):
    """A Target whose forwards of several rows decide near ties the other way."""

    def score(self, hidden, differentiable=False):
        logits = super().score(hidden, differentiable).astype(mx.bfloat16)
        return mx.array(swapped(np.array(logits.astype(mx.float32)))).astype(mx.bfloat16) if many(hidden) else logits


def widened(target):
    """The target, widened."""
    return Widened(**{field.name: getattr(target, field.name) for field in dataclasses.fields(Target)})


def many(hidden):
    """Whether there is more than one row."""
    return math.prod(hidden.shape[:-1]) > 1


def swapped(logits):
    """Rows [..., V] of float32 that hold bfloat16 values, near ties swapped."""
    rows = logits.reshape(-1, logits.shape[-1])
    for row in rows:
        second, first = np.argsort(row, kind="stable")[-2:]
        if margin_ulps(row) <= REACH:
            row[first], row[second] = row[second], row[first]
    return rows.reshape(logits.shape)


def margin_ulps(row):
    """Top-1 minus top-2 of a row in ULPs of bfloat16, whose neighbours lie 2^-7 of a power of two apart."""
    second, first = np.sort(row)[-2:]
    return (first - second) / 2.0 ** (math.floor(math.log2(abs(first))) - 7)
