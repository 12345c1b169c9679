"""The tables of a result and what has to be said under them, all from its rows: (title, header, rows, notes) each.

Cells are text; a table without rows is left out. `of` gives all tables of any result.
"""

import re

from decode.lab import census, criteria, experiment, statistics
from decode.lab.experiment import label
from decode.lab.shown import fixed, percent, ratio, span, yes

SPEED_HEADER = (
    "arm", "tok/s", "speedup", "[95 %]", "loop-free", "[95 %]", "τ pooled", "τ mean", "tok/fwd", "accept", "draft",
    "verify", "commit", "other", "cycle ms", "identical", "= mlx_lm", "tie/width/defect",
)  # fmt: skip
CATEGORY_HEADER = (
    "category", "prompts", "arm", "tok/s", "speedup", "[95 %]", "loop-free", "[95 %]", "τ pooled", "τ mean", "accept",
    "identical",
)  # fmt: skip
SURE_HEADER = (
    "arm", "speedup", "[95 %]", "twin floor", "beyond it", "all arms at once", "mean log-ratio", "[95 %]",
    "detectable", "rows", "of every row", "[95 %]",
)  # fmt: skip
RULES_HEADER = ("criterion", "rule", "found", "verdict")
STATE_HEADER = ("state", "before", "after")
TIES_HEADER = (
    "arm", "prompt", "position", "class", "plain → arm", "narrow ULPs", "wide ULPs", "width", "wide − recorded",
)  # fmt: skip
GUARD_HEADER = (
    "arm", "guard, ULPs", "identical without", "with", "tokens decided anew", "speed over unguarded", "[95 %]",
)  # fmt: skip
CENSUS_HEADER = ("rows W", "positions", "texts", "disagree", "rate", "[95 %]", "tie", "width", "largest difference")
COST_HEADER = ("rows W", "ms", "spread", "host ms", "pipelined ms", "over W=1", "mlx_lm ms", "over W=1")
CONTEXT_HEADER = ("context", "rows W", "ms", "spread", "over W=1")


def of(result, arms=None):
    """All tables of a result; arms: its figures as `experiment.summarise` gives them, for one that measured arms."""
    if result["command"] == "cost":
        return with_rows([widths(result["cost"]), contexts(result["cost"])])
    if arms is None:  # nothing was timed
        return []
    found = [speed(result, arms), categories(result), certainty(result, arms), survival(arms), rules(result, arms)]
    found += [health(result)]
    found += [divergences(result), guards(result, arms), disagreement(result), by_margin(result)]
    return with_rows(found)


def with_rows(tables):
    """The tables that have something to show."""
    return [table for table in tables if table[2]]


def speed(result, arms):
    """The main table."""
    return "speed and acceptance", SPEED_HEADER, [cells(arm) for arm in arms], notes(result, arms)


def cells(arm):
    """One arm's row of the main table."""
    tau, ms = arm["tau"] or {}, arm["ms"] or {}
    total = arm["prompts"]
    return [
        label(arm),
        fixed(arm["tok_s"], 1),
        *ratio(arm["speedup"]),
        *ratio(arm["speedup_loop_free"]),
        fixed(tau.get("pooled"), 2),
        fixed(tau.get("per_prompt"), 2),
        fixed(arm.get("tokens_per_forward"), 2),
        fixed(arm["acceptance_rate"], 3),
        *(fixed(ms.get(stage), 2) for stage in ("draft", "verify", "commit", "other", "cycle")),
        f"{arm['identical']}/{total}",
        f"{arm['identical_mlx_lm']}/{total}",
        "/".join(map(str, arm["divergences"].values())) if arm["divergences"] else "–",
    ]


def notes(result, arms):
    """What has to be said under the main table."""
    config, drafter, state = result["config"], result["drafter"] or {}, result["health"]
    prompts, used, disturbed = config["prompts"], len(config["prompts"]["used"]), len(state["flagged_rows"])
    loops = len(experiment.loops(result))
    synchronised = len({stage["prompt"] for stage in result["stages"]})
    defects = sum(arm["divergences"]["defect"] for arm in arms if arm["divergences"])
    quiet = experiment.headline(result) == statistics.QUIET
    said = {
        f"INCOMPLETE: {len(result['rows'])} rows so far; these figures are of the rows there are": (
            not result.get("complete", True)
        ),
        f"{used} of {prompts['total']} prompts of {prompts['name']} ({prompts['turns']}), {loops} looping; "
        f"{config['repeats']} repeat(s), at most {config['max_tokens']} tokens, for which τ holds": True,
        "speedup = mlx_lm's seconds per token ÷ the arm's, from the first emitted token to the last, prefill apart; "
        + (
            "too few prompts for an interval, so the range is given"
            if used < statistics.FEWEST_PROMPTS
            else "95 % intervals over prompts"
        ): True,
        f"stage times come from a separate synchronised pass over {synchronised} prompt(s)": synchronised,
        f"prompts were fed raw: {config.get('raw_reason')}": config.get("raw_reason"),
        "the drafter is an untrained control: its arms show what drafting costs": drafter.get("kind") == "untrained",
        "the drafter was made for another target (--allow-target-mismatch)": drafter.get("target_mismatch"),
        f"{disturbed} of {len(result['rows'])} rows were disturbed and are "
        + ("left out of every speed but `of every row`" if quiet else "COUNTED in every speed")
        + f": {state['rule']}": disturbed,
        f"DEFECT: {defects} output(s) differ from plain for a reason that rounding does not explain": defects,
    }
    return [line + "." for line, holds in said.items() if holds]


