"""Prompt sets: shipped, sampled, and refused when malformed."""

import collections
import hashlib
import json

import pytest

from decode.lab import prompts
from kernels.errors import UserError


def test_the_module_wins_over_the_data_folder_of_the_same_name():
    assert prompts.__file__.endswith("prompts.py")
    assert prompts.FOLDER.is_dir() and not (prompts.FOLDER / "__init__.py").exists()


# The digests of the files as the sets' authors published them (THIRD_PARTY.md gives their origin).
@pytest.mark.parametrize(
    "name, digest",
    [
        ("gsm8k", "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27"),
        ("humaneval", "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e"),
        ("mt_bench", "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"),
    ],
)
def test_shipped_benchmarks_are_unchanged(name, digest):
    found = prompts.load(name)
    assert found.sha256 == digest
    assert len(found.prompts) == 80


def test_suite_has_three_prompts_in_each_of_nine_categories():
    found = prompts.load("suite")
    count = collections.Counter(prompt.category for prompt in found.prompts)
    assert len(count) == 9 and set(count.values()) == {3}
    assert len({prompt.text for prompt in found.prompts}) == 27


def test_limit_takes_from_every_category_of_a_sorted_file():
    found = prompts.load("mt_bench", limit=8)
    assert len({prompt.category for prompt in found.prompts}) == 8


@pytest.mark.parametrize("limit, expected", [(1, "d"), (2, "bf"), (3, "bdf"), (7, "abcdefg"), (9, "abcdefg")])
def test_limit_spreads_evenly_over_the_file(tmp_path, limit, expected):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcdefg"))
    assert "".join(prompt.text for prompt in prompts.load(str(path), limit).prompts) == expected


def test_several_sets_are_asked_in_turns_and_name_their_prompts(tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "one"}\n{"prompt": "two", "category": "own"}\n')
    sets = prompts.load_each([str(short), "gsm8k"], limit=3)
    found = prompts.join(sets)
    assert [prompt.id for prompt in found.prompts] == [
        f"{short}:1", "gsm8k:13", f"{short}:2", "gsm8k:40", "gsm8k:66",
    ]  # fmt: skip
    assert [prompt.category for prompt in found.prompts] == [str(short), "gsm8k", str(short), "gsm8k", "gsm8k"]
    assert (found.name, found.total) == (f"{short} + gsm8k", 82)
    assert found.sha256 not in {one.sha256 for one in sets}
    assert prompts.join(sets[:1]) == sets[0]


def test_a_set_named_twice_is_refused():
    with pytest.raises(UserError, match="--prompts gsm8k suite gsm8k: a set is named twice"):
        prompts.load_each(["gsm8k", "suite", "gsm8k"])


def test_only_the_first_turn_is_asked_and_the_record_says_so(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"question_id": "x7", "category": "c", "turns": ["one", "two", "three"]}\n\n')
    found = prompts.load(str(path))
    assert found.prompts == (prompts.Prompt("x7", "c", "one", 2),)
    assert found.identity()["turns"] == "first turn only"
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "content, words",
    [
        ("", ["holds no prompts"]),
        ("\n  \n", ["holds no prompts"]),
        ('{"prompt": "a"}\n{"prompt": \n', [":2", "not JSON"]),
        ('{"question": "a"}\n', [":1", "neither", "question"]),
        ('["a"]\n', [":1", "list"]),
        ('{"turns": []}\n', [":1", "turns"]),
        ('{"turns": ["", "b"]}\n', [":1", "turns"]),
        ('{"prompt": 3}\n', [":1", "prompt", "3"]),
        ('{"question_id": 1, "prompt": "a"}\n{"question_id": 1, "prompt": "b"}\n', ["question_id 1", "twice"]),
        (b"\xff\xfe\n", ["UTF-8"]),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refusal:
        prompts.load(str(path))
    assert str(path) in str(refusal.value)
    assert all(word in str(refusal.value) for word in words)


def test_an_unknown_set_names_the_nearest_and_the_choices(tmp_path):
    with pytest.raises(UserError, match="did you mean mt_bench.*gsm8k, humaneval, mt_bench, python_heldout, suite"):
        prompts.load("mtbench")
    with pytest.raises(UserError, match="is a folder"):
        prompts.load(str(tmp_path))
