"""Which pieces of a step are compiled: what was measured decides, on a GPU alone, and measuring moves nothing."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from decode.lab import training_cost as costs
from drafter import config, pieces, shapes, trainer
from kernels import verdicts

SHAPE = costs.Shape(rows=2, row_tokens=24, blocks=3, rows_per_chunk=7)
SMALL = {
    "num_hidden_layers": 6, "hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 211,
}  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """(a Trainer, its batch), where compiling is a name that is noted and nothing more."""
    noted = []
    monkeypatch.setattr(mx, "compile", lambda function: noted.append(function) or function)
    target = shapes.build("shape:smollm2_135m", dtype="float32", **SMALL)
    options = config.DrafterConfig(num_hidden_layers=1, block_size=4, mask_token_id=3)
    setup = costs.set_up(target, options, SHAPE, 9)
    loop = trainer.Trainer(setup.drafter, setup.goal, setup.options, setup.steps, "float32")
    loop.noted = noted
    return loop, setup.batch


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine that seems to have a GPU, and nothing measured on it."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)
    verdicts.decided.cache_clear()
    yield
    verdicts.decided.cache_clear()


def test_on_a_cpu_nothing_is_compiled_or_measured(made, monkeypatch):
    monkeypatch.setattr(pieces, "measure", None)
    assert pieces.chosen(*made) == ()


@pytest.mark.parametrize(
    ("found", "chosen", "verdict"),
    [((0.0, 1.0, 2.0), trainer.PIECES, "use"), ((0.0, 2.0, 1.0), (), "slow"), ((1.0, 1.0, 2.0), (), "wrong")],
)
def test_the_faster_way_is_chosen_and_measured_once(gpu, made, monkeypatch, found, chosen, verdict):
    monkeypatch.setattr(pieces, "measure", lambda loop, batch: found)
    assert pieces.chosen(*made) == chosen
    assert verdicts.state(pieces.NAME, pieces.case(*made)).verdict == verdict
    monkeypatch.setattr(pieces, "measure", None)
    assert pieces.chosen(*made) == chosen


def test_measuring_moves_neither_the_loop_nor_its_drafter(gpu, made):
    loop, batch = made
    before = {name: np.array(value) for name, value in loop.state().items()}
    weights = {name: np.array(value) for name, value in tree_flatten(loop.drafter.parameters())}
    pieces.chosen(loop, batch)
    found = verdicts.state(pieces.NAME, pieces.case(loop, batch))
    assert (found.verdict in ("use", "slow"), found.error) == (True, 0)  # two ways that are one here
    for name, value in loop.state().items():
        np.testing.assert_array_equal(np.array(value), before[name], err_msg=name)
    for name, value in tree_flatten(loop.drafter.parameters()):
        np.testing.assert_array_equal(np.array(value), weights[name], err_msg=name)


def test_both_pieces_are_compiled_when_they_are_chosen(made):
    loop, batch = made
    plain = trainer.Trainer(loop.drafter, loop.objective, loop.options, loop.steps, "float32")
    loop.compile(trainer.PIECES)
    assert len(loop.noted) == 2
    assert loop.step(0, batch).loss == plain.step(0, batch).loss  # through the arrays of a batch and back
    for one, other in zip(loop.master, plain.master, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
