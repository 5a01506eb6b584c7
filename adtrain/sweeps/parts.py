"""Jobs in parts: generators that are run in turns, so that a device can do several jobs side by side."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

from adtrain.core.backend import backend

T = TypeVar("T")
Parts: TypeAlias = Generator[bool, None, T]
"""Yields after each part: True if the next one waits for the device, False if it only starts more work."""


def run_to_end(parts: Parts[T]) -> T:
    """Run all parts of a job; returns its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def side_by_side(jobs: Sequence[Parts[bool]], device: str) -> bool:
    """Run jobs to their ends, and return whether all results are True.

    On a device that runs several Programs at a time, each job has its own stream. A part that waits for the device
    runs when the others have started all they can. On other devices one job runs after the other.
    """
    if len(jobs) == 1:
        return run_to_end(jobs[0])
    with backend(device).side_by_side(len(jobs)) as streams:
        if not streams:
            return all(run_to_end(job) for job in jobs)
        return _alternately(jobs, streams)


def _alternately(jobs: Sequence[Parts[bool]], streams: Sequence[Callable[[], AbstractContextManager[None]]]) -> bool:
    waiting = dict.fromkeys(range(len(jobs)), False)
    results = []
    while waiting:
        for i in [i for i, waits in waiting.items() if not waits] or list(waiting):
            with streams[i]():
                try:
                    waiting[i] = next(jobs[i])
                except StopIteration as end:
                    results.append(end.value)
                    del waiting[i]
    return all(results)
