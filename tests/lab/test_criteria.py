"""Rules are registered before a run and judged after it: digest, commit, verdicts, refusals."""

import hashlib
import subprocess

import pytest

from decode.lab import criteria
from kernels.errors import UserError

ARMS = ["plain", "dflash-8"]
RULES = """
- {name: fast, arm: dflash-8, figure: speedup.low, at_least: 1.2}
- {name: sound, arm: dflash-8, figure: divergences.defect, at_most: 0}
- {name: as predicted, arm: dflash-8, figure: tau.pooled, between: [2, 3], why: a trial}
- {name: all at once, arm: dflash-8, figure: speedup.family.0, at_least: 1.0}
"""


def figures(low=1.3, defects=0, tau=2.5, family=(0.9, 1.5)):
    """The figures of dflash-8 that the rules look at."""
    speedup = {"ratio": 1.4, "low": low, "high": 1.5, "family": family and list(family)}
    return [
        {"name": "dflash-8", "speedup": speedup, "divergences": {"defect": defects}, "tau": tau and {"pooled": tau}}
    ]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def verdicts(file, arms):
    return [one["verdict"] for one in criteria.judge(criteria.register(file, ARMS), arms)]


def test_rules_are_met_missed_or_not_testable(file):
    assert verdicts(file, figures()) == ["met", "met", "met", "missed"]
    assert verdicts(file, figures(low=1.2, defects=1, tau=3.0001)) == ["met", "missed", "missed", "missed"]
    nothing = figures(low=None, tau=None, family=None)
    assert verdicts(file, nothing) == ["not testable", "met", "not testable", "not testable"]
    assert verdicts(file, []) == ["not testable"] * 4


def test_a_registration_carries_the_digest_and_the_commit_of_just_these_bytes(file):
    assert criteria.register(file, ARMS)["commit"] is None  # in no checkout
    git = lambda *words: subprocess.run(["git", "-C", file.parent, *words], check=True, capture_output=True, text=True)
    git("init", "-q")
    git("add", "rules.yaml")
    assert criteria.register(file, ARMS)["commit"] is None  # not committed
    git("-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "rules")
    found = criteria.register(file, ARMS)
    assert found["commit"] == git("rev-parse", "HEAD").stdout.strip()
    assert found["sha256"] == hashlib.sha256(RULES.encode()).hexdigest() and len(found["rules"]) == 4
    file.write_text(RULES.replace("1.2", "1.1"))
    assert criteria.register(file, ARMS)["commit"] is None  # changed since


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "found NoneType"),
        ("a: b", "found dict"),
        ("- [", "expected a YAML list"),
        ("- text", "rule 1 is no mapping"),
        ("- {name: a, arm: plain, figure: tok_s, at_leest: 1}", "unknown at_leest"),
        ("- {name: a, figure: tok_s, at_least: 1}", "lacks arm"),
        ("- {name: a, arm: dflash-4, figure: tok_s, at_least: 1}", "arm dflash-4; this run has plain, dflash-8"),
        ("- {name: a, arm: plain, figure: speed, at_least: 1}", "figure speed; expected one of tok_s"),
        ("- {name: a, arm: plain, figure: tok_s}", "has 0 bounds"),
        ("- {name: a, arm: plain, figure: tok_s, at_least: 1, at_most: 2}", "has 2 bounds"),
        ("- {name: a, arm: plain, figure: tok_s, at_least: fast}", "expected a number"),
        ("- {name: a, arm: plain, figure: tok_s, at_least: [1, 2]}", "expected a number"),
        ("- {name: a, arm: plain, figure: tok_s, between: [2, 1]}", r"expected \[low, high\]"),
        ("- {name: a, arm: plain, figure: tok_s, between: 2}", r"expected \[low, high\]"),
    ],
)
def test_a_rule_that_no_result_could_answer_is_refused(tmp_path, content, words):
    path = tmp_path / "rules.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as refusal:
        criteria.register(path, ARMS)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="rules.yaml: No such file"):
        criteria.register(tmp_path / "rules.yaml", ARMS)
