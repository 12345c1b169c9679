"""Overlap: near duplicates against every pair, held-out prompts whatever is around them, and no false alarms."""

import gzip
import json
import pathlib
import random

import pytest

from drafter import overlap, prompts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILES = sorted((ROOT / "decode" / "lab" / "prompts").glob("*.jsonl"))


@pytest.fixture(scope="module")
def evaluation():
    """Every user turn of the shipped evaluation sets."""
    return [turn for path in FILES for turn in prompts.read_turns(path)]


def test_words_are_letters_and_digits_and_single_characters_where_no_space_parts_words():
    assert overlap.words("Don't PRINT_me 3×, Straße!") == ["don", "t", "print", "me", "3", "strasse"]
    assert overlap.words("今日は hot") == ["今", "日", "は", "hot"]


def test_a_short_text_is_one_gram():
    assert overlap.grams("One two", 3) == {("one", "two")}
    assert overlap.grams("a b c d", 3) == {("a", "b", "c"), ("b", "c", "d")}
    assert overlap.grams("?!", 3) == set()


def near(one, other):
    """By hand: three fifths of all word trigrams are in both."""
    sets = []
    for text in (one, other):
        found = text.lower().split()
        sets.append({" ".join(found[n : n + 3]) for n in range(max(1, len(found) - 2))})
    return 5 * len(sets[0] & sets[1]) >= 3 * len(sets[0] | sets[1])


@pytest.mark.parametrize("seed", range(4))
def test_kept_texts_are_those_that_no_earlier_kept_one_resembles(seed):
    draw, texts = random.Random(seed), []
    for _ in range(160):
        if texts and draw.random() < 0.6:  # an earlier text with a few words changed
            found = draw.choice(texts).split()
            for _ in range(draw.randrange(3)):
                found[draw.randrange(len(found))] = draw.choice("abcdefgh")
            texts.append(" ".join(found))
        else:
            texts.append(" ".join(draw.choices("abcdefgh", k=draw.randrange(1, 24))))
    kept = []
    for text in texts:
        kept.append(not any(near(text, earlier) for earlier, keep in zip(texts, kept) if keep))
    assert overlap.first_of_each(texts) == kept
    assert overlap.first_of_each(texts[:70]) == kept[:70], "later texts change no earlier choice"
    assert 30 < sum(kept) < 140


def test_every_evaluation_prompt_is_found_with_words_around_it_and_in_another_case(evaluation):
    held = overlap.HeldOut(evaluation)
    assert len(evaluation) > 300
    assert all(held.holds(f" {text.upper()}\n") for text in evaluation)
    longer = [text for text in evaluation if len(text.split()) >= 12]
    assert len(longer) > 250
    assert all(held.holds(f"Please help me with this task, my friend.\n{text}\nThink step by step.") for text in longer)


def test_the_larger_part_of_a_held_out_prompt_is_found_and_a_smaller_one_is_not():
    text = " ".join(f"w{n}" for n in range(47))  # 40 eight-grams
    held = overlap.HeldOut(["something else of nine words that is not it", text])
    rest = " ".join(f"other{n}" for n in range(47))
    found = text.split()
    assert held.holds(" ".join(found[:27]) + " " + rest)  # 20 of 40
    assert not held.holds(" ".join(found[:26]) + " " + rest)  # 19 of 40


def test_no_training_prompt_is_taken_for_an_evaluation_prompt(evaluation):
    held = overlap.HeldOut(evaluation)
    rows = gzip.decompress((ROOT / "runs/synthesis/smollm2-135m/answers.jsonl.gz").read_bytes()).splitlines()
    texts = [json.loads(row)["messages"][-1]["content"] for row in rows]
    texts += prompts.expand(prompts.read_templates(ROOT / "configs" / "data" / "general.yaml"), 1, 4000)
    assert len(texts) > 7000
    assert not [text for text in texts if held.holds(text)]
