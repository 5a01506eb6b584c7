"""Signals: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (a lost connection). The second one ends the process at once.

The first one requests a stop of a training, and ends other commands.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from adtrain.backends.cpu.toolchain import end_all
from adtrain.cli.output import is_silent

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTE = b"adtrain: stopping after the current steps; a second signal ends at once\n"


class StopSignals:
    """Records whether a signal has arrived, and which one."""

    number: int | None = None

    def stop_requested(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, the shell's convention."""
        return 128 + (self.number or 0)

    def handle(self, number: int, frame: FrameType | None) -> None:
        # It must not raise: the handler can run inside a callback that swallows exceptions.
        if self.stop_requested():
            self.number = number
            self.exit_now()
        self.number = number
        if is_silent():
            return
        with suppress(OSError):  # whoever read it may be gone
            # The newline is for a progress bar.
            os.write(sys.stderr.fileno(), b"\n" + NOTE if sys.stderr.isatty() else NOTE)

    def exit_now(self) -> None:
        """End the process immediately. This loses no data, because files are replaced atomically."""
        end_all()  # compilers, which have sessions of their own
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, RuntimeError, ValueError):  # the stream is closed, or a write was interrupted
                stream.flush()
        os._exit(self.exit_code)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Replace Python's handlers of the signals during a `with` block by those of a StopSignals.

    A SIGHUP that the caller ignores, as `nohup` does, stays ignored.
    """
    signals = StopSignals()
    ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
    listened = [number for number in SIGNALS if number not in ignored]
    previous = {number: signal.signal(number, signals.handle) for number in listened}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: temporary files and compilers are cleaned up.

    A second signal ends it at once. A SIGHUP that the caller ignores, as `nohup` does, stays ignored.
    """
    for number, handler in ((signal.SIGINT, _interrupt), (signal.SIGTERM, _end), (signal.SIGHUP, _end)):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handler)


def let_signals_kill() -> None:
    """Let SIGINT end the process as SIGTERM and SIGHUP do by default, unless the caller ignores it.

    A rank that waits for the others to start can run no Python. And mpiexec ends the other ranks at once if a signal
    has ended one of them, but not for an exit code of 130.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt from a line of adtrain, which tells it from one that a plug-in raises."""
    raise KeyboardInterrupt
