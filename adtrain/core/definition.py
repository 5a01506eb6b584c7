"""Where the user has defined something that has a name, and whether a later definition may replace it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Definition:
    """A line of a file that runs as the module `module`."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def replaces(self, earlier: Definition) -> bool:
        """Whether this is the earlier definition run again: the same line, a cell of a notebook, or a changed plug-in.

        A plug-in that has changed is another module from a file of the same name.
        """
        if self.file.startswith("<") or str(self) == str(earlier):
            return True
        return Path(self.file).name == Path(earlier.file).name and self.module != earlier.module


def caller(depth: int) -> Definition:
    """The line that runs `depth` calls above the function that calls this."""
    frame = sys._getframe(depth + 1)
    return Definition(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))
