"""Ctrl-C and SIGTERM while a training runs: the first asks it to stop, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTE = b"adtrain: stopping after the steps under way; once more to leave at once\n"


class StopSignals:
    """Whether one of the signals has come, and which."""

    number: int | None = None

    def asked(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as a shell says it."""
        return 128 + (self.number or 0)

    def hear(self, number: int, frame: FrameType | None) -> None:
        # Nothing is raised: this may run in the middle of anything, a callback that swallows exceptions among them.
        if self.asked():
            self.number = number
            self.leave()
        self.number = number
        os.write(2, b"\n" + NOTE if sys.stderr.isatty() else NOTE)  # below a bar

    def leave(self) -> None:
        """End the process without waiting for anything. Every file is whole at any time, so none is lost."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, RuntimeError, ValueError):  # closed, or in the middle of being written to
                stream.flush()
        os._exit(self.exit_code)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Hear the signals in place of Python's own handlers, in a block; who trains asks whether one has come."""
    heard = StopSignals()
    before = {number: signal.signal(number, heard.hear) for number in SIGNALS}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
