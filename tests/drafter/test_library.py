"""The standard library as text: what is read, a split that no version moves, and passages from the right side."""

import json

import pytest

from decode.lab import prompts
from drafter import library
from kernels.errors import UserError


@pytest.fixture(scope="module")
def whole():
    return library.read()


def test_both_sides_hold_text_and_share_no_file(whole):
    assert len(whole.train) > 100 and len(whole.held_out) > 10
    names = [text.name for text in (*whole.train, *whole.held_out)]
    assert len(set(names)) == len(names)
    sizes = [sum(len(text.text) for text in side) for side in (whole.train, whole.held_out)]
    assert sizes[0] > 4 * sizes[1] > 1_000_000
    assert all(text.held_out for text in whole.held_out) and not any(text.held_out for text in whole.train)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("json/decoder.py", True),
        ("ast.py", True),
        ("site-packages/mlx/nn/losses.py", False),
        ("unittest/mock.py", True),
        ("latest/contest.py", True),  # only whole names are left out
        ("unittest/test/testmock/support.py", False),
        ("test/test_ast.py", False),
        ("distutils/tests/test_build.py", False),
        ("encodings/cp037.py", False),
        ("config-3.12-x86_64-linux-gnu/python-config.py", False),
        ("_sysconfigdata__linux_x86_64-linux-gnu.py", False),
    ],
)
def test_only_the_library_proper_is_wanted(name, expected):
    assert library.wanted(name) == expected


@pytest.mark.parametrize(
    "names",
    [
        ("zipfile.py", "zipfile/__init__.py", "zipfile/_path/glob.py"),
        ("decimal.py", "_pydecimal.py"),
        ("datetime.py", "_pydatetime.py"),
        ("posixpath.py", "ntpath.py"),
        ("sre_parse.py", "re/_parser.py"),
    ],
)
def test_what_moves_between_versions_or_has_a_twin_stays_on_one_side(names):
    assert len({library.family(name) for name in names}) == 1


def test_a_copy_of_the_library_is_split_as_the_library_is(tmp_path, whole):
    held, trained = whole.held_out[0], whole.train[0]
    for text in (held, trained):
        path = tmp_path / "copy" / text.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.text, encoding="utf-8")
    more = library.read([tmp_path / "copy"])
    assert (len(more.train), len(more.held_out)) == (len(whole.train) + 1, len(whole.held_out) + 1)


def test_digests_name_the_side_and_change_with_a_name_or_a_byte(whole):
    assert [entry["name"].rpartition(", ")[2] for entry in whole.digests()] == ["training", "held out"]
    one = library.Text("a.py", "x = 1\n")
    others = [library.Text("b.py", "x = 1\n"), library.Text("a.py", "x = 2\n")]
    digests = {library.digest([text]) for text in (one, *others)} | {library.digest([one, one]), library.digest([])}
    assert len(digests) == 5


def test_a_limit_draws_the_same_files_whatever_else_is_there(whole):
    few = library.draw(whole.train, 7)
    assert len(few) == 7 and few == sorted(few, key=lambda text: text.name)
    assert library.draw(few, 3) == library.draw(whole.train, 3)


@pytest.mark.parametrize(("content", "named"), [(b"\xff\xfe", "not text in its encoding"), (None, "not found")])
def test_a_source_that_cannot_be_read_is_named(tmp_path, content, named):
    path = tmp_path / "bad.txt"
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.txt.*{named}"):
        library.read([path])


# Passages.


def test_a_passage_is_whole_lines_from_a_definition_on(whole):
    texts = {text.name: text.text for text in whole.held_out}
    rows = library.passages(whole.held_out, 10**6)
    assert len(rows) > 100
    for row in rows:
        name, line = row["question_id"].rsplit(":", 1)
        rest = texts[name].split("\n", int(line) - 1)[-1]
        assert rest.startswith(row["prompt"]) and rest[len(row["prompt"])].isspace()
        assert row["prompt"].startswith(("def ", "class ", "async def ", "@"))
        assert 200 <= len(row["prompt"]) <= 400 and not row["prompt"][-1].isspace()


def test_files_take_turns(whole):
    rows = library.passages(whole.held_out, 10**6)
    files = {row["question_id"].split(":")[0] for row in rows}
    few = library.passages(whole.held_out, len(files))
    assert {row["question_id"].split(":")[0] for row in few} == files
    assert {row["question_id"] for row in few} <= {row["question_id"] for row in rows}


def test_the_shipped_prompts_are_forty_passages_of_held_out_files():
    found = prompts.load("python_heldout")
    assert len({prompt.id for prompt in found.prompts}) == 40
    for prompt in found.prompts:
        assert library.Text(prompt.id.split(":")[0], "").held_out, prompt.id
        assert 200 <= len(prompt.text) <= 400 and prompt.category == "python"


def test_the_shipped_prompts_are_nowhere_in_the_training_side(whole):
    text = "\0".join(text.text for text in whole.train)
    rows = [json.loads(line) for line in prompts.find("python_heldout").read_text().splitlines()]
    assert not [row["question_id"] for row in rows if row["prompt"] in text]
