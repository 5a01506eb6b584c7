"""The `adtrain` script, apart from the package: importing that takes half a second, in which Ctrl-C may come."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command. Ctrl-C during the imports ends the process with exit code 130 and no traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise the caller ignores the signal
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from adtrain.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()
