"""Figures as text: cells and tables as every page of a report shows them."""

import html


def fixed(value, places):
    """A number to so many places, or a dash."""
    return "–" if value is None else f"{value:.{places}f}"


def percent(value, places=1):
    """A share as a percentage, or a dash."""
    return "–" if value is None else f"{value:.{places}%}"


def ratio(speedup):
    """A speedup's two cells: the ratio, and its interval, or its range in words below ten prompts."""
    if speedup is None:
        return ["–", "–"]
    if speedup["low"] is None:
        return [fixed(speedup["ratio"], 3), "range {:.2f}–{:.2f}".format(*speedup["range"])]
    return [fixed(speedup["ratio"], 3), span(speedup["low"], speedup["high"])]


def estimate(found, places=3):
    """The two cells of a `statistics.estimate`: its value, and its interval or why there is none."""
    if found is None:
        return ["–", "–"]
    if found["low"] is None:
        return [fixed(found["value"], places), f"{found['prompts']} prompts"]
    return [fixed(found["value"], places), span(found["low"], found["high"], places)]


def yes(holds):
    """Whether something holds, or a dash where it cannot be told."""
    return "–" if holds is None else "yes" if holds else "no"


def span(low, high, places=3):
    """An interval's cell, or a dash."""
    return "–" if low is None else f"{low:.{places}f}–{high:.{places}f}"


def as_text(header, rows):
    """A table in columns: the first to the left, the others to the right."""
    grid = [list(header), *rows]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    columns = [
        [cell.rjust(width) for cell in column] for column, width in zip(zip(*grid, strict=True), widths, strict=True)
    ]
    columns[0] = [row[0].ljust(widths[0]) for row in grid]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def as_markdown(header, rows):
    """A table in Markdown."""
    line = lambda row: "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    rule = "|---" + "|--:" * (len(header) - 1) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def as_html(header, rows):
    """A table in HTML."""
    line = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"
