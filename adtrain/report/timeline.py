"""The time of a run from the start of its process to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adtrain.report.ticks import ticks
from adtrain.training.summary import Summary


class Bar(NamedTuple):
    """A span of time; `left` and `width` are in percent of the axis."""

    left: float
    width: float
    tooltip: str


class Lane(NamedTuple):
    """All spans of one activity, and their sum."""

    name: str
    seconds: float
    bars: Sequence[Bar]


class Lanes(NamedTuple):
    """The lanes in the order in which they start, the axis, and the seconds of all lanes."""

    lanes: Sequence[Lane]
    ticks: Sequence[float]
    seconds: float


def lanes(summary: Summary) -> Lanes | None:
    """None if the run recorded no spans."""
    spans = summary.spans
    if not spans:
        return None
    first, end = min(span.start for span in spans), max(span.start + span.seconds for span in spans)
    axis = ticks(0.0, end - first)
    names = dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.start))

    def bar(start: float, seconds: float) -> Bar:
        left, width = (x / axis[-1] * 100 for x in (start - first, seconds))
        return Bar(left, width, f"{seconds:.3g} s from {start - first:.3g} s")

    found = [
        Lane(
            name,
            sum(span.seconds for span in spans if span.name == name),
            [bar(span.start, span.seconds) for span in spans if span.name == name],
        )
        for name in names
    ]
    return Lanes(found, axis, end - first)
