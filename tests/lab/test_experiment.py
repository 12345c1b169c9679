"""A whole comparison on a small real target: its record, and what it does with a loop that decodes wrongly."""

import copy
import json

import pytest

import tiny
from decode import transaction
from decode.lab import arms, experiment, prompts, record, report, statistics, tables, ties, timing
from drafter import manifest
from drafter import target as targets
from kernels.errors import UserError

PLAN = timing.Plan(max_tokens=11, repeats=2, warmup=1)
TEXTS = ["the river ran past the old mill", "def add(first, second):", "a small model may write small words"]
ASKED = [prompts.Prompt(f"p{index}", "abc"[index], text) for index, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.mktemp("target"))), dtype="float32")


def quiet(items, *, total, desc):
    """A progress wrapper that checks the announced total and prints nothing."""
    found = list(items)
    assert len(found) == total, desc
    return found


def compare(target, plan=PLAN, **options):
    """A ksweep of two block sizes over TEXTS."""
    drafter, identity = arms.untrained(target, block_size=4, seed=3)
    compared = arms.ksweep(target, drafter, (2, 4), (2,), 3)
    encoded = experiment.encode(target, ASKED, plan)
    config = {
        "prompts": {"name": "own", "total": 3, "used": [prompt.id for prompt in ASKED], "turns": "single turn"},
        "max_tokens": plan.max_tokens,
        "repeats": plan.repeats,
        "raw_reason": target.raw_reason(),
    }
    header = experiment.header("ksweep", ["ksweep", "--x"], config, target, identity)
    return experiment.run(header, compared, encoded, plan, quiet, **options)


@pytest.fixture(scope="module")
def result(target):
    return compare(target)


def test_the_record_has_the_published_keys(result):
    assert result["schema"] == "foredraft.result/1"
    assert set(result) == {
        *("schema", "command", "argv", "config", "provenance", "target", "drafter", "health", "arms", "rows"),
        *("stages", "divergences", "complete"),
    }
    assert set(result["provenance"]) >= {"commit", "dirty", "versions", "device", "blas"}
    assert set(result["target"]) >= {"source", "fingerprint"}
    assert set(result["drafter"]) >= {"path", "sha256", "kind"}
    assert set(result["health"]) >= {"before", "after", "flagged_rows"}
    for arm in result["arms"]:
        assert set(arm) == {
            *("name", "kind", "block_size", "tok_s", "speedup", "speedup_loop_free", "tau", "acceptance_rate"),
            *("survival", "ms", "prompts", "rows", "speedup_every_row", "identical", "identical_mlx_lm", "divergences"),
            *("diverged_rows", "tokens_per_forward"),
        }
    for row in result["rows"]:
        assert set(row) >= {"arm", "prompt", "repeat", "tokens", "accepted_per_cycle", "seconds", "loop_fraction"}


def test_there_is_one_row_per_arm_prompt_and_repeat(result):
    found = {(row["arm"], row["prompt"], row["repeat"]) for row in result["rows"]}
    assert len(found) == len(result["rows"]) == 6 * 3 * 2


def test_a_sound_loop_in_float32_is_identical_and_has_no_divergence(result):
    for arm in result["arms"]:
        assert arm["identical"] == arm["identical_mlx_lm"] == arm["prompts"] == 3, arm["name"]
    assert result["divergences"] == []


def test_stages_add_up_to_the_cycle(result):
    by_name = {arm["name"]: arm["ms"] for arm in result["arms"]}
    assert by_name["mlx_lm"] is by_name["mlx_lm-twin"] is None
    for name in ("plain", "ngram-2", "dflash-2", "dflash-4"):
        ms = dict(by_name[name])
        assert sum(ms[part] for part in ("draft", "verify", "commit", "other")) == pytest.approx(ms["cycle"])
    assert by_name["dflash-4"]["draft"] > 0 == by_name["plain"]["draft"]


def test_figures_come_back_from_the_stored_rows_alone(result, tmp_path):
    path = tmp_path / "result.json"
    manifest.write_json(path, result)
    stored = record.read(path)
    assert report.same(experiment.summarise(stored), result["arms"])


class Killed(Exception):
    """Stands for whatever ends a run."""


