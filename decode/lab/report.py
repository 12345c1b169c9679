"""Reports from result files alone: nothing here runs a model, and every figure is computed from the rows again.

A result's stored `arms` are compared with what its rows give, so that a file edited by hand, or written by other
arithmetic, is noticed.
"""

import math
import pathlib

from decode.lab import (
    controls,
    experiment,
    factors,
    figures,
    forecast,
    layouts,
    lengths,
    page,
    plots,
    policies,
    record,
    shown,
    staging,
    tables,
    training_cost,
    transfer,
    walked,
)
from drafter import manifest

EVALUATIONS = {
    "adaptive": policies,
    "confidence": policies,
    "context": lengths,
    "controls": controls,
    "decompose": factors,
    "ksweep": forecast,
    "staged": staging,
    "transfer": transfer,
    "walk": walked,
}  # by command: what else its rows say, and the tables of that
MEASUREMENTS = {"layouts": layouts, "training_cost": training_cost}  # by command: the tables of what it timed
TOLERANCE = 1e-9  # relative; the same sums in the same order, but JSON read back on another machine
PAGE = "report.html"


def write(results, out):
    """Rebuild every table and plot of the results {path: result} into folder `out`.

    Each result gives NAME.md, NAME.txt and, where matplotlib is installed, NAME-PLOT.png and NAME-PLOT-dark.png; all
    together give one report.html. Returns {path: (text, names of the arms whose stored figures are not what its rows
    give)}.
    """
    sections, told = [], {}
    for path, result in results.items():
        name = record.stem(path)
        arms = experiment.summarise(result) if "rows" in result else None
        drawn = drawings(result, arms)
        told[path] = text(result, arms), changed(result, arms)
        store(out / f"{name}.txt", told[path][0])
        store(out / f"{name}.md", markdown(result, arms))
        for plot, title, painter in drawn:
            store(out / f"{name}-{plot}.png", plots.render(painter, "light", "png", title))
            store(out / f"{name}-{plot}-dark.png", plots.render(painter, "dark", "png", title))
        sections.append((name, heading(result), made(result), every_table(result, arms), drawn))
    store(out / PAGE, page.whole(sections))
    return told


def findings(result):
    """What a whole result's own evaluation finds in its rows; None for a command that has none, or a run cut short."""
    evaluation = EVALUATIONS.get(result["command"])
    return evaluation.findings(result) if evaluation and result.get("complete", True) else None


def every_table(result, arms=None):
    """All tables of a result, those of its own evaluation last: [(title, header, rows of text, notes)]."""
    command = result["command"]
    if command == "cost":
        model = result["cost"].get("model")
        own = forecast.cost_tables(model) if model else []
    elif command in MEASUREMENTS:
        own = MEASUREMENTS[command].tables(result[command])
    else:
        found = findings(result)
        own = EVALUATIONS[command].tables(found) if found else []
    own = [(title, header, rows, [f"{line}." for line in notes]) for title, header, rows, notes in own]
    return tables.of(result, arms) + tables.with_rows(own)


def drawings(result, arms):
    """All plots of a result, where matplotlib is installed."""
    if not plots.available():
        return []
    return plots.of(result, arms) + figures.of(result["command"], findings(result))


def store(path, content):
    """Write text or bytes, whole or not at all."""
    with manifest.atomic(pathlib.Path(path), "w" if isinstance(content, str) else "wb") as stream:
        stream.write(content)


def changed(result, arms):
    """The names of the arms whose stored figures are not what the rows give, and of the findings where they are not."""
    pairs = zip(arms or [], result.get("arms", []), strict=False)
    names = [experiment.label(new) for new, old in pairs if not same(new, old)]
    kept = "findings" not in result or same(findings(result), result["findings"])
    return names + ([] if kept else ["the findings"])


def same(one, other):
    """Whether figures agree with stored ones, numbers within TOLERANCE; an older result may store fewer."""
    if isinstance(one, dict) and isinstance(other, dict):
        return other.keys() <= one.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return one == other


def text(result, arms=None):
    """The tables for a terminal."""
    parts = []
    for title, header, rows, notes in every_table(result, arms):
        parts += [title, shown.as_text(header, rows), *(["\n".join(notes)] if notes else [])]
    return "\n\n".join(parts) + "\n"


def markdown(result, arms=None):
    """The tables for a page, under a line that says what was run."""
    parts = [f"## {heading(result)}", made(result)]
    for title, header, rows, notes in every_table(result, arms):
        parts += [f"### {title}", shown.as_markdown(header, rows), "\n".join(f"- {line}" for line in notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(result):
    """What was run."""
    return f"{result['command']}: {result['target']['source']}, {result['target']['dtype']}"


def made(result):
    """By which code, on what, when."""
    made, device = result["provenance"], result["provenance"].get("device")
    if isinstance(device, dict):
        device = device.get("device_name") or device.get("device")
    dirty = " (dirty)" if made.get("dirty") else ""
    return f"commit {made.get('commit')}{dirty}, {device or 'unknown device'}, {made['created']}"
