"""Tables from result files alone."""

import gzip
import json

import pytest

from decode.lab import experiment, record, report, shown, tables
from drafter import manifest
from kernels.errors import UserError

PROMPTS = [f"p{index}" for index in range(11)]


def row(arm, prompt, seconds, accepted=()):
    """One row of five tokens, its cycles having offered two proposals each."""
    return {
        "arm": arm,
        "prompt": prompt,
        "category": "own",
        "repeat": 0,
        "tokens": [1, 2, 3, 4, 5],
        "seconds": seconds,
        "loop_fraction": 0.0,
        "disturbed": [],
        "proposed_per_cycle": [2] * len(accepted),
        "accepted_per_cycle": list(accepted),
        "committed_per_cycle": [count + 1 for count in accepted],
    }


@pytest.fixture
def result():
    """A result of eleven prompts: dflash-3 takes half the baseline's time on every one."""
    rows = []
    for index, prompt in enumerate(PROMPTS):
        time = 1.0 + index
        rows += [row("mlx_lm", prompt, time), row("plain", prompt, time), row("dflash-3", prompt, time / 2, [2, 0])]
    stages = [
        {"arm": "dflash-3", "prompt": "p0", "cycles": 2, "seconds": 0.05, "draft": 0.01, "verify": 0.03, "commit": 0.0}
    ]
    value = {
        "schema": experiment.SCHEMA,
        "command": "ksweep",
        "config": {
            "prompts": {"name": "own", "total": 40, "used": PROMPTS, "turns": "first turn only"},
            "max_tokens": 5,
            "repeats": 1,
            "raw_reason": None,
        },
        "provenance": {"commit": "abc123", "dirty": False, "created": "2026-01-02"},
        "target": {"source": "tiny", "dtype": "float32"},
        "drafter": {"path": "d", "sha256": "e", "kind": "dflash", "target_mismatch": None},
        "health": {"flagged_rows": [], "rule": "r"},
        "arms": [
            {"name": "mlx_lm", "kind": "mlx_lm", "block_size": None},
            {"name": "plain", "kind": "plain", "block_size": None},
            {"name": "dflash-3", "kind": "dflash", "block_size": 3},
        ],
        "rows": rows,
        "stages": stages,
        "divergences": [],
    }
    return value | {"arms": experiment.summarise(value)}


def test_the_table_says_what_the_rows_say(result):
    _, _, dflash = map(tables.cells, result["arms"])
    shown = dict(zip(tables.SPEED_HEADER, dflash, strict=True))
    assert dflash[:6] == ["dflash-3", "1.3", "2.000", "2.000–2.000", "2.000", "2.000–2.000"]  # 44 tokens in 33 s
    assert (shown["τ pooled"], shown["accept"], shown["identical"]) == ("2.00", "0.500", "11/11")
    assert (shown["draft"], shown["verify"], shown["other"], shown["cycle ms"]) == ("5.00", "15.00", "5.00", "25.00")
    assert shown["tie/width/defect"] == "0/0/0"


def test_below_ten_prompts_the_table_shows_a_range(result):
    result["rows"] = [one for one in result["rows"] if one["prompt"] in PROMPTS[:9]]
    assert tables.cells(experiment.summarise(result)[2])[3] == "range 2.00–2.00"


def test_a_category_of_prompts_enough_has_figures_of_its_own(result):
    assert tables.categories(result)[2] == []  # there is one only
    others = [one | {"prompt": f"{one['prompt']}x", "category": "slow"} for one in result["rows"]]
    for one in others:
        one["seconds"] *= 1 if one["arm"] == "mlx_lm" else 4
    few = [one | {"prompt": f"{one['prompt']}y", "category": "few"} for one in result["rows"] if one["prompt"] != "p3"][
        :27
    ]
    result["rows"] += others + few
    _, header, rows, _ = tables.categories(result)
    shown = [dict(zip(header, cells, strict=True)) for cells in rows]
    assert [(each["category"], each["arm"], each["speedup"], each["prompts"]) for each in shown] == [
        ("own", "plain", "1.000", "11"),
        ("own", "dflash-3", "2.000", "11"),
        ("slow", "plain", "0.250", "11"),
        ("slow", "dflash-3", "0.500", "11"),
    ]


