"""scripts/make_variant.py at its edge: four recipes, and refusals that leave nothing behind."""

import functools
import json

import make_variant
import pytest

import tiny
from drafter import manifest


@pytest.fixture
def command(run_script):
    return functools.partial(run_script, "make_variant.py", make_variant.main)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the river ran past the old mill and the miller counted sacks " * 4)
    return path


@pytest.fixture
def sets(tmp_path):
    """Two prompt files."""
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, prompt in zip(paths, ("the river ran", "def add(first"), strict=True):
        path.write_text(json.dumps({"prompt": prompt}) + "\n")
    return paths


def test_every_recipe_makes_a_verified_folder(command, target, text, sets, tmp_path):
    second = tiny.folder("llama", tmp_path, seed=2)
    recipes = {
        "quantised": ("--bits", 8, "--group-size", 32),
        "tuned": ("--text", text, "--steps", 2, "--row-tokens", 9),
        "merged": ("--with", second),
        "ablated": ("--prompts", *sets),
    }
    made = set()
    for recipe, words in recipes.items():
        out = tmp_path / recipe
        code, closing, shown, _ = command(recipe, "--target", target, "--dtype", "float32", "--out", out, *words)
        assert code == 0 and closing["status"] == "done" and closing["recipe"] == recipe and "parent" in shown
        assert manifest.verify(out).extra["fingerprint"] == closing["fingerprint"]
        made.add(closing["fingerprint"])
    assert len(made) == 4


# arguments ("{…}" is filled in) -> words the one line must hold
BAD = {
    "no recipe": ("", ["RECIPE"]),
    "an unknown option": ("quantised --bit 4 --out {tmp}/new", ["--bit", "did you mean --bits?"]),
    "odd bits": ("quantised --bits 5 --out {tmp}/new", ["--bits", "5"]),
    "no place": ("quantised", ["--out"]),
    "a place that is taken": ("quantised --target {target} --out {target}", ["already there"]),
    "no steps": ("tuned --steps 0 --out {tmp}/new", ["--steps 0", "at least 1"]),
    "a missing text": ("tuned --target {target} --text {tmp}/no.txt --out {tmp}/new", ["no.txt", "no such file"]),
    "too little text": (
        "tuned --target {target} --text {text} --row-tokens 900 --out {tmp}/new",
        ["less than one row"],
    ),
    "a share of 0": ("merged --with x --share 0 --out {tmp}/new", ["--share 0", "above 0"]),
    "a merge with nothing": ("merged --target {target} --with {tmp}/gone --out {tmp}/new", ["gone"]),
    "an unknown set": (
        "ablated --target {target} --prompts humanevl suite --out {tmp}/new",
        ["did you mean humaneval"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_2_and_leaves_nothing(command, target, text, tmp_path, name):
    before = sorted(tmp_path.rglob("*"))
    line, words = BAD[name]
    argv = [word.format(tmp=tmp_path, target=target, text=text) for word in line.split()]
    code, closing, _, err = command(*argv)
    assert code == 2 and closing["status"] == "refused"
    (said,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert all(word in said for word in words), said
    assert "Traceback" not in err and sorted(tmp_path.rglob("*")) == before
