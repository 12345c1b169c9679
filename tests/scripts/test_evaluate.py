"""The evaluations at their edge: each runs on a small target, its result rebuilds, and it refuses in one line."""

import functools
import json

import pytest
import spec_decode

import opening
import tiny
from decode.lab import health, timing

pytestmark = pytest.mark.usefixtures("quiet")
REFERENCES = ["mlx_lm", "mlx_lm-twin", "plain"]


@pytest.fixture
def command(run_script):
    return functools.partial(run_script, "spec_decode.py", spec_decode.main)


@pytest.fixture
def asked(tmp_path):
    """A prompt file of two prompts."""
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "the river ran"}\n{"prompt": "def add(first"}\n')
    return path


@pytest.fixture
def run(command, target, asked, tmp_path):
    """Run an evaluation at its smoke size: (closing line, the result, what was shown); its report must agree."""

    def run(name, *words):
        out = tmp_path / f"{name}.json"
        code, closing, shown, err = command(
            name,
            *("--target", target, "--prompts", asked, "--smoke", "--limit", 2, "--max-tokens", 10, "--out", out),
            *words,
        )
        assert code == 0, err
        assert closing["status"] == "done" and closing["defects"] == 0 and "SMOKE" in shown
        again = command("report", out, "--out", tmp_path / "tables")
        assert again[0] == 0 and again[1]["changed"] == {}, again
        return closing, json.loads(out.read_text()), shown

    return run


def test_transfer_judges_every_variant(run, target, tmp_path):
    variants = tiny.folder("llama", tmp_path, seed=2, chat_template=True), tiny.quantised(target, tmp_path)
    closing, result, shown = run("transfer", "--variants", *variants, "--block-sizes", "2,3")
    assert set(closing["verdicts"]) == {path.name for path in variants}
    assert [one["part"] for one in result["targets"]] == [path.name for path in (target, *variants)]
    assert len({one["fingerprint"] for one in result["targets"]}) == 3
    names = [*REFERENCES, "dflash-2", "dflash-3"]
    assert [arm["name"] for arm in result["arms"]] == names * 3
    assert len(result["rows"]) == 5 * 3 * 2 and len(result["agreement"]) == 2 * 2
    assert all(arm["identical"] == 2 for arm in result["arms"])
    assert "top-1 agreement" in shown and "verdict" in shown


def test_context_cuts_the_same_documents_at_every_length(run, tmp_path):
    texts = tmp_path / "texts.jsonl"
    words = "the river ran past the old mill and the miller counted sacks of grain "
    texts.write_text("".join(json.dumps({"prompt": f"{word} {words * 12}"}) + "\n" for word in ("a", "def", "small")))
    closing, result, shown = run("context", "--prompts", texts, "--lengths", "17,48", "--block-sizes", 3)
    assert closing["documents"] == 2 and result["config"]["prompts"]["total"] == 3
    assert {(row["part"], row["prompt_tokens"]) for row in result["rows"]} == {("17", 17), ("48", 48)}
    assert len(result["rows"]) == 2 * 4 * 2 and len(result["stages"]) == 2 * 2 * 2
    assert [one["length"] for one in result["findings"]["lengths"]] == [17, 48]
    assert "context length, dflash-3" in shown


def test_controls_stand_beside_the_drafter(run):
    closing, result, shown = run("controls", "--block-size", 3, "--ngram", 2)
    names = ["ngram-2", "untrained-3", "shuffled-3", "dflash-3"]
    assert [one["arm"] for one in result["findings"]["arms"]] == names
    assert [arm["name"] for arm in result["arms"]] == [*REFERENCES, *names]
    assert closing["twin"] > 0 and "identical twin" in shown
    assert all(arm["identical"] == 2 for arm in result["arms"])  # the target's own text, whatever proposes


def test_decompose_interleaves_four_cells_and_attributes_all_of_it(run, target, tmp_path):
    other = tiny.quantised(target, tmp_path)
    closing, result, shown = run("decompose", "--variant", other, "--block-size", 3)
    parts = [target.name, other.name]
    assert result["findings"]["weights"] == parts == [one["part"] for one in result["targets"]]
    first = [row for row in result["rows"] if row["prompt"] == "1"]
    assert sorted(row["place"] for row in first) == list(range(8))  # one interleaving of all arms, not two
    assert {row["part"] for row in first[:5]} == set(parts)
    found = closing["log_speedup"]
    assert found["both"] == pytest.approx(found["drafting"] + found["weights"] + found["interaction"])
    assert all(arm["identical"] == 2 for arm in result["arms"])  # each beside the plain loop on its own weights
    assert "lossless" in shown


