"""The `adtrain` script, apart from the package: importing that takes half a second, in which Ctrl-C may come."""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

USAGE, INTERRUPTED = 2, 130
NO_THREADS = b"adtrain: error: NumPy cannot start its threads; raise ulimit -u, or set OPENBLAS_NUM_THREADS=1\n"


def main() -> NoReturn:
    """Run the command. Ctrl-C during the imports ends the process with exit code 130 and no traceback.

    OpenBLAS, which NumPy imports, raises the same signal where it cannot start its threads; then the exit code is 2.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise the caller ignores the signal
        signal.signal(signal.SIGINT, lambda number, frame: _end())
    from adtrain.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


def _end() -> NoReturn:
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        try:
            os.write(2, NO_THREADS)
        finally:
            os._exit(USAGE)
    os._exit(INTERRUPTED)
