"""The templates of all HTML pages (Jinja2, with their CSS and JavaScript), of pictures (SVG), and of exported C.

A page extends `page.html.j2`, and says when and by which command it was made. Values are escaped; HTML is of the type
`markupsafe.Markup`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from adtrain.text import invocation, visible


@cache
def environment() -> Environment:
    """The environment of the templates in this folder. An undefined variable is an error."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.globals["invocation"] = invocation
    return found


def _visible(value: Any) -> Any:
    """The value of an expression as text without characters that a browser obeys or hides, such as direction marks."""
    return value if hasattr(value, "__html__") else "\n".join(map(visible, str(value).split("\n")))


def macro(template: str, name: str) -> Callable[..., Markup]:
    """A macro of a template as a function."""
    found: Callable[..., Markup] = getattr(environment().get_template(template).module, name)
    return found


bar, breakable, facts, key, note, notice, section, table, tiles = (
    macro("parts.html.j2", name)
    for name in ("bar", "breakable", "facts", "key", "note", "notice", "section", "table", "tiles")
)
"""Building blocks of pages: the macros of `parts.html.j2` as functions."""
