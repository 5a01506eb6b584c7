"""Line charts as SVG whose colours are the page's, so that they follow its light and dark."""

from __future__ import annotations

from html import escape

from adtrain.report.curves import Curve, Panel

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 38


def chart(panel: Panel) -> str:
    """The panel's curves over the epochs, as an SVG element of WIDTH x HEIGHT units that takes the width it is given.

    Marked points say their value when they are pointed at. The classes for styles are `axis`, `grid`, and, with the
    curve's part, `curve`, `faint` and `marker`.
    """
    xs, ys = panel.ticks()

    def across(x: float) -> float:
        return LEFT + x / xs[-1] * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)} over the epochs">']
    for y in ys:
        parts.append(f'<path class="grid" d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_label(LEFT - 6, down(y) + 3.5, panel.tick(y), "end"))
    parts += [_label(across(x), HEIGHT - BOTTOM + 16, f"{x:g}") for x in xs]
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "epoch"))
    for curve in panel.curves:
        points = [(across(x), down(y)) for x, y in zip(curve.epochs, curve.values, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="{"curve" if curve.name else "faint"} {curve.part}" points="{line}"/>')
        if curve.marked:
            parts += [_marker(panel, curve, i, *point) for i, point in enumerate(points)]
    return "".join([*parts, "</svg>"])


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _marker(panel: Panel, curve: Curve, i: int, x: float, y: float) -> str:
    said = f"epoch {curve.epochs[i]:.3g}: {curve.name} {panel.text(curve.values[i])}"
    return f'<circle class="marker {curve.part}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(said)}</title></circle>'
