"""Ratios with their intervals on a logarithmic axis, as HTML of variable width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import log
from typing import Any

from adtrain.bench.page import cells
from adtrain.report.ticks import log_ticks


class Scale:
    """An axis that covers 1 and the intervals of all ratios."""

    def __init__(self, ratios: Iterable[Mapping[str, float]]) -> None:
        values = [1.0, *(ratio[end] for ratio in ratios for end in ("low", "high"))]
        self.ticks: Sequence[float] = log_ticks(min(values), max(values))

    def percent(self, ratio: float) -> float:
        """The position of the ratio on the axis, in percent."""
        return 100 * log(ratio / self.ticks[0]) / log(self.ticks[-1] / self.ticks[0])

    def lane(self, marks: Iterable[tuple[str, str, Mapping[str, Any]]]) -> str:
        """The medians as points and their intervals as lines, one below the other, over the grid.

        Args:
            marks: for each ratio the CSS class with its colour, its name, and its record.
        """
        found = list(marks)
        drawn = "".join(self._mark(f"{(i + 1) / (len(found) + 1):.0%}", *mark) for i, mark in enumerate(found))
        return f'<div class="interval">{self._grid()}{drawn}</div>'

    def axis(self) -> str:
        """The labels of the ticks."""
        one = self.ticks.index(1.0)
        ticks = "".join(
            f'<span class="{"minor" if (i - one) % 2 else ""}" style="left:{self.percent(tick):.2f}%">{tick:g}</span>'
            for i, tick in enumerate(self.ticks)
        )
        return f'<div class="interval ticks">{ticks}</div>'

    def _grid(self) -> str:
        return "".join(
            f'<u class="{"one" if tick == 1 else ""}" style="left:{self.percent(tick):.2f}%"></u>'
            for tick in self.ticks
        )

    def _mark(self, down: str, kind: str, name: str, ratio: Mapping[str, Any]) -> str:
        low, at, high = (self.percent(ratio[end]) for end in ("low", "median", "high"))
        tooltip = escape(f"{name}: {cells.factor(ratio['median'])}, {cells.range_of(ratio)}")
        return (
            f'<i class="{kind}" style="top:{down};left:{low:.2f}%;width:{high - low:.2f}%"></i>'
            f'<b class="{kind}" style="top:{down};left:{at:.2f}%" title="{tooltip}"></b>'
        )
