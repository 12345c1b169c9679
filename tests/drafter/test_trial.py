"""A compiled step is used where it is near the modules' own forward and faster, and nowhere else."""

import time

import mlx.core as mx
import pytest

import tiny
from drafter import layers, steps, target, trial
from kernels import verdicts


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine that seems to have a GPU, where nothing is known yet and little is timed."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(trial, "ROUNDS", 3)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    verdicts.decided.cache_clear()
    yield
    verdicts.decided.cache_clear()


@pytest.fixture(scope="module", params=["qwen3_5", "llama"])
def known(request, tmp_path_factory):
    return target.load(str(tiny.folder(request.param, tmp_path_factory.mktemp("trial"))), dtype="float32")


@pytest.fixture
def step(known, monkeypatch):
    """The step in plain operations, all of its kernels found right."""
    step = steps.for_model(known.model, known.backbone, layers.PLAIN)
    monkeypatch.setattr(steps, "for_model", lambda *model: step)
    monkeypatch.setattr(verdicts, "on_gpu", lambda: True)
    vars(step)["sound"] = True
    return step


def test_the_distance_of_a_right_step_is_of_rounding(known, step):
    error, mine, theirs = trial.measure(known, step)
    assert error < 1e-5 and mine > 0 and theirs > 0  # 0 where both go through products of few rows


@pytest.mark.parametrize(("seconds", "verdict"), [((0.1, 0.2), "use"), ((0.2, 0.1), "slow"), ((0.1, 0.1), "use")])
def test_the_faster_one_serves(known, step, monkeypatch, seconds, verdict):
    monkeypatch.setattr(trial, "measure", lambda *given: (1e-4, *seconds))
    trial.ensure(known)
    found = verdicts.state(steps.NAME, step.case)
    assert (found.verdict, found.ratio, found.error) == (verdict, seconds[0] / seconds[1], 1e-4)
    assert step.ready == (verdict == "use")


def test_a_step_that_waits_is_slow(known, step, monkeypatch):
    forward = step.forward
    monkeypatch.setattr(step, "forward", lambda *given: time.sleep(0.3) or forward(*given))
    assert trial.judge(known, step).verdict == "slow"


@pytest.mark.parametrize("spoil", [lambda x: x * 1.1, lambda x: x * mx.nan, lambda x: mx.roll(x, 1, axis=1)])
def test_a_wrong_step_is_not_used_however_fast(known, step, monkeypatch, spoil):
    run = type(step).__call__
    monkeypatch.setattr(type(step), "__call__", lambda *given: (spoil(run(*given)[0]), ()))
    found = trial.judge(known, step)
    assert found.verdict == "wrong" and "at most 1.0e-02 expected" in found.reason and not step.ready


def test_a_step_that_cannot_be_built_is_not_used(known, step, monkeypatch):
    def fails(*given):
        raise RuntimeError("no\nsuch instruction")

    monkeypatch.setattr(step, "forward", fails)
    found = trial.judge(known, step)
    assert (found.verdict, found.reason) == ("unbuilt", "no such instruction") and not step.ready


def test_it_is_measured_once_a_machine(known, step, monkeypatch):
    calls = []
    monkeypatch.setattr(trial, "measure", lambda *given: calls.append(1) or (0.0, 1.0, 2.0))
    trial.ensure(known)
    trial.ensure(known)
    assert len(calls) == 1


@pytest.mark.parametrize("reason", ["a part is not sound", "forced", "a CPU", "no step"])
def test_nothing_is_measured_where_nothing_could_be_used(known, step, monkeypatch, reason):
    monkeypatch.setattr(trial, "measure", None)
    vars(step)["sound"] = reason != "a part is not sound"
    monkeypatch.setattr(verdicts, "on_gpu", lambda: reason != "a CPU")
    if reason == "no step":
        monkeypatch.setattr(steps, "for_model", lambda *model: None)
    with verdicts.forced("on" if reason == "forced" else "off" if reason == "a CPU" else {"steps"}):
        if reason in {"forced", "a CPU"}:
            trial.ensure(known)
    if reason not in {"forced", "a CPU"}:
        trial.ensure(known)
    assert verdicts.current() == {}


def test_a_part_that_is_right_but_slow_by_itself_may_serve(known, step, monkeypatch):
    del vars(step)["sound"]
    parts = {("small_matmul.product", "a"), ("fused_rows.rotate_heads", "b")}
    monkeypatch.setattr(steps, "served", lambda *given: True)
    monkeypatch.setattr(steps, "needed", lambda *given: parts)
    for kernel, case in parts:
        verdicts.record(kernel, case, "slow", "")
    assert step.sound
    del vars(step)["sound"]
    verdicts.record("small_matmul.product", "a", "wrong", "")
    assert not step.sound


def test_a_change_of_the_steps_own_source_makes_it_unknown(known, step, monkeypatch, tmp_path):
    trial.judge(known, step)
    assert verdicts.state(steps.NAME, step.case)
    changed = tmp_path / "layers.py"
    changed.write_text("from kernels import small_matmul\n")
    verdicts.source_digest.cache_clear()
    monkeypatch.setitem(verdicts._above, "steps", (verdicts._above["steps"][0], changed))
    assert verdicts.state(steps.NAME, step.case) is None
    verdicts.source_digest.cache_clear()
