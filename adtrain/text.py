"""Text to show: text from files, arguments and other programs made safe, numbers with a unit, and the command line."""

from __future__ import annotations

import shlex
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that a terminal or page obeys or does not show: controls such as newline and escape,
formats such as marks of writing direction, halves of surrogate pairs, separators of lines and of paragraphs."""


def visible(text: object) -> str:
    r"""The text on one line: each character of a category in HIDDEN as its escape in Python, such as \n or \u202e.

    All other characters stay, so a second call changes nothing.
    """
    found = str(text)
    if found.isprintable():
        return found
    return "".join(_escape(x) if unicodedata.category(x) in HIDDEN else x for x in found)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def counted(count: int, things: str) -> str:
    """The number with its noun, given in the plural: "1 class", "2,000 classes"."""
    suffix = "es" if things.endswith("sses") else "s"
    return f"{count:,} {things.removesuffix(suffix) if count == 1 else things}"


MAX_LISTED = 12
"""Names of a list in a message, by default."""


def first_names(names: Sequence[str], most: int = MAX_LISTED) -> str:
    """At most `most` of the names, joined by commas: "a, b, ..."."""
    return ", ".join([*names[:most], "..."] if len(names) > most else names)


def mebibytes(size: float) -> str:
    """The size in bytes as text: "1,234.5 MiB"."""
    return f"{size / 2**20:,.1f} MiB"


def short(number: float, unit: str = "") -> str:
    """The number with three digits, a metric prefix and the unit, such as 3.21 MB; empty for 0."""
    if not number:
        return ""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}".rstrip()


class Invocation(NamedTuple):
    """A time in UTC as ISO 8601, and a command line."""

    date: str
    command: str


def invocation() -> Invocation:
    """The time of this call, and the command line of this process."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return Invocation(datetime.now(timezone.utc).isoformat(timespec="seconds"), shlex.join([name, *sys.argv[1:]]))
