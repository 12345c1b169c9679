"""Trees as one vector: what goes in comes out, nested as it was."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from drafter import flat

SHAPES = {"norm": (7,), "wide": (3, 5), "deep": (2, 3, 4)}


def draw(name, key):
    return mx.random.normal(SHAPES[name], key=mx.random.key(key))


TREES = {
    "modules": lambda: {
        "norm": {"weight": draw("norm", 1)},
        "layers": [{"q": draw("wide", 2)}, {"q": draw("deep", 3)}],
    },
    "an adapter, whose names hold dots": lambda: {
        "model.layers.1.q_proj": {"lora_a": draw("wide", 4)},
        "model.layers.3.q_proj": {"lora_a": draw("norm", 5)},
    },
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_as_it_was_and_its_norm_is_the_vectors(name):
    tree = TREES[name]()
    order = flat.Flat(tree)
    vector = order.join(tree)
    back = order.split(vector)
    assert back.keys() == tree.keys()
    for (one, value), (other, found) in zip(tree_flatten(tree), tree_flatten(back), strict=True):
        assert one == other
        np.testing.assert_array_equal(np.array(found), np.array(value))
    squares = sum(float((np.array(value, np.float64) ** 2).sum()) for _, value in tree_flatten(tree))
    assert flat.norm(vector).item() == pytest.approx(squares**0.5, rel=1e-6)
