"""The loop: exact resume, schedule, clipping, and the order in which `fit` calls what it is given."""

import dataclasses
import json
import math
import types

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from drafter import checkpoint, corpus, dflash, flat, losses, objective, ranks, trainer
from drafter import config as configuration
from drafter.documents import Document
from kernels.errors import UserError

B, STEPS = 4, 9
OPTIONS = configuration.OptimizerConfig(learning_rate=3e-3, warmup_fraction=0.3, weight_decay=0.01)


@pytest.fixture(scope="module")
def llama(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def rows(llama):
    """Packed rows of the target's own greedy text, which a drafter can learn."""
    generator, numbered = np.random.default_rng(4), []
    for number in range(1, 7):
        tokens = generator.integers(5, tiny.VOCABULARY, 3).tolist()
        for _ in range(14):
            tokens.append(mx.argmax(llama.model(mx.array([tokens]))[0, -1]).item())
        numbered.append((number, Document(str(number), np.array(tokens, np.int32), np.arange(17) >= 3)))
    return corpus.pack(numbered, "train", 37, 0, ())


@pytest.fixture
def fresh(llama, tiny_config):
    """make(steps, heads, loss, weights, **options): a new trainer with the same first weights."""

    def make(steps=STEPS, target=llama, dtype="float32", heads=None, loss="cross_entropy", weights="exponential",
             **options):  # fmt: skip
        shape = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "block_size": B} | (heads or {})
        drafter = dflash.initialise(dflash.DFlash(tiny_config(llama, **shape)), target, 0)
        goal = objective.Objective(target, loss, B, weights=weights, rows_per_chunk=19)
        return trainer.Trainer(drafter, goal, dataclasses.replace(OPTIONS, **options), steps, dtype)

    return make


@pytest.fixture
def feed(rows):
    return objective.Feed(rows, rows_per_step=2, block_size=B, per_row=3, seed=8)


