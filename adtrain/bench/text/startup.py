"""The text of a start-up measurement: a line for each system, with empty caches and with filled ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.text.cells import wrapped
from adtrain.bench.timing.protocol import busy
from adtrain.table import Column, render

COLUMNS = (Column("system", text=True), Column("caches", text=True), Column("seconds"))
CACHES = {"cold": "empty", "warm": "filled"}
MIN_SECONDS = 0.02


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    about = result["protocol"]
    yield from wrapped(
        [
            f"Start-up of {result['config']} on {about['device']}, {about['device_name']}: medians of "
            f"{about['samples'][0]} processes. adtrain trains to the end; the seconds are those of the whole process. "
            "A peer imports its package and takes its first steps; the seconds leave out the start of Python."
        ],
        width,
    )
    yield ""
    yield from render(COLUMNS, [_cells(start) for start in result["starts"]], width)
    yield ""
    yield from wrapped([f"{', '.join(_cells(start)[:2])}: {_spans(start)}" for start in result["starts"]], width)
    notes = [f"{name}: skipped, {reason}" for name, reason in result["skipped"].items()]
    notes += [f"{name}: failed, {reason}" for name, reason in result["failed"].items()]
    losses = result["losses"]
    notes += [f"{name}: the first loss is {losses[name]:.6g}, expected adtrain's" for name in result["different"]]
    if warning := busy(about):
        notes.append(warning)
    if notes:
        yield ""
        yield from wrapped(notes, width)


def _cells(start: Mapping[str, Any]) -> list[str]:
    return [start["system"], CACHES[start["cache"]], f"{start['seconds']:.2f}"]


def _spans(start: Mapping[str, Any]) -> str:
    """The seconds of each activity, longest first."""
    longest = sorted(start["spans"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= MIN_SECONDS)
