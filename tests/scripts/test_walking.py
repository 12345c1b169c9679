"""spec_decode.py walk: its walks are what decoding commits, its tables rebuild, and it refuses in one line."""

import functools
import json

import pytest
import spec_decode

from decode.lab import arms
from drafter import checkpoint, manifest
from drafter import target as targets

pytestmark = pytest.mark.usefixtures("quiet")
CAP = 14


@pytest.fixture
def command(run_script):
    return functools.partial(run_script, "spec_decode.py", spec_decode.main)


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    """Folders of two untrained drafters for the target: of blocks of 4 rows, and of 3."""
    model, folders = targets.load(str(target), dtype="float32"), []
    for name, B in (("wide", 4), ("narrow", 3)):
        drafter, _ = arms.untrained(model, block_size=B, seed=B)
        folders.append(tmp_path_factory.mktemp("drafters") / name)
        checkpoint.save_drafter(folders[-1], drafter)
        manifest.write(folders[-1], kind="checkpoint", target=model.identity())
    return folders


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two prompt sets, of three prompts and of one."""
    folder = tmp_path_factory.mktemp("sets")
    texts = {
        "three": ["the river ran", "def add(first", "a small mill by the river"],
        "one": ["the miller counted sacks"],
    }
    for name, some in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in some))
    return [folder / f"{name}.jsonl" for name in texts]


def test_every_walk_commits_what_decoding_commits(command, target, drafters, sets, tmp_path):
    walked, swept = tmp_path / "walk.json", tmp_path / "ksweep.json"
    asked = ["--target", target, "--max-tokens", CAP, "--block-sizes", "2,4"]
    code, closing, *_ = command("walk", *asked, "--drafter", drafters[0], "--prompts", sets[0], "--out", walked)
    assert code == 0 and closing["prompts"] == 3
    ksweep = ["--drafter", drafters[0], "--prompts", sets[0], "--repeats", 1, "--warmup", 0, "--out", swept]
    assert command("ksweep", *asked, *ksweep)[0] == 0
    rows = json.loads(swept.read_text())["rows"]
    decoded = {(row["arm"], row["prompt"]): row["committed_per_cycle"] for row in rows}
    walks = json.loads(walked.read_text())["walks"]
    assert len(walks) == 2 * 3
    for one in walks:
        assert one["committed_per_cycle"] == decoded[f"dflash-{one['block_size']}", one["prompt"]]
        assert one["answer_tokens"] == 1 + sum(one["committed_per_cycle"])


def test_drafters_walk_the_same_texts_each_as_far_as_it_was_trained(command, target, drafters, sets, tmp_path):
    out = tmp_path / "walk.json"
    asked = ["--block-sizes", "2,3,4", "--max-tokens", CAP, "--batch-size", 2, "--out", out]
    code, closing, shown, err = command("walk", "--target", target, "--drafter", *drafters, "--prompts", *sets, *asked)
    assert code == 0, err
    result = json.loads(out.read_text())
    assert [one["name"] for one in result["drafters"]] == ["wide", "narrow"]
    found = {(one["set"], one["drafter"], one["block_size"]): one for one in result["findings"]}
    arms = [("wide", 2), ("wide", 3), ("wide", 4), ("narrow", 2), ("narrow", 3)]
    names = [str(path) for path in sets]
    assert list(found) == [(name, *arm) for name in (*names, "all") for arm in arms]
    assert found["all", "wide", 4]["tau"]["prompts"] == 4 and found[names[1], "wide", 4]["tau"]["prompts"] == 1
    over = found["all", "narrow", 3]["over_first"]["value"]
    assert over == pytest.approx(found["all", "narrow", 3]["tau"]["value"] / found["all", "wide", 3]["tau"]["value"])
    assert found["all", "wide", 3]["over_first"] is None
    assert "walked τ" in shown and closing["tau"] >= 1
    again = command("report", out, "--out", tmp_path / "tables")
    assert again[0] == 0 and again[1]["changed"] == {}
    result["findings"][0]["tau"]["value"] += 0.5
    out.write_text(json.dumps(result))
    assert command("report", out, "--out", tmp_path / "tables")[1]["changed"] == {str(out): ["the findings"]}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda result: result["walks"][0].update(committed_per_cycle=[]), "walks[0].committed_per_cycle is []"),
        (lambda result: result["walks"][1].update(committed_per_cycle=[2, 0]), "every cycle commits a token"),
        (lambda result: result["walks"][1].update(drafter="who"), "walks[1].drafter is who; expected one of narrow"),
        (lambda result: result.update(walks=[]), "it holds no walk"),
        (lambda result: result["walks"][0].pop("loop_fraction"), "loop_fraction"),
    ],
)
def test_a_damaged_result_is_refused_in_one_line(command, target, drafters, sets, tmp_path, damage, words):
    out = tmp_path / "walk.json"
    asked = ["--target", target, "--drafter", drafters[1], "--prompts", sets[0], "--smoke", "--limit", 2, "--out", out]
    assert command("walk", *asked)[0] == 0
    result = json.loads(out.read_text())
    damage(result)
    out.write_text(json.dumps(result))
    code, closing, *_ = command("report", out, "--out", tmp_path / "tables")
    assert code == 2 and words in closing["error"]


def test_samples_are_walked_where_they_are_asked_for(command, target, drafters, sets, tmp_path):
    asked = ["--target", target, "--drafter", drafters[1], "--prompts", sets[0], "--max-tokens", CAP]
    found = []
    for T in (0, 3, 3):
        out = tmp_path / f"walk{len(found)}.json"
        assert command("walk", *asked, "--temperature", T, "--block-sizes", 2, "--out", out)[0] == 0
        result = json.loads(out.read_text())
        assert result["config"]["temperature"] == T
        found.append(
            [one["loop_fraction"] for one in result["walks"]] + [one["committed_per_cycle"] for one in result["walks"]]
        )
    assert found[1] == found[2] != found[0]


def test_two_drafters_of_one_name_are_numbered(command, target, drafters, sets, tmp_path):
    out = tmp_path / "walk.json"
    asked = ["--target", target, "--drafter", drafters[1], drafters[1], "--prompts", sets[1], "--smoke", "--out", out]
    assert command("walk", *asked)[0] == 0
    result = json.loads(out.read_text())
    assert [one["name"] for one in result["drafters"]] == ["narrow", "narrow-2"]
    assert all(one["over_first"]["value"] == 1 for one in result["findings"] if one["drafter"] == "narrow-2")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompts", "gsm8k", "gsm8k"], "a set is named twice"),
        (["--prompts", "nothing_of_the_kind"], "no prompt set or file called"),
        (["--block-sizes", "1"], "a block is the pending token"),
        (["--max-tokens", "1"], "at least 2"),
        (["--temperature", "-1"], "expected a temperature"),
        (["--drafter", "no/such/drafter"], "no/such/drafter: not found"),
    ],
)
def test_bad_input_is_refused_in_one_line(command, target, drafters, words, told):
    code, closing, _, err = command("walk", "--target", target, "--drafter", drafters[0], *words)
    assert code == 2 and closing["status"] == "refused" and told in closing["error"]
    assert len(err.strip().split("\n")) <= 2


def test_a_target_whose_answers_end_at_once_is_refused(command, drafters, target, sets, tmp_path, monkeypatch):
    from decode.lab import walk

    monkeypatch.setattr(walk, "texts_at", lambda *_: [])
    asked = ["--target", target, "--drafter", drafters[0], "--prompts", sets[1], "--out", tmp_path / "walk.json"]
    code, closing, *_ = command("walk", *asked)
    assert code == 2 and "every answer ends at once" in closing["error"]