def test_a_killed_run_has_saved_its_rounds_and_is_gone_on_with(target, result):
    saved = []

    def save(so_far):
        saved.append(copy.deepcopy(so_far))
        if len(so_far["rows"]) == 4 * 6:
            raise Killed

    with pytest.raises(Killed):
        compare(target, save=save)
    assert [len(one["rows"]) for one in saved] == [0, 6, 12, 18, 24]
    assert not saved[-1]["complete"] and report.text(saved[-1], experiment.summarise(saved[-1]))
    ended = compare(target, earlier=saved[-1])
    assert ended["complete"] and ended["rows"][:24] == saved[-1]["rows"] and len(ended["rows"]) == 36
    identity = lambda rows: [(row["arm"], row["prompt"], row["repeat"], row["place"], row["tokens"]) for row in rows]
    assert identity(ended["rows"]) == identity(result["rows"])


def test_disturbed_rows_are_left_out_of_the_headline_and_counted(result):
    disturbed = copy.deepcopy(result)
    for row in disturbed["rows"]:
        row["disturbed"] = ["a busy loop"] if row["repeat"] else []
        row["seconds"] *= 100 if row["repeat"] and row["arm"] == "dflash-4" else 1
    arm, *_ = [arm for arm in experiment.summarise(disturbed) if arm["name"] == "dflash-4"]
    assert arm["rows"] == {"counted": 3, "of": 6}
    assert arm["speedup"]["ratio"] > 20 * arm["speedup_every_row"]["ratio"]
    for row in disturbed["rows"]:
        row["disturbed"] = ["a busy loop"]
    figures = {arm["name"]: arm for arm in experiment.summarise(disturbed)}["dflash-4"]
    assert figures["speedup"] is figures["tok_s"] is None and figures["tau"] and figures["speedup_every_row"]
    disturbed["health"]["headline"] = statistics.EVERY
    figures = {arm["name"]: arm for arm in experiment.summarise(disturbed)}["dflash-4"]
    assert figures["speedup"] == figures["speedup_every_row"]


def test_looping_text_is_marked_in_its_rows(target, result):
    for row in result["rows"]:
        assert row["loop_fraction"] == statistics.loop_fraction(row["tokens"])


def test_a_rollback_that_keeps_a_row_too_many_is_a_defect(target, monkeypatch):
    def keep(self, rows, n):
        self.cache.offset = self.start + min(n + 1, rows)

    monkeypatch.setattr(transaction.Trimmed, "keep", keep)
    found = compare(target, timing.Plan(max_tokens=9, repeats=2, warmup=0))
    by_name = {arm["name"]: arm for arm in found["arms"]}
    assert by_name["plain"]["identical_mlx_lm"] == 3  # the plain loop opens no transaction
    assert by_name["dflash-4"]["divergences"]["defect"] == 3 - by_name["dflash-4"]["identical"] > 0
    audited = [case for case in found["divergences"] if case["class"] == "defect"]
    assert all(case["replayed"] and case["recorded_difference"] > 0.1 for case in audited)
    assert len(audited) == len({(case["arm"], case["prompt"], case["position"]) for case in audited})
    assert any("DEFECT" in line for line in tables.notes(found, found["arms"]))


def test_a_prompt_that_leaves_no_room_for_the_answer_is_refused_before_timing(target):
    long = prompts.Prompt("long", "c", "mill " * 600)
    with pytest.raises(UserError, match="prompt long has .* tokens.*--max-tokens 11.*context of 512"):
        experiment.encode(target, [*ASKED, long], PLAN)


def test_a_verify_is_found_by_the_token_it_committed():
    verifies = [ties.Verify(1, (5, 6)), ties.Verify(3, (7, 8)), ties.Verify(4, (9,))]
    assert [experiment.locate(verifies, position) for position in (0, 1, 2, 3, 4, 9)] == [
        *(None, verifies[0], verifies[0], verifies[1], verifies[2], verifies[2])
    ]


def test_a_verify_that_does_not_repeat_is_rebuilt_from_its_counts():
    row = {"tokens": [10, 11, 12, 13, 14], "proposed_per_cycle": [3, 2], "committed_per_cycle": [3, 1]}
    assert experiment.rebuilt(row, 2) == ties.Verify(
        1, (10, 11, 12, 10)
    )  # pending 10, 11 and 12 accepted, one rejected
    assert experiment.rebuilt(row, 4) == ties.Verify(4, (13, 13, 13))
    assert experiment.rebuilt(row, 0) is None


def test_the_record_is_plain_json(result):
    assert json.loads(json.dumps(result, allow_nan=False))["command"] == "ksweep"