@pytest.fixture
def three(tmp_path):
    """A prompt file of three prompts: two to measure on, one to set up on."""
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the river", "def add(", "a small model")))
    return path


def test_adaptive_sets_up_on_prompts_that_it_does_not_measure(run, three):
    closing, result, shown = run("adaptive", "--prompts", three, "--block-sizes", "2,3")
    config = result["config"]
    assert len(config["prompts"]["used"]) == 2 and not set(config["set_up_on"]) & set(config["prompts"]["used"])
    assert list(result["setup"]["costs"]) == ["1", "2", "3"] and closing["fixed"] in ("dflash-2", "dflash-3")
    kinds = [arm["kind"] for arm in result["arms"]]
    assert kinds == ["mlx_lm", "mlx_lm", "plain", "dflash", "dflash", *["policy"] * 4]
    assert all(arm["identical"] == 2 for arm in result["arms"])  # whatever decides, the text is the target's
    assert "policies against a fixed block size" in shown


def test_confidence_records_what_was_said_of_every_proposal_offered(run, three):
    closing, result, shown = run("confidence", "--prompts", three, "--block-sizes", "2,4", "--thresholds", "0.9")
    cuts = [arm["name"] for arm in result["arms"] if arm["kind"] == "policy"]
    assert cuts[0] == "confidence-0.00" and "confidence-0.90" in cuts
    rows = [row for row in result["rows"] if row["arm"] == cuts[0]]
    for row in rows:
        assert [len(said) for said in row["confidence_per_cycle"]] == row["proposed_per_cycle"]
    assert result["findings"]["calibration"]["confidence"]["judged"] > 0 and closing["ece"]["confidence"] >= 0
    assert all(arm["identical"] == 2 for arm in result["arms"])
    assert "calibration of confidence" in shown


def test_staged_offers_what_a_block_has_left(run):
    closing, result, shown = run("staged")
    more = [f"{kind}-5-{V}" for V in (2, 3) for kind in ("truncated", "staged")]
    names = [*REFERENCES, "dflash-2", "dflash-3", "dflash-5", *more]
    assert [arm["name"] for arm in result["arms"]] == names and set(closing["over"]) == set(more)
    assert all(arm["identical"] == 2 for arm in result["arms"])
    assert "draft D, verify V" in shown


TEXTS = "the river ran past the old mill and the miller counted sacks of grain"
# an evaluation in small, and its runs in a round: None where what is measured decides; each over two prompts
SMALL = {
    "ksweep": ("--ngram 2 --block-sizes 2,3", 6),
    "ties": ("--ngram 2 --block-sizes 2 --widths 2", 7),
    "transfer": ("--variants {other} --block-sizes 2", 4),
    "context": ("--lengths 5,9 --block-sizes 3", 4),
    "controls": ("--block-size 3 --ngram 2", 7),
    "decompose": ("--variant {other} --block-size 3", 8),
    "adaptive": ("--block-sizes 2,3", 9),
    "confidence": ("--block-sizes 2,3 --thresholds 0.5", None),
    "staged": ("--drafted 4 --verified 2", 7),
}


@pytest.fixture
def small(target, tmp_path):
    """The arguments of an evaluation in small, by its name."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"{word} {TEXTS}"}) + "\n" for word in ("a", "def", "small")))
    other = tiny.folder("llama", tmp_path, seed=2, chat_template=True)
    options = ("--target", target, "--prompts", texts, "--smoke", "--limit", 2)
    return lambda name: (name, *options, *SMALL[name][0].format(other=other).split())


@pytest.mark.parametrize("name", SMALL)
def test_a_killed_evaluation_leaves_its_rounds_and_is_gone_on_with(command, small, tmp_path, monkeypatch, name):
    out, partial, rounds = tmp_path / "r.json", tmp_path / "r.partial.json", timing.rounds
    argv = (*small(name), "--out", out)

    def cut(*given):
        yield next(rounds(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "rounds", cut)
    assert command(*argv)[0] == 130 and not out.exists()
    saved = json.loads(partial.read_text())
    assert len(saved["rows"]) == (SMALL[name][1] or len(saved["arms"]))
    code, closing, shown, err = command("report", partial, "--out", tmp_path / "tables")
    assert code == 0 and "INCOMPLETE" in shown and closing["changed"] == {}, err
    monkeypatch.setattr(timing, "rounds", rounds)
    code, closing, _, err = command(*argv, "--resume")
    assert code == 0 and closing["status"] == "done" and not partial.exists(), err
    result = json.loads(out.read_text())
    assert (
        result["complete"] and result["rows"][: len(saved["rows"])] == saved["rows"] and len(result["continued"]) == 1
    )
    places = [(row.get("part"), row["arm"], row["prompt"], row["repeat"]) for row in result["rows"]]
    assert len(set(places)) == len(places) == len(result["arms"]) * 2
    assert result.get("setup") == saved.get("setup")  # a resumed run keeps what its policies were set up with
    again = command("report", out, "--out", tmp_path / "tables")
    assert again[0] == 0 and again[1]["changed"] == {}


@pytest.mark.parametrize("name", SMALL)
def test_an_evaluation_of_which_every_row_was_disturbed_has_no_speed_and_says_so(
    command, small, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(health, "disturbance", lambda before, after: ["a busy loop"])
    out = tmp_path / "r.json"
    code, closing, shown, err = command(*small(name), "--out", out)
    assert code == 0 and closing["flagged_rows"] == len(json.loads(out.read_text())["rows"]), err
    assert "left out of every speed" in shown
    assert all(arm["speedup"] is None for arm in json.loads(out.read_text())["arms"])
    again = command("report", out, "--out", tmp_path / "tables")
    assert again[0] == 0 and again[1]["changed"] == {}


def test_criteria_name_the_arms_of_a_part(command, small, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {name: sound, arm: 9 dflash-3, figure: divergences.defect, at_most: 0}\n")
    code, closing, shown, err = command(*small("context"), "--out", tmp_path / "r.json", "--criteria", rules)
    assert code == 0 and closing["criteria"]["met"] == 1 and "sound" in shown, err
    rules.write_text("- {name: sound, arm: dflash-3, figure: divergences.defect, at_most: 0}\n")
    code, closing, _, _ = command(*small("context"), "--out", tmp_path / "s.json", "--criteria", rules)
    assert code == 2 and "this run has 5 mlx_lm" in closing["error"]


# arguments ("{…}" is filled in) -> words the one line must hold
BAD = {
    "a variant of another shape": (
        "transfer --target {target} --prompts {asked} --variants {wide}",
        ["hidden_size is 128", "has 96", "train one"],
    ),
    "verifying as much as is drafted": (
        "staged --target {target} --prompts {asked} --drafted 4 --verified 2,4",
        ["--verified 4", "fewer rows than are drafted, 4"],
    ),
    "too few prompts to set up on": (
        "adaptive --target {target} --prompts {asked}",
        ["holds 2 prompts", "--calibrate 4"],
    ),
    "a threshold of 1": ("confidence --thresholds 0.5,1", ["--thresholds", "below 1"]),
    "decompose without other weights": ("decompose", ["--variant"]),
    "a context beyond the target's": ("context --target {target} --lengths 600 --limit 1", ["--lengths 600", "of 512"]),
    "a length twice": ("context --lengths 64,64", ["64 stands twice"]),
    "documents that are too short": ("context --target {target} --prompts {asked}", ["0 of its 2 documents"]),
    "a block of one row": ("controls --block-size 1", ["--block-size", "found 1"]),
    "transfer without variants": ("transfer", ["--variants"]),
    "a variant that is not there": ("transfer --target {target} --prompts {asked} --variants {tmp}/no", ["/no"]),
    "the same target twice": ("transfer --target {target} --prompts {asked} --variants {target}", ["both called"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_2_and_leaves_nothing(command, target, asked, tmp_path, monkeypatch, name):
    monkeypatch.setattr(opening, "RUNS", tmp_path / "runs")
    before = sorted(tmp_path.rglob("*"))
    line, words = BAD[name]
    wide = tiny.folder("llama", target.parent, hidden_size=128)
    argv = [word.format(tmp=tmp_path, target=target, asked=asked, wide=wide) for word in line.split()]
    code, closing, _, err = command(*argv)
    assert code == 2 and closing["status"] == "refused"
    (said,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert all(word in said for word in words), said
    assert "Traceback" not in err and sorted(tmp_path.rglob("*")) == before
