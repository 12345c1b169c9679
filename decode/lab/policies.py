"""Policies for the block size and the verify width, against the fixed block size that was chosen beforehand.

B block size, V milliseconds of a verify. Costs, calibration and the best fixed B come from prompts of their own, so
that nothing a policy is judged on was used to set it up. `prepare` measures them; `adaptive` and `confidence` are the
arms; `findings` pairs every policy with the fixed arm that preparation chose.
"""

import dataclasses
import functools
import time

from decode import schedule
from decode.lab import arms as lab_arms
from decode.lab import calibration, experiment, shown, statistics, timing
from decode.proposers import DFlashProposer

MEASURES = tuple(schedule.MEASURES)
THRESHOLD = 0.3  # of S_j, where costs at one block size cannot tell what a row is worth (assumed)
BOUNDS = 0.02, 0.9  # of a threshold from costs: noise must not turn a cut off or drafting away (assumed)
HEADER = ("policy", "speedup", "[95 %]", "over fixed", "[95 %]", "τ", "mean width", "proposed", "identical")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What policies are set up with.

    costs      {B: milliseconds of a cycle} from 1, a plain step, to the largest, interpolated between measured ones
    best       the fixed B with least milliseconds a token
    threshold  S_j at which one more row to verify is worth its time
    lines      {measure: (a, b)}, the calibration maps
    """

    costs: dict
    best: int
    threshold: float
    lines: dict

    def record(self):
        """As a result keeps it."""
        return dataclasses.asdict(self)


def recalled(record):
    """The Setup of a record read back from JSON, whose keys are text: a run that is gone on with keeps its own."""
    costs = {int(B): ms for B, ms in record["costs"].items()}
    return Setup(costs, record["best"], record["threshold"], {name: tuple(ab) for name, ab in record["lines"].items()})


def prepare(target, drafter, sizes, prompts, plan, progress):
    """Measure a Setup on prompts of its own; each kind of run is warmed up once."""
    fixed = [lab_arms.Arm("plain", "plain", None, target), *fixed_arms(target, drafter, sizes)]
    watched = [cut(target, drafter, max(sizes), name, 0.0, (1.0, 0.0)) for name in MEASURES]
    runs, total = {}, len(fixed) + len(watched)
    for arm in progress(fixed + watched, total=total, desc="preparing"):
        arm.run(prompts[0].tokens, plan.max_tokens)
        runs[arm.name] = [arm.run(prompt.tokens, plan.max_tokens, clock=time.perf_counter) for prompt in prompts]
        timing.settle()
    found = {B: totals(runs[name]) for B, name in zip((1, *sizes), (arm.name for arm in fixed), strict=True)}
    costs = interpolated({B: one["cycle_ms"] for B, one in found.items()})
    best = min(sizes, key=lambda B: found[B]["token_ms"])
    lines = {
        name: calibration.fit(calibration.judged([spoken(run) for run in runs[arm.name]]))
        for name, arm in zip(MEASURES, watched, strict=True)
    }
    return Setup(costs, best, worthwhile(found, sizes, found[best]["token_ms"]), lines)


def totals(runs):
    """Mean milliseconds of a cycle, of its verify, and of a token, over the runs of one arm."""
    cycles = [cycle for run in runs for cycle in run.cycles]
    seconds, tokens = sum(run.seconds for run in runs), sum(len(run.tokens) - 1 for run in runs)
    verify = sum(cycle.seconds["verify"] for cycle in cycles)
    count = max(len(cycles), 1)
    return {
        "cycle_ms": 1e3 * seconds / count,
        "verify_ms": 1e3 * verify / count,
        "token_ms": 1e3 * seconds / max(tokens, 1),
    }


def spoken(run):
    """The calibration row of a run."""
    return {
        "confidence_per_cycle": [cycle.confidence for cycle in run.cycles],
        "accepted_per_cycle": [cycle.accepted for cycle in run.cycles],
        "committed_per_cycle": [cycle.committed for cycle in run.cycles],
    }


def interpolated(points):
    """{B: ms} for every B from the least to the largest of a few measured ones, straight between neighbours."""
    known = sorted(points)
    found = dict(points)
    for low, high in zip(known, known[1:], strict=False):
        for B in range(low + 1, high):
            found[B] = points[low] + (points[high] - points[low]) * (B - low) / (high - low)
    return dict(sorted(found.items()))


def worthwhile(found, sizes, token_ms):
    """S_j at which a row pays: its share of the verify's time, over the time a token takes; within BOUNDS."""
    if len(sizes) < 2:
        return THRESHOLD
    row_ms = (found[max(sizes)]["verify_ms"] - found[min(sizes)]["verify_ms"]) / (max(sizes) - min(sizes))
    return min(max(row_ms / token_ms, BOUNDS[0]), BOUNDS[1])