def categories(result):
    """The main figures by the prompts' category, or their set where there are several: of those with prompts enough."""
    rows, groups = [], statistics.group([row for row in result["rows"] if row.get("category")], "category")
    whole = len(groups) < 2 or experiment.parts_of(result["arms"]) != [None]
    for name, some in () if whole else groups.items():
        if len({row["prompt"] for row in some}) >= statistics.FEWEST_PROMPTS:
            arms = statistics.summarise(some, result["arms"], experiment.headline(result))
            rows += [[name, *category_cells(arm)] for arm in arms if arm["name"] != "mlx_lm"]
    return "by category", CATEGORY_HEADER, rows, []


def category_cells(arm):
    """One arm's row of the table by category."""
    tau = arm["tau"] or {}
    return [
        str(arm["prompts"]),
        arm["name"],
        fixed(arm["tok_s"], 1),
        *ratio(arm["speedup"]),
        *ratio(arm["speedup_loop_free"]),
        fixed(tau.get("pooled"), 2),
        fixed(tau.get("per_prompt"), 2),
        fixed(arm["acceptance_rate"], 3),
        f"{arm['identical']}/{arm['prompts']}",
    ]


def certainty(result, arms):
    """How sure the speedups are: beside the twin, for all arms at once, by the other mean, and with every row."""
    floor = lambda arm: statistics.twin_floor(arms, arm.get("part"))
    rows = [sure_cells(arm, floor(arm)) for arm in arms if arm["name"] != "mlx_lm" and arm["speedup_every_row"]]
    many = next((arm["speedup_every_row"]["compared"] for arm in arms if arm["speedup_every_row"]), 0)
    said = [
        "twin floor: mlx_lm run again elsewhere in each round, over mlx_lm; an effect inside it is noise",
        f"{many} arms are compared with one baseline: the best of them is a choice among {many}, for which `all arms "
        "at once` holds (95 % for all together, Bonferroni)",
        "mean log-ratio: every prompt weighs the same, where the speedup weighs it by its seconds",
        "detectable: the least speedup that so many prompts of this spread would have shown in 4 of 5 runs",
        *pace(result),
    ]
    return "how sure the speedups are", SURE_HEADER, rows, [f"{line}." for line in said] if rows else []


def sure_cells(arm, floor):
    """One arm's row of the table of certainty."""
    speedup = arm["speedup"] or {}
    mean = speedup.get("mean_log") or {}
    return [
        label(arm),
        *ratio(arm["speedup"]),
        "–" if floor is None else ratio(floor)[1],
        yes(statistics.beyond(arm["speedup"], floor)),
        span(*(speedup.get("family") or (None, None))),
        fixed(mean.get("ratio"), 3),
        span(mean.get("low"), mean.get("high")),
        fixed(speedup.get("detectable"), 3),
        "{counted}/{of}".format(**arm["rows"]),
        *ratio(arm["speedup_every_row"]),
    ]


def pace(result):
    """What the plain loop's drift over the run was, in words; a line for every part where it can be told."""
    return [pace_line(drift) for drift in experiment.drift(result)]


def pace_line(drift):
    """One part's drift."""
    how = "last repeat over first" if drift["paired"] else "second half of the prompts over the first, unpaired"
    interval = f" [{span(drift['low'], drift['high'])}]" if drift["low"] else ""
    of = f" of {drift['part']}" if "part" in drift else ""
    return f"the plain loop's seconds per token{of} drifted by {drift['ratio'] - 1:+.1%}{interval} over the run ({how})"


def survival(arms):
    """The survival table, of the arms that proposed anything."""
    shown = [arm for arm in arms if arm["survival"]]
    width = max((len(arm["survival"]) for arm in shown), default=0)
    blank = lambda arm: [""] * (width - len(arm["survival"]))
    rows = [[label(arm), *(fixed(share, 2) for share in arm["survival"]), *blank(arm)] for arm in shown]
    return "survival", ["P(accepted ≥ j), j =", *map(str, range(1, width + 1))], rows, []


def rules(result, arms):
    """The criteria registered before the run, judged."""
    registered = result.get("criteria")
    if not registered:
        return "criteria", RULES_HEADER, [], []
    judged = criteria.judge(registered, arms)
    rows = [[one["name"], one["rule"], fixed(one["found"], 3), one["verdict"]] for one in judged]
    commit = registered["commit"] or "none: the file was not committed as it stood"
    return (
        "criteria",
        RULES_HEADER,
        rows,
        [f"registered before the run: sha256 {registered['sha256']}, commit {commit}."],
    )


