"""Text that is put into HTML is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from string import Formatter
from typing import Any

from markupsafe import Markup, escape

from adtrain.text import visible

__all__ = ["Markup", "html", "join"]


def html(template: str, *values: object) -> Markup:
    """The template with the values in the place of its braces, as `str.format` writes them; all but Markup escaped."""
    return Markup(_ESCAPING.vformat(template, values, {}))


def join(parts: Iterable[str], between: str = "") -> Markup:
    """The parts with `between` between them; all but Markup escaped."""
    return Markup(_escaped(between).join(map(_escaped, parts)))


def _escaped(text: str) -> str:
    """Of other text also characters are escaped that a browser obeys or does not show, such as marks of direction."""
    return text if isinstance(text, Markup) else escape("\n".join(map(visible, text.split("\n"))))


class _Escaping(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return _escaped(value if isinstance(value, Markup) else format(value, format_spec))


_ESCAPING = _Escaping()
