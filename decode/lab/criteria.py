"""Predictions and pass rules written before a run: registered in its result by digest and commit, judged by its report.

A file is a YAML (or JSON) list; every rule names an arm, one of its figures and exactly one bound:

    - {name: worth shipping, arm: dflash-8, figure: speedup.low, at_least: 1.2}
    - {name: no defect, arm: dflash-8, figure: divergences.defect, at_most: 0}
    - {name: as the trial predicted, arm: dflash-8, figure: tau.pooled, between: [2.4, 2.9], why: it gave 2.6}

`between` is how a prediction is written. A rule is met or missed by the figure as the report recomputes it, and not
testable where the arm or the figure is not there (an interval below ten prompts, a run cut short).
"""

import hashlib
import math
import pathlib
import subprocess

import yaml

from decode.lab import experiment
from drafter import manifest
from kernels.errors import UserError

VERDICTS = ("met", "missed", "not testable")
BOUNDS = ("at_least", "at_most", "between")
KEYS = {"name", "arm", "figure", "why", *BOUNDS}
ENDS = ("ratio", "low", "high")
FIGURES = (
    "tok_s", "acceptance_rate", "tau.pooled", "tau.per_prompt", "identical", "identical_mlx_lm",
    *(f"{name}.{end}" for name in ("speedup", "speedup_loop_free", "speedup_every_row") for end in ENDS),
    *(f"speedup.mean_log.{end}" for end in ENDS), "speedup.family.0", "speedup.family.1", "speedup.detectable",
    *(f"ms.{stage}" for stage in ("draft", "verify", "commit", "other", "cycle")),
    *(f"divergences.{kind}" for kind in ("tie", "width_sensitive", "defect")),
)  # fmt: skip


def register(path, arms):
    """What a result records of a criteria file before its run: {path, sha256, commit, rules}.

    arms: the names that the run will have (`experiment.label`: with parts, where it has them). commit: the last commit
    of the file as it now stands, None where it is not committed so. Raises UserError for a file that is none, or a rule
    that no result could answer.
    """
    try:
        data = pathlib.Path(path).read_bytes()
        rules = yaml.safe_load(data)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "problem", None) or getattr(error, "strerror", None) or error).split())
        raise UserError(f"--criteria {path}: {reason}; expected a YAML list of rules") from None
    if not isinstance(rules, list) or not rules:
        raise UserError(f"--criteria {path}: expected a YAML list of rules, found {type(rules).__name__}")
    for index, rule in enumerate(rules, 1):
        wrong = fault(rule, arms)
        if wrong:
            raise UserError(f"--criteria {path}: rule {index} {wrong}")
    return {"path": str(path), "sha256": hashlib.sha256(data).hexdigest(), "commit": commit(path), "rules": rules}


def fault(rule, arms):
    """What is wrong with a rule, in words; None where nothing is."""
    if not isinstance(rule, dict):
        return "is no mapping; write name, arm, figure and a bound"
    unknown, missing = sorted(map(str, set(rule) - KEYS)), {"name", "arm", "figure"} - set(rule)
    if unknown or missing:
        return f"has unknown {', '.join(unknown)}" if unknown else f"lacks {', '.join(sorted(missing))}"
    if not isinstance(rule["name"], str):
        return f"has the name {rule['name']!r}; expected text"
    if rule["arm"] not in arms:
        return f"names arm {rule['arm']}; this run has {', '.join(arms)}"
    if rule["figure"] not in FIGURES:
        return f"names figure {rule['figure']}; expected one of {', '.join(FIGURES)}"
    bounds = [bound for bound in BOUNDS if bound in rule]
    if len(bounds) != 1:
        return f"has {len(bounds)} bounds; give one of {', '.join(BOUNDS)}"
    value = rule[bounds[0]]
    numbers = value if bounds[0] == "between" and isinstance(value, list) and len(value) == 2 else [value]
    sound = all(isinstance(end, (int, float)) and math.isfinite(end) for end in numbers)
    if not sound or (bounds[0] == "between") != (len(numbers) == 2) or numbers != sorted(numbers):
        return f"has {bounds[0]} {value!r}; expected {'[low, high]' if bounds[0] == 'between' else 'a number'}"
    return None


def commit(path):
    """The last commit that changed the file, where it stands in git just as it is now; None elsewhere."""
    path = pathlib.Path(path).resolve()
    try:
        if manifest.git(path.parent, "status", "--porcelain", "--", path.name).strip():
            return None
        return manifest.git(path.parent, "log", "-1", "--format=%H", "--", path.name).strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def judge(registered, arms):
    """[{name, verdict, found, rule}] of registered criteria; the verdict is met, missed or not testable."""
    figures = {experiment.label(arm): arm for arm in arms}
    return [verdict(rule, look_up(figures.get(rule["arm"]), rule["figure"])) for rule in registered["rules"]]


def verdict(rule, found):
    """One rule's judgement on the figure found, None where there is none."""
    low, high = rule.get("between", (rule.get("at_least", -math.inf), rule.get("at_most", math.inf)))
    said = "not testable" if found is None else "met" if low <= found <= high else "missed"
    bound = next(f"{key.replace('_', ' ')} {rule[key]}" for key in BOUNDS if key in rule)
    return {"name": rule["name"], "verdict": said, "found": found, "rule": f"{rule['arm']} {rule['figure']} {bound}"}


def look_up(figures, path):
    """The number at a dotted path, or None where something on the way is missing."""
    for key in path.split("."):
        figures = figures[int(key)] if isinstance(figures, list) else figures and figures.get(key)
    return figures
