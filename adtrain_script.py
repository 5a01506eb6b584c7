"""The `adtrain` script, apart from the package: importing that takes half a second, in which Ctrl-C may come."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

USAGE, INTERRUPTED = 2, 130
NO_THREADS = b"adtrain: error: NumPy cannot start its threads; raise ulimit -u, or set OPENBLAS_NUM_THREADS=1\n"


def main() -> NoReturn:
    """Run the command. Ctrl-C during the imports ends the process with exit code 130 and no traceback."""
    end_at_interrupt()
    from adtrain.cli.main import main as run

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def end_at_interrupt() -> None:
    """Let SIGINT end the process with exit code 130, unless the caller ignores the signal.

    OpenBLAS, which NumPy imports, raises the same signal where it cannot start its threads; then the exit code is 2.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        try:
            os.write(2, NO_THREADS)
        finally:
            os._exit(USAGE)
    os._exit(INTERRUPTED)