def held(loop):
    """Every array that a later step builds on, as NumPy."""
    return {name: np.array(value) for name, value in loop.state().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def figures(record):
    """A StepRecord without its time."""
    return {name: value for name, value in dataclasses.asdict(record).items() if name != "seconds"}


HEADED = {"heads": {"markov_rank": 5, "confidence_head": True}, "loss": "overlap_hybrid", "weights": "dpace"}


@pytest.mark.parametrize("kind", [{}, HEADED], ids=["plain", "heads, a loss of the target, D-PACE"])
def test_a_run_split_in_three_is_the_unsplit_run_bit_for_bit(llama, fresh, feed, tmp_path, kind):
    whole = fresh(**kind)
    expected = [figures(whole.step(number, feed(number))) for number in range(STEPS)]
    found, folder = [], None
    for start, end in ((0, 2), (2, 7), (7, STEPS)):
        loop = fresh(**kind)
        if folder:
            arrays, state = checkpoint.load_training(folder)
            assert state["step"] == start
            loop.restore(arrays)
        found += [figures(loop.step(number, feed(number))) for number in range(start, end)]
        record = {"target": llama.identity(), "config_digest": None, "data": [], "argv": []}
        folder = checkpoint.save_step(tmp_path, end, loop.drafter, loop.state(), {}, **record)
    assert found == expected
    assert_same(held(loop), held(whole))
    final = {name: np.array(value) for name, value in tree_flatten(loop.drafter.parameters())}
    assert_same(final, {name: np.array(value) for name, value in tree_flatten(whole.drafter.parameters())})


def test_the_optimizer_state_matters_to_what_follows(fresh, feed):
    """A resume that kept the weights and dropped the moments would differ: the test above can fail."""
    loop = fresh()
    loop.step(0, feed(0))
    kept = dict(loop.state())
    expected = figures(loop.step(1, feed(1)))
    bare = fresh()
    bare.restore({name: mx.zeros_like(v) if name.endswith((".m", ".v")) else v for name, v in kept.items()})
    assert figures(bare.step(1, feed(1)))["loss"] == expected["loss"]
    assert not all(np.array_equal(held(bare)[name], held(loop)[name]) for name in kept)
    again = fresh()
    again.restore(kept)
    again.step(1, feed(1))
    assert_same(held(again), held(loop))


def test_the_rate_warms_up_and_falls_as_half_a_cosine():
    options = types.SimpleNamespace(schedule="cosine", learning_rate=2.0, warmup_fraction=0.04)
    found = [trainer.learning_rate(step, 100, options) for step in range(100)]
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    expected = [1 + math.cos(math.pi * step / 96) for step in range(96)]
    assert found[4:] == pytest.approx(expected)
    none = types.SimpleNamespace(schedule="cosine", learning_rate=2.0, warmup_fraction=0.0)
    assert [trainer.learning_rate(step, 1, none) for step in range(1)] == [2.0]


def test_a_step_is_adamw_on_the_mean_gradient(llama, fresh, feed):
    """Against AdamW written out in float64 for the first step: moments, bias correction, decoupled decay, clipping."""
    loop = fresh(max_gradient_norm=0.05)
    batch = feed(0)
    before = {name: np.array(value, np.float64) for name, value in tree_flatten(loop.parameters)}
    prepared = loop.objective.prepare(loop.drafter, batch)

    def total(parameters):
        loop.drafter.update(parameters)
        return loop.objective(loop.drafter, prepared)

    (value, weight), gradients = mx.value_and_grad(total)(loop.parameters)
    gradients = {name: np.array(g, np.float64) / weight.item() for name, g in tree_flatten(gradients)}
    norm = math.sqrt(sum((g * g).sum() for g in gradients.values()))
    record = loop.step(0, batch)
    assert record.step == 1
    assert record.loss == pytest.approx(value.item() / weight.item(), rel=1e-6)
    assert record.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.05  # it was clipped
    rate = 3e-3 / 3  # the first of three warm-up steps
    assert record.learning_rate == pytest.approx(rate)
    for name, value in tree_flatten(loop.parameters):
        gradient = gradients[name] * 0.05 / norm
        moved = before[name] * (1 - rate * 0.01) - rate * gradient / (np.abs(gradient) + 1e-8)
        # float32 gradients: where |g| is near 1e-8, its last digits decide the direction; one step moves at most `rate`
        close = np.abs(np.array(value) - moved) < 0.02 * rate
        assert close.mean() > 0.999, name
        np.testing.assert_allclose(np.array(value), moved, atol=2 * rate, rtol=0)


def test_one_vector_takes_the_steps_of_many(fresh, feed, monkeypatch):
    """As on a GPU, where all tensors are updated as one; and either resumes from what the other saved."""
    many = fresh()
    separate = flat.Flat
    monkeypatch.setattr(flat, "Flat", lambda tree, together: separate(tree, True))
    one = fresh()
    assert (len(one.master), len(many.master) > 9) == (1, True)
    one.step(0, feed(0)), many.step(0, feed(0))
    for name, value in held(one).items():  # float32: products round as their arrays lie in memory
        close = np.abs(value - held(many)[name]) <= 1e-6
        # a first step is AdamW's whole rate either way, whichever sign rounding gives a gradient near nothing
        assert close.mean() > 0.999 if name.startswith("parameters") else close.all(), name
    assert one.step(1, feed(1)).loss == pytest.approx(many.step(1, feed(1)).loss, rel=1e-5)
    again = fresh()
    again.restore(many.state())
    assert_same(held(again), held(many))


def test_moments_are_float32_and_the_drafter_computes_in_the_targets_dtype(tiny_target, fresh, feed):
    target = tiny_target("llama", dtype="bfloat16")
    loop = fresh(target=target, dtype="bfloat16")
    record = loop.step(0, feed(0))
    assert math.isfinite(record.loss)
    assert {value.dtype for _, value in tree_flatten(loop.drafter.parameters())} == {mx.bfloat16}
    floats = {value.dtype for name, value in loop.state().items() if not name.endswith("optimizer.step")}
    assert floats == {mx.float32}


def test_the_loss_falls_and_the_target_stays_as_it_was(llama, fresh, feed):
    before = llama.live_digest()
    loop = fresh(steps=30, learning_rate=1e-2, warmup_fraction=0.1)
    losses = [loop.step(number, feed(number)).loss for number in range(30)]
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:3])
    assert losses[0] == pytest.approx(math.log(tiny.VOCABULARY), abs=2)  # scores of deviation 1: not far from uniform
    assert llama.live_digest() == before


