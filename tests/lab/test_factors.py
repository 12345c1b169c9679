"""Attribution to two factors: hand-made cells, and shares that add up."""

import math

import pytest

from decode.lab import factors


def row(part, arm, prompt, seconds, tokens):
    return {
        "part": part, "arm": arm, "prompt": prompt, "repeat": 0, "seconds": seconds, "tokens": tokens,
        "proposed_per_cycle": [3] * 5 if "-" in arm else [], "accepted_per_cycle": [1] * 5 if "-" in arm else [],
        "committed_per_cycle": [2] * 5 if "-" in arm else [], "loop_fraction": 0.0, "disturbed": [],
    }  # fmt: skip


def result(cells, prompts=2, other_text=range(11)):
    """A result whose cells take these seconds on the first prompt and proportionally longer on the others."""
    arms, rows = [], []
    for part, (off, on) in zip(("bf16", "4bit"), (cells[:2], cells[2:]), strict=True):
        for name, kind, seconds in (("mlx_lm", "mlx_lm", off), ("plain", "plain", off), ("dflash-4", "dflash", on)):
            arms.append({"part": part, "name": name, "kind": kind, "block_size": 4 if kind == "dflash" else None})
            text = list(range(11) if part == "bf16" else other_text)
            rows += [row(part, name, str(i), seconds * (1 + i), text) for i in range(prompts)]
    return {"command": "decompose", "arms": arms, "rows": rows, "stages": [], "divergences": [], "health": {}}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ((8.0, 4.0, 2.0, 1.0), {"drafting": 2, "weights": 4, "interaction": 1, "both": 8}),
        ((8.0, 4.0, 2.0, 2.0), {"drafting": 2, "weights": 4, "interaction": 0.5, "both": 4}),  # it no longer pays
    ],
)
@pytest.mark.parametrize("prompts", [2, 11])
def test_effects_multiply_to_the_whole(cells, expected, prompts):
    found = factors.findings(result(cells, prompts))
    for name, factor in expected.items():
        one = found["effects"][name]
        assert one["value"] == pytest.approx(math.log(factor), abs=1e-12)
        if prompts == 11:  # every prompt alike, so the interval has no width
            assert one["low"] == pytest.approx(one["value"], abs=1e-9) == pytest.approx(one["high"], abs=1e-9)
        else:
            assert one["low"] is None
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["cells"]["00"] == pytest.approx(8.0 * sum(range(1, prompts + 1)) / (10 * prompts))


def test_shares_give_each_factor_half_the_interaction():
    found = factors.findings(result((8.0, 4.0, 2.0, 2.0)))
    both, half = math.log(4), math.log(0.5) / 2
    assert found["shares"]["drafting"] == pytest.approx((math.log(2) + half) / both)
    assert found["shares"]["weights"] == pytest.approx((math.log(4) + half) / both)


@pytest.mark.parametrize(
    "cells",
    [(2.0, 1.0, 4.0, 2.0), (2.0, 2.0, 2.0, 2.0), (8.0, 10.0, 2.0, 3.0)],
    ids=["one undoes the other", "nothing", "apart"],
)
def test_no_shares_where_there_is_no_whole_to_share(cells):
    found = factors.findings(result(cells))
    assert found["shares"] is None and factors.tables(found)[0][2][0][4] == ""


def test_other_weights_that_write_other_text_are_not_lossless():
    same, other = (
        factors.findings(result((8.0, 4.0, 2.0, 1.0), other_text=text)) for text in (range(11), range(1, 12))
    )
    assert same["lossless"] == {"drafting": 2, "weights": 2, "prompts": 2}
    assert other["lossless"] == {"drafting": 2, "weights": 0, "prompts": 2}


def test_the_table_shows_effects_as_factors():
    ((title, header, rows, _),) = factors.tables(factors.findings(result((8.0, 4.0, 2.0, 1.0))))
    assert "bf16 → 4bit" in title and {len(one) for one in rows} == {len(header)}
    assert [one[1] for one in rows] == ["2.000", "4.000", "1.000", "8.000"]
    assert [one[4] for one in rows] == ["33%", "67%", "", ""]
