"""Transfer between targets: agreement against plain numpy, and findings from rows written by hand."""

import mlx.core as mx
import numpy as np
import pytest

import tiny
from decode.lab import agreement, transfer
from drafter import target as targets
from kernels.errors import UserError

PROMPT, ANSWER = [7, 31, 100, 55], [20, 42, 9, 250, 77]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("targets")
    return [targets.load(str(tiny.folder("llama", tmp, seed=seed)), dtype="float32") for seed in (1, 2)]


@pytest.mark.parametrize("rows", [2, 128])
def test_agreement_is_that_of_whole_forwards(pair, monkeypatch, rows):
    monkeypatch.setattr(agreement, "ROWS", rows)
    logits = [np.array(one.model(mx.array([PROMPT + ANSWER])), np.float64)[0, 3:8] for one in pair]
    p, q = (np.exp(rows) / np.exp(rows).sum(-1, keepdims=True) for rows in logits)
    found = agreement.compare(*pair, PROMPT, ANSWER)
    assert found["tokens"] == 5
    assert found["agree"] == (logits[0].argmax(-1) == logits[1].argmax(-1)).sum()
    assert found["kl"] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-4)


def test_a_target_agrees_with_itself(pair):
    assert agreement.compare(pair[0], pair[0], PROMPT, ANSWER) == {"tokens": 5, "agree": 5, "kl": 0.0}


def test_another_tokenizer_is_refused(pair):
    class Other:
        source, tokenizer_sha256 = "other", "0"

    with pytest.raises(UserError, match="different tokenizers"):
        agreement.refuse_tokenizer(pair[0], Other)


def row(part, arm, prompt, seconds, accepted, repeat=0):
    """A row of 1 + 10 tokens."""
    return {
        "part": part, "arm": arm, "prompt": prompt, "repeat": repeat, "seconds": seconds, "tokens": list(range(11)),
        "proposed_per_cycle": [3] * len(accepted), "accepted_per_cycle": accepted,
        "committed_per_cycle": [count + 1 for count in accepted], "loop_fraction": 0.0, "disturbed": [],
    }  # fmt: skip


def result(prompts, variants):
    """A transfer; variants: {part: (seconds of an arm's answer, accepted per cycle)}, baselines take 2 seconds."""
    rows, arms = [], []
    for part, (seconds, accepted) in variants.items():
        kinds = {"mlx_lm": None, "plain": None, "dflash-4": 4}
        arms += [{"part": part, "name": name, "kind": name.split("-")[0], "block_size": B} for name, B in kinds.items()]
        for prompt in range(prompts):
            rows += [row(part, name, str(prompt), 2.0, []) for name in ("mlx_lm", "plain")]
            rows.append(row(part, "dflash-4", str(prompt), seconds * (1 + prompt / 10), accepted))
    agreed = [
        {"part": part, "prompt": str(prompt), "tokens": 10, "agree": 8, "kl": 0.5}
        for part in list(variants)[1:]
        for prompt in range(prompts)
    ]
    return {
        "command": "transfer",
        "arms": arms,
        "rows": rows,
        "stages": [],
        "divergences": [],
        "agreement": agreed,
        "health": {},
    }


STOCK = (1.0, [3, 1])  # accepts 2 a cycle, twice as fast as the baseline on its first prompt


def test_what_is_kept_is_a_ratio_of_pooled_counts():
    found = transfer.findings(result(2, {"stock": STOCK, "variant": (1.5, [1, 1, 1])}))
    stock, variant = found["targets"]
    assert found["arm"] == "dflash-4" and stock["part"] == "stock" and "verdict" not in stock
    assert stock["speedup"]["ratio"] == pytest.approx(4 / 2.1)
    assert variant["accepted_kept"]["value"] == pytest.approx(0.5)
    assert variant["speedup_kept"]["value"] == pytest.approx(1 / 1.5)
    assert variant["agreement"] == {"top1": {"value": 0.8, "low": None, "high": None, "prompts": 2}, "kl": 0.05}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ((1.0, [3, 1]), "keep"),
        ((1.0, [2, 2, 2, 1, 2]), "keep"),  # 90 % of the accepted tokens
        ((1.0, [2, 2, 2, 1, 1]), "adapt"),
        ((2.5, [3, 1]), "adapt"),  # kept, but no faster than the baseline
        ((1.0, [1]), "adapt"),  # half is not below half
        ((1.0, [1, 1, 0]), "retrain"),
    ],
)
@pytest.mark.parametrize("prompts", [2, 12])
def test_the_verdict_follows_the_rule(variant, expected, prompts):
    scaled = (variant[0] / (1 + (prompts - 1) / 20), variant[1])
    found = transfer.findings(result(prompts, {"stock": STOCK, "variant": scaled}))
    assert found["targets"][1]["verdict"] == expected


def test_a_drafter_that_accepts_nothing_has_no_verdict():
    found = transfer.findings(result(2, {"stock": (1.0, [0, 0]), "variant": (1.0, [0, 1])}))
    assert found["targets"][1]["verdict"] is None and found["targets"][1]["accepted_kept"] is None


def test_the_interval_is_paired_and_comes_at_ten_prompts():
    few, many = (transfer.findings(result(n, {"stock": STOCK, "variant": (1.5, [1])})) for n in (9, 10))
    assert few["targets"][1]["speedup_kept"]["low"] is None
    kept = many["targets"][1]["speedup_kept"]
    assert kept["low"] == pytest.approx(kept["value"]) == pytest.approx(kept["high"])  # every prompt slowed alike


def test_the_table_has_a_row_a_target_and_says_that_weights_differ():
    ((title, header, rows, notes),) = transfer.tables(
        transfer.findings(result(2, {"stock": STOCK, "variant": (1.5, [1])}))
    )
    assert "dflash-4" in title and [one[0] for one in rows] == ["stock", "variant"]
    assert {len(one) for one in rows} == {len(header)}
    assert rows[1][-1] == "adapt" and any("decompose" in line for line in notes)
