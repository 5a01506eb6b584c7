"""Building blocks of pages, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from adtrain.text import visible

# With this policy the browser refuses all network access.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, body: str, style: str = "") -> str:
    """A self-contained page. Characters that a browser obeys or does not show, such as marks of direction, are escaped.

    Args:
        title: plain text.
        body: HTML.
        style: CSS, added after page.css.
    """
    style = resources.files("adtrain.report").joinpath("page.css").read_text(encoding="utf-8") + style
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""
    return "\n".join(map(visible, page.split("\n")))


def section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}</section>\n"


def tiles(found: Iterable[tuple[str, str]]) -> str:
    """Names (plain text) and values (HTML) in large print. A value's id is its name with hyphens."""
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd id="{escape(name.replace(", ", "-").replace(" ", "-"))}">{text}</dd></div>'
        for name, text in found
    )
    return f'<dl class="tiles">{cells}</dl>\n' if cells else ""


def facts(found: Mapping[str, Any]) -> str:
    """A line for each name and value."""
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in found.items())
    return f'<dl class="facts">{pairs}</dl>\n'


def note(text: str) -> str:
    return f'<p class="note">{text}</p>\n'


def key(kind: str, text: str) -> str:
    """An entry of a legend; the CSS class `kind` defines its colour."""
    return f'<span class="key {kind}">{text}</span>'


def table(columns: Mapping[str, str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table; `columns` maps titles to the CSS class of their cells, `rows` are cells as HTML."""
    head = "".join(f'<th scope="col" class="{cells}">{title}</th>' for title, cells in columns.items())
    body = ""
    for row in rows:
        tds = (f'<td class="{cells}">{cell}</td>' for cells, cell in zip(columns.values(), row, strict=True))
        body += f"<tr>{''.join(tds)}</tr>\n"
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>'
    return f'<div class="wide">{table}</div>\n'


def breakable(fused: str) -> str:
    """Names joined by "+", with an optional line break after each "+"."""
    return escape(fused).replace("+", "+<wbr>")


def bar(share: float, text: str, kind: str = "") -> str:
    """Text in front of a bar of length `share`, 0 to 1; the CSS class `kind` defines its colour."""
    return f'<span class="bar {kind}" style="--share:{share:.3f}">{text}</span>'
