"""HTML as a type of its own: text that is put into it is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from string import Formatter
from typing import Any

from adtrain.text import visible


class Markup(str):
    """HTML. Make it by `html` and `join`, which escape all other text, or of a literal."""

    def __add__(self, other: str) -> Markup:
        return join([self, other])


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
