"""The order in which arms run, and what is timed."""

import collections
import dataclasses

import pytest

from decode.lab import timing


@dataclasses.dataclass(frozen=True)
class Arm:
    """An arm that notes that it ran."""

    name: str
    log: list
    part: str | None = None

    def run(self, tokens, max_tokens):
        self.log.append((self.name, tokens, max_tokens))
        return f"run of {self.name}"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt whose tokens tell it apart."""

    tokens: str
    part: str | None = None

    @property
    def id(self):
        return self.tokens


def arms(names, log):
    """One arm per letter."""
    return [Arm(name, log) for name in names]


@pytest.mark.parametrize(
    "prompt, repeat, expected", [(0, 0, "Mabcd"), (1, 0, "Mbcda"), (3, 0, "Mdabc"), (1, 2, "Mdabc")]
)
def test_the_baseline_stays_first_and_the_others_rotate(prompt, repeat, expected):
    assert "".join(timing.order("Mabcd", prompt, repeat)) == expected


def test_over_a_set_every_arm_stands_equally_often_at_every_place():
    places = collections.Counter()
    for prompt in range(8):
        for place, arm in enumerate(timing.order("Mabcd", prompt, 0)):
            places[arm, place] += 1
    assert {places[arm, place] for arm in "abcd" for place in (1, 2, 3, 4)} == {2}
    assert places["M", 0] == 8


def test_arms_are_interleaved_within_prompt_within_repeat():
    log = []
    plan = timing.Plan(max_tokens=5, repeats=2, warmup=1)
    found = list(timing.rounds(arms("Mab", log), [Prompt("p"), Prompt("q")], plan))
    assert [(name, tokens) for name, tokens, _ in log] == [
        *[("M", "p"), ("a", "p"), ("b", "p"), ("M", "q"), ("b", "q"), ("a", "q")],
        *[("M", "p"), ("b", "p"), ("a", "p"), ("M", "q"), ("a", "q"), ("b", "q")],
    ]
    assert {cap for _, _, cap in log} == {5}
    assert [(repeat, prompt.id) for repeat, prompt, *_ in found] == [(0, "p"), (0, "q"), (1, "p"), (1, "q")]
    assert [(arm.name, place) for arm, place, *_ in found[1][2]] == [("M", 0), ("b", 1), ("a", 2)]
    assert found[1][2][1][2] == "run of b"


def test_rounds_that_are_done_are_passed_over_and_the_others_keep_their_order():
    log, plan = [], timing.Plan(max_tokens=5, repeats=2)
    done = {(0, "p", None), (1, "q", None)}
    found = list(timing.rounds(arms("Mab", log), [Prompt("p"), Prompt("q")], plan, done))
    assert [(repeat, prompt.id) for repeat, prompt, *_ in found] == [(0, "q"), (1, "p")]
    assert [name for name, *_ in log] == ["M", "b", "a", "M", "b", "a"]


def test_the_same_prompt_has_a_round_in_every_part():
    plan, asked = timing.Plan(max_tokens=5), [Prompt("p", "24"), Prompt("p", "96")]
    assert timing.places(arms("Ma", []), asked, plan) == {(0, "p", "24"), (0, "p", "96")}
    found = list(timing.rounds(arms("Ma", []), asked, plan, {(0, "p", "24")}))
    assert [prompt.part for _, prompt, *_ in found] == ["96"]
    assert timing.places([Arm("M", [], "q4"), Arm("M", [], "stock")], [Prompt("p")], plan) == {(0, "p", "q4")}


def test_what_a_check_finds_between_prompts_falls_on_both_rounds_beside_it(monkeypatch):
    states = iter([dict.fromkeys(["niceness"], nice) for nice in (0, 0, 5, 0, 0)])
    monkeypatch.setattr(timing.health, "check", lambda: timing.health.Check(wall=0.0, **next(states)))
    prompts = [Prompt(id) for id in "pqrs"]
    found = list(timing.rounds(arms("Ma", []), prompts, timing.Plan(5)))
    assert [bool(ailments) for *_, ailments in found] == [False, True, True, False]


def test_warm_up_runs_every_arm_as_often_as_asked_and_none_is_timed():
    log = []
    list(timing.warm_up(arms("Mab", log), [Prompt("p"), Prompt("q")], timing.Plan(5, repeats=1, warmup=3)))
    assert collections.Counter(name for name, *_ in log) == {"M": 3, "a": 3, "b": 3}
    assert not list(timing.warm_up(arms("Mab", log), [Prompt("p")], timing.Plan(5, repeats=1, warmup=0)))
