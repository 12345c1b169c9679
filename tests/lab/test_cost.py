"""Costs measured on a tiny hybrid: what is timed is what it says, and nothing measured changes a cache."""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode.lab import cost
from drafter import hybrid
from drafter import target as targets

CONTEXT = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("qwen3_5", tmp_path_factory.mktemp("cost"))), dtype="float32")


@pytest.fixture(params=[cost.Ours, cost.Stock])
def arm(request, target):
    arm = request.param(target)
    arm.prompt(cost.tokens(target, CONTEXT))
    return arm


def held(arm):
    """The arrays of every cache: two of a recurrent layer, keys and values of the rows that count of the others."""
    return [np.array(value) for entry in arm.caches for value in contents(entry)]


def contents(entry):
    if isinstance(entry.state[0], list):
        return entry.cache
    return [value[:, :, : entry.offset] for value in (entry.keys, entry.values)]


def test_a_verify_that_is_undone_leaves_the_caches_as_they_were(arm):
    before = held(arm)
    arm.mark()
    mx.eval(arm.verify(cost.tokens(arm.target, 5)))
    arm.undo()
    for one, other in zip(held(arm), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_both_arms_choose_the_same_tokens(target):
    rows, found = cost.tokens(target, 6, seed=2), []
    for kind in (cost.Ours, cost.Stock):
        arm = kind(target)
        arm.prompt(cost.tokens(target, CONTEXT))
        found.append(arm.verify(rows).tolist())
    assert found[0] == found[1]


def test_the_stock_arm_runs_mlx_lms_own_layers(target, monkeypatch):
    seen = []
    monkeypatch.setattr(hybrid, "forward", lambda *given: seen.append(given))
    arm = cost.Stock(target)
    mx.eval(arm.feed(cost.tokens(target, 3)))
    assert not seen


def test_kernels_are_chosen_before_anything_is_timed(target, monkeypatch):
    seen = []
    monkeypatch.setattr(cost.selfcheck, "ensure", seen.append)
    monkeypatch.setattr(cost.trial, "ensure", seen.append)
    monkeypatch.setattr(cost, "bandwidth", lambda: 1 / len(seen))  # the first that is timed
    monkeypatch.setattr(cost, "widths", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cost.measure(target, (2,), (CONTEXT,), (8,), 1, 4, lambda result: None)
    assert seen == [cost.selfcheck.dims_of(target.model), target]


def test_every_part_is_measured_and_saved_as_it_comes(target):
    saved = []
    result = cost.measure(target, (2, 5), (7, 11), (13,), 2, 8, lambda found: saved.append(sorted(found)))
    assert saved[-1] == sorted(result)
    assert saved == sorted(saved, key=len)
    assert set(result["widths"]) == {"foredraft", "mlx_lm"}
    assert set(result["widths"]["mlx_lm"]) == {1, 2, 5}
    assert set(result["contexts"]) == {7, 11}
    rates = {name: found["tok_s"] for name, found in result["prefill"][13].items()}
    assert result["headline"]["prefill_13_over_stock"] == rates["foredraft"] / rates["mlx_lm"]
    for row in result["widths"]["foredraft"].values():
        assert 0 < row["host_ms"] <= row["spread_ms"][1]
        assert row["pipelined_ms"] > 0
    ours = result["widths"]["foredraft"]
    assert result["headline"]["verify_5_over_plain"] == ours[5]["ms"] / ours[1]["ms"]
    assert result["rollback"]["kept"] == cost.KEPT
    assert result["memory"]["prompt_rows"] == 13


def test_a_rollback_keeps_three_rows_of_each_cycle(target, monkeypatch):
    arm, ends = cost.Ours(target), {}
    monkeypatch.setattr(cost, "Ours", lambda _: arm)
    chain = cost.chain

    def watched(arm, rows, n):
        found = chain(arm, rows, n)
        ends.setdefault(n, []).append(next(entry.offset for entry in arm.caches if hasattr(entry, "offset")))
        return found

    monkeypatch.setattr(cost, "chain", watched)
    cost.rollback(target, CONTEXT, 5, 2)
    assert ends == {n: [CONTEXT + cost.CHAIN * each] * 3 for n, each in ((cost.KEPT, cost.KEPT), (5, 5), (None, 5))}


def test_a_rollbacks_share_is_the_median_over_neighbouring_runs(target, monkeypatch):
    """The first run of each kind compiles, and counts for nothing."""
    runs = {cost.KEPT: [99, 3.3, 6.0, 4.4], 5: [99, 3.0, 5.0, 4.0], None: [99, 2.0, 4.0, 2.0]}
    left = {n: iter(samples) for n, samples in runs.items()}
    monkeypatch.setattr(cost, "chain", lambda arm, rows, n: next(left[n]))
    result = cost.rollback(target, CONTEXT, 5, 3)
    assert (result["cycle_ms"], result["cycle_keeping_all_ms"], result["cycle_free_ms"]) == (4.4, 4.0, 2.0)
    assert result["share"] == pytest.approx(0.1) and result["recorded"] == pytest.approx(0.65)
    assert result["share_spread"] == pytest.approx([0.1, 0.2]) and result["context"] == CONTEXT
