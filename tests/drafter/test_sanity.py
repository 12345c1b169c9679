"""Sanity: prompts of many scripts pass, and each fault is found in a text that has no other."""

import pytest

from drafter import sanity


@pytest.mark.parametrize(
    "text",
    [
        "How tall is Mount Everest?",
        "Write `def add(a, b): return a + b` in Rust.\n\tKeep it short.",
        "Объясни, почему небо голубое.",
        "今日の天気はどうですか",
        "请用 Python 写一个排序函数。",
        "اشرح لي كيف تعمل البوصلة",
        "x = [1, 2, 3]; print(x[0], x[1])",
        "What is the sum of Δ, Σ and π in this formula of mine?",
        "Le café est-il meilleur que le thé ?",
    ],
)
def test_a_prompt_in_any_script_passes(text):
    assert sanity.fault(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hello there", "too short"),
        ("", "too short"),
        ("what is this \ufffd thing", "strange characters"),
        ("what is this \x07 thing", "strange characters"),
        ("what is this \ue001 thing", "strange characters"),
        ("a b c !!!! ???? ----", "few letters"),
        ("what is небо голубое here", "mixed scripts"),
        ("one two three four five six seven eight nine " * 2, "repeats itself"),
    ],
)
def test_each_fault_is_named(text, reason):
    assert sanity.fault(text) == reason


def test_another_script_than_the_one_wanted_is_a_fault():
    assert sanity.fault("How tall is Mount Everest?", "latin") is None
    assert sanity.fault("Объясни, почему небо голубое.", "latin") == "another script"
    assert sanity.fault("Объясни, почему небо голубое.", "cyrillic") is None
    assert sanity.fault("今日の天気はどうですか", "cjk") is None
