"""The cost model: planted coefficients come back, and what it foretells is arithmetic done by hand."""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode.lab import arms as lab_arms
from decode.lab import cost, forecast
from drafter import target as targets

PLANTED = {"a": 4.0, "b": 0.25, "c": 1e-3, "d": 2e-5}


def planted(W, T):
    return PLANTED["a"] + PLANTED["b"] * W + PLANTED["c"] * T + PLANTED["d"] * W * T


def test_planted_costs_come_back():
    points = [(W, T, planted(W, T)) for W in (1, 5, 16) for T in (512, 2048, 7680)]
    found = forecast.fit(points)
    for name, value in PLANTED.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert found["r2"] == pytest.approx(1) and found["worst"] < 1e-12 and found["points"] == 9
    assert forecast.evaluate(found, 7, 1000) == pytest.approx(planted(7, 1000))


def test_noise_is_told_and_the_fit_is_numpys():
    generator = np.random.default_rng(2)
    points = [(W, T, planted(W, T) * generator.normal(1, 0.05)) for W in (1, 3, 9, 16) for T in (256, 1024)]
    W, T, ms = np.array(points).T
    expected, *_ = np.linalg.lstsq(np.stack([np.ones_like(W), W, T, W * T], 1), ms, rcond=None)
    found = forecast.fit(points)
    assert [found[name] for name in "abcd"] == pytest.approx(expected.tolist(), rel=1e-6)
    assert 0.01 < found["worst"] < 0.2 and 0.5 < found["r2"] < 1


def test_terms_that_the_points_cannot_tell_apart_are_left_out():
    one_context = forecast.fit([(W, 512, 3 + 2 * W) for W in (1, 4, 8)])
    assert one_context["c"] == one_context["d"] == 0 and one_context["b"] == pytest.approx(2)
    one_width = forecast.fit([(4, T, 3 + T / 100) for T in (100, 200)])
    assert one_width["b"] == one_width["d"] == 0 and one_width["c"] == pytest.approx(0.01)


COSTS = {1: 10.0, 2: 12.0, 3: 13.0, 4: 18.0}


def test_a_slot_breaks_even_at_what_its_row_costs_over_a_plain_step():
    slots = {one["B"]: one["slot"] for one in forecast.break_even(COSTS)}
    assert slots == {2: pytest.approx(0.2), 3: pytest.approx(0.1), 4: pytest.approx(0.5)}
    assert forecast.break_even(COSTS)[-1]["tau"] == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("survival", "B", "speed"),
    [
        ([0.9, 0.8, 0.7], 3, 2.7 / 1.3),
        ([0.9, 0.8, 0.8, 0.8], 3, 2.7 / 1.3),  # nothing was measured past B = 4, and 3.5 ÷ 1.8 is less
        ([0.9, 0.1, 0.1], 2, 1.9 / 1.2),
        ([0.1, 0.0, 0.0], 1, 1.0),
    ],
)
def test_the_best_block_size_makes_most_tokens_of_the_time(survival, B, speed):
    assert forecast.best(survival, COSTS) == (B, pytest.approx(speed))


def test_a_cost_measurement_and_a_drafter_make_a_whole_model(tmp_path):
    target = targets.load(str(tiny.folder("llama", tmp_path)), dtype="float32")
    drafter = lab_arms.untrained(target, block_size=5, seed=0)[0]
    found = {
        "context": 7,
        "widths": {"foredraft": {W: {"ms": planted(W, 7)} for W in (1, 2, 5)}},
        "contexts": {T: {W: {"ms": planted(W, T)} for W in (1, 5)} for T in (7, 23)},
    }
    drafted = forecast.drafting(target, drafter, (2, 5), (7, 23), rounds=2)
    assert [point[:2] for point in drafted["draft"]] == [[2, 7], [5, 7], [2, 23], [5, 23]]
    assert all(point[2] > 0 for point in drafted["draft"]) and drafted["commit_ms"] > 0
    model = forecast.model(found, drafted)
    draft = forecast.evaluate(model["draft"], 4, 7)
    assert model["costs"][4] == pytest.approx(planted(4, 7) + draft + drafted["commit_ms"], rel=1e-6)
    assert model["costs"][1] == pytest.approx(planted(1, 7)) and list(model["costs"]) == [1, 2, 3, 4, 5]
    free = forecast.model(found)
    assert free["draft"] is None and free["costs"][5] == pytest.approx(planted(5, 7))
    for title, header, rows, _ in forecast.cost_tables(model):
        assert rows and {len(row) for row in rows} == {len(header)}, title


def test_a_draft_pass_is_as_wide_as_asked(tmp_path, monkeypatch):
    target = targets.load(str(tiny.folder("llama", tmp_path)), dtype="float32")
    drafter, seen = lab_arms.untrained(target, block_size=5, seed=0)[0], []
    draft = type(drafter).draft
    monkeypatch.setattr(
        type(drafter), "draft", lambda self, c, rows: seen.append(rows.shape[1]) or draft(self, c, rows)
    )
    forecast.drafting(target, drafter, (2, 4), (cost.KEPT + 2,), rounds=1)
    assert seen == [2] * 3 + [4] * 3
    mx.synchronize()


def row(arm, seconds, cycles):
    """A row of 1 + 12 tokens whose cycles are (proposed, accepted)."""
    return {
        "arm": arm, "prompt": "a", "repeat": 0, "seconds": seconds, "tokens": list(range(13)),
        "proposed_per_cycle": [one[0] for one in cycles], "accepted_per_cycle": [one[1] for one in cycles],
        "committed_per_cycle": [one[1] + 1 for one in cycles], "loop_fraction": 0.0, "disturbed": [],
    }  # fmt: skip


def test_a_sweep_is_foretold_from_its_widest_arm():
    arms = [{"name": name, "kind": name.split("-")[0], "block_size": B} for name, B in
            (("mlx_lm", None), ("plain", None), ("dflash-2", 2), ("dflash-4", 4))]  # fmt: skip
    rows = [
        *(row("mlx_lm", 1.2, []), row("plain", 1.2, []), row("dflash-2", 0.8, [(1, 1)] * 6)),
        row("dflash-4", 0.6, [(3, 3), (3, 1), (3, 1), (3, 3)]),
    ]
    stage = lambda arm, ms: {
        "arm": arm,
        "prompt": "a",
        "cycles": 10,
        "seconds": ms / 100,
        "draft": 0,
        "verify": 0,
        "commit": 0,
    }
    stages = [stage("plain", 10.0), stage("dflash-2", 12.0), stage("dflash-4", 15.0)]
    found = forecast.findings({"arms": arms, "rows": rows, "stages": stages, "divergences": [], "health": {}})
    two, four = found["sizes"]
    assert found["from"] == "dflash-4"
    assert two["tau_foretold"] == pytest.approx(2.0) and four["tau_foretold"] == pytest.approx(1 + 1 + 0.5 + 0.5)
    assert two["speed_foretold"] == pytest.approx(2 * 10 / 12) and four["speed_foretold"] == pytest.approx(3 * 10 / 15)
    assert two["speed"] == pytest.approx(1.5) and four["speed"] == pytest.approx(2.0)
    assert found["best"] == {"foretold": 4, "found": 4}
    ((_, header, cells, notes),) = forecast.tables(found)
    assert [one[0] for one in cells] == ["2", "4"] and {len(one) for one in cells} == {len(header)}
    assert cells[1][-1] == "+0%" and "dflash-4" in notes[0]