def fixed_arms(target, drafter, sizes):
    """The fixed arms."""
    return [lab_arms.Arm(f"dflash-{B}", "dflash", B, target, DFlashProposer(target, drafter, B)) for B in sizes]


def cut(target, drafter, size, measure, threshold, line):
    """The arm of one cut; its name says the threshold that its proposals' chance had to reach."""
    calibrate = functools.partial(calibration.apply, line)
    policy = functools.partial(schedule.Cut, size, measure, threshold, calibrate)
    return policy_arm(target, drafter, f"{measure}-{threshold:.2f}", size, policy)


def policy_arm(target, drafter, name, size, policy):
    """An arm whose blocks are as large as a fresh `policy()` says, `size` at most."""
    return lab_arms.Arm(name, "policy", size, target, DFlashProposer(target, drafter, 2), policy=policy)


def adaptive(target, drafter, sizes, setup):
    """The arms of `adaptive`: every fixed B, and the policies at the largest."""
    most = max(sizes)
    made = functools.partial(policy_arm, target, drafter)
    return [
        *lab_arms.references(target),
        *fixed_arms(target, drafter, sizes),
        cut(target, drafter, most, "entropy", setup.threshold, setup.lines["entropy"]),
        made("survival", most, functools.partial(schedule.Survival, most, setup.threshold)),
        made("expected", most, functools.partial(schedule.ExpectedValue, most, setup.costs)),
        made("auto-off", most, functools.partial(schedule.AutoOff, most, setup.costs)),
    ]


def confidence(target, drafter, sizes, setup, thresholds):
    """The arms of `confidence`: every fixed B, a cut that only records, one at each threshold and at the costs'."""
    most, line = max(sizes), setup.lines["confidence"]
    chosen = sorted({0.0, *thresholds, round(setup.threshold, 2)})
    cuts = [cut(target, drafter, most, "confidence", threshold, line) for threshold in chosen]
    return [*lab_arms.references(target), *fixed_arms(target, drafter, sizes), *cuts]


def findings(result):
    """{"setup", "fixed": the chosen arm, "policies": [one each], "calibration": {measure: …} of what was recorded}."""
    arms, setup = experiment.summarise(result), result["setup"]
    fixed = f"dflash-{setup['best']}"
    by_arm = statistics.group(result["rows"], "arm")
    told = {name: spoken_rows(by_arm, arms, name) for name in MEASURES}
    return {
        "fixed": fixed,
        "policies": [beside(result, arm, fixed) for arm in arms if arm["kind"] in ("dflash", "policy")],
        "calibration": {
            name: calibration.findings(rows, setup["lines"][name]) for name, rows in told.items() if rows
        },
    }  # fmt: skip


def spoken_rows(by_arm, arms, measure):
    """The rows that record a measure, of the arm that cut least: others judge the same proposals again."""
    cuts = [arm["name"] for arm in arms if arm["name"].startswith(f"{measure}-")]
    return [row for row in by_arm[min(cuts)] if "confidence_per_cycle" in row] if cuts else []


def beside(result, arm, fixed):
    """One policy's figures, and its speed over the chosen fixed arm's, paired over prompts."""
    rows = [row for row in result["rows"] if row["arm"] == arm["name"]]
    widths = [1 + proposed for row in rows for proposed in row["proposed_per_cycle"]]
    own = arm["name"] == fixed
    return {
        "arm": arm["name"],
        "kind": arm["kind"],
        "speedup": arm["speedup"],
        "over_fixed": None if own else experiment.compare(result, fixed, arm["name"]),
        "tau": arm["tau"],
        "mean_width": sum(widths) / len(widths) if widths else None,
        "proposed": sum(widths) - len(widths),
        "identical": arm["identical"],
        "prompts": arm["prompts"],
    }


def tables(found):
    """What a report shows: [(title, header, rows of text, notes)]."""
    rows = [
        [
            one["arm"],
            *shown.ratio(one["speedup"]),
            *shown.ratio(one["over_fixed"]),
            shown.fixed(one["tau"] and one["tau"]["pooled"], 2),
            shown.fixed(one["mean_width"], 2),
            str(one["proposed"]),
            f"{one['identical']}/{one['prompts']}",
        ]
        for one in found["policies"]
    ]
    notes = [
        f"over fixed: speed over {found['fixed']}, the fixed block size that was fastest on the prompts of the setup",
        "costs, calibration and thresholds come from prompts that no figure here was measured on",
    ]
    told = [calibration.table(name, one) for name, one in found["calibration"].items()]
    return [("policies against a fixed block size", HEADER, rows, notes), *told]
