"""Problems of a config, one line each: position, what was found, what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from adtrain.core.errors import AdtrainError

PathParts = tuple[str | int, ...]

MAX_LISTED = 30


@dataclass(frozen=True)
class Problem:
    """One problem: `where` is `file:line:col` or `--set key`, `path` the key in the config ("" for the whole), `known`
    the names that are possible there, if the message ends with them. `excerpt` has the lines that follow the message:
    a text of the config, and a caret under a character of it."""

    where: str
    path: str
    message: str
    known: tuple[str, ...] | None = None
    excerpt: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = self.where if not self.path or self.where == f"--set {self.path}" else f"{self.where}: {self.path}"
        text = f"{where}: {self.message}"
        return text if self.known is None else f"{text}; {listed(self.known)}"


class ConfigError(AdtrainError):
    """An invalid config. `problems` holds all problems; the message has one line for each, up to MAX_LISTED, and each
    list of known names once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        more = len(self.problems) - MAX_LISTED
        lines: list[str] = []
        lists: list[tuple[str, ...] | None] = []
        for problem in self.problems[:MAX_LISTED]:
            lines.append(str(replace(problem, known=None) if problem.known in lists else problem))
            lines += problem.excerpt
            lists.append(problem.known)
        return (*lines, f"... and {more} more problems") if more > 0 else tuple(lines)


def dotted(path: PathParts) -> str:
    """The path as text: `model.layers[3].conv2d.padding`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{key_text(part)}" for part in path)
    return text.removeprefix(".")


def key_text(key: str) -> str:
    """The key for a one-line message: shortened and quoted unless it is a plain word."""
    return key if re.fullmatch(r"[\w-]{1,40}", key) else repr(shortened(key))


def found(value: object) -> str:
    """A config value as YAML writes it, shortened to about 40 characters, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            text = ", ".join(found(item) for item in value[:8]) + (", ..." if len(value) > 8 else "")
            return f"[{text}]" if len(text) <= 40 else f"a list of {len(value)}"
        case dict():
            return f"a mapping with {', '.join(map(key_text, list(value)[:4]))}" if value else "an empty mapping"
        case str():
            return repr(shortened(value))
        case _:
            return shortened(str(value))


def shortened(text: str) -> str:
    """The text, cut to 40 characters."""
    return text if len(text) <= 40 else f"{text[:37]}..."


def known(name: str, names: Iterable[str], many: str = "known") -> str:
    """A hint for a message: `did you mean relu?`, the closest of `names`, or the list of all."""
    names = list(names)
    return similar(name, names) or listed(names, many)


def similar(name: str, names: Iterable[str], least: float = 0.6) -> str | None:
    """`did you mean relu?`, the closest of `names`; None if none has a similarity of `least`, of 1 for equal names."""
    close = difflib.get_close_matches(name.lower()[:80], list(names), 1, least)
    return f"did you mean {close[0]}?" if close else None


def listed(names: Iterable[str], many: str = "known") -> str:
    return f"{many}: {', '.join(names) or 'none'}"
