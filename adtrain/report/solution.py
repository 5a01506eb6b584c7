"""What a page shows of a solution of equations: curves for one variable, maps for more, and the learnt coefficients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from adtrain.report.classes import data_url, signed
from adtrain.report.plot import Axis, Plot, ticks
from adtrain.report.predictions import SolutionPredictions

MOST_PICTURES = 4
"""The most outputs, and the most equations, of which a page has pictures."""


class Figure(NamedTuple):
    """A picture. `legend` says what its colours or lines are."""

    title: str
    legend: str
    picture: Markup


def figures(found: SolutionPredictions) -> list[Figure]:
    """The pictures of the outputs, of their errors if the solution is known, and of the residuals of the equations."""
    if found.axes is None:
        return []
    draw = _curve if len(found.variables) == 1 else _map
    drawn = list(zip(found.outputs, found.values.T, strict=True))[:MOST_PICTURES]
    if found.true is not None:
        errors = (found.values - found.true).T
        drawn += [(f"error of {name}", x) for name, x in zip(found.outputs, errors, strict=True)][:MOST_PICTURES]
    drawn += found.residuals[:MOST_PICTURES]
    return [draw(found, title, x) for title, x in drawn]


def coefficients(found: SolutionPredictions) -> list[tuple[str, str]]:
    """The learnt coefficients and their values."""
    return [(name, f"{value:.6g}") for name, value in found.coefficients.items()]


def _curve(found: SolutionPredictions, title: str, values: np.ndarray) -> Figure:
    """A line over the one variable."""
    order = np.argsort(found.points[:, 0])
    xs, ys = found.points[order, 0], values[order]
    plot = Plot(
        f"{title} over {found.variables[0]}",
        Axis(found.variables[0], ticks(float(xs.min()), float(xs.max()))),
        Axis("", ticks(float(ys.min()), float(ys.max()))),
    )
    plot.line(list(zip(xs.tolist(), ys.tolist(), strict=True)), "curve train")
    return Figure(title, _range(values), plot.svg())


def _map(found: SolutionPredictions, title: str, values: np.ndarray) -> Figure:
    """Colours over the first two variables, the first one along the x axis. The others have values in the middle."""
    assert found.axes is not None
    x, y, *others = found.axes
    middle = [axis[len(axis) // 2] for axis in others]
    shown = (found.points[:, 2:] == middle).all(axis=1)
    points, values = found.points[shown], values[shown]
    fixed = [f"{name} = {value:.3g}" for name, value in zip(found.variables[2:], middle, strict=True)]
    grid = np.zeros((len(x), len(y)))
    grid[np.searchsorted(x, points[:, 0]), np.searchsorted(y, points[:, 1])] = values
    plot = Plot(
        f"{title} over {found.variables[0]} and {found.variables[1]}",
        Axis(found.variables[0], _inside(x)),
        Axis(found.variables[1], _inside(y)),
    )
    picture = signed(grid.T[::-1][np.newaxis, np.newaxis].astype(np.float64))[0]
    plot.image(data_url(picture), (float(x[0]), float(y[0])), (float(x[-1]), float(y[-1])))
    return Figure(title, ", ".join([*fixed, _range(values)]), plot.svg())


def _inside(axis: np.ndarray) -> list[float]:
    """The ends of an axis, and round numbers between them."""
    low, high = float(axis[0]), float(axis[-1])
    gap = 0.1 * (high - low)
    return [low, *(tick for tick in ticks(low, high) if low + gap < tick < high - gap), high]


def _range(values: np.ndarray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"