@pytest.mark.parametrize("name", losses.LOSSES)
def test_every_loss_lowers_itself_in_bf16_too(tiny_target, fresh, feed, name):
    target = tiny_target("llama", dtype="bfloat16")
    loop = fresh(10, target, "bfloat16", loss=name, weights="dpace", learning_rate=1e-2, warmup_fraction=0.1)
    batch = feed(0)
    before = loop.objective.evaluate(loop.drafter, batch).loss.sum()
    for number in range(10):
        assert math.isfinite(loop.step(number, batch).gradient_norm)
    assert loop.objective.evaluate(loop.drafter, batch).loss.sum() < 0.9 * before


def test_a_batch_without_a_block_moves_nothing_and_stops_nothing(fresh, feed):
    """Answers of one token have no block; a batch of such documents once stopped the run as non-finite."""
    loop, batch = fresh(weight_decay=0.0), feed(0)
    drawn = dataclasses.replace(
        batch.anchors, used=batch.anchors.used & False, supervised=batch.anchors.supervised & False
    )
    before = held(loop)
    record = loop.step(0, dataclasses.replace(batch, anchors=drawn))
    assert (record.loss, record.gradient_norm) == (0, 0)
    for name, value in held(loop).items():
        if name.startswith("parameters"):
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_named(fresh, feed, poison):
    loop = fresh()
    loop.step(0, feed(0))
    loop.show([vector * poison for vector in loop.weights])
    with pytest.raises(trainer.NonFinite, match="step 2: loss nan"):
        loop.step(1, feed(1))


# fit.


class Stub:
    """Stands in for a Trainer: counts, and notes each call in `calls`."""

    def __init__(self, steps, calls, size=1):
        self.steps, self.calls, self.drafter, self.ranks = steps, calls, "drafter", ranks.Ranks(size=size)

    def launch(self, number, batch):
        assert batch == f"batch {number}"
        self.calls.append(f"launch {number}")
        return number

    def finish(self, number):
        return trainer.StepRecord(number + 1, 2.0, 1.0, 0.1, 0.0)


def calls_of(steps, *, start=0, stop_after=None, validate_every=4, save_every=3, size=1):
    """(what `fit` returned, the calls it made)."""
    calls = []
    options = types.SimpleNamespace(validate_every=validate_every, save_every=save_every)

    def evaluator(name):
        return lambda drafter: calls.append(f"{name} of {drafter}") or {name: 1}

    done = trainer.fit(
        Stub(steps, calls, size),
        lambda number: f"batch {number}",
        start=start,
        options=options,
        evaluators=[evaluator("loss"), evaluator("tau")],
        save=lambda step, figures: calls.append(f"save {step} {json.dumps(figures)}"),
        log=lambda figures: calls.append(f"log {figures['step']} {'tau' if 'tau' in figures else 'step'}"),
        stopping=lambda: stop_after is not None and calls.count("launch " + str(stop_after - 1)) > 0,
    )
    return done, calls


EVALUATED = '{"loss": 1, "tau": 1}'


def test_fit_validates_saves_and_logs_in_order():
    """A step's loss is read when the next one is launched, and before anything of it is saved."""
    done, calls = calls_of(5)
    assert done == 5
    assert calls == [
        "launch 0",
        "launch 1", "log 1 step",
        "launch 2", "log 2 step", "log 3 step", "save 3 null",
        "launch 3", "log 4 step", "loss of drafter", "tau of drafter", "log 4 tau", f"save 4 {EVALUATED}",
        "launch 4", "log 5 step", "loss of drafter", "tau of drafter", "log 5 tau", f"save 5 {EVALUATED}",
    ]  # fmt: skip


