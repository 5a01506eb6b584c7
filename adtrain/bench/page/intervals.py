"""Ratios with their intervals on a logarithmic axis, as HTML of variable width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks, cells
from adtrain.report.ticks import log_ticks


class Scale:
    """An axis that covers 1 and the intervals of all ratios."""

    def __init__(self, ratios: Iterable[Mapping[str, float]]) -> None:
        values = [1.0, *(ratio[end] for ratio in ratios for end in ("low", "high"))]
        self.ticks: Sequence[float] = log_ticks(min(values), max(values))

    def percent(self, ratio: float) -> float:
        """The position of the ratio on the axis, in percent."""
        return 100 * log(ratio / self.ticks[0]) / log(self.ticks[-1] / self.ticks[0])

    def lane(self, marks: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Markup:
        """The medians as points and their intervals as lines, one below the other, over the grid.

        Args:
            marks: for each ratio the CSS class with its colour, its name, and its record.
        """
        found = list(marks)
        drawn = [self._mark(round(100 * (i + 1) / (len(found) + 1)), *mark) for i, mark in enumerate(found)]
        return blocks.lane([(self.percent(tick), tick == 1) for tick in self.ticks], drawn)

    def axis(self) -> Markup:
        """The labels of the ticks."""
        one = self.ticks.index(1.0)
        return blocks.axis([(self.percent(tick), f"{tick:g}", (i - one) % 2) for i, tick in enumerate(self.ticks)])

    def _mark(self, down: int, kind: str, name: str, ratio: Mapping[str, Any]) -> dict[str, Any]:
        low, at, high = (self.percent(ratio[end]) for end in ("low", "median", "high"))
        tooltip = f"{name}: {cells.factor(ratio['median'])}, {cells.range_of(ratio)}"
        return {"kind": kind, "down": down, "low": low, "at": at, "high": high, "tooltip": tooltip}
