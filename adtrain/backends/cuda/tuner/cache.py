"""What measuring candidates has found, kept in the user's cache: a document for each problem."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from adtrain import documents

KIND = "tuning"


def find(key: str, labels: Collection[str]) -> Mapping[str, float] | None:
    """The microseconds of a launch by label, as stored under the key; None where nothing is, or where the fastest
    candidate is not among ``labels``. What cannot be read counts as nothing, with a warning that names the file."""
    times = documents.find(KIND, key, _read)
    return times if times and min(times, key=times.__getitem__) in labels else None


def store(key: str, problem: str, times: Mapping[str, float], chosen: str) -> None:
    """Put the microseconds by label under the key, in place of what was there; ``problem`` and ``chosen`` are for
    people who read the file.

    Raises AdtrainError where that fails.
    """
    documents.store(KIND, key, {"problem": problem, "microseconds": dict(times), "chosen": chosen})


def _read(document: Any) -> Mapping[str, float]:
    """The times of a document that `store` has written. Raises ValueError for another one."""
    times = document.get("microseconds") if isinstance(document, dict) else None
    if not isinstance(times, dict) or not times:
        raise ValueError("it holds no times")
    for label, time in times.items():
        if not isinstance(time, float) or not 0 < time < math.inf:
            raise ValueError(f"{label} takes {time!r} microseconds")
    return times
