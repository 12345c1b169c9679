"""Figures of walks, by hand."""

import pytest

from decode.lab import walked


def one(set, prompt, drafter, committed, loops=0.0):
    return {"set": set, "prompt": prompt, "drafter": drafter, "block_size": 4, "committed_per_cycle": committed,
            "answer_tokens": 1 + sum(committed), "loop_fraction": loops}  # fmt: skip


RESULT = {
    "drafters": [{"name": "a"}, {"name": "b"}],
    "walks": [
        one("math", "1", "a", [2, 2]), one("math", "2", "a", [1, 1, 1, 1], loops=0.3), one("chat", "1", "a", [4]),
        one("math", "1", "b", [4]), one("math", "2", "b", [2, 2], loops=0.3), one("chat", "1", "b", [1, 3]),
    ],
}  # fmt: skip


def test_tau_is_pooled_over_cycles_and_averaged_over_prompts_with_and_without_loops():
    found = {(each["set"], each["drafter"]): each for each in walked.findings(RESULT)}
    assert list(found) == [(name, drafter) for name in ("math", "chat", "all") for drafter in ("a", "b")]
    math = found["math", "a"]
    assert (math["tau"]["value"], math["tau"]["per_prompt"]) == (pytest.approx(8 / 6), pytest.approx(1.5))
    assert (math["loop_free"]["value"], math["looping"]) == (2, 1)
    assert found["all", "a"]["tau"]["value"] == pytest.approx(12 / 7)
    assert found["all", "a"]["tau"]["per_prompt"] == pytest.approx((2 + 1 + 4) / 3)
    assert found["all", "a"]["loop_free"]["prompts"] == 2


def test_a_drafter_is_held_against_the_first_over_the_prompts_of_both():
    found = {(each["set"], each["drafter"]): each["over_first"] for each in walked.findings(RESULT)}
    assert found["math", "b"]["value"] == pytest.approx((8 / 3) / (8 / 6))
    assert found["all", "b"]["value"] == pytest.approx((12 / 5) / (12 / 7))
    assert found["all", "a"] is None


def test_the_same_prompt_id_in_two_sets_is_two_prompts():
    assert walked.findings(RESULT)[-1]["tau"]["prompts"] == 3


def test_a_table_has_a_row_for_each_figure():
    ((title, header, rows, notes),) = walked.tables(walked.findings(RESULT))
    assert len(rows) == 6 and all(len(row) == len(header) for row in rows)
    assert rows[0][:4] == ["math", "a", "4", "1.33"]
    assert "0%" not in notes[1] and "5%" in notes[1]
