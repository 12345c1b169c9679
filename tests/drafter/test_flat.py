"""Trees as vectors and back, all tensors in one or each in its own, and the norm of all."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from drafter import flat

SIZES = {"norm": 3, "matrix": (5, 7), "scale": 1}


@pytest.fixture
def tree():
    drawn = {name: mx.random.normal(np.atleast_1d(size).tolist(), key=mx.random.key(1)) for name, size in SIZES.items()}
    return {"layers": [{"norm": drawn["norm"]}, {"matrix": drawn["matrix"]}], "scale": drawn["scale"]}


@pytest.mark.parametrize(("together", "sizes"), [(True, [39]), (False, [35, 3, 1])])
def test_a_tree_comes_back_from_its_vectors(tree, together, sizes):
    order = flat.Flat(tree, together)
    vectors = order.join(tree)
    assert [vector.size for vector in vectors] == sizes
    back = dict(tree_flatten(order.split(vectors)))
    assert back.keys() == dict(tree_flatten(tree)).keys()
    for name, value in tree_flatten(tree):
        np.testing.assert_array_equal(np.array(back[name]), np.array(value), err_msg=name)


def test_matrices_come_first(tree):
    together = flat.Flat(tree, True).join(tree)[0]
    np.testing.assert_array_equal(np.array(together[:35]), np.array(tree["layers"][1]["matrix"]).reshape(-1))


def test_vectors_have_the_dtype_asked_for(tree):
    assert [vector.dtype for vector in flat.Flat(tree, True).join(tree, mx.bfloat16)] == [mx.bfloat16]


@pytest.mark.parametrize("together", [True, False])
def test_the_norm_is_of_every_number(tree, together):
    squares = sum((np.array(value, np.float64) ** 2).sum() for _, value in tree_flatten(tree))
    assert flat.norm(flat.Flat(tree, together).join(tree)).item() == pytest.approx(math.sqrt(squares), rel=1e-6)


@pytest.mark.parametrize("together", [True, False])
def test_an_adapters_names_which_hold_dots_stay_whole(tree, together):
    adapter = {"model.layers.3.q_proj": {"lora_a": tree["layers"][1]["matrix"], "lora_b": tree["scale"]}}
    order = flat.Flat(adapter, together)
    back = order.split(order.join(adapter))
    assert back.keys() == adapter.keys()
    (found, *_), (given, *_) = (one["model.layers.3.q_proj"].values() for one in (back, adapter))
    np.testing.assert_array_equal(np.array(found), np.array(given))
