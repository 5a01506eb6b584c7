"""Signals: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (a lost connection). The second one ends the process at once.

During the imports the first one ends the process too. Later it requests a stop of a training, and ends other commands.
A signal that the caller ignores, as `nohup` does SIGHUP, stays ignored.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from types import FrameType
from typing import Any, NoReturn, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

USAGE, TIME_OVER, INTERRUPTED = 2, 124, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTE = b"adtrain: stopping after the current steps; a second signal ends at once\n"
NO_THREADS = b"adtrain: error: NumPy cannot start its threads; raise ulimit -u, or set OPENBLAS_NUM_THREADS=1\n"


@contextmanager
def handled(handler: Handler, numbers: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Let `handler` handle the signals during a `with` block. A SIGHUP that the caller ignores stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number in numbers if not (ignored and number == signal.SIGHUP)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def interrupt_while_importing(is_rank: bool) -> Iterator[None]:
    """Let SIGINT end the process with exit code 130 and no traceback during a `with` block.

    OpenBLAS, which NumPy imports, raises the same signal where it cannot start its threads; then the exit code is 2.
    mpiexec ends the other ranks only if a signal has ended one of them, so a rank is ended by the signal itself.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        try:
            threading.Thread(target=int).start()
        except RuntimeError:
            end_with(NO_THREADS)
        if is_rank:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(INTERRUPTED)

    with handled(end, [signal.SIGINT] if is_default() else []):
        yield


def is_default() -> bool:
    """Whether SIGINT raises KeyboardInterrupt: neither the caller ignores it nor the program has its own handler."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: temporary files and compilers are cleaned up."""
    for number, handler in ((signal.SIGINT, _interrupt), (signal.SIGTERM, _end), (signal.SIGHUP, _end)):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handler)


def let_signals_kill() -> None:
    """Let SIGINT end the process as SIGTERM and SIGHUP do by default.

    A rank that waits for the others to start can run no Python. And mpiexec ends the other ranks at once if a signal
    has ended one of them, but not for an exit code of 130.
    """
    if is_default():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def stop_signals(is_silent: bool, deadline: float = math.inf) -> Iterator[StopSignals]:
    """Record the signals during a `with` block. The first one is noted on stderr, unless `is_silent`.

    `deadline`, by `time.perf_counter`, requests a stop too.
    """
    signals = StopSignals(is_silent, deadline)
    with handled(signals.handle):
        yield signals


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Only record the first SIGINT of a `with` block; the function returned says whether it has come.

    The second one raises KeyboardInterrupt. Does nothing in threads other than the main one, and where the program has
    a handler of its own.
    """
    arrived: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    with handled(handle, [signal.SIGINT] if is_main and is_default() else []):
        yield lambda: bool(arrived)


class StopSignals:
    """Records whether a signal has arrived, and which one, and whether the deadline has passed."""

    number: int | None = None

    def __init__(self, is_silent: bool, deadline: float) -> None:
        self.is_silent, self.deadline = is_silent, deadline

    def stop_requested(self) -> bool:
        return self.number is not None or perf_counter() >= self.deadline

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, the shell's convention; without a signal that of the command `timeout`."""
        return TIME_OVER if self.number is None else 128 + self.number

    def handle(self, number: int, frame: FrameType | None) -> None:
        # It must not raise: the handler can run inside a callback that swallows exceptions.
        if self.number is not None:
            self.number = number
            self.exit_now()
        self.number = number
        if self.is_silent:
            return
        with suppress(OSError):  # the reader may have exited
            # The newline is for a progress bar.
            os.write(sys.stderr.fileno(), b"\n" + NOTE if sys.stderr.isatty() else NOTE)

    def exit_now(self) -> None:
        """End the process immediately. This loses no data, because files are replaced atomically."""
        toolchain = sys.modules.get("adtrain.backends.cpu.compiler")  # an import could wait for the interrupted code
        if toolchain is not None:
            toolchain.end_all()  # compilers, which have sessions of their own
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, RuntimeError, ValueError):  # the stream is closed, or a write was interrupted
                stream.flush()
        os._exit(self.exit_code)


def end_with(line: bytes) -> NoReturn:
    """Print the line and end the process with exit code 2, without a module that may be missing."""
    try:
        os.write(2, line)
    finally:
        os._exit(USAGE)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt from a line of adtrain, which tells it from one that a plug-in raises."""
    raise KeyboardInterrupt