def health(result):
    """The machine before and after, and what disturbed rows."""
    before, after = (flat(result["health"].get(end) or {}) for end in ("before", "after"))
    rows = [[name, cell, after.get(name, "–")] for name, cell in before.items()]
    reasons = [re.sub(r"[\d.,]+", "…", reason) for row in result["rows"] for reason in row["disturbed"]]
    return "machine", STATE_HEADER, rows, [f"{reasons.count(one)} row(s): {one}." for one in dict.fromkeys(reasons)]


def flat(state, name=""):
    """{dotted name: cell} of a nested state, what is unknown left out."""
    if isinstance(state, dict):
        parts = [(f"{name}.{key}".lstrip("."), value) for key, value in state.items()]
    elif isinstance(state, list) and any(isinstance(value, (dict, list)) for value in state):
        parts = [(f"{name}.{index}", value) for index, value in enumerate(state)]
    elif isinstance(state, list):
        return {name: ", ".join(map(str, state)) or "none"}
    else:
        return {} if state is None else {name: f"{state:,}" if isinstance(state, int) else str(state)}
    return {key: cell for part, value in parts for key, cell in flat(value, part).items()}


def divergences(result):
    """Every distinct divergence, as judged."""
    rows = [divergence_cells(case) for case in result["divergences"]]
    said = (
        "gaps between the two tokens' logits, in ULPs, from caches prefilled afresh: one row, and the verify's own rows"
    )
    return "divergences from plain", TIES_HEADER, rows, [f"{said}."]


def divergence_cells(case):
    """One divergence's row."""
    gaps, tokens = case.get("gap_ulps") or {}, case.get("tokens") or ("–", "–")
    return [
        label({**case, "name": case["arm"]}),
        case["prompt"],
        str(case.get("position")),
        case["class"].replace("_", "-"),
        f"{tokens[0]} → {tokens[1]}",
        *(fixed(gaps.get(route), 1) for route in ("narrow", "wide")),
        str(case.get("verify_width") or "–"),
        "–" if case.get("recorded_difference") is None else f"{case['recorded_difference']:.2g}",
    ]


def guards(result, arms):
    """What the tie guard costs and buys."""
    rows = [
        [
            one["arm"],
            one["guard"],
            *(f"{count}/{one['prompts']}" for count in one["identical"]),
            percent(one["redecided"]),
            *ratio(one["speed"]),
        ]
        for one in statistics.guards(result["rows"], arms, experiment.headline(result))
    ]
    return "tie guard: what it costs and buys", GUARD_HEADER, rows, ["identical: prompts whose text is plain's own."]


def disagreement(result):
    """The census: how often W rows decide otherwise than one."""
    found = census.summarise(result.get("census") or [])
    rows = [
        [str(W), str(one["positions"]), str(one["texts"]), str(one["disagree"]), percent(one["rate"], 3),
         f"{one['low']:.3%}–{one['high']:.3%}", *(str(count) for count in one["kinds"].values()),
         f"{one['largest_difference']:.2g}"]
        for W, one in found.items()
    ]  # fmt: skip
    said = "over plain's own texts, teacher-forced; intervals take texts as clusters (Wilson at the effective size)"
    return "census of decisions", CENSUS_HEADER, rows, [f"{said}."]


def by_margin(result):
    """The census by the margin of the one-row decision."""
    found = census.summarise(result.get("census") or [])
    rows = [
        [str(W), *(f"{differing}/{positions}" for positions, differing in one["by_margin"])] for W, one in found.items()
    ]
    return "disagreements by margin", ["rows W, margin in ULPs", *census.names()], rows, []


def widths(cost):
    """Milliseconds against the rows of a forward."""
    ours, stock = cost["widths"]["foredraft"], cost["widths"].get("mlx_lm", {})
    over = lambda arm, W: fixed(arm[W]["ms"] / arm["1"]["ms"], 2) if W in arm else "–"
    rows = [
        [
            W,
            *timed_cells(one),
            *(fixed(one[kind], 2) for kind in ("host_ms", "pipelined_ms")),
            over(ours, W),
            fixed(stock[W]["ms"], 2) if W in stock else "–",
            over(stock, W),
        ]
        for W, one in ours.items()
    ]
    return f"cost against width, after {cost['context']} rows", COST_HEADER, rows, []


def contexts(cost):
    """Milliseconds against the rows that are held already."""
    rows = [
        [length, W, *timed_cells(one), fixed(one["ms"] / found["1"]["ms"], 2) if "1" in found else "–"]
        for length, found in cost.get("contexts", {}).items()
        for W, one in found.items()
    ]
    return "cost against context", CONTEXT_HEADER, rows, []


def timed_cells(one):
    """Median and spread of one timed unit."""
    return fixed(one["ms"], 2), span(*one["spread_ms"], places=2)
