"""Errors that a user can act on, and lines of the user's code.

A message is one line: what and where, found, expected, what to do.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parent.parent)
"""The folder of the package."""


class AdtrainError(Exception):
    """Base of errors that the user caused; the command line prints its lines and exits with code 2."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The message. An error that lists several problems has a line for each."""
        return (str(self),)


class ShapeError(AdtrainError, ValueError):
    """Shapes that do not fit together, or an axis, size or index that does not fit a shape."""


class DTypeError(AdtrainError, TypeError):
    """A dtype, or a type of argument, that the operation does not take."""


class DeviceError(AdtrainError):
    """A device that is not available, or arrays of one operation on different devices."""


class OutOfMemory(DeviceError, MemoryError):
    """A device has less free memory than needed."""


class DeviceFault(DeviceError):
    """A device has failed; this process cannot use it any more."""


class TraceError(AdtrainError):
    """A traced value used where its elements are needed or after its trace has ended, or a side effect."""


class OptionError(AdtrainError, ValueError):
    """An option that no input makes valid: of a wrong type, out of its range, or in contradiction to another option."""


def one_line(error: BaseException) -> str | None:
    """The text of an error on one line; None if its class, which may be the user's, cannot give it."""
    try:
        return " ".join(str(error).split())
    except BaseException:
        return None


def user_line() -> str:
    """``file:line`` of the innermost frame outside adtrain."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


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


def with_article(noun: str) -> str:
    """The singular with its article: "an int", "a dict"."""
    return f"{'an' if noun[0].lower() in 'aeio' else 'a'} {noun}"
