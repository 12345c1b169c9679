"""Plots and the page: what is drawn is what the result says, labelled, in both schemes, and nothing lies outside."""

import math
import re

import pytest

from decode.lab import figures as findings_figures
from decode.lab import page, plots, report, tables

figure = pytest.importorskip("matplotlib.figure")


def figures(name, size, ratio, survival, **more):
    """One arm's figures."""
    speedup = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.2, "range": [ratio - 0.3, ratio + 0.4]}
    ms = {"draft": 1.0, "verify": 4.0, "commit": 0.5, "other": 0.2, "cycle": 5.7}
    return {"name": name, "block_size": size, "speedup": speedup, "survival": survival, "ms": ms} | more


ARMS = [
    figures("mlx_lm", None, 1.0, [], ms=None),
    figures("mlx_lm-twin", None, 1.01, [], ms=None),
    figures("plain", None, 1.05, []),
    figures("ngram-3", 8, 1.2, [0.5, 0.3]),
    *(figures(f"dflash-{B}", B, 1.0 + B / 10, [0.9**j for j in range(1, B)]) for B in (2, 4, 8, 16)),
    *(figures(f"dflash-{B}-guard1", B, 0.9 + B / 10, [0.9**j for j in range(1, B)]) for B in (2, 4, 8, 16)),
]
TIMED = {"ms": 4.0, "host_ms": 1.0, "pipelined_ms": 3.5, "spread_ms": [3.8, 4.4]}
COST = {
    "command": "cost",
    "cost": {
        "context": 1024,
        "floor_ms": 2.0,
        "widths": {name: dict.fromkeys(("1", "2", "5", "16", "17", "64"), TIMED) for name in ("foredraft", "mlx_lm")},
        "contexts": {"1024": {"1": TIMED, "5": TIMED}, "4096": {"1": TIMED, "5": TIMED}},
    },
}


def row(prompt, repeat, seconds, disturbed=()):
    """One plain row."""
    named = {"arm": "plain", "prompt": prompt, "repeat": repeat, "disturbed": list(disturbed)}
    return named | {"tokens": [1, 2, 3], "seconds": seconds}


MEASURED = {
    "command": "ties",
    "rows": [row("p", 0, 1.0), row("q", 0, 2.0), row("p", 1, 1.2, ["noise"]), row("q", 1, 2.2)],
    "census": [
        {"width": W, "by_margin": [[9, 4], [5, 1], [7, 0], [0, 0], [3, 0], [2, 0], [80, 0]],
         "kinds": {"tie": 5, "width_sensitive": 0}, "largest_difference": 0.1}
        for W in (2, 8)
    ],
}  # fmt: skip


def axes_of(painter):
    """The axes that a painter leaves."""
    axes = figure.Figure(figsize=plots.SIZE, layout="constrained").add_subplot()
    painter(axes)
    axes.figure.draw_without_rendering()
    return axes


def estimate(value, half=0.05):
    """A figure with its interval."""
    return {"value": value, "low": half and value - half, "high": half and value + half, "prompts": 20}


def at(length, tau):
    """The figures of one arm at one context length."""
    ms = {"draft": 2.0, "verify": 4.0 + length / 1000, "commit": 0.4, "other": 0.1, "cycle": 6.5}
    return {
        "arm": "dflash-8", "length": length, "plain_ms": 3.0, "ms": ms, "tau": {"pooled": tau}, "predicted": tau / 2.2,
        "speedup": figures("dflash-8", 8, tau / 2.1, [])["speedup"],
    }  # fmt: skip


BIN = {"low": 0.0, "high": 0.1, "count": 40, "said": 0.06, "accepted": 0.1, "calibrated": 0.09}
FOUND = {
    "confidence": {
        "calibration": {
            "confidence": {
                "ece": 0.08,
                "ece_calibrated": 0.02,
                "bins": [BIN, BIN | {"count": 400, "said": 0.95, "accepted": 0.8, "calibrated": 0.82}],
            }
        }
    },
    "transfer": {
        "arm": "dflash-8",
        "targets": [
            {"part": "stock"},
            *(
                {"part": f"a-variant-with-a-long-name-{k}", "verdict": "adapt", "accepted_kept": estimate(0.9 - k / 10),
                 "speedup_kept": estimate(0.95 - k / 10, None)}
                for k in range(5)
            ),
        ],
    },
    "decompose": {
        "weights": ["smollm2", "smollm2-4bit"],
        "effects": {name: estimate(k / 10) for k, name in enumerate(("interaction", "drafting", "weights", "both"))},
    },
    "context": {"trained_length": 1024, "lengths": [at(T, 4 - T / 4000) for T in (512, 2048, 4096, 7680)]},
}  # fmt: skip


