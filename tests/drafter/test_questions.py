"""User turns that the target writes: where they begin and end, what is refused, and conversations built of them.

Targets are small and random, in float32, with ends of our choice so that turns end. The cap is 23 tokens.
"""

import collections
import dataclasses
import gzip
import json

import pytest

import tiny
from drafter import manifest, questions, synthesis
from drafter import target as targets
from drafter.conversations import Recipe
from drafter.overlap import HeldOut, grams
from drafter.prompts import Prompt, make_prompt
from kernels.errors import UserError

CAP = 23
SPECIAL = {name: token for token, name in enumerate(tiny.SPECIAL)}
USER_ENDS = ((SPECIAL["<|im_end|>"],),)
BRACKETS = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def load(folder, **changes):
    """A small target whose chat template or further ends are changed."""
    target = targets.load(str(folder), dtype="float32")
    for name, value in changes.items():
        setattr(target.tokenizer, name, value)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """chat(**overrides) or raw: the folder of a small target."""
    return lambda **more: tiny.folder("llama", tmp_path_factory.getbasetemp(), **more)


@pytest.fixture(scope="module")
def chat(folder):
    """A target with a template, for which some common tokens end a turn, too."""
    letters = [tiny.tokenizer().token_to_id(letter) for letter in "jkvwxyzJKVWXYZ)"]
    return load(folder(chat_template=True, eos_token_id=[SPECIAL["<|im_end|>"], *letters]))


@pytest.fixture(scope="module")
def raw(folder):
    return load(folder())


def text_of(target, tokens):
    return target.tokenizer.decode(tokens)


# Where a user's turn begins and ends.


def test_a_users_turn_begins_where_the_template_puts_its_text(folder):
    target = load(folder(chat_template=True))
    opened = questions.opening(target, [{"role": "system", "content": "old"}], {})
    assert text_of(target, opened.tokens) == "<|im_start|>system\nold<|im_end|>\n<|im_start|>user\n"
    assert opened.ends == USER_ENDS
    turns = [{"role": "user", "content": "the mill"}, {"role": "assistant", "content": "add"}]
    later = text_of(target, questions.opening(target, turns, {}).tokens)
    assert later == "<|im_start|>user\nthe mill<|im_end|>\n<|im_start|>assistant\nadd<|im_end|>\n<|im_start|>user\n"


def test_a_turn_that_ends_in_plain_text_ends_there(folder):
    target = load(folder(chat_template=True, seed=3), chat_template=BRACKETS)
    opened = questions.opening(target, [], {})
    assert text_of(target, opened.tokens) == "[INST]"
    closing = tuple(target.tokenizer.encode(" [/INST]"))
    assert closing in opened.ends
    body = list(target.tokenizer.encode(" the miller counted sacks"))
    asking = questions.Asking()
    read = questions.read_question(target, opened, [*body, *closing], "stop", asking)
    assert read == ("the miller counted sacks", None)


@pytest.mark.parametrize("kind", ["chat", "raw"])
def test_first_words_stand_before_what_is_written_and_in_the_prompt(request, kind):
    target = request.getfixturevalue(kind)
    plain, opened = (questions.opening(target, [], {}, begun) for begun in ("", "the river ran"))
    assert text_of(target, opened.tokens) == text_of(target, plain.tokens) + "the river ran"
    assert opened.ends == plain.ends
    tokens = list(target.tokenizer.encode(" past the old mill", add_special_tokens=False))
    read = questions.read_question(target, opened, tokens, "stop", questions.Asking())
    assert read == ("the river ran past the old mill", None)


def test_beginnings_are_shared_out_evenly_and_by_name(chat):
    asking = questions.Asking(beginnings=("", "the mill", "add"))
    given = [questions.beginning(asking, f"{name:08}", 5) for name in range(300)]
    assert all(80 < given.count(each) < 120 for each in asking.beginnings)
    assert given != [questions.beginning(asking, f"{name:08}", 6) for name in range(300)]


