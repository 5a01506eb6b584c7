"""Line charts over the epochs of a run."""

from __future__ import annotations

from adtrain.report.curves import Panel
from adtrain.report.plot import Axis, Plot


def chart(panel: Panel) -> str:
    """The panel's curves over the epochs, as an SVG element.

    Marked points say their value when they are pointed at. Curves have the class of their part.
    """
    xs, ys = panel.ticks()
    plot = Plot(f"{panel.title} over the epochs", Axis("epoch", xs), Axis("", ys, panel.tick))
    for curve in panel.curves:
        plot.line(zip(curve.epochs, curve.values, strict=True), f"{'curve' if curve.name else 'faint'} {curve.part}")
        if curve.marked:
            for x, y in zip(curve.epochs, curve.values, strict=True):
                plot.marker(x, y, curve.part, f"epoch {x:.3g}: {curve.name} {panel.text(y)}")
    return plot.svg()
