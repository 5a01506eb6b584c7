"""A check that OpenMP can start its threads: where it cannot, it ends the process with exit code 1."""

from __future__ import annotations

import functools
import threading

from adtrain.core.errors import AdtrainError


class ThreadLimit(AdtrainError):
    """The system does not let this process start the threads of compiled code."""


@functools.cache
def require_threads(count: int) -> None:
    """Start and end this many threads. Raises ThreadLimit where the system refuses one. Checked once for each count."""
    done, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=done.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        advice = "raise the limit (ulimit -u), or set OMP_NUM_THREADS to a smaller number"
        raise ThreadLimit(f"only {len(started)} of {count} more threads can be started; {advice}") from None
    finally:
        done.set()
        for thread in started:
            thread.join()