def every():
    """(name, painter) of every kind of plot."""
    drawn = [plot for result in (MEASURED, COST) for plot in plots.of(result, ARMS)]
    drawn += [plot for command, found in FOUND.items() for plot in findings_figures.of(command, found)]
    return [(name, painter) for name, _, painter in drawn]


def test_a_result_gives_the_plots_that_it_has_data_for():
    assert [name for name, _ in every()] == [
        *("speed", "survival", "stages", "pace", "census", "width", "context"),
        *("calibration-confidence", "transfer", "decomposition"),
        *("context-cost-dflash-8", "context-tau", "context-speed"),
    ]
    assert findings_figures.of("ksweep", {"x": 1}) == findings_figures.of("transfer", None) == []
    bare = {"command": "ksweep", "rows": []}
    assert plots.of(bare, [figures("mlx_lm", None, 1.0, [], ms=None)]) == []


@pytest.mark.parametrize(("name", "painter"), every(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_plot_names_its_axes_and_its_tick_labels_do_not_overlap(name, painter):
    axes = axes_of(painter)
    units = r"\(.+\)|share|÷|^arm$|order run"
    assert re.search(units, axes.get_xlabel()) and re.search(units, axes.get_ylabel())
    legend = axes.get_legend() or axes.figure.legends[0]
    assert legend.get_texts()
    for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
        spans = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False)), name
    whole, legend = axes.figure.bbox, legend.get_window_extent()
    assert legend.x1 <= whole.x1 + 1 and legend.y0 >= whole.y0 - 1  # on the page, and over nothing drawn:
    assert legend.x0 >= axes.get_window_extent().x1 or legend.y1 <= axes.xaxis.label.get_window_extent().y0


def test_the_speed_plot_shows_every_ratio_with_its_interval():
    axes = axes_of(plots.speed_plot(ARMS)[2])
    lines = {container.get_label(): container for container in axes.containers}
    assert set(lines) == {"ngram-3", "dflash", "dflash-guard1"}
    line, _, (bars,) = lines["dflash"]
    assert line.get_ydata().tolist() == pytest.approx([1.2, 1.4, 1.8, 2.6])
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        pytest.approx([y - 0.1, y + 0.2]) for y in (1.2, 1.4, 1.8, 2.6)
    ]


def test_a_decomposition_shows_effects_as_factors_one_of_no_effect_too():
    axes = axes_of(findings_figures.of("decompose", FOUND["decompose"])[0][2])
    ((line, _, _),) = axes.containers
    assert line.get_xdata().tolist() == pytest.approx([math.exp(k / 10) for k in range(4)])


def test_the_pace_plot_divides_every_run_by_its_prompts_mean_and_marks_disturbed_ones():
    axes = axes_of(plots.pace_plot(MEASURED)[2])
    quiet, disturbed = axes.get_lines()[:2]
    assert quiet.get_ydata() == pytest.approx([1 / 1.1, 2 / 2.1, 2.2 / 2.1])
    assert disturbed.get_xdata() == pytest.approx([3]) and disturbed.get_ydata() == pytest.approx([1.2 / 1.1])


@pytest.mark.parametrize("scheme", plots.SCHEMES)
def test_a_plot_is_drawn_in_the_colours_of_its_page_and_always_the_same(scheme):
    painter = plots.survival_plot(ARMS)[2]
    svg = plots.render(painter, scheme, "svg", "How far")
    assert svg == plots.render(painter, scheme, "svg", "How far")
    page_colour, ink, *_ = plots.SCHEMES[scheme]
    assert page_colour in svg.decode() and ink in svg.decode()
    assert plots.render(painter, scheme, "png", "How far").startswith(b"\x89PNG")


def luminance(colour):
    """Relative luminance of #rrggbb, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", plots.SCHEMES)
def test_every_colour_can_be_read_on_its_page(scheme):
    ground, ink, _, colours = plots.SCHEMES[scheme]
    for colour in (ink, *colours):
        light, dark = sorted((luminance(ground), luminance(colour)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG's bound for text, above its 3 for graphics


def test_the_page_needs_nothing_beside_it():
    drawn = plots.of(COST)
    found = page.whole([("a<b", "cost: x", "commit 1", tables.of(COST), drawn)])
    assert "a&lt;b" in found and "a<b" not in found
    assert found.count("<picture>") == len(drawn) == 2
    assert re.findall(r'(?:src|srcset|href)="(?!data:image/svg\+xml;base64,|#)', found) == []
    assert "prefers-color-scheme: dark" in found and "<script" not in found


def test_without_matplotlib_the_tables_are_written_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "available", lambda: False)
    head = {"target": {"source": "t", "dtype": "float32"}, "provenance": {"commit": "c", "created": "now"}}
    report.write({"runs/x.json": COST | head}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "x.md", "x.txt"]
    assert "<table>" in (tmp_path / "report.html").read_text()
