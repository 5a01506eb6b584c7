"""What a page shows of a learnt function: a solution of equations and its coefficients, or a neural field."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.report.classes import data_url, signed
from adtrain.report.plot import Axis, Plot, ticks
from adtrain.report.predictions import FieldPredictions, SolutionPredictions
from adtrain.training.scores import value_text

MOST_PICTURES = 4
"""The most outputs, and the most equations, of which a page has pictures."""
MOST_PIXELS = 1024
"""The most rows and columns of a picture. Of larger arrays it has every second or third one, and so on."""


class Figure(NamedTuple):
    """A picture, an SVG element or the address of an image. `legend` says what its colours or lines are."""

    title: str
    legend: str
    picture: str


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


def pictures(predictions: FieldPredictions) -> list[Figure]:
    """The network's picture, the truth and the error, of the image or the middle slice of its last two axes."""
    true, found = (_slice(x) for x in (predictions.true, predictions.found))
    low, high = (0.0, 1.0) if predictions.is_image else (float(true.min()), float(true.max()))
    scale = f"black {low:.3g}, white {high:.3g}"
    error = found - true
    largest = np.abs(error).max()
    return [
        Figure("network", f"PSNR {value_text('psnr', predictions.psnr)}", data_url(_shown(found, low, high))),
        Figure("truth", "" if predictions.is_image else scale, data_url(_shown(true, low, high))),
        Figure("error", f"at most {largest:.3g}", data_url(signed(error.transpose(2, 0, 1)[np.newaxis])[0])),
    ]


def slice_text(predictions: FieldPredictions) -> str:
    """Which slice the pictures show; empty if they show all."""
    fixed = zip(predictions.axes[:-2], predictions.true.shape, strict=False)
    return ", ".join(f"{axis} = {(n // 2 + 0.5) / n:.3g}" for axis, n in fixed)


def _slice(values: np.ndarray) -> np.ndarray:
    """(H, W, outputs): the elements in the middle of all axes but the last two; one axis is a row."""
    while values.ndim > 3:
        values = values[len(values) // 2]
    values = values.reshape((1,) * (3 - values.ndim) + values.shape)
    step = -(-max(values.shape[:2]) // MOST_PIXELS)
    return values[::step, ::step].astype(np.float64)


def _shown(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The numbers from `low` to `high` as uint8."""
    shown = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    return np.round(255 * shown).astype(np.uint8)
