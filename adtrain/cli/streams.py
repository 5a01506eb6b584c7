"""The standard streams of a command: opened such that none of them can end it wrongly."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from adtrain.cli.output import SUBSTITUTE

BROKEN_PIPE = 141


class _Output(io.FileIO):
    """A file descriptor for results, whose errors say where they came from."""

    def write(self, content: Any) -> Any:
        try:
            return super().write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


class _Forgiving(io.FileIO):
    """A file descriptor for messages: what cannot be written, because a reader is gone or a disk is full, is lost."""

    def write(self, content: Any) -> int:
        with suppress(OSError):
            written = super().write(content)
            if written is not None:  # None: the descriptor does not block, and is full
                return written
        return len(content)


class _Lasting(io.TextIOWrapper):
    """A stream that stays open until the end of the process."""

    def close(self) -> None:
        self.flush()


def open_streams() -> None:
    """Open the standard streams such that no message can end a run.

    Descriptors that the caller closed (`>&-`) become the null device; otherwise the next file would get their number,
    and the messages. Standard error drops what it cannot write. Characters that the terminal lacks become ASCII.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding
    output = io.BufferedWriter(_Output(os.dup(1), "w"))
    sys.stdout = _Lasting(output, encoding, errors=SUBSTITUTE, line_buffering=os.isatty(1))
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    raw = _Forgiving(os.dup(2), "w")
    sys.stderr = _Lasting(io.BufferedWriter(raw), encoding, errors=SUBSTITUTE, line_buffering=True)


@contextmanager
def broken_pipes() -> Iterator[None]:
    """Exit with BROKEN_PIPE if the reader of stdout has closed it (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        close_stdout()
        raise SystemExit(BROKEN_PIPE) from None


def close_stdout() -> None:
    """Redirect stdout, so that Python's final flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
