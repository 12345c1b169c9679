"""Whatever was done to a result file is said in one line that names the field; nothing is computed from it."""

import copy
import json
import random

import pytest

from decode.lab import experiment, record, report
from kernels.errors import UserError

ROW = {
    "arm": "mlx_lm", "prompt": "p", "category": "own", "repeat": 0, "tokens": [3, 4, 5], "seconds": 1.5,
    "proposed_per_cycle": [2], "accepted_per_cycle": [1], "committed_per_cycle": [2], "loop_fraction": 0.0,
    "disturbed": [], "redecided": 1,
}  # fmt: skip
RESULT = {
    "schema": experiment.SCHEMA,
    "command": "ksweep",
    "config": {
        "prompts": {"name": "own", "total": 1, "used": ["p"], "turns": "single turn"},
        "repeats": 1,
        "max_tokens": 3,
        "raw_reason": None,
    },
    "provenance": {"commit": "c", "created": "now", "source_digest": "s", "device": {"device": "cpu"}},
    "target": {"source": "t", "dtype": "float32"},
    "drafter": {"kind": "dflash", "sha256": "d", "target_mismatch": None},
    "health": {"before": {"load": [0.1]}, "after": None, "flagged_rows": [], "rule": "r"},
    "arms": [
        {"name": "mlx_lm", "kind": "mlx_lm", "block_size": None},
        {"name": "plain", "kind": "plain", "block_size": None},
        {"name": "dflash-3", "kind": "dflash", "block_size": 3},
        {"name": "dflash-3-guard1", "kind": "dflash", "block_size": 3},
    ],
    "rows": [ROW | {"arm": arm} for arm in ("mlx_lm", "plain", "dflash-3", "dflash-3-guard1")],
    "stages": [
        {"arm": "plain", "prompt": "p", "cycles": 2, "seconds": 1.0, "draft": 0.0, "verify": 0.9, "commit": 0.0}
    ],
    "divergences": [{"arm": "dflash-3", "prompt": "p", "position": 1, "class": "tie", "tokens": [1, 2]}],
    "complete": False,
    "census": [
        {"prompt": "p", "width": 3, "by_margin": [[4, 1]] * 7, "kinds": {"tie": 6, "width_sensitive": 1},
         "largest_difference": 0.5}
    ],
    "criteria": {
        "path": "rules.yaml", "sha256": "0", "commit": None,
        "rules": [{"name": "sound", "arm": "dflash-3", "figure": "divergences.defect", "at_most": 0}],
    },
}  # fmt: skip


def read(tmp_path, result):
    """What is read back of a result, or of any JSON."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result))
    return record.read(path)


def test_a_sound_result_is_read_as_it_is_and_reported(tmp_path):
    found = read(tmp_path, RESULT)
    assert found == RESULT
    assert "dflash-3" in report.text(found, experiment.summarise(found))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("rows",), None, "rows is null; expected a list"),
        (("rows", 1), None, r"rows\[1\] is null; expected an object"),
        (("rows", 2, "seconds"), None, r"rows\[2\]\.seconds is null; expected a number"),
        (("rows", 2, "seconds"), float("nan"), r"rows\[2\]\.seconds is NaN"),
        (("rows", 0, "seconds"), -1.5, r"rows\[0\]\.seconds is -1.5 for 3 tokens"),
        (("rows", 0, "seconds"), True, r"rows\[0\]\.seconds is true"),
        (("rows", 0, "tokens", 1), "4", r'rows\[0\]\.tokens\[1\] is "4"; expected a whole number'),
        (("rows", 0, "accepted_per_cycle"), [], r"rows\[0\] counts 1/0/1 cycles"),
        (("stages", 0, "verify"), "fast", r'stages\[0\]\.verify is "fast"'),
        (("divergences", 0, "class"), "fine", r'divergences\[0\] has class "fine"'),
        (("config", "prompts", "used"), 3, r"config\.prompts\.used is 3; expected a list"),
        (("health", "rule"), {}, r"health\.rule is \{\}; expected text"),
        (("arms", 0), "mlx_lm", r'arms\[0\] is "mlx_lm"; expected an object'),
        (("target",), [], r"target is \[\]; expected an object"),
        (("command",), 7, "command is 7; expected text"),
    ],
)
def test_a_field_that_was_edited_is_named(tmp_path, path, value, words):
    result = copy.deepcopy(RESULT)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(UserError, match=words):
        read(tmp_path, result)


def places(value, path=()):
    """Every path in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def test_no_single_edit_of_any_field_is_a_traceback(tmp_path):
    rng = random.Random(6)
    for path in [path for path in places(RESULT) if path]:
        for value in (None, [], {}, "x", -3, 1e308, rng.choice([True, [None], {"a": 1}])):
            result = copy.deepcopy(RESULT)
            holder = result
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            try:
                found = read(tmp_path, result)
            except UserError as refusal:
                assert "x.json" in str(refusal)
            else:
                report.text(found, experiment.summarise(found))


def test_a_cost_result_is_read_by_what_it_has(tmp_path):
    head = {key: RESULT[key] for key in ("schema", "config", "target", "provenance")}
    timed = {"ms": 1.0, "host_ms": 1.0, "pipelined_ms": 1.0, "spread_ms": [1.0, 1.0]}
    cost = head | {"command": "cost", "cost": {"context": 9, "widths": {"foredraft": {"1": timed}}}}
    assert "cost against width, after 9 rows" in report.text(read(tmp_path, cost))
    with pytest.raises(UserError, match="cost.widths.foredraft"):
        read(tmp_path, cost | {"cost": {"context": 9, "widths": {"foredraft": {"1": {**timed, "ms": None}}}}})
    with pytest.raises(UserError, match="lacks cost"):
        read(tmp_path, head | {"command": "cost"})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("config", RESULT["config"] | {"repeats": 2}, "its config is not this run's"),
        ("target", {"source": "other"}, "its target"),
        ("drafter", None, "its drafter"),
        ("criteria", {"sha256": "0"}, "its criteria"),
        ("provenance", RESULT["provenance"] | {"source_digest": "z"}, "its source code"),
        ("provenance", RESULT["provenance"] | {"device": {"device": "gpu"}}, "its device"),
    ],
)
def test_only_the_same_run_is_gone_on_with(tmp_path, key, value, words):
    path = tmp_path / "x.partial.json"
    path.write_text(json.dumps(RESULT))
    assert record.unfinished(path, RESULT) == RESULT
    with pytest.raises(UserError, match=words):
        record.unfinished(path, RESULT | {key: value})
    path.write_text(json.dumps(RESULT | {"complete": True}))
    with pytest.raises(UserError, match="nothing to resume"):
        record.unfinished(path, RESULT)
