"""Errors of reading data, and how they show texts of files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from adtrain.core.errors import AdtrainError
from adtrain.text import visible

_log = logging.getLogger(__name__)


class DataError(AdtrainError):
    """A data set, file or image is missing, damaged or of the wrong kind; the message names it."""


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Make a DataError of an error of the system in the block; `path` is its place."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


class DataOptionError(DataError):
    """An option of `Options` does not fit the files; `option` is its name, `reason` says what is wrong."""

    def __init__(self, option: str, reason: str) -> None:
        self.option, self.reason = option, reason
        super().__init__(f"data.{option}: {reason}")


def warn(place: object, message: str) -> None:
    """Warn about a file, a folder or data in memory."""
    _log.warning("adtrain: warning: %s: %s", visible(str(place)), message)


def quoted(text: str) -> str:
    """A text from a file for messages, shortened to 40 characters."""
    return repr(text[:40])


def printable(name: str) -> str:
    """A name from a file for messages; quoted if it is long or has control characters."""
    return name if name.isprintable() and len(name) <= 40 else quoted(name)
