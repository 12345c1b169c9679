"""A tree of parameters as one vector, so that an update is a few launches and not a dozen for each tensor.

P numbers of the vector.
"""

import math

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

WIDTH = 1024  # P is a whole multiple of it: sums go through as many partial ones, which keeps float32's digits


class Flat:
    """The order of a tree's tensors in a vector [P]; zeros fill it up.

    Matrices come first: their sizes are multiples of 128 in any drafter worth speed, so each starts where a GPU's
    products may read widely, which a norm's few numbers before it would spoil.
    """

    def __init__(self, tree):
        named = sorted(tree_flatten(tree), key=lambda item: item[1].ndim < 2)
        self.shapes = {name: value.shape for name, value in named}
        self.names = tree_map_with_path(lambda name, _: name, tree)  # the tree itself: an adapter's keys hold dots
        self.ends = [0]
        for shape in self.shapes.values():
            self.ends.append(self.ends[-1] + math.prod(shape))
        self.filling = -self.ends[-1] % WIDTH

    def join(self, tree, dtype=mx.float32):
        """The vector of a tree that has these tensors, nested as it may be."""
        named = dict(tree_flatten(tree))
        pieces = [named[name].reshape(-1) for name in self.shapes]
        return mx.concatenate([*pieces, mx.zeros(self.filling, pieces[0].dtype)]).astype(dtype)

    def split(self, vector):
        """The tree of a vector; tensors are views of it."""
        pieces = mx.split(vector, self.ends[1:])[:-1]
        found = {name: piece.reshape(self.shapes[name]) for name, piece in zip(self.shapes, pieces)}
        return tree_map(found.get, self.names)


def norm(vector):
    """√Σ x² of a vector [P] as `join` makes it, float32."""
    return mx.sqrt(mx.sum(mx.sum(mx.square(vector.reshape(-1, WIDTH)), axis=1)))