def test_a_template_that_hides_the_text_is_refused(folder):
    target = load(folder(chat_template=True, seed=4), chat_template="{{ messages|length }}")
    with pytest.raises(UserError, match="hides the user's text; give prompts of your own"):
        questions.opening(target, [], {})


def test_a_document_begins_with_the_first_token_and_has_a_length_of_its_own(raw):
    opened = questions.opening(raw, [], {})
    assert opened.tokens == [SPECIAL["<|endoftext|>"]]
    jobs = [questions.question_job(raw, f"prompt {n}", n, opened, questions.Asking(), 0) for n in range(400)]
    lengths = {job.max_tokens for job in jobs}
    assert (min(lengths), max(lengths)) == (8, 64)
    again = questions.question_job(raw, "prompt 7", 7, opened, questions.Asking(), 0)
    assert again.max_tokens == jobs[7].max_tokens
    tokens = list(raw.tokenizer.encode("the river ran past the ol"))
    assert questions.read_question(raw, opened, tokens, "length", questions.Asking()) == (
        "the river ran past the",
        None,
    )


@pytest.mark.parametrize(
    ("text", "finish", "fault"),
    [
        ("the miller counted sacks<|im_end|>", "stop", None),
        ("the miller counted", "length", "longer than a prompt may be"),
        ("the<|im_end|>", "stop", "too short"),
        ("the miller counted<|im_start|>sacks<|im_end|>", "stop", "special token"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_reason(folder, text, finish, fault):
    target = load(folder(chat_template=True))
    opened = questions.opening(target, [], {})
    tokens = list(target.tokenizer.encode(text, add_special_tokens=False))
    assert questions.read_question(target, opened, tokens, finish, questions.Asking())[1] == fault


# Runs.


def run(target, folder, prompts=(), **changes):
    """A run, with what a Recipe has put into one."""
    names = {field.name for field in dataclasses.fields(Recipe)} & changes.keys()
    recipe = Recipe(**{"seed": 1, "max_tokens": CAP} | {name: changes.pop(name) for name in names})
    settings = {"data": [], "argv": [], "batch_size": 5} | changes
    return synthesis.run(target, list(prompts), folder, recipe=recipe, **settings)


def rows_of(folder, name="answers"):
    shards = sorted(folder.glob(f"{name}-*.jsonl.gz"))
    return [json.loads(line) for shard in shards for line in gzip.decompress(shard.read_bytes()).splitlines()]


def contents(folder):
    """Every file's bytes but the manifest's, which tells the time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def balanced(counts):
    return counts.input == counts.written + counts.remaining + sum(counts.skipped.values()) + sum(
        counts.failed.values()
    )


ASKING = questions.Asking(temperature=0.35, max_tokens=40)  # hotter ones write bytes that are no text
WHOLE = {"self_prompts": 24, "turns": 3, "temperatures": (0.0, 0.8), "asking": ASKING, "shard_rows": 7}
GIVEN = [make_prompt(f"the {word} ran", "words") for word in ("river", "mill", "grain")]


@pytest.fixture(scope="module")
def whole(chat, tmp_path_factory):
    """(folder, counts) of an uninterrupted run with prompts given and written, in three turns."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run(chat, folder, GIVEN, **WHOLE)


def test_every_prompt_and_every_further_turn_is_accounted_for(chat, whole):
    folder, counts = whole
    rows, left_out, written = (rows_of(folder, name) for name in ("answers", "left_out", "prompts"))
    assert balanced(counts)
    assert counts.remaining == 0
    assert counts.written == len(rows)
    assert len(written) == 24
    faults = collections.Counter(row["fault"] for row in written if row["fault"])
    assert all(counts.skipped[reason] >= number for reason, number in faults.items())
    later = [row for row in [*rows, *left_out] if row["turn"] > 1]
    assert counts.input == 24 + 3 + len(later)
    assert len([row for row in rows if row["turn"] > 1]) >= 5, "the test must see further turns"
    assert [row for row in left_out if "skipped" in row], "and some that are refused"
    extra = manifest.verify(folder).extra
    assert {name: extra[name] for name in dataclasses.asdict(counts)} == dataclasses.asdict(counts)
    assert manifest.verify(folder).data[-1]["name"] == "self-prompts"


def test_a_further_turn_goes_on_from_the_answer_before_it(chat, whole):
    rows = {(row["conversation"], row["turn"]): row for row in rows_of(whole[0])}
    for (conversation, turn), row in rows.items():
        assert len(row["messages"]) == 2 * turn - 1
        assert row["prompt_tokens"] == chat.encode(row["messages"])
        if turn == 1:
            assert row["id"] == conversation
            continue
        before = rows[conversation, turn - 1]
        assert before["finish"] == "stop"
        assert row["messages"][:-1] == [*before["messages"], {"role": "assistant", "content": before["answer"]}]
        assert row["messages"][-1]["role"] == "user"
        assert row["temperature"] == before["temperature"]


def test_a_conversation_that_stopped_has_a_next_turn_or_a_reason_why_not(whole):
    rows, left_out = rows_of(whole[0]), rows_of(whole[0], "left_out")
    known = {(row["conversation"], row["turn"]) for row in [*rows, *left_out]}
    for row in rows:
        goes_on = row["finish"] == "stop" and row["turn"] < 3
        assert ((row["conversation"], row["turn"] + 1) in known) == goes_on


def test_written_prompts_are_clean_and_no_two_are_alike(whole):
    rows = [row for row in rows_of(whole[0]) if row["source"] == "self-prompts" and row["turn"] == 1]
    texts = [row["messages"][-1]["content"] for row in rows]
    assert len(texts) >= 6
    sets = [grams(text, 3) for text in texts]
    pairs = [(a, b) for n, a in enumerate(sets) for b in sets[:n]]
    assert all(5 * len(a & b) < 3 * len(a | b) for a, b in pairs)
    assert not [text for text in texts if "<|" in text]


class Killed(BaseException):
    """Stands for a signal."""


def stop_after(steps):
    """A progress callback that ends the run at its step `steps`."""
    seen = iter(range(steps))

    def progress(*_):
        if next(seen, None) is None:
            raise Killed

    return progress


@pytest.mark.parametrize("steps", [(3,), (25,), (40, 12, 6), (55,)])
def test_a_run_stopped_at_any_stage_continues_to_the_same_bytes(chat, whole, tmp_path, steps):
    for count in steps:
        with pytest.raises(Killed):
            run(chat, tmp_path, GIVEN, **WHOLE, progress=stop_after(count))
    assert run(chat, tmp_path, GIVEN, **WHOLE) == whole[1]
    assert contents(tmp_path) == contents(whole[0])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_sampled_rows_are_the_same_in_any_batch(chat, whole, tmp_path, batch_size):
    assert run(chat, tmp_path, GIVEN, **WHOLE, batch_size=batch_size) == whole[1]
    assert contents(tmp_path) == contents(whole[0])


def test_prompts_begin_with_the_words_they_were_given(chat, tmp_path):
    begun = dataclasses.replace(ASKING, beginnings=("the miller counted", "the grain"))
    run(chat, tmp_path, self_prompts=12, asking=begun)
    texts = [row["text"] for row in rows_of(tmp_path, "prompts")]
    assert {text.startswith("the miller counted") for text in texts} == {True, False}
    assert all(text.startswith(begun.beginnings) for text in texts)
    with pytest.raises(UserError, match="asking"):
        run(chat, tmp_path, self_prompts=12, asking=ASKING)


def test_another_seed_gives_other_prompts(chat, whole, tmp_path):
    run(chat, tmp_path, **WHOLE | {"turns": 1, "seed": 2})
    texts, others = ({row["text"] for row in rows_of(folder, "prompts")} for folder in (tmp_path, whole[0]))
    assert len(texts - others) >= 8


def test_more_prompts_add_to_those_that_are_there(chat, whole, tmp_path):
    fewer = run(chat, tmp_path, GIVEN, **WHOLE | {"self_prompts": 10})
    assert balanced(fewer)
    assert run(chat, tmp_path, GIVEN, **WHOLE) == whole[1]
    assert contents(tmp_path) == contents(whole[0])
    less = run(chat, tmp_path, GIVEN, **WHOLE | {"self_prompts": 10})
    assert balanced(less)


def test_no_answer_is_begun_before_all_prompts_are_there(chat, whole, tmp_path):
    clock = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesis.time, "monotonic", lambda: float(next(clock)))
        early = run(chat, tmp_path, GIVEN, **WHOLE, minutes=0.3)
    assert early.written == 0 < early.remaining
    assert balanced(early)
    assert not rows_of(tmp_path)
    manifest.verify(tmp_path)
    assert run(chat, tmp_path, GIVEN, **WHOLE) == whole[1]
    assert contents(tmp_path) == contents(whole[0])


def test_a_user_turn_that_overlaps_with_an_evaluation_prompt_is_left_out(chat, whole, tmp_path):
    """Every second user turn that was written without the rule is an evaluation prompt now."""
    rows = [row for row in rows_of(whole[0]) if row["source"] == "self-prompts" or row["turn"] > 1]
    held = [row["messages"][-1]["content"] for row in rows][::2]
    counts = run(chat, tmp_path, GIVEN, **WHOLE, held_out=held)
    assert balanced(counts)
    assert counts.skipped["evaluation prompt"] >= len(held) / 2
    rule = HeldOut(held)
    assert not [row for row in rows_of(tmp_path) if rule.holds(row["messages"][-1]["content"])]
    assert rows_of(tmp_path)


def test_a_target_without_template_writes_document_beginnings(raw, tmp_path):
    counts = run(raw, tmp_path, self_prompts=20, asking=ASKING)
    rows = rows_of(tmp_path)
    assert balanced(counts)
    assert len(rows) >= 10
    for row in rows:
        assert row["prompt_tokens"] == list(raw.tokenizer.encode(row["messages"][0]["content"]))
    with pytest.raises(UserError, match="no user's turn can follow an answer; leave --turns at 1"):
        run(raw, tmp_path / "turns", self_prompts=20, turns=2)


# Templates.


def test_template_options_reach_every_prompt_and_the_manifest(folder, tmp_path):
    template = tiny.TEMPLATE + "{% if add_generation_prompt and not enable_thinking %}the mill{% endif %}"
    target = load(folder(chat_template=True, seed=5), chat_template=template)
    run(target, tmp_path / "off", GIVEN, template_options={"enable_thinking": False})
    assert all(text_of(target, row["prompt_tokens"]).endswith("the mill") for row in rows_of(tmp_path / "off"))
    extra = manifest.verify(tmp_path / "off").extra
    assert (extra["template_options"], extra["thinking"]) == ({"enable_thinking": False}, "off")
    run(target, tmp_path / "on", GIVEN, template_options={"enable_thinking": True})
    assert not [row for row in rows_of(tmp_path / "on") if text_of(target, row["prompt_tokens"]).endswith("the mill")]
    assert manifest.verify(tmp_path / "on").extra["thinking"] == "on"
    with pytest.raises(UserError, match="template_options"):
        run(target, tmp_path / "on", GIVEN, template_options={"enable_thinking": False})


def test_an_option_that_the_template_does_not_use_is_refused(chat, raw, tmp_path):
    with pytest.raises(UserError, match="--template-option thinking: the chat template does not use it"):
        run(chat, tmp_path / "run", GIVEN, template_options={"thinking": False})
    with pytest.raises(UserError, match="--template-option thinking: .*has no chat template"):
        run(raw, tmp_path / "run", GIVEN, template_options={"thinking": False})
    assert not (tmp_path / "run").exists()


def test_a_prompt_without_text_is_skipped_and_counted(chat, tmp_path):
    counts = run(chat, tmp_path, [*GIVEN, Prompt(({"role": "user", "content": " "},), "words")])
    assert counts.skipped == {"no text": 1}
    assert balanced(counts)
