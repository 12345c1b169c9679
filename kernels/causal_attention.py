"""Causal attention of a prompt on a CPU: blocks of queries against the keys before them, never the future.

R rows, H query heads, G key/value heads, T queries, L keys, d head dimension, B queries of a block. MLX's own attention
scores all pairs, and its softmax takes most of its time in the exponential. For inference only, as `exponential` is.
"""

import mlx.core as mx

from kernels import exponential

BLOCK = 128  # B; measured on a CPU at 512 queries of four heads: 64 and 256 are slower by a tenth or two
HIDDEN = -1e30  # a score whose exponential is 0 beside any other


def attend_causal(queries, keys, values, scale):
    """softmax(scale · q kᵀ) v, where the last query sees all keys and each one before it a key less.

    queries [R,H,T,d]   keys, values [R,G,L,d], L ≥ T, H a multiple of G   all float32
    Returns [R,H,T,d] float32: within 1e-6 of the largest value of float64's.
    """
    R, H, T, d = queries.shape
    G, L = keys.shape[1:3]
    grouped = (queries * scale).reshape(R, G, H // G, T, d)
    answers = []
    for start in range(0, T, BLOCK):
        rows = min(BLOCK, T - start)
        end = L - T + start + rows
        block = grouped[:, :, :, start : start + rows].reshape(R, G, -1, d)
        scores = (block @ keys[:, :, :end].swapaxes(-1, -2)).reshape(R, G, H // G, rows, end)
        scores = mx.where(triangle(rows, end), scores, HIDDEN).reshape(R, G, -1, end)
        weights = exponential.exp(scores - mx.max(scores, axis=-1, keepdims=True))  # exactly 0 where hidden
        answer = (weights @ values[:, :, :end]) / (weights @ mx.ones((end, 1)))
        answers.append(answer.reshape(R, H, rows, d))
    return mx.concatenate(answers, axis=2)


def triangle(rows, end):
    """Which of `end` keys each of the last `rows` rows sees: bool [rows,end]."""
    return mx.arange(end)[None] <= mx.arange(end - rows, end)[:, None]
