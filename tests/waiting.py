"""Waiting for other processes, on slow and busy machines too."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, Protocol

PATIENCE = 900.0
"""Seconds after which a test fails. On a fast machine the wait takes a few seconds."""


class Process(Protocol):
    """A `subprocess.Popen`, or what has the same method."""

    def poll(self) -> Any:
        """None while the process runs."""


def wait_until(condition: Callable[[], object], process: Process | None = None) -> None:
    """Return once the condition holds. AssertionError after PATIENCE, or when the process ends before that."""
    deadline = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < deadline, f"waited {PATIENCE} s in vain"
        assert process is None or process.poll() is None or condition(), "the process ended early"
        sleep(0.01)
