"""The command at its edge: what it prints, writes and refuses. Refusals leave nothing behind."""

import errno
import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import spec_decode

import edge
import evaluate
import measuring
import opening
import tiny
from decode import transaction
from decode.lab import arms, health, timing
from drafter import checkpoint, manifest
from drafter import target as targets

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def command(run_script):
    return functools.partial(run_script, "spec_decode.py", spec_decode.main)


@pytest.fixture
def asked(tmp_path):
    """A prompt file of two prompts."""
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "the river ran"}\n{"turns": ["def add(first", "again"]}\n')
    return path


def small(target, asked, out):
    """The arguments of a ksweep that takes a second."""
    return (
        *("ksweep", "--target", target, "--prompts", asked, "--block-sizes", "2,3", "--ngram", "2"),
        *("--max-tokens", 6, "--repeats", 1, "--warmup", 0, "--out", out),
    )


def test_ksweep_prints_a_card_a_table_and_a_closing_line_and_writes_its_result(command, target, asked, tmp_path):
    out = tmp_path / "new" / "folder" / "result.json"
    code, closing, shown, err = command(*small(target, asked, out))
    assert code == 0 and closing["status"] == "done" and closing["out"] == str(out)
    assert closing["best"] in ("dflash-2", "dflash-3") and closing["tau"] >= 1 and closing["speedup"] > 0
    assert closing["identical"] == closing["prompts"] == 2 and closing["defects"] == 0
    for words in ("target ", "fingerprint", "device ", "untrained control", "first turn only", "mlx_lm", "dflash-3"):
        assert words in shown
    assert "timed" in err and "Traceback" not in err
    result = json.loads(out.read_text())
    looping = {row["prompt"] for row in result["rows"] if row["arm"] == "plain" and row["loop_fraction"] >= 0.05}
    assert closing["loop_free_prompts"] == 2 - len(looping)
    assert [arm["name"] for arm in result["arms"]] == [
        "mlx_lm",
        "mlx_lm-twin",
        "plain",
        "ngram-2",
        "dflash-2",
        "dflash-3",
    ]
    assert result["config"]["block_sizes"] == [2, 3] and result["config"]["seed"] == 0
    assert [path.name for path in out.parent.iterdir()] == ["result.json"]


def test_ksweep_fails_where_an_output_is_a_defect(command, target, asked, tmp_path, monkeypatch):
    def keep(self, rows, n):
        self.cache.offset = self.start + min(n + 1, rows)

    monkeypatch.setattr(transaction.Trimmed, "keep", keep)
    code, closing, shown, _ = command(*small(target, asked, tmp_path / "result.json"))
    assert code == 1 and closing["status"] == "failed" and closing["defects"] > 0
    assert "DEFECT" in shown and (tmp_path / "result.json").exists()  # the evidence is kept


def test_report_rebuilds_the_tables_and_fails_on_an_edited_figure(command, target, asked, tmp_path):
    out = tmp_path / "result.json"
    _, _, shown, _ = command(*small(target, asked, out))
    code, closing, again, _ = command("report", out, "--out", tmp_path / "tables")
    assert code == 0 and closing["files"] == 1 and closing["changed"] == {}
    table = (tmp_path / "tables" / "result.txt").read_text()
    assert table.rstrip() in shown and table.rstrip() in again
    result = json.loads(out.read_text())
    result["arms"][4]["tok_s"] *= 2
    out.write_text(json.dumps(result))
    code, closing, _, _ = command("report", out, "--out", tmp_path / "tables")
    assert code == 1 and closing["status"] == "failed" and closing["changed"] == {str(out): ["dflash-2"]}


