"""What a target is worth: bits by one long forward, samples by Python's own tokenize, and time that runs out."""

import math
import types

import mlx.core as mx
import numpy as np
import pytest

from drafter import appraisal, config, library

TOLERANCE = 2e-4  # bits a token, float32: windows against one forward of the whole
SETTINGS = config.PretrainTrainerConfig(samples=5, sample_tokens=6)
SOURCE = '''def greet(name, times=2):
    """Greet somebody, so often that a passage of the shortest length comes out of this one definition.

    Nothing else is meant by these lines; they are here to be long.
    """
    for _ in range(times):
        print("hello", name)
    return [name, times]
'''


def spelled(count):
    """A stand-in for a library: two held-out files of `count` definitions each, and one to train on."""
    held = [library.Text(f"{name}.py", SOURCE * count) for name in ("one", "two")]
    return library.Library([library.Text("three.py", SOURCE)], held, "3.0")


# Bits.


@pytest.mark.parametrize("T", [2, 7, 8, 64])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 9, 23])
def test_windows_score_every_token_once_behind_half_a_row(T, count):
    ids = list(range(100, 100 + count))
    scored = []
    for tokens, labels, mask in appraisal.windows(ids, T):
        assert len(tokens) == len(labels) == len(mask) == T
        for place in np.flatnonzero(mask):
            at = labels[place] - 100
            before = [0, *ids[:at]]
            seen = tokens[: place + 1].tolist()
            assert seen == before[len(before) - len(seen) :]
            assert len(seen) == len(before) or len(seen) > T // 2
            scored.append(labels[place])
    assert scored == ids


def test_bits_in_one_window_are_those_of_one_forward(tiny_target):
    target = tiny_target("llama")
    texts = [library.Text("a.py", "the mill by the river"), library.Text("b.py", "x")]
    bits, tokens = appraisal.text_bits(target, texts, row_tokens=64)
    expected = 0.0
    for text in texts:
        ids = [0, *target.tokenizer.encode(text.text)]
        logits = np.array(target.model(mx.array([ids[:-1]]))[0], np.float64)
        chosen = logits[np.arange(len(ids) - 1), ids[1:]]
        expected += (np.log(np.exp(logits).sum(-1)) - chosen).sum() / math.log(2)
    assert abs(bits - expected) <= TOLERANCE * tokens
    assert tokens == sum(len(target.tokenizer.encode(text.text)) for text in texts)


def test_bits_do_not_depend_on_how_rows_are_batched(tiny_target, monkeypatch):
    target, texts, found = tiny_target("llama"), [library.Text("a.py", SOURCE)], []
    for rows in (1, 5):
        monkeypatch.setattr(appraisal, "ROWS", rows)
        found.append(appraisal.text_bits(target, texts, 16))
    (one, tokens), (five, same) = found
    assert abs(one - five) <= TOLERANCE * tokens and tokens == same


# Samples.


@pytest.mark.parametrize(
    ("prefix", "continuation", "expected"),
    [
        ("x = 1", "\ny = 2\n", True),
        ("x = 1", "\ny = 2\nthis is cut (", True),  # after the last line end
        ("x = 1", "\n", False),  # nothing of its own was completed
        ("x = 1", "\ny = 2", False),
        ("def f():", "\n    return 1\n", True),
        ("x = f(1,", "\n  2)\n", True),
        ("x = f(1,", "\n  2,\n  3,\n", False),  # what the prefix left open stays open
        ('def f():\n    """Says', " what\n\n    it does.\n", False),
        ('def f():\n    """Says', ' what\n    """\n', True),
        ('def f():\n    """Says', ' what\n    """\n    y = g(\n        1,\n', True),
        ("x = 1", '\ny = 2\nz = """still open\n', True),
        ("x = 1", "\ny = 2\nz = 'open\n", False),
        ("if x:", "\n        y\n    z\n", False),  # a dedent to no outer level
        ("x = 1", "\ny = a ? b\n", False),
        ("x = 1", "\ny = $z\n", False),
    ],
)
def test_samples_pass_by_pythons_tokenize_and_the_rule_of_the_cut(prefix, continuation, expected):
    assert appraisal.tokenizes(prefix, continuation) == expected


def test_continuations_are_written_after_held_out_passages(tiny_target):
    target, texts = tiny_target("llama"), spelled(3).held_out
    written = appraisal.continuations(target, texts, SETTINGS)
    assert [row["id"] for row in written] == [row["question_id"] for row in library.passages(texts, 5)]
    for row in written:
        assert (SOURCE * 3).startswith(row["prefix"])
        assert row["continuation"]
        assert row["tokenizes"] == appraisal.tokenizes(row["prefix"], row["continuation"])
    assert written == appraisal.continuations(target, texts, SETTINGS)
    assert len({row["continuation"] for row in written}) > 1  # sampled, each row by itself


def test_a_summary_counts_what_passes():
    found = appraisal.summary([{"tokenizes": passes} for passes in (True, False, True)], SETTINGS)
    assert (found["count"], found["pass_tokenize"]) == (3, 2)
    assert (found["temperature"], found["tokens"]) == (0.8, 6)


# The report.


def test_a_report_holds_every_figure(tiny_target):
    said = []
    found, written = appraisal.report(tiny_target("llama"), spelled(2), SETTINGS, 32, say=said.append)
    assert found["held_out_bytes"] == 4 * len(SOURCE)
    assert 0 < found["ngram_5_bits_per_byte"] < 2 < found["bits_per_byte"]  # a copied text, and a random target
    assert found["samples"]["count"] == len(written) == 4
    assert len(said) == 3


@pytest.mark.parametrize(("calls", "kept"), [(0, False), (4, False), (18, True)])  # samples take under 18 looks
def test_what_the_time_does_not_allow_is_left_out(tiny_target, monkeypatch, calls, kept):
    """The clock stands still for so many looks at it, and is then an hour on."""
    monkeypatch.setattr(appraisal, "ROWS", 1)
    left = iter([0.0] * (calls + 1))
    monkeypatch.setattr(appraisal, "time", types.SimpleNamespace(monotonic=lambda: next(left, 3600.0)))
    said = []
    found, written = appraisal.report(tiny_target("llama"), spelled(2), SETTINGS, 32, seconds=60, say=said.append)
    assert found["bits_per_byte"] is None and found["ngram_5_bits_per_byte"] is None
    assert "resume=auto" in said[-1]
    assert (written is not None) == (found["samples"] is not None) == kept
