"""One HTML page of several results that needs nothing beside it: tables, notes, and plots in light and dark."""

import base64
import html

from decode.lab import plots, shown

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2328; --soft: #59636e; --rule: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9198a1; --rule: #3d444d; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 78rem; padding: 0 1rem; }
h2 { border-top: 1px solid var(--rule); margin-top: 3rem; padding-top: 1rem; }
p.made { color: var(--soft); }
a { color: inherit; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
ul { color: var(--soft); font-size: 13px; padding-left: 1.2rem; }
figure { margin: 1.5rem 0; }
img { height: auto; max-width: 46rem; width: 100%; }
"""


def whole(sections):
    """The page of several sections: (name, heading, line on how it was made, tables, plots) each."""
    names = "".join(f'<li><a href="#{anchor(name)}">{html.escape(name)}</a></li>' for name, *_ in sections)
    body = "\n".join(section(*parts) for parts in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Foredraft report</title><style>{STYLE}</style></head>\n"
        f"<body><h1>Foredraft report</h1>\n<nav><ul>{names}</ul></nav>\n{body}\n</body></html>\n"
    )


def section(name, heading, made, tables, drawn):
    """One result."""
    head = f'<h2 id="{anchor(name)}">{html.escape(name)}: {html.escape(heading)}</h2>'
    figures = "\n".join(figure(title, painter) for _, title, painter in drawn)
    return "\n".join([head, f'<p class="made">{html.escape(made)}</p>', figures, *map(table, tables)])


def table(parts):
    """One table with its title and notes."""
    title, header, rows, notes = parts
    said = "".join(f"<li>{html.escape(line)}</li>" for line in notes)
    content = f'<h3>{html.escape(title)}</h3><div class="wide">{shown.as_html(header, rows)}</div>'
    return content + (f"<ul>{said}</ul>" if said else "")


def figure(title, painter):
    """One plot, embedded once for each scheme; the browser shows the one that fits its page."""
    light, dark = (embedded(plots.render(painter, scheme, "svg", title)) for scheme in ("light", "dark"))
    source = f'<source srcset="{dark}" media="(prefers-color-scheme: dark)">'
    image = f'<img src="{light}" alt="{html.escape(title)}">'
    return f"<figure><picture>{source}{image}</picture></figure>"


def embedded(svg):
    """An SVG as a data URI."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def anchor(name):
    """A name as an id."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
