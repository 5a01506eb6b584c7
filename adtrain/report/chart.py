"""Line charts over the epochs of a run, as SVG."""

from __future__ import annotations

from adtrain.report.curves import Panel
from adtrain.report.markup import Markup
from adtrain.report.plot import Axis, Plot


def chart(panel: Panel) -> Markup:
    """The panel's curves over the epochs, as an SVG element.

    Markers show their value in a tooltip. The CSS class of a curve is its split.
    """
    xs, ys = panel.ticks()
    plot = Plot(f"{panel.title} over the epochs", Axis("epoch", xs), Axis("", ys, panel.format_tick))
    for curve in panel.curves:
        plot.line(zip(curve.epochs, curve.values, strict=True), f"{'curve' if curve.name else 'faint'} {curve.split}")
        if curve.marked:
            for x, y in zip(curve.epochs, curve.values, strict=True):
                plot.marker(x, y, curve.split, f"epoch {x:.3g}: {curve.name} {panel.format_value(y)}")
    return plot.svg()