def test_a_killed_ksweep_leaves_its_rounds_to_be_reported_and_resumed(command, target, asked, tmp_path, monkeypatch):
    out, partial = tmp_path / "result.json", tmp_path / "result.partial.json"
    rounds = timing.rounds

    def cut(*given):
        yield next(rounds(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "rounds", cut)
    code, closing, _, _ = command(*small(target, asked, out))
    assert code == 130 and closing["status"] == "interrupted" and not out.exists()
    assert len(json.loads(partial.read_text())["rows"]) == 6
    code, closing, shown, _ = command("report", partial, "--out", tmp_path / "tables")
    assert code == 0 and "INCOMPLETE" in shown
    monkeypatch.setattr(timing, "rounds", rounds)
    code, closing, _, err = command(*small(target, asked, out), "--max-tokens", 5, "--resume")
    assert code == 2 and "its config is not this run's" in closing["error"]
    code, closing, _, _ = command(*small(target, asked, out), "--resume")
    assert code == 0 and closing["identical"] == 2 and not partial.exists()
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 12 and len(result["continued"]) == 1
    code, closing, _, _ = command(*small(target, asked, out), "--resume")
    assert code == 2 and "result.partial.json: not found" in closing["error"]


def test_criteria_are_registered_before_the_run_and_judged_after_it(command, target, asked, tmp_path):
    rules, out = tmp_path / "rules.yaml", tmp_path / "result.json"
    rules.write_text(
        "- {name: sound, arm: dflash-3, figure: divergences.defect, at_most: 0}\n"
        "- {name: fast, arm: dflash-3, figure: speedup.low, at_least: 1}\n"
        "- {name: magic, arm: dflash-3, figure: tau.pooled, at_least: 9}\n"
    )
    code, closing, shown, _ = command(*small(target, asked, out), "--criteria", rules)
    assert code == 0 and closing["criteria"] == {"met": 1, "missed": 1, "not testable": 1}
    assert "sound" in shown and "not testable" in shown
    assert json.loads(out.read_text())["criteria"]["sha256"] == hashlib.sha256(rules.read_bytes()).hexdigest()


@pytest.mark.parametrize("place", ["rows", "seconds", "health", "prompts"])
def test_report_of_an_edited_file_is_one_line(command, target, asked, tmp_path, place):
    out = tmp_path / "result.json"
    command(*small(target, asked, out))
    result = json.loads(out.read_text())
    holder = {"rows": result, "seconds": result["rows"][3], "health": result, "prompts": result["config"]}[place]
    holder[place] = None
    out.write_text(json.dumps(result))
    code, closing, _, err = command("report", out, "--out", tmp_path / "tables")
    assert code == 2 and str(out) in closing["error"] and f"{place} is null; expected" in closing["error"]
    assert "Traceback" not in err


def test_ties_compares_guarded_arms_beside_the_others_and_takes_a_census(command, target, asked, tmp_path):
    out = tmp_path / "ties.json"
    argv = ["ties", *small(target, asked, out)[1:], "--tie-guard", "2.5", "--widths", "2,5"]
    code, closing, shown, _ = command(*argv)
    assert code == 0 and closing["defects"] == 0
    assert set(closing["disagreement"]) == {"2", "5"} and "census" in shown or "rows W" in shown
    result = json.loads(out.read_text())
    assert [arm["name"] for arm in result["arms"]][3:] == [
        *("ngram-2", "dflash-2", "dflash-3", "ngram-2-guard2.5", "dflash-2-guard2.5", "dflash-3-guard2.5")
    ]
    assert {row["width"] for row in result["census"]} == {2, 5}
    code, _, again, _ = command("report", out, "--out", tmp_path / "tables")
    assert code == 0 and "census of decisions" in again and "disagreements by margin" in again


def test_ties_fails_where_a_divergence_is_a_defect(command, target, asked, tmp_path, monkeypatch):
    def keep(self, rows, n):
        self.cache.offset = self.start + min(n + 1, rows)

    monkeypatch.setattr(transaction.Trimmed, "keep", keep)
    code, closing, _, _ = command("ties", *small(target, asked, tmp_path / "ties.json")[1:])
    assert code == 1 and closing["status"] == "failed" and closing["defects"] > 0


def test_ksweep_under_a_guard_has_guarded_arms_only(command, target, asked, tmp_path):
    out = tmp_path / "result.json"
    code, closing, _, _ = command(*small(target, asked, out), "--tie-guard", 1)
    assert code == 0 and closing["best"].endswith("-guard1")
    names = [arm["name"] for arm in json.loads(out.read_text())["arms"]]
    assert names[2:] == ["plain", "ngram-2-guard1", "dflash-2-guard1", "dflash-3-guard1"]


def test_disturbed_rows_are_no_headline_unless_asked_for(command, target, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "disturbance", lambda before, after: ["a busy loop"])
    out = tmp_path / "result.json"
    code, closing, shown, _ = command(*small(target, asked, out))
    assert code == 0 and closing["best"] is None and closing["flagged_rows"] == 12
    assert "12 of 12 rows were disturbed and are left out of every speed" in shown
    code, closing, shown, _ = command(*small(target, asked, out), "--include-disturbed")
    assert code == 0 and closing["speedup"] > 0 and "COUNTED in every speed" in shown


@pytest.mark.parametrize("source", ["option", "standard input"])
def test_generate_writes_text_and_a_closing_line(command, target, source):
    argv = ("generate", "--target", target, "--max-tokens", 7)
    text = "the river ran"
    code, closing, _, err = command(*argv, "--prompt", text) if source == "option" else command(*argv, stdin=text)
    assert code == 0 and closing["status"] == "done" and 1 <= closing["tokens"] <= 7
    assert closing["tau"] is None and closing["raw"] is None and "plain decoding" in err


def test_generate_says_when_it_feeds_a_prompt_raw(command, target):
    code, closing, _, err = command("generate", "--target", target, "--prompt", "a", "--max-tokens", 2, "--raw")
    assert code == 0 and closing["raw"] == "raw was asked for" and "fed raw: raw was asked for" in err


def test_help_names_the_commands_that_exist_and_no_other(capsys):
    with pytest.raises(SystemExit) as leaving:
        spec_decode.main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    listed = shown.split("positional arguments:")[1].splitlines()
    named = [line.split()[0] for line in listed if line.startswith("    ") and line[4] != " "]
    assert named == ["generate", "ksweep", "ties", "cost", *evaluate.COMMANDS, "walk", "layouts", "report"]


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """A drafter's folder as training leaves it: block size 3, made for the target."""
    model = targets.load(str(target), dtype="float32")
    drafter, _ = arms.untrained(model, block_size=3, seed=5)
    folder = tmp_path_factory.mktemp("run") / "step-1"
    checkpoint.save_drafter(folder, drafter)
    manifest.write(folder, kind="checkpoint", target=model.identity())
    checkpoint.point(folder.parent, "best", 1)
    return folder


@pytest.mark.parametrize("place", ["step-1", ".", "step-1/model.safetensors"])
def test_a_drafter_is_found_by_its_folder_its_run_or_its_file(command, target, trained, asked, tmp_path, place):
    out = tmp_path / "result.json"
    code, closing, shown, _ = command(*small(target, asked, out), "--adapter", trained.parent / place)
    assert code == 0 and closing["identical"] == 2
    result = json.loads(out.read_text())
    digest = hashlib.sha256((trained / "model.safetensors").read_bytes()).hexdigest()
    assert result["drafter"]["sha256"] == digest and digest[:16] in shown
    assert result["drafter"]["kind"] == "dflash" and result["drafter"]["target_mismatch"] is None


def test_default_block_sizes_stop_at_the_one_the_drafter_was_trained_at(command, target, trained, asked, tmp_path):
    out = tmp_path / "result.json"
    argv = [word for word in small(target, asked, out) if word not in ("--block-sizes", "2,3")]
    assert command(*argv, "--drafter", trained)[0] == 0
    assert json.loads(out.read_text())["config"]["block_sizes"] == [2]
    code, closing, _, _ = command(*argv, "--drafter", trained, "--block-sizes", "2,8")
    assert code == 2 and "block size 8" in closing["error"] and "trained at block size 3" in closing["error"]


def test_generate_drafts_with_a_drafter(command, target, trained):
    argv = ("generate", "--target", target, "--prompt", "the river ran", "--max-tokens", 7)
    plain, drafted = command(*argv), command(*argv, "--drafter", trained)
    assert drafted[0] == 0 and drafted[1]["tau"] >= 1
    assert drafted[2] == plain[2]  # the target's own text either way


def test_a_changed_byte_in_the_drafter_is_refused_by_name(command, target, trained, asked, tmp_path):
    broken = shutil.copytree(trained, tmp_path / "broken")
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "model.safetensors").write_bytes(data)
    code, closing, _, _ = command(*small(target, asked, tmp_path / "r.json"), "--drafter", broken)
    assert code == 2 and "model.safetensors" in closing["error"] and "changed" in closing["error"]
    assert not (tmp_path / "r.json").exists()