def test_survival_is_a_table_of_the_arms_that_proposed(result):
    _, header, rows, _ = tables.survival(result["arms"])
    assert header[1:] == ["1", "2"] and rows == [["dflash-3", "0.50", "0.50"]]


def test_columns_line_up(result):
    lines = shown.as_text(tables.SPEED_HEADER, map(tables.cells, result["arms"])).splitlines()
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_written_result_is_rebuilt_unchanged(result, tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    data = json.dumps(result).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    ((content, changed),) = report.write({path: record.read(path)}, tmp_path).values()
    assert changed == []
    assert (tmp_path / "run.txt").read_text() == content
    assert "| dflash-3 | 1.3 | 2.000 |" in (tmp_path / "run.md").read_text()


def test_an_edited_figure_is_noticed(result, tmp_path):
    result["arms"][2]["speedup"]["ratio"] = 2.5
    assert report.write({"run.json": result}, tmp_path)["run.json"][1] == ["dflash-3"]


def test_what_must_be_said_is_said(result):
    said = " ".join(tables.notes(result, result["arms"]))
    assert "11 of 40 prompts of own (first turn only)" in said and "at most 5 tokens" in said
    for word in ("raw", "untrained", "another target", "disturbed", "DEFECT"):
        assert word not in said
    result["config"]["raw_reason"] = "no template"
    result["drafter"] |= {"kind": "untrained", "target_mismatch": {"trained_for": "x", "used_with": "y"}}
    result["health"]["flagged_rows"] = [3]
    result["arms"][2]["divergences"]["defect"] = 1
    said = " ".join(tables.notes(result, result["arms"]))
    for word in ("raw", "untrained", "another target", "1 of 33 rows were disturbed", "DEFECT"):
        assert word in said


@pytest.mark.parametrize(
    "content, words",
    [
        (b"not json", "not a result file"),
        (b"[1, 2]", "schema None"),
        (b'{"schema": "foredraft.manifest/1"}', "foredraft.manifest/1"),
        (b'{"schema": "foredraft.result/1", "arms": []}', "lacks"),
        (b"\xff\xfe", "not a result file"),
    ],
)
def test_what_is_no_result_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as refusal:
        record.read(path)
    assert str(path) in str(refusal.value)


def test_a_folder_gives_its_results_and_passes_over_other_json(result, tmp_path):
    manifest.write_json(tmp_path / "b.json", result)
    (tmp_path / "a.json").write_text("{}")
    assert list(record.find([tmp_path])) == [tmp_path / "b.json"]
    manifest.write_json(tmp_path / "b.json.gz", result)  # not gzip: no result
    assert list(record.find([tmp_path, tmp_path / "b.json"])) == [tmp_path / "b.json"]
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "b.json").read_bytes()))
    with pytest.raises(UserError, match="two results are called b"):
        record.find([tmp_path])
    (tmp_path / "b.json.gz").unlink()
    (tmp_path / "b.json").unlink()
    with pytest.raises(UserError, match="no result file"):
        record.find([tmp_path])
    with pytest.raises(UserError, match="not found"):
        record.find([tmp_path / "c.json"])


def test_every_committed_result_rebuilds_to_what_it_says(tmp_path):
    """What the README quotes comes from these: each is whole, and its figures are what its rows give."""
    results = record.find([manifest.ROOT / "runs" / "benchmarks"])
    assert len(results) > 5
    told = report.write(results, tmp_path)
    assert {path.name: names for path, (_, names) in told.items() if names} == {}
    assert all(text.strip() for text, _ in told.values())
