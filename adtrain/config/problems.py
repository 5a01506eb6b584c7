"""What is wrong with a config, in one line a problem: where it stands, what was found, what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adtrain.core.errors import AdtrainError

PathParts = tuple[str | int, ...]

MAX_LISTED = 30


@dataclass(frozen=True)
class Problem:
    """One problem: `where` is `file:line:col` or `--set key`, `path` the place in the config ("" for the whole)."""

    where: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}  {self.path}: {self.message}" if self.path else f"{self.where}  {self.message}"


class ConfigError(AdtrainError):
    """A config that cannot be used; `problems` holds every problem found, and the message one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:MAX_LISTED]]
        if len(self.problems) > MAX_LISTED:
            lines.append(f"... and {len(self.problems) - MAX_LISTED} more problems")
        super().__init__("\n".join(lines))


def dotted(path: PathParts) -> str:
    """The path as it is printed: `model.layers[3].conv2d.padding`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{word(part)}" for part in path)
    return text.removeprefix(".")


def word(key: str) -> str:
    """A key as it is printed: quoted where it is no plain word, so that a message stays on its line."""
    return key if re.fullmatch(r"[\w-]{1,40}", key) else repr(shortened(key))


def found(value: object) -> str:
    """A config value in the words of the file, shortened to some 40 characters."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            text = ", ".join(found(item) for item in value[:8]) + (", ..." if len(value) > 8 else "")
            return f"[{text}]" if len(text) <= 40 else f"a list of {len(value)}"
        case dict():
            return f"a mapping with {', '.join(map(word, list(value)[:4]))}" if value else "an empty mapping"
        case str():
            return repr(shortened(value))
        case _:
            return shortened(str(value))


def shortened(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def known(name: str, names: Iterable[str], many: str = "known") -> str:
    """`did you mean relu? (known: ...)`: the closest of `names`, where one is close, and the list of them all."""
    names = list(names)
    listed = f"{many}: {', '.join(names) or 'none'}"
    close = difflib.get_close_matches(name.lower()[:80], names, n=1)
    return f"did you mean {close[0]}? ({listed})" if close else listed
