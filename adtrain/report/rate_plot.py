"""The plot of `adtrain lr-find`: the loss at each learning rate, as an SVG file of its own."""

from __future__ import annotations

from math import isfinite

from adtrain.report.plot import Axis, Plot, log_ticks, ticks
from adtrain.sweeps.rates import RateSearch
from adtrain.templates import environment
from adtrain.text import counted

WIDTH, HEIGHT = 720, 360
HIGHEST = 1.2
"""Losses above this multiple of the loss at the smallest rate are drawn at the upper edge."""


def svg(found: RateSearch) -> str:
    """The losses, the smooth curve, the rates that are nearly as good as a band, and the proposal as a line."""
    rates = [x.rate for x in found.tried]
    losses = {x.rate: x.loss for x in found.tried if x.loss is not None}
    least, first_loss = min(losses.values()), next(iter(losses.values()))
    x = Axis(found.key.removeprefix("optimizer."), log_ticks(rates[0], rates[-1]), logarithmic=True)
    y = Axis("mean loss of the steps", ticks(least, min(max(losses.values()), max(least, HIGHEST * first_loss))))
    plot = Plot(f"loss by learning rate, {counted(found.steps, 'steps')} each", x, y, WIDTH, HEIGHT)
    low, high = y.ticks[0], y.ticks[-1]
    first, last = (rates[i] for i in found.near)
    plot.band([(first, low), (last, low)], [(first, high), (last, high)], "near")
    plot.line([(found.proposal, low), (found.proposal, high)], "level")
    smooth = zip(rates, found.smooth, strict=True)
    plot.line([(rate, min(loss, high)) for rate, loss in smooth if isfinite(loss)], "curve rate")
    for rate, loss in losses.items():
        plot.marker(rate, min(loss, high), "rate", f"rate {rate:g}, loss {loss:.4g}", 2)
    right, down = plot.at(found.proposal, high)
    plot.text((right + 5, down + 12), f"{found.proposal:g}", "axis")
    return environment().get_template("plot.svg.j2").render(plot=plot)
