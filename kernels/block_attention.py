"""Attention of draft blocks: each block's rows against a shared context and against their own block.

R rows, T context rows, N blocks, B block, H query heads, G key/value heads, d head dimension. Arrays in, arrays out.
The context half and the block half are scored apart and share one softmax, so the work is T+B keys a query, never the
N·B keys of a dense mask over all blocks.
"""

import mlx.core as mx


def attend(queries, context_keys, context_values, block_keys, block_values, context_seen, block_seen, scale):
    """Softmax attention over a context part and a block part joined along the keys; differentiable.

    queries         [R,H,N,B,d]
    context_keys    [R,G,T,d]     context_values  [R,G,T,d]     shared by all blocks of a row
    block_keys      [R,G,N,B,d]   block_values    [R,G,N,B,d]   each block's own
    context_seen    bool, broadcastable to [R,1,N,B,T]          block_seen  bool, broadcastable to [R,1,N,B,B]
    scale           multiplies the scores. H is a multiple of G; query head h reads key head h // (H/G).

    Scores are softmaxed in float32 whatever the dtype. Every query must see at least one key of its block.
    Returns [R,H,N,B,d] in the queries' dtype.
    """
    R, H, N, B, d = queries.shape
    G, T = context_keys.shape[1:3]
    grouped = (queries * scale).reshape(R, G, H // G, N, B, d)

    flat = grouped.reshape(R, G, H // G * N * B, d)
    context_scores = (flat @ context_keys.swapaxes(-1, -2)).reshape(R, G, H // G, N, B, T)
    block_scores = grouped @ block_keys[:, :, None].swapaxes(-1, -2)  # [R,G,H/G,N,B,B]
    scores = mx.concatenate(
        [hide(context_scores, context_seen[:, :, None]), hide(block_scores, block_seen[:, :, None])], axis=-1
    )
    weights = mx.softmax(scores, axis=-1, precise=True)

    from_context = weights[..., :T].reshape(R, G, H // G * N * B, T) @ context_values
    from_block = weights[..., T:] @ block_values[:, :, None]
    return (from_context.reshape(from_block.shape) + from_block).reshape(R, H, N, B, d)


def hide(scores, seen):
    """Scores where `seen`, the dtype's most negative number elsewhere."""
    return mx.where(seen, scores, mx.finfo(scores.dtype).min)
