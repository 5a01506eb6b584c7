"""Ratios with their intervals on a logarithmic axis, as HTML of variable width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

from adtrain.bench.page import cells
from adtrain.report.markup import Markup, html, join
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
        drawn = join(self._mark(f"{(i + 1) / (len(found) + 1):.0%}", *mark) for i, mark in enumerate(found))
        return html('<div class="interval">{}{}</div>', self._grid(), drawn)

    def axis(self) -> Markup:
        """The labels of the ticks."""
        one = self.ticks.index(1.0)
        kinds = ["minor" if (i - one) % 2 else "" for i in range(len(self.ticks))]
        ticks = join(
            html('<span class="{}" style="left:{:.2f}%">{:g}</span>', kind, self.percent(tick), tick)
            for kind, tick in zip(kinds, self.ticks, strict=True)
        )
        return html('<div class="interval ticks">{}</div>', ticks)

    def _grid(self) -> Markup:
        return join(
            html('<u class="{}" style="left:{:.2f}%"></u>', "one" if tick == 1 else "", self.percent(tick))
            for tick in self.ticks
        )

    def _mark(self, down: str, kind: str, name: str, ratio: Mapping[str, Any]) -> Markup:
        low, at, high = (self.percent(ratio[end]) for end in ("low", "median", "high"))
        tooltip = f"{name}: {cells.factor(ratio['median'])}, {cells.range_of(ratio)}"
        return html(
            '<i class="{0}" style="top:{1};left:{2:.2f}%;width:{3:.2f}%"></i>'
            '<b class="{0}" style="top:{1};left:{4:.2f}%" title="{5}"></b>',
            *(kind, down, low, high - low, at, tooltip),
        )
