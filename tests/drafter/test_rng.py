"""Random streams: a draw depends on its seed, stream and step, and on nothing else."""

import mlx.core as mx
import numpy as np
import pytest

from drafter import rng


def mlx_draw(*name):
    return tuple(mx.random.normal((5,), key=rng.key(*name)).tolist())


def numpy_draw(*name):
    return tuple(rng.numpy_rng(*name).standard_normal(5))


DRAWS = pytest.mark.parametrize("draw", [mlx_draw, numpy_draw])


@DRAWS
def test_every_part_of_the_name_makes_another_draw(draw):
    names = [
        (seed, stream, step) for seed in (0, 1, 11) for stream in ("anchors", "anchor", "rows/1") for step in (0, 1, 11)
    ]
    drawn = {draw(*name) for name in names}
    assert len(drawn) == len(names)


@DRAWS
def test_the_same_name_draws_the_same_whatever_was_drawn_before(draw):
    first = draw(3, "anchors", 7)
    mx.random.seed(5)
    np.random.seed(5)
    for step in range(4):
        draw(3, "other", step)
    assert draw(3, "anchors", 7) == first


@DRAWS
def test_a_draw_leaves_the_global_generators_alone(draw):
    mx.random.seed(13)
    np.random.seed(13)
    expected = mx.random.normal((3,)).tolist(), np.random.standard_normal(3).tolist()
    mx.random.seed(13)
    np.random.seed(13)
    draw(1, "anchors", 2)
    assert (mx.random.normal((3,)).tolist(), np.random.standard_normal(3).tolist()) == expected


def test_streams_are_the_same_on_every_machine():
    """Written down once: the first eight bytes of BLAKE2b-64 over b"3/anchors/7", little end first."""
    assert rng.key_number(3, "anchors", 7) == 0xC1B6806807FEDDDC
    assert rng.key_number(np.int64(3), "anchors", np.int32(7)) == rng.key_number(3, "anchors", 7)