def test_another_target_is_refused_unless_allowed_and_then_recorded(command, trained, asked, tmp_path):
    other = tiny.folder("llama", tmp_path, seed=2, chat_template=True)
    out = tmp_path / "r.json"
    argv = (*small(other, asked, out), "--drafter", trained)
    code, closing, _, _ = command(*argv)
    assert code == 2 and "--allow-target-mismatch" in closing["error"] and not out.exists()
    code, _, shown, _ = command(*argv, "--allow-target-mismatch")
    assert code == 0 and "MADE FOR ANOTHER TARGET" in shown and "made for another target" in shown
    mismatch = json.loads(out.read_text())["drafter"]["target_mismatch"]
    assert mismatch["trained_for"] != mismatch["used_with"]


# arguments ("{…}" is filled in) -> words the one line must hold
BAD = {
    "an unknown command": ("sweep", ["sweep", "ksweep"]),
    "no command": ("", ["COMMAND"]),
    "an unknown option": ("ksweep --repeat 3", ["--repeat", "did you mean --repeats?"]),
    "a block size of 0": ("ksweep --block-sizes 4,0", ["--block-sizes", "found 0", "at least 1"]),
    "a block size of 1": ("ksweep --block-sizes 1", ["block size 1", "the pending token and at least one proposal"]),
    "a block size that is no number": ("ksweep --block-sizes 2,x", ["found 'x'", "whole number"]),
    "a block size given twice": ("ksweep --block-sizes 4,2,4", ["4 stands twice"]),
    "no block size": ("ksweep --block-sizes=", ["--block-sizes", "found ''"]),
    "a negative limit": ("ksweep --limit -3", ["--limit", "found -3", "at least 1"]),
    "a fraction": ("ksweep --max-tokens 2.5", ["--max-tokens", "found '2.5'"]),
    "no repeats": ("ksweep --repeats 0", ["--repeats", "found 0"]),
    "a negative warm-up": ("ksweep --warmup -1", ["--warmup", "found -1"]),
    "a negative seed": ("ksweep --seed -1", ["--seed", "found -1"]),
    "an unknown dtype": ("ksweep --dtype float8", ["--dtype", "float8", "bfloat16"]),
    "an unknown set": ("ksweep --prompts humanevl", ["humanevl", "did you mean humaneval?"]),
    "a missing prompt file": ("ksweep --prompts {tmp}/none.jsonl", ["none.jsonl", "shipped sets"]),
    "an empty prompt file": ("ksweep --prompts {tmp}/empty.jsonl", ["empty.jsonl", "holds no prompts"]),
    "a bad line": ("ksweep --prompts {tmp}/bad.jsonl", ["bad.jsonl:2", "not JSON"]),
    "an output that is a folder": ("ksweep --prompts {tmp}/good.jsonl --out {tmp}", ["is a folder"]),
    "an output inside a file": ("ksweep --prompts {tmp}/good.jsonl --out {tmp}/good.jsonl/x.json", ["is a file"]),
    "a missing drafter": ("ksweep --prompts {tmp}/good.jsonl --out {tmp}/r.json --drafter {tmp}/no", ["no", "drafter"]),
    "a missing target": ("ksweep --prompts {tmp}/good.jsonl --out {tmp}/r.json --target {tmp}/gone", ["gone"]),
    "a prompt beyond the context": (
        "ksweep --prompts {tmp}/long.jsonl --out {tmp}/r.json --target {target} --block-sizes 2",
        ["prompt 1 has", "context of 512", "--max-tokens"],
    ),
    "generate beyond the context": ("generate --target {target} --prompts {tmp}/long.jsonl", ["512"]),
    "an empty prompt": ("generate --target {target}", ["empty", "--prompt"]),
    "two sources of prompts": ("generate --prompt a --prompts suite", ["--prompts", "not allowed with"]),
    "a limit on one prompt": ("generate --prompt a --limit 2", ["--limit", "--prompts"]),
    "a guard that is no number": ("ksweep --tie-guard close", ["--tie-guard", "found 'close'", "ULPs"]),
    "a negative guard": ("ties --tie-guard -1", ["--tie-guard", "at least 0"]),
    "a guard without a drafter": ("generate --target {target} --prompt a --tie-guard 1", ["tie_guard", "drafter"]),
    "criteria that are none": (
        "ksweep --target {target} --prompts {tmp}/good.jsonl --block-sizes 2 --out {tmp}/r --criteria {tmp}/no.yaml",
        ["--criteria", "no.yaml", "No such file"],
    ),
    "nothing to resume": (
        "ksweep --target {target} --prompts {tmp}/good.jsonl --block-sizes 2 --out {tmp}/r.json --resume",
        ["r.partial.json", "not found"],
    ),
    "a block without a drafter": ("generate --target {target} --prompt a --block-size 4", ["block_size", "drafter"]),
    "report without a place": ("report {tmp}/good.jsonl", ["--out"]),
    "report of what is missing": ("report {tmp}/none.json --out {tmp}/tables", ["none.json", "not found"]),
    "report of no result": ("report {tmp}/good.jsonl --out {tmp}/tables", ["good.jsonl", "schema"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_2_and_leaves_nothing(command, target, tmp_path, monkeypatch, name):
    monkeypatch.setattr(opening, "RUNS", tmp_path / "runs")
    (tmp_path / "good.jsonl").write_text('{"prompt": "mill"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "mill"}\n{"prompt" "mill"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "mill " * 700}) + "\n")
    before = sorted(tmp_path.rglob("*"))
    line, words = BAD[name]
    argv = [word.format(tmp=tmp_path, target=target) for word in line.split()]
    code, closing, _, err = command(*argv)
    assert code == 2 and closing["status"] == "refused"
    (said,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert all(word in said for word in words), said
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number, words", [(errno.ENOSPC, "free some space"), (errno.EROFS, "not read-only")])
def test_a_disk_that_takes_no_result_is_refused_early(command, target, asked, tmp_path, monkeypatch, number, words):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(number, "no")

    monkeypatch.setattr(opening.tempfile, "NamedTemporaryFile", lambda **options: Full())
    monkeypatch.setattr(measuring, "open_models", lambda *given: pytest.fail("the target was loaded"))
    code, closing, _, err = command(*small(target, asked, tmp_path / "result.json"))
    assert code == 2 and closing["status"] == "refused"
    assert "result.json" in err and words in err


def test_the_probe_leaves_no_file(tmp_path):
    opening.refuse_unwritable(tmp_path / "a" / "b.json")
    assert list(tmp_path.iterdir()) == []


def test_cost_prints_its_ratios_and_writes_every_part(command, target, tmp_path, monkeypatch):
    from decode.lab import cost

    monkeypatch.setattr(cost, "bandwidth", lambda: 1e9)
    out = tmp_path / "cost.json"
    plan = ("--widths", 2, "--contexts", "5,9", "--prefills", 7, "--rounds", 2, "--cycles", 8)
    code, closing, shown, err = command("cost", "--target", target, "--dtype", "float32", *plan, "--out", out)
    assert code == 0 and closing["status"] == "done" and closing["out"] == str(out)
    result = json.loads(out.read_text())
    assert closing["verify_2_over_plain"] == result["cost"]["headline"]["verify_2_over_plain"]
    assert result["schema"] == "foredraft.result/1" and result["command"] == "cost"
    assert sorted(result["cost"]["contexts"]) == ["5", "9"] and list(result["cost"]["prefill"]) == ["7"]
    assert "mlx_lm W=2" in shown and "Traceback" not in err


@pytest.mark.parametrize(
    "plan", [("--contexts", "8,999999"), ("--prefills", "999999"), ("--contexts", "8", "--widths", "5,999999")]
)
def test_cost_refuses_rows_that_the_target_has_no_context_for(command, target, plan):
    code, closing, _, _ = command("cost", "--target", target, "--dtype", "float32", *plan)
    assert code == 2 and "999999" in closing["error"] and "exceed the context of" in closing["error"]


def test_cost_foretells_the_best_block_size_of_a_sweep(command, target, trained, asked, tmp_path, monkeypatch):
    from decode.lab import cost

    monkeypatch.setattr(cost, "bandwidth", lambda: 1e9)
    sweep, out = tmp_path / "sweep.json", tmp_path / "cost.json"
    assert command(*small(target, asked, sweep), "--drafter", trained)[0] == 0
    argv = ("cost", "--target", target, "--dtype", "float32", "--smoke", "--widths", "2,3", "--drafter", trained)
    code, closing, shown, _ = command(*argv, "--survival-of", sweep, "--out", out)
    assert code == 0 and closing["best"]["B"] in (1, 2, 3) and "break-even against plain" in shown
    model = json.loads(out.read_text())["cost"]["model"]
    assert [one["B"] for one in model["even"]] == [2, 3] and model["draft"]["points"] == 4
    assert json.loads(out.read_text())["drafter"]["kind"] == "dflash"
    code, closing, _, _ = command(*argv, "--survival-of", asked, "--out", out)
    assert code == 2 and "not a result file" in closing["error"]


def test_cost_refuses_a_shape_that_is_not_known(command, tmp_path):
    code, closing, _, err = command("cost", "--target", "shape:giant", "--out", tmp_path / "cost.json")
    assert code == 2 and closing["status"] == "refused"
    assert "expected one of shape:qwen3_5_4b" in err and "Traceback" not in err


BEFORE_MLX = """
import sys
import pytest, spec_decode
from kernels import backend

class Asked(Exception):
    pass

def load():
    raise Asked("mlx.core" in sys.modules)

backend.load = load
for words in sys.argv[1:]:
    with pytest.raises(Asked) as asked:
        spec_decode.main(words.split())
    assert asked.value.args == (False,), words
"""


def test_every_command_asks_for_a_blas_before_mlx_is_imported(asked):
    """Afterwards it would be too late, and a CPU's products thirty times slower."""
    more = {"transfer": "--variants no/folder", "decompose": "--variant no/folder", "report": "no.json --out no"}
    more |= {"walk": "--drafter no/folder", "generate": f"--prompts {asked}", "cost": "", "layouts": ""}
    names = spec_decode.build_parser()._subparsers._group_actions[0].choices
    lines = [f"{name} {more.get(name, f'--prompts {asked}')}" for name in names]
    folders = [str(edge.ROOT), str(edge.ROOT / "scripts")]
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_MLX, *lines],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
