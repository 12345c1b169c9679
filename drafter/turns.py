"""Work on one part after the other, forward and backward, so that memory is that of one part.

C parts, n slots of each. MLX evaluates a graph breadth first: parts that do not depend on each other are begun
together, up to twenty at once, and `mx.checkpoint` alone leaves them so. Here each part waits for the one before.
"""

import functools

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map


def in_turn(judge, parts, shared, *, differentiable=True):
    """judge(i, parts[i], shared) of every part in turn, joined: {name: [C·n]}, with a gradient through "loss" alone.

    judge: returns {name: array [n]}; a slot's loss depends on its own row of the part and on `shared` alone. parts
    [C,n,...], shared (a tree of arrays): what the gradient is taken by; not differentiable: none is wanted.
    """
    if differentiable and not tree_flatten(shared):
        return by_row(judge, parts)
    return twice(judge, parts, shared)


def by_row(judge, parts):
    """`in_turn` with nothing shared: slopes are taken while a part's logits are there, which are then made once only.

    The cotangent of a slot's loss, known later, scales its row's slope and no other.
    """

    @mx.custom_function
    def run(parts):
        found = []
        for i, part in enumerate(parts):
            found.append(with_slope(functools.partial(judge, i), after(part, found[-1:])))
        return {name: mx.concatenate([one[name] for one in found]) for name in found[0]}

    @run.vjp
    def back(parts, cotangents, outputs):
        by_loss = cotangents["loss"].reshape(-1, *[1] * (parts.ndim - 2))
        return (outputs["slope"] * by_loss).astype(parts.dtype).reshape(parts.shape)

    found = run(parts)
    return {name: value for name, value in found.items() if name != "slope"}


def with_slope(judge, part):
    """What judge(part, {}) says, and as `slope` [n,...] the gradient of each slot's loss by its row."""

    def total(part):
        found = judge(part, {})
        return mx.sum(found["loss"]), found

    (_, found), slope = mx.value_and_grad(total)(part)
    return found | {"slope": slope}


def twice(judge, parts, shared):
    """`in_turn` that calls judge once more for each part in the backward pass, which keeps nothing else."""

    @mx.custom_function
    def run(parts, shared):
        found = []
        for i, part in enumerate(parts):
            found.append(judge(i, after(part, found[-1:]), shared))
        return {name: mx.concatenate([one[name] for one in found]) for name in found[0]}

    @run.vjp
    def back(primals, cotangents, outputs):
        parts, shared = primals
        slopes, total, done = [], None, outputs
        for i, (part, by_loss) in enumerate(zip(parts, cotangents["loss"].reshape(len(parts), -1))):
            pull = mx.grad(lambda part, shared, i=i, by=by_loss: mx.sum(by * judge(i, part, shared)["loss"]), (0, 1))
            slope, by_shared = pull(after(part, done), shared)
            total = tree_map(mx.add, total, by_shared) if total else by_shared
            slopes.append(slope)
            done = [slope, total]
        return mx.stack(slopes), total

    return run(parts, shared)


def after(part, done):
    """The same array, to be read only once the tree `done` is computed."""
    waited = [array for _, array in tree_flatten(done)]
    return mx.depends([part], waited)[0] if waited else part