def test_ranks_finish_a_step_before_they_ask_each_other_whether_to_stop():
    """A reduction that waits for a lost rank behind the step's own would wait for ever."""
    assert calls_of(3, size=2, validate_every=9, save_every=9)[1][:6] == [
        "launch 0", "log 1 step", "launch 1", "log 2 step", "launch 2", "log 3 step",
    ]  # fmt: skip


def test_a_batch_that_cannot_be_made_ends_the_run_with_its_own_error():
    def batches(number):
        if number == 2:
            raise UserError("row 2 is gone")
        return f"batch {number}"

    calls, options = [], types.SimpleNamespace(validate_every=9, save_every=9)
    given = {"evaluators": [], "save": None, "log": lambda figures: None, "stopping": lambda: False}
    with pytest.raises(UserError, match="row 2 is gone"):
        trainer.fit(Stub(9, calls), batches, start=0, options=options, **given)
    assert calls == ["launch 0", "launch 1"]


def test_nothing_is_saved_of_a_step_that_is_not_finite():
    class Diverging(Stub):
        def finish(self, number):
            if number == 1:
                raise trainer.NonFinite("step 2")
            return super().finish(number)

    saved, options = [], types.SimpleNamespace(validate_every=9, save_every=1)
    given = {"evaluators": [], "log": lambda figures: None, "stopping": lambda: False}
    with pytest.raises(trainer.NonFinite, match="step 2"):
        trainer.fit(
            Diverging(9, []), "batch {}".format, start=0, options=options,
            save=lambda step, figures: saved.append(step), **given,
        )  # fmt: skip
    assert saved == [1]


def test_a_stop_saves_the_step_it_reached_and_returns_it():
    done, calls = calls_of(9, stop_after=2)
    assert (done, calls[-2:]) == (2, ["log 2 step", "save 2 null"])
    done, calls = calls_of(9, stop_after=4)
    assert (done, calls[-1], sum(call.startswith("save 4") for call in calls)) == (4, f"save 4 {EVALUATED}", 1)


def test_a_resumed_fit_begins_where_it_was_and_a_finished_one_does_nothing():
    assert calls_of(5, start=3)[1] == calls_of(5)[1][7:]
    assert calls_of(5, start=5) == (5, [])


def test_a_gradient_that_vanishes_under_a_high_loss_stops_the_run(fresh, feed):
    """A drafter that is certain and wrong: total variation is near 2 and has no slope left."""
    loop = fresh()
    loop.objective = objective.Objective(loop.objective.target, "total_variation", B, weights="uniform")
    kept = loop.state()
    loop.restore(kept | {"parameters.norm.weight": kept["parameters.norm.weight"] * 1e4})
    for number in range(trainer.PATIENCE - 1):
        record = loop.step(number, feed(number))
        assert record.loss > 1 and record.gradient_norm < trainer.VANISHED
    with pytest.raises(trainer.Saturated, match="saturated"):
        loop.step(trainer.PATIENCE, feed(trainer.PATIENCE))
    assert "learning_rate" in trainer.Saturated.remedy


def test_small_gradients_under_a_low_loss_are_a_drafter_that_has_learnt(fresh, feed):
    loop = fresh()
    launched = (0, mx.array(0.01), mx.array(1e-5), 1.0, 0.0)
    for _ in range(trainer.PATIENCE + 1):
        loop.finish(launched)
    for number in range(3 * trainer.PATIENCE):  # high losses, but never PATIENCE in a row without a slope
        loop.finish((number, mx.array(1.5), mx.array(1e-5 if number % trainer.PATIENCE else 0.1), 1.0, 0.0))


def test_a_constant_rate_only_warms_up():
    options = types.SimpleNamespace(learning_rate=2.0, warmup_fraction=0.25, schedule="constant")
    assert [trainer.learning_rate(step, 8, options) for step in range(8)] == [1.0] + [2.0] * 7
