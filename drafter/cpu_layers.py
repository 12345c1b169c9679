"""Modules of hybrid targets that read a prompt faster on a CPU than mlx-lm's own: attention, MLP and the gated norm.

R rows, T tokens, D hidden, H query heads, d head dimension. Each forward is its mlx-lm class's, operation by operation,
but that exponentials are `kernels.exponential`'s and attention leaves out the future. It serves the many rows of a
prompt in float32, outside of training; all else, steps and verifies among it, goes to the class it was made from.
`hybrid.attach` puts them in place.
"""

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP, Qwen3NextRMSNormGated

from kernels import exponential
from kernels.causal_attention import attend_causal


def attention(self, x, mask=None, cache=None):
    """Gated attention of x [R,T,D]; fast where the mask is plain causal and the cache holds plain keys and values."""
    if not serves(self, x) or not isinstance(mask, str) or hasattr(cache, "bits"):
        return Qwen3NextAttention.__call__(self, x, mask, cache)
    R, T, _ = x.shape
    queries, gate = mx.split(self.q_proj(x).reshape(R, T, self.num_attention_heads, -1), 2, axis=-1)
    keys, values = (project(x).reshape(R, T, self.num_key_value_heads, -1) for project in (self.k_proj, self.v_proj))
    offset = cache.offset if cache is not None else 0
    queries, keys = (
        self.rope(norm(rows).swapaxes(1, 2), offset=offset)
        for norm, rows in ((self.q_norm, queries), (self.k_norm, keys))
    )
    values = values.swapaxes(1, 2)
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    answer = attend_causal(queries, keys, values, self.scale).swapaxes(1, 2).reshape(R, T, -1)
    return self.o_proj(exponential.gated(gate.reshape(R, T, -1), answer))


def mlp(self, x):
    """down(silu(gate(x)) up(x)) of x [R,T,D]."""
    if not serves(self, x):
        return Qwen3NextMLP.__call__(self, x)
    return self.down_proj(exponential.swiglu(self.gate_proj(x), self.up_proj(x)))


def gated_norm(self, hidden_states, gate=None):
    """RMSNorm of [R,T,H,d] times silu(gate)."""
    if not serves(self, hidden_states) or gate is None:
        return Qwen3NextRMSNormGated.__call__(self, hidden_states, gate)
    return exponential.swiglu(gate, mx.fast.rms_norm(hidden_states, self.weight, self.eps))


def serves(module, x):
    """Whether x [R,T,...] is a prompt for the fast forward, and no gradient is wanted."""
    return not module.training and exponential.serves(x)


FORWARDS = {Qwen3NextAttention: attention, Qwen3NextMLP: mlp, Qwen3NextRMSNormGated: gated_norm}
