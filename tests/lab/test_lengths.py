"""Context lengths: the same text continued at every length, and figures from rows written by hand."""

import json

import numpy as np
import pytest

import tiny
from decode.lab import lengths
from drafter import target as targets
from kernels.errors import UserError

WORDS = ["river", "mill", "grain", "miller", "old", "sacks", "stood", "small", "words", "after"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.load(str(tiny.folder("llama", tmp_path_factory.mktemp("target"))), dtype="float32")


@pytest.fixture
def source(tmp_path):
    """Five documents of 40 to 200 words."""
    path = tmp_path / "texts.jsonl"
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, 40 * (1 + index))) for index in range(5)]
    path.write_text(
        "".join(json.dumps({"question_id": f"d{i}", "prompt": text}) + "\n" for i, text in enumerate(texts))
    )
    return path


def test_a_longer_context_only_adds_what_came_before(target, source):
    chosen, found = lengths.documents(str(source), target, 90, 3)
    encoded = lengths.cut(chosen, (13, 47, 90), target, 7)
    assert [(one.id, one.part) for one in encoded] == [(id, part) for id in chosen for part in ("13", "47", "90")]
    for short, middle, long in zip(*[iter(encoded)] * 3):
        assert [len(one.tokens) for one in (short, middle, long)] == [13, 47, 90]
        assert middle.tokens[-13:] == short.tokens and long.tokens[-47:] == middle.tokens
    assert found["used"] == list(chosen) and found["total"] == 5
    assert lengths.documents(str(source), target, 90, 3)[0] == chosen


def test_too_few_long_documents_are_refused_with_what_there_is(target, source):
    with pytest.raises(UserError, match=r"5 of its 5 documents have 90 tokens or more, 6 were asked for"):
        lengths.documents(str(source), target, 90, 6)


def test_the_library_gives_held_out_documents_first(target):
    chosen, found = lengths.documents(lengths.LIBRARY, target, 300, 2)
    held_out = {text.name for text in lengths.library.read().held_out}
    assert set(chosen) <= held_out and len(chosen) == 2 and "library" in found["name"]


def test_a_length_beyond_the_context_is_refused(target):
    with pytest.raises(UserError, match="--lengths 510 with --max-tokens 7 exceeds the context of 512"):
        lengths.cut({"d": tuple(range(510))}, (13, 510), target, 7)


def row(part, arm, prompt, seconds, committed):
    """A row of 1 + 10 tokens."""
    return {
        "part": part, "arm": arm, "prompt": prompt, "repeat": 0, "seconds": seconds, "tokens": list(range(11)),
        "proposed_per_cycle": [3] * len(committed), "accepted_per_cycle": [count - 1 for count in committed],
        "committed_per_cycle": committed, "loop_fraction": 0.0, "disturbed": [],
    }  # fmt: skip


def result():
    """Two documents at two lengths: the longer costs twice as much and commits 3 a cycle where the shorter does 2."""
    rows, stages, arms = [], [], []
    for part, factor, committed in (("16", 1, [2, 2]), ("64", 2, [3, 3, 3])):
        for name, kind, size in (("mlx_lm", "mlx_lm", None), ("plain", "plain", None), ("dflash-4", "dflash", 4)):
            arms.append({"part": part, "name": name, "kind": kind, "block_size": size})
            cycles = committed if size else []
            rows += [row(part, name, prompt, factor * (1.0 if size else 2.0), cycles) for prompt in ("a", "b")]
            if name != "mlx_lm":
                spent = {"draft": 0.01, "verify": 0.02, "commit": 0.01, "seconds": 0.05} if size else {}
                spent = spent or {"draft": 0.0, "verify": 0.02, "commit": 0.0, "seconds": 0.02}
                spent = {stage: factor * value for stage, value in spent.items()}
                stages.append({"part": part, "arm": name, "prompt": "a", "cycles": 1, **spent})
    drafter = {"trained_length": 32}
    found = {"arms": arms, "rows": rows, "stages": stages, "divergences": []}
    return found | {"command": "context", "drafter": drafter, "health": {}}


def test_cost_and_acceptance_are_told_apart_and_together():
    found = lengths.findings(result())
    short, long = found["lengths"]
    assert found["trained_length"] == 32 and [short["length"], long["length"]] == [16, 64]
    assert short["plain_ms"] == pytest.approx(20) and long["plain_ms"] == pytest.approx(40)
    assert short["cost"] == pytest.approx(2.5) == long["cost"]  # both cost more, by the same factor
    assert short["tau_kept"] is None and long["tau_kept"]["value"] == pytest.approx(1.5)
    assert short["predicted"] == pytest.approx(2 / 2.5) and long["predicted"] == pytest.approx(3 / 2.5)
    assert long["speedup"]["ratio"] == pytest.approx(2)


def test_the_table_has_a_row_a_length_and_names_the_training_length():
    ((title, header, rows, notes),) = lengths.tables(lengths.findings(result()))
    assert "dflash-4" in title and [one[0] for one in rows] == ["16", "64"]
    assert {len(one) for one in rows} == {len(header)}
    assert "rows of 32 tokens" in notes[0]
