"""Prompts: every file form is read, templates expand to different natural texts, samples grow without changing."""

import collections
import gzip
import json
import pathlib
import re

import pytest

from drafter import prompts
from kernels.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GENERAL = ROOT / "configs" / "data" / "general.yaml"


@pytest.fixture(scope="module")
def general():
    return prompts.read_templates(GENERAL)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"turns": ["one?", "later"]}\n{"prompt": "two\\nlines"}\n\n{"question": "three", "n": 3}\n'),
        ("a.txt", "one?\n\n  two lines  \nthree\n"),
    ],
)
def test_prompts_are_the_first_turns_of_a_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    found = prompts.read_prompts(tmp_path / name)
    assert [" ".join(prompt.text.split()) for prompt in found] == ["one?", "two lines", "three"]
    assert {prompt.source for prompt in found} == {"a"}
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    if name == "a.jsonl":
        assert prompts.read_prompts(tmp_path / "a.jsonl.gz") == found


def test_a_system_turn_comes_first_and_changes_the_id(tmp_path):
    (tmp_path / "a.txt").write_text("hello\n")
    plain, led = (prompts.read_prompts(tmp_path / "a.txt", system=system)[0] for system in (None, "Be brief."))
    assert led.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"})
    assert led.text == plain.text == "hello"
    assert led.id != plain.id


def test_every_turn_of_an_evaluation_set_is_held_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["one", "two"]}\n{"prompt": "three"}\n')
    assert prompts.read_turns(tmp_path / "a.jsonl") == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", "", "empty file"),
        ("a.txt", " \n\n", "no prompts found"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', "line 2: no prompt found; expected `turns`"),
        ("a.jsonl", '{"turns": []}\n', "line 1: no prompt found"),
        ("a.jsonl", '{"turns": "all"}\n', "line 1: no prompt found"),
        ("a.jsonl", '{"prompt": " "}\n', "line 1: no prompt found"),
        ("a.jsonl", '{"prompt": 3}\n', "line 1: no prompt found"),
        ("a.jsonl", '{"prompt"', "line 1: not JSON"),
        ("a.yaml", "families: [", "not valid YAML"),
        ("a.yaml", "slots: {}", "found no `families`"),
        ("a.yaml", "families: {f: {phrasings: ['{n} of 2'], slots: {n: [1, 2]}}}", "found count=None"),
    ],
)
def test_a_prompt_file_without_prompts_is_refused(tmp_path, name, content, named):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=named):
        prompts.read_prompts(tmp_path / name)


def test_a_missing_prompt_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: prompt file not found"):
        prompts.read_prompts(tmp_path / "none.jsonl")


def test_a_text_that_is_no_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8"):
        prompts.read_prompts(tmp_path / "a.txt")


# Datasets.


@pytest.fixture
def table(tmp_path):
    """save(split=rows): a folder that `datasets.load_dataset` takes as it takes a name on the hub."""

    def save(**splits):
        for split, rows in splits.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / "table").mkdir(exist_ok=True)
            (tmp_path / "table" / f"{split}.jsonl").write_text(lines)
        return f"hf:{tmp_path / 'table'}"

    return save


def texts(name, **options):
    return [prompt.text for prompt in prompts.read_dataset(name, **options)[0]]


def test_a_dataset_gives_its_split_and_column(table):
    name = table(train=[{"question": f"q{n}", "answer": f"a{n}"} for n in range(5)], test=[{"question": "t"}])
    assert texts(name) == [f"q{n}" for n in range(5)]
    assert texts(f"{name}:test") == ["t"]
    assert texts(f"{name}:train[:2]:answer") == ["a0", "a1"]
    found, digest = prompts.read_dataset(f"{name}:train", system="Be brief.")
    assert {prompt.source for prompt in found} == {"table"}
    assert found[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert digest == prompts.read_dataset(name)[1] != prompts.read_dataset(f"{name}:train[:2]")[1]


def test_a_conversation_asks_its_first_user_turn_and_rows_without_one_have_no_text(table):
    talk = [{"role": "system", "content": "old"}, {"role": "user", "content": " hi "}, {"role": "user", "content": "b"}]
    name = table(train=[{"messages": talk}, {"messages": [{"role": "assistant", "content": "x"}]}, {"messages": []}])
    assert texts(name) == ["hi", "", ""]
    assert texts(table(train=[{"turns": ["one", "two"]}, {"turns": None}])) == ["one", ""]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (":validation", "cannot be loaded .*; check its name and split"),
        (":train:prompt", r"no column of prompts \(found title\); name one as"),
        ("", r"no column of prompts \(found title\)"),
        (":a:b:c:d", r"expected hf:NAME\[:SPLIT"),
    ],
)
def test_a_dataset_that_gives_no_prompts_is_refused(table, more, named):
    with pytest.raises(UserError, match=named):
        prompts.read_dataset(table(train=[{"title": "x"}]) + more)


