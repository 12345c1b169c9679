"""The plots of a result, from its rows alone: each drawn once for a light page and once for a dark one.

B block size, W rows of a forward, j a slot. matplotlib comes with the extra `report`; without it there are tables only.
A painter takes matplotlib's axes and names both axes with their unit.
"""

import importlib.util
import io
import math

from decode.lab import census, statistics
from decode.lab.experiment import label

SIZE = (7.2, 4.2)  # inches
DPI = 160
SCHEMES = {
    "light": ("#ffffff", "#1f2328", "#d0d7de", ["#0b62c4", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d"]),
    "dark": ("#0d1117", "#e6edf3", "#3d444d", ["#6cb6ff", "#ffa657", "#7ee787", "#d2a8ff", "#e3b341", "#ff9bce"]),
}  # page, ink, grid, and the series' colours, chosen to be read on that page
CLOSE = 0.05  # of the axis: as wide as a tick's number, about
MARKS = "osD^vP"
STAGES = (*statistics.STAGES, "other")


def available():
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def of(result, arms=None):
    """[(name, title, painter)] of the plots that a result has data for; arms as for `tables.of`."""
    if result["command"] == "cost":
        found = [width_plot(result["cost"]), context_plot(result["cost"])]
    elif arms is None:  # nothing was timed
        found = []
    else:
        found = [speed_plot(arms), survival_plot(arms), stage_plot(arms), pace_plot(result), census_plot(result)]
    return [plot for plot in found if plot]


def render(painter, scheme, kind, title):
    """One plot as bytes; kind: "png" or "svg"."""
    import matplotlib
    from matplotlib.figure import Figure

    page, ink, grid, colours = SCHEMES[scheme]
    settings = {
        "figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page, "legend.facecolor": page,
        "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": grid, "xtick.color": ink, "ytick.color": ink,
        "legend.edgecolor": grid, "grid.color": grid, "axes.grid": True, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "legend.fontsize": 9,
        "axes.prop_cycle": matplotlib.cycler(color=colours), "svg.hashsalt": "foredraft",
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        painter(axes)
        axes.set_title(title, loc="left", fontsize=11, pad=10)
        stream = io.BytesIO()
        figure.savefig(stream, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return stream.getvalue()


def speed_plot(arms):
    """Speedup against block size, a line for every kind of arm, over the baseline's own noise."""
    drafting = [arm for arm in arms if arm["block_size"] and arm["speedup"]]
    if not drafting:
        return None

    def paint(axes):
        lines = series(drafting)
        for index, (name, members) in enumerate(lines.items()):
            shift = 2 ** (0.05 * (index - (len(lines) - 1) / 2))  # side by side, so that no interval hides another
            points = [(arm["block_size"] * shift, arm["speedup"]["ratio"], ends(arm["speedup"])) for arm in members]
            whiskers(axes, points, name, MARKS[index % len(MARKS)])
        floor = statistics.twin_floor(arms)
        if floor:
            axes.axhspan(*ends(floor), color=axes.yaxis.label.get_color(), alpha=0.12, label="twin floor", linewidth=0)
        axes.axhline(1.0, color=axes.yaxis.label.get_color(), linewidth=1, label="mlx_lm")
        for arm in arms:
            if arm["name"] == "plain" and arm["speedup"] and "part" not in arm:
                axes.axhline(arm["speedup"]["ratio"], linestyle=":", color=axes.yaxis.label.get_color(), label="plain")
        axes.set_xscale("log", base=2)
        ticks(axes, sorted({arm["block_size"] for arm in drafting}))
        axes.set_xlabel("block size B (rows)")
        axes.set_ylabel("speedup over mlx_lm (×)")
        beside(axes)

    few = any(arm["speedup"]["low"] is None for arm in drafting)
    said = "bars: range over prompts, too few for an interval" if few else "bars: 95 % over prompts"
    return "speed", f"Speedup against block size ({said})", paint


def survival_plot(arms):
    """P(accepted ≥ j) against j."""
    shown = [arm for arm in arms if arm["survival"]]
    if not shown:
        return None

    def paint(axes):
        for index, arm in enumerate(shown):
            slots = range(1, len(arm["survival"]) + 1)
            style = {"marker": MARKS[index % len(MARKS)], "markersize": 5, "linewidth": 1.6}
            axes.plot(slots, arm["survival"], label=label(arm), linestyle="-" if index < 6 else "--", **style)
        axes.set_ylim(0, 1.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("slot j (proposals into the block)")
        axes.set_ylabel("P(accepted ≥ j), a share of cycles")
        beside(axes)

    return "survival", "How far blocks survive", paint


def stage_plot(arms):
    """Where a cycle's milliseconds go, stacked by stage."""
    shown = [arm for arm in arms if arm["ms"]]
    if not shown:
        return None

    def paint(axes):
        left = [0.0] * len(shown)
        for stage in STAGES:
            widths = [max(arm["ms"][stage], 0.0) for arm in shown]
            axes.barh([label(arm) for arm in shown], widths, left=left, label=stage)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel("time of a cycle, synchronised (ms)")
        axes.set_ylabel("arm")
        beside(axes)

    return "stages", "Where a cycle's time goes", paint


def pace_plot(result):
    """Every plain run's pace against its place in time, over its prompt's mean: the machine's drift, if any."""
    rows = [row for row in result["rows"] if row["arm"] == "plain" and len(row["tokens"]) > 1 and "part" not in row]
    if len({row["repeat"] for row in rows}) < 2:
        return None
    means = {id: seconds / tokens for id, (seconds, tokens) in statistics.timings(rows).items()}
    pace = [row["seconds"] / (len(row["tokens"]) - 1) / means[row["prompt"]] for row in rows]

    def paint(axes):
        for said, flagged, mark in (("undisturbed", False, "o"), ("disturbed", True, "x")):
            chosen = [index for index, row in enumerate(rows) if bool(row["disturbed"]) == flagged]
            axes.plot([i + 1 for i in chosen], [pace[i] for i in chosen], mark, label=said, markersize=5)
        axes.axhline(1.0, color=axes.yaxis.label.get_color(), linewidth=1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("plain runs, in the order run")
        axes.set_ylabel("seconds per token ÷ the prompt's mean")
        beside(axes)

    return "pace", "The plain loop's pace over the run", paint


def census_plot(result):
    """Share of positions where W rows decide otherwise than one, against the margin of the one-row decision."""
    found = census.summarise(result.get("census") or [])
    if not found:
        return None
    names = census.names()

    def paint(axes):
        for index, (W, one) in enumerate(found.items()):
            shares = [(k, differing / total) for k, (total, differing) in enumerate(one["by_margin"]) if total]
            style = {"marker": MARKS[index % len(MARKS)], "label": f"W = {W}"}
            axes.plot([k for k, _ in shares], [share * 100 for _, share in shares], **style)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
        axes.set_xlabel("margin of the one-row decision (ULPs)")
        axes.set_ylabel("positions decided otherwise (%)")
        beside(axes)

    return "census", "Where W rows decide otherwise than one", paint


def width_plot(cost):
    """Milliseconds of a forward against its rows."""

    def paint(axes):
        for index, (name, found) in enumerate(cost["widths"].items()):
            points = [(int(W), one["ms"], one["spread_ms"]) for W, one in found.items()]
            whiskers(axes, points, name, MARKS[index])
        if "floor_ms" in cost:
            axes.axhline(cost["floor_ms"], linestyle=":", color=axes.yaxis.label.get_color(), label="weights read once")
        axes.set_ylim(bottom=0)
        ticks(axes, [int(W) for W in cost["widths"]["foredraft"]])
        axes.set_xlabel("width W of a forward (rows)")
        axes.set_ylabel("time (ms; bars 5–95 %)")
        beside(axes)

    return "width", f"Cost against width, after {cost['context']} rows", paint


def context_plot(cost):
    """Milliseconds of a plain step and a verify against the rows that are held already."""
    lengths = cost.get("contexts") or {}
    if len(lengths) < 2:
        return None

    def paint(axes):
        for index, W in enumerate(next(iter(lengths.values()))):
            points = [(int(length), found[W]["ms"], found[W]["spread_ms"]) for length, found in lengths.items()]
            whiskers(axes, points, f"W = {W}", MARKS[index % len(MARKS)])
        axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        ticks(axes, sorted(map(int, lengths)))
        axes.set_xlabel("context (rows held)")
        axes.set_ylabel("time (ms; bars 5–95 %)")
        beside(axes)

    return "context", "Cost against context", paint


def series(arms):
    """{name without its block size: arms}, part by part."""
    found = {}
    for arm in arms:
        found.setdefault(label(arm).replace(f"-{arm['block_size']}", "", 1), []).append(arm)
    return found


def ends(speedup):
    """A speedup's interval, or its range where there are too few prompts."""
    return speedup["range"] if speedup["low"] is None else (speedup["low"], speedup["high"])


def whiskers(axes, points, name, mark):
    """A line of (x, y, (low, high)) points with their bars."""
    x, y, spans = zip(*sorted(points), strict=True)
    below = [max(value - low, 0.0) for value, (low, _) in zip(y, spans, strict=True)]
    above = [max(high - value, 0.0) for value, (_, high) in zip(y, spans, strict=True)]
    axes.errorbar(x, y, yerr=(below, above), label=name, marker=mark, capsize=3, linewidth=1.6, markersize=5)


def ticks(axes, values):
    """Ticks at just these values of x, as plain numbers; one that its neighbour's would touch has no number."""
    place = math.log2 if axes.get_xscale() == "log" else float
    gap, shown = (place(values[-1]) - place(values[0])) * CLOSE, []
    for value in values:
        shown += [value] if not shown or place(value) - place(shown[-1]) >= gap else []
    axes.set_xticks(values, [f"{value:,}" if value in shown else "" for value in values])
    axes.set_xticks([], minor=True)


def beside(axes):
    """The legend, outside the axes so that it covers no point."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False)


def below(axes):
    """The legend under the axes, for plots whose names need the width."""
    axes.figure.legend(loc="outside lower center", frameon=False, ncols=3)
