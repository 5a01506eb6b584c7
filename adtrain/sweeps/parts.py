"""Work in parts: generators that are run alternately, so that a device can do the work of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

from adtrain.core.backend import backend

T = TypeVar("T")
Parts: TypeAlias = Generator[bool, None, T]
"""Yields after each part: True if the next one waits for the device, False if it only starts more work."""


def finished(work: Parts[T]) -> T:
    """Run work to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def side_by_side(works: Sequence[Parts[bool]], device: str) -> bool:
    """Run works to their ends, and return whether all results are True.

    On a device that runs several Programs at a time, each work has its own stream. A part that waits for the device
    runs when the others have started all they can. On other devices one work runs after the other.
    """
    if len(works) == 1:
        return finished(works[0])
    with backend(device).side_by_side(len(works)) as streams:
        if not streams:
            return all(finished(work) for work in works)
        return _alternately(works, streams)


def _alternately(works: Sequence[Parts[bool]], streams: Sequence[Callable[[], AbstractContextManager[None]]]) -> bool:
    waiting = dict.fromkeys(range(len(works)), False)
    results = []
    while waiting:
        for i in [i for i, waits in waiting.items() if not waits] or list(waiting):
            with streams[i]():
                try:
                    waiting[i] = next(works[i])
                except StopIteration as end:
                    results.append(end.value)
                    del waiting[i]
    return all(results)