def test_a_dataset_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded"):
        prompts.read_dataset(f"hf:{tmp_path / 'none'}")


# Templates.


def test_a_template_fills_its_own_slots_before_the_shared_ones():
    templates = {
        "slots": {"what": ["shared"], "n": [3]},
        "families": {"f": {"phrasings": ["{what} {n} {n} {x} {other}"], "slots": {"what": ["own"], "x": [" y\n"]}}},
    }
    assert prompts.expand(templates, 0, 1) == ["own 3 3 y {other}"]


def test_more_prompts_than_the_templates_hold_are_refused():
    templates = {"families": {"f": {"phrasings": ["{n} of 3"], "slots": {"n": [1, 2, 3]}}}}
    assert sorted(prompts.expand(templates, 0, 3)) == ["1 of 3", "2 of 3", "3 of 3"]
    with pytest.raises(UserError, match="found 3 different prompts, expected 4; lower --count"):
        prompts.expand(templates, 0, 4)


def test_families_share_the_prompts_by_weight():
    slots = {"a": list(range(99)), "b": list(range(99))}
    families = {name: {"phrasings": [name + " {a} {b}"], "weight": weight} for name, weight in (("x", 1), ("y", 3))}
    counts = collections.Counter(text[0] for text in prompts.expand({"slots": slots, "families": families}, 5, 2000))
    assert 420 < counts["x"] < 580  # a fair draw gives 500, standard deviation 19


def test_general_prompts_are_many_different_and_whole(general):
    texts = prompts.expand(general, 0, 4000)
    assert len(set(texts)) == len(texts) == 4000
    assert not [text for text in texts if re.search(r"\{\w+\}", text)]
    assert not [text for text in texts if text != text.strip() or "  a " in text or " ." in text]
    assert len(general["slots"]["topic"]) >= 150
    assert sum(len(family["phrasings"]) for family in general["families"].values()) >= 60


def test_every_general_phrasing_and_slot_is_used(general):
    for name, family in general["families"].items():
        wanted = {slot for phrasing in family["phrasings"] for slot in re.findall(r"\{(\w+)\}", phrasing)}
        assert wanted <= general["slots"].keys() | family.get("slots", {}).keys(), name
        assert family.get("slots", {}).keys() <= wanted, name


def test_general_prompts_depend_on_the_seed_alone(general):
    first = prompts.expand(general, 7, 300)
    assert prompts.expand(general, 7, 500)[:300] == first
    assert prompts.expand(general, 8, 300) != first


def test_no_general_prompt_is_an_evaluation_prompt(general):
    files = sorted((ROOT / "decode" / "lab" / "prompts").glob("*.jsonl"))
    assert {file.stem for file in files} >= {"gsm8k", "humaneval", "mt_bench", "suite"}
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    held = {" ".join(turn.lower().split()) for line in lines for turn in line.get("turns") or [line["prompt"]]}
    assert not held & {" ".join(text.lower().split()) for text in prompts.expand(general, 0, 12000)}


def test_a_larger_sample_holds_the_smaller_one():
    found = [prompts.Prompt(({"role": "user", "content": f"prompt {n}"},), "a") for n in range(90)]
    small, large = (prompts.sample(found, limit, seed=2) for limit in (20, 50))
    assert large[:20] == small
    assert prompts.sample(found[::-1], 20, seed=2) == small
    assert prompts.sample(found, 20, seed=3) != small
    assert sorted(prompt.text for prompt in prompts.sample(found, None, seed=2)) == sorted(p.text for p in found)
