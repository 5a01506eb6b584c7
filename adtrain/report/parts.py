"""Building blocks of pages. Text that is not Markup is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adtrain.report.markup import Markup, html, join
from adtrain.templates import environment


def document(title: str, main: Markup) -> str:
    """A self-contained page."""
    return environment().get_template("page.html.j2").render(title=title, main=main)


def section(title: str, content: Markup) -> Markup:
    return html("<section>\n<h2>{}</h2>\n{}</section>\n", title, content)


def tiles(found: Iterable[tuple[str, str]]) -> Markup:
    """Names and values in large print. A value's id is its name with hyphens."""
    cells = join(
        html('<div><dt>{}</dt><dd id="{}">{}</dd></div>', name, name.replace(", ", "-").replace(" ", "-"), text)
        for name, text in found
    )
    return html('<dl class="tiles">{}</dl>\n', cells) if cells else cells


def facts(found: Mapping[str, Any]) -> Markup:
    """A line for each name and value."""
    pairs = join(html("<dt>{}</dt><dd>{}</dd>", name, value) for name, value in found.items())
    return html('<dl class="facts">{}</dl>\n', pairs)


def note(text: str) -> Markup:
    return html('<p class="note">{}</p>\n', text)


def key(kind: str, text: str) -> Markup:
    """An entry of a legend; the CSS class `kind` defines its colour."""
    return html('<span class="key {}">{}</span>', kind, text)


def table(columns: Mapping[str, str], rows: Iterable[Sequence[str]], kind: str = "") -> Markup:
    """A table; `columns` maps titles to the CSS class of their cells."""
    head = join(html('<th scope="col" class="{}">{}</th>', cells, title) for title, cells in columns.items())
    lines = []
    for row in rows:
        tds = (html('<td class="{}">{}</td>', cells, cell) for cells, cell in zip(columns.values(), row, strict=True))
        lines.append(html("<tr>{}</tr>\n", join(tds)))
    drawn = html('<table class="{}"><thead><tr>{}</tr></thead><tbody>\n{}</tbody></table>', kind, head, join(lines))
    return html('<div class="wide">{}</div>\n', drawn)


def breakable(names: str, after: str = "+") -> Markup:
    """Names with an optional line break after each `after`."""
    return join(names.split(after), html("{}<wbr>", after))


def bar(share: float, text: str, kind: str = "") -> Markup:
    """Text in front of a bar of length `share`, 0 to 1; the CSS class `kind` defines its colour."""
    return html('<span class="bar {}" style="--share:{:.3f}">{}</span>', kind, share, text)
