"""Processes that compute for this one and talk to it through pipes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A new process, in its own session, so that Ctrl-C does not reach it.

    It ends when its stdin is closed, at the latest when this process ends. Raises OSError if it cannot be started.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload]


def end(*processes: subprocess.Popen[bytes]) -> None:
    """End processes and wait for them."""
    for process in processes:  # all at once: the system takes milliseconds to free the memory of each
        process.kill()
    for process in processes:
        with suppress(BrokenPipeError), process:  # closes the pipes and waits
            pass
