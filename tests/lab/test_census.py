"""The census and the audit on a real small target whose width effect is planted, so that every count is known."""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode.lab import arms, census, experiment, prompts, statistics, ties, timing
from drafter import target as targets
from widened import REACH, margin_ulps, widened

ANSWER = 48
TEXTS = ["the river ran past the old mill", "def add(first, second):", "a small model may write small words"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.mktemp("target"))), dtype="float32")


@pytest.fixture(scope="module")
def text(target):
    """(prompt ids, ids that follow: random, so that their margins are of every size)."""
    return target.encode(TEXTS[0]), np.random.default_rng(5).integers(5, tiny.VOCABULARY, ANSWER).tolist()


def margins_of(target, prompt, answer):
    """Margin in bfloat16 ULPs of every answer position, by mlx-lm's model over the whole text at once."""
    logits = target.model(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :].astype(mx.bfloat16)
    return [margin_ulps(row) for row in np.array(logits.astype(mx.float32))]


def test_a_planted_effect_is_counted_where_it_was_planted_and_nowhere_else(target, text):
    margins = np.array(margins_of(target, *text))
    assert sum((margins > 0) & (margins <= REACH)) >= 3  # else this would show nothing
    for row in census.count(widened(target), *text, (2, 5, ANSWER)):
        near = margins[: ANSWER // row["width"] * row["width"]]
        expected, low = [], -1.0
        for bound in census.BOUNDS:
            inside = (near > low) & (near <= bound)
            expected.append([int(inside.sum()), int((inside & (near > 0) & (near <= REACH)).sum())])
            low = bound
        assert row["by_margin"] == expected, row["width"]
        assert row["kinds"]["tie"] == ((near > 0) & (near <= 1)).sum()
        assert sum(row["kinds"].values()) == sum(differing for _, differing in expected)


def test_a_target_in_float32_has_nothing_to_count(target, text):
    found = census.summarise(census.count(target, *text, (3,)))
    assert found[3]["positions"] == ANSWER and found[3]["disagree"] == 0
    assert found[3]["low"] == 0 < found[3]["high"] < 0.1 and 0 <= found[3]["largest_difference"] < 1e-4


def test_a_text_shorter_than_the_width_is_left_out(target):
    assert census.count(target, [7, 8], [9, 10, 11], (2, 4)) != []
    assert [row["width"] for row in census.count(target, [7, 8], [9, 10, 11], (2, 4))] == [2]


def test_texts_are_pooled_by_width():
    row = lambda W, pairs, tie: {
        "width": W,
        "by_margin": pairs + [[0, 0]] * (len(census.BOUNDS) - len(pairs)),
        "kinds": {"tie": tie, "width_sensitive": sum(d for _, d in pairs) - tie},
        "largest_difference": 0.5 * W,
    }
    found = census.summarise([row(4, [[10, 3], [20, 1]], 2), row(2, [[5, 1]], 1), row(4, [[30, 1]], 1)])
    assert list(found) == [2, 4]
    assert (found[4]["positions"], found[4]["disagree"], found[4]["texts"]) == (60, 5, 2)
    assert found[4]["by_margin"][:2] == [[40, 4], [20, 1]] and found[4]["kinds"] == {"tie": 3, "width_sensitive": 2}
    assert found[4]["low"] < found[4]["rate"] == 5 / 60 < found[4]["high"]


@pytest.fixture(scope="module")
def audited(target):
    """A whole run over the widened target: proposals right and wrong, unguarded and under two guards."""
    wide = widened(target)
    asked = [prompts.Prompt(f"p{index}", "c", text) for index, text in enumerate(TEXTS)]
    plan = timing.Plan(max_tokens=28, repeats=1, warmup=0)
    drafter, identity = arms.untrained(wide, block_size=4, seed=3)
    bare = arms.ksweep(wide, drafter, (4,), (2,), 5)
    compared = [*arms.guarded(bare, 1, beside=True), *arms.guarded(bare, REACH, beside=False)[3:]]
    encoded = experiment.encode(wide, asked, plan)
    header = experiment.header("ties", [], {}, wide, identity)
    result = experiment.run(header, compared, encoded, plan, lambda items, total, desc: items)
    return {arm["name"]: arm for arm in result["arms"]}, result


def test_the_planted_effect_is_width_sensitive_or_a_tie_and_no_defect(audited):
    figures, result = audited
    cases = [case for case in result["divergences"] if "guard" not in case["arm"]]
    assert any(case["class"] == "width_sensitive" and 1 < case["gap_ulps"]["narrow"] <= REACH for case in cases)
    assert all(case["class"] in ties.CLASSES[:2] for case in result["divergences"])
    assert all(case["recorded_difference"] < 0.2 for case in cases)  # one ULP of bfloat16 at the logits' size or less
    assert figures["dflash-4"]["identical"] < 3


def test_a_guard_as_wide_as_the_effect_buys_identity_and_a_narrower_one_only_ties(audited):
    figures, result = audited
    for name in ("dflash-4", "ngram-2"):
        assert figures[f"{name}-guard3"]["identical"] == figures[f"{name}-guard3"]["prompts"] == 3
        assert figures[name]["identical"] <= figures[f"{name}-guard1"]["identical"] <= 3
    spent = {row["arm"]: row["redecided"] for row in result["rows"] if row["prompt"] == "p0"}
    assert spent["dflash-4-guard3"] > 0 == spent["dflash-4"]
    assert {case["class"] for case in result["divergences"] if case["arm"] == "dflash-4-guard1"} <= {"width_sensitive"}
    told = {(one["arm"], one["guard"]): one for one in statistics.guards(result["rows"], list(figures.values()))}
    assert set(told) == {(arm, guard) for arm in ("ngram-2", "dflash-4") for guard in ("1", "3")}
    one = told["dflash-4", "3"]
    assert one["identical"] == (figures["dflash-4"]["identical"], 3)
    rows = [row for row in result["rows"] if row["arm"] == "dflash-4-guard3"]
    assert one["redecided"] == sum(row["redecided"] for row in rows) / sum(len(row["tokens"]) - 1 for row in rows)
    bare = [row for row in result["rows"] if row["arm"] == "dflash-4"]
    pace = lambda some: sum(row["seconds"] for row in some) / sum(len(row["tokens"]) - 1 for row in some)
    assert one["speed"]["ratio"] == pytest.approx(pace(bare) / pace(rows))
