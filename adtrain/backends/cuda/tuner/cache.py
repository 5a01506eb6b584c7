"""Measured times of candidates in the user's cache: a JSON document for each problem."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from adtrain import documents

KIND = "tuning"


def find(key: str, labels: Collection[str]) -> Mapping[str, float] | None:
    """The microseconds of a launch by label, as stored under the key.

    None if there are none, if the fastest candidate is not among ``labels``, or if the file cannot be read, which gives
    a warning that names it.
    """
    times = documents.find(KIND, key, _read)
    return times if times and min(times, key=times.__getitem__) in labels else None


def any_stored() -> bool:
    """Whether times of any problem are stored."""
    return documents.any_stored(KIND)


def store(key: str, problem: str, times: Mapping[str, float], chosen: str) -> None:
    """Store the microseconds by label under the key. ``problem`` and ``chosen`` are for people who read the file.

    Raises:
        AdtrainError: the file cannot be written.
    """
    documents.store(KIND, key, {"problem": problem, "microseconds": dict(times), "chosen": chosen})


def _read(document: Any) -> Mapping[str, float]:
    """The times in a document that `store` has written.

    Raises:
        ValueError: it is another document.
    """
    times = document.get("microseconds") if isinstance(document, dict) else None
    if not isinstance(times, dict) or not times:
        raise ValueError("it holds no times")
    for label, time in times.items():
        if not isinstance(time, float) or not 0 < time < math.inf:
            raise ValueError(f"{label} takes {time!r} microseconds")
    return times
