"""Data at points: sets of points at which equations are to hold, grids, tables with the outputs there, and fields.

The sets of points do not depend on the seed. A training step shifts the set by a random vector, or draws other points;
see `augment.Resampled`.

The data of a field are the pixels of an image, or the elements of an array, each at its place in [0, 1]^d: element i of
an axis of n elements has the coordinate (i + 1/2) / n. Each training step draws its elements: see `augment.Drawn`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from adtrain.data import csv_table
from adtrain.data.datasets import DataSet
from adtrain.data.errors import DataError, warn
from adtrain.data.file_array import require_memory
from adtrain.data.images import read_image
from adtrain.data.npz import read_npy
from adtrain.data.part import Columns
from adtrain.data.split import Split
from adtrain.data.statistics import PIXEL_MAX, offsets
from adtrain.data.table_encoder import TableEncoder
from adtrain.option_types import Positive, Size, Text
from adtrain.text import counted

TABLES = (".csv", ".tsv", ".npy")
"""The endings of the names of files with tables of points."""

Sampling: TypeAlias = Literal["uniform", "latin_hypercube", "sobol"]
Resample: TypeAlias = Literal["step", "epoch", "never"]
Box: TypeAlias = Mapping[str, tuple[float, float]]
"""The interval of each variable, in the order of the network's inputs."""

SEED = 0x70_6F_69_6E_74
"""The seed of the Latin hypercubes, and of the order of known and measured outputs."""

DIRECTIONS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0b11, (1,)),
    (0b111, (1, 3)),
    (0b1011, (1, 3, 1)),
    (0b1101, (1, 1, 1)),
    (0b10011, (1, 1, 3, 3)),
    (0b11001, (1, 3, 5, 13)),
    (0b100101, (1, 1, 5, 5, 17)),
    (0b101001, (1, 1, 5, 5, 5)),
    (0b101111, (1, 1, 7, 11, 19)),
)
"""For each dimension of a Sobol sequence after the first: a primitive polynomial over GF(2), as bits, and the initial
direction numbers, from S. Joe and F. Kuo, "Constructing Sobol sequences with better two-dimensional projections"
(2008)."""
MOST_DIMENSIONS = 1 + len(DIRECTIONS)
"""The maximum number of variables of a Sobol sequence."""
BITS = 32
"""The binary digits of a coordinate of a Sobol sequence."""
COMPARED = 256
"""The maximum number of points in a training step at which the outputs are compared with the known solution."""
MOST_GRID_DIMENSIONS = 4
"""The maximum number of variables for which the points of the evaluation are a grid."""


@dataclass(frozen=True)
class PointOptions:
    """The options of points.

    Attributes:
        sampling: the points of a step: uniform, independent of one another; latin_hypercube or sobol, a set that fills
            the box evenly, shifted by a random vector
        resample: when new points are drawn: for each step, for each epoch, or never
        resample_until: the number of steps after which the points stay the same, as lbfgs needs it
        adaptive: keep the points whose residual is above the mean, and draw only the others again; equations with at
            have new points in each step
        steps_per_epoch: the number of steps in an epoch
        test_points: the maximum number of points of the evaluation: a grid, or with more than 4 variables a Latin
            hypercube
        measurements: a file .csv or .npy of measured outputs, with columns for variables and outputs; their mean
            squared error is a part of the loss
        sdf: a mesh .obj or .stl: the measurements and the reference are the signed distances from its surface
        sdf_points: the number of measurements from the mesh: a quarter on the surface, a half near it
        measurements_weight: the factor of the error at the measurements in the loss
    """

    sampling: Sampling = "uniform"
    resample: Resample = "step"
    resample_until: Size | None = None
    adaptive: bool = False
    steps_per_epoch: Size = 100
    test_points: Size = 10_000
    measurements: Text | None = None
    sdf: Text | None = None
    sdf_points: Size = 1 << 16
    measurements_weight: Positive = 1.0

    @property
    def has_measurements(self) -> bool:
        """Whether measured outputs are a part of the loss."""
        return self.measurements is not None or self.sdf is not None

    def stay_after(self, step: int) -> bool:
        """Whether all steps after this number of steps have the same points."""
        return self.resample == "never" or (self.resample_until is not None and self.resample_until <= step)


@dataclass(frozen=True)
class Labels:
    """The labels of the training part, float64 (N, columns). They are at other points than those of the examples.

    First a point of the evaluation and the outputs there, if the solution is `known`; then, if there are some, a
    measured point and the outputs there.
    """

    variables: int
    outputs: int
    known: bool

    def known_points(self, labels: Any) -> Any:
        return labels[:, : self.variables]

    def known_outputs(self, labels: Any) -> Any:
        return labels[:, self.variables : self.variables + self.outputs]

    def measured_points(self, labels: Any) -> Any:
        return labels[:, self._first : self._first + self.variables]

    def measured_outputs(self, labels: Any) -> Any:
        return labels[:, self._first + self.variables :]

    @property
    def _first(self) -> int:
        return self.variables + self.outputs if self.known else 0


def load(
    box: Box,
    outputs: Sequence[str],
    batch_size: int,
    options: PointOptions,
    shifted: bool,
    test: np.ndarray,
    labels: np.ndarray | None,
    measured: np.ndarray | None,
) -> DataSet:
    """The data set of points: those of the steps, and those of the evaluation.

    An example of the training part is a point with a label as `Labels` says. There are as many as a batch has, or as
    there are measurements. The label of an example of the test part has the outputs there.

    Args:
        box: in the order of the network's inputs.
        shifted: whether numbers far from 0 are stored without their `offset`; see `data.statistics`.
        test: the points of the evaluation (N, variables).
        labels: the outputs there, (N, outputs); None if they are not known.
        measured: measured points and the outputs there, (M, variables + outputs); None if there are none.

    Raises:
        DataError: there are too many variables for the sampling.
    """
    low, high = np.array(list(box.values())).T
    rows = batch_size * math.ceil(max(1, len(measured) if measured is not None else 1) / batch_size)
    if options.sampling == "sobol" and len(box) > MOST_DIMENSIONS:
        expected = f"expected at most {MOST_DIMENSIONS} for sobol; latin_hypercube takes any number"
        raise DataError(f"data.sampling: found {counted(len(box), 'variables')}, {expected}")
    unit = sobol(rows, len(box)) if options.sampling == "sobol" else latin_hypercube(rows, len(box))
    rng = np.random.default_rng(SEED)
    tables = [] if labels is None else [np.concatenate([test, labels], axis=1)]
    tables += [] if measured is None else [measured]
    known = [table[rng.permutation(len(table))[np.arange(rows) % len(table)]] for table in tables]
    train_labels = np.concatenate(known, axis=1) if known else np.zeros((rows, len(outputs)))
    labels = np.zeros((len(test), len(outputs))) if labels is None else labels
    mean, std = tuple(((low + high) / 2).tolist()), tuple(((high - low) / 2).tolist())
    offset = offsets(mean, std) if shifted else ()
    return DataSet(
        name="points",
        train=Split(stored(low + (high - low) * unit, offset), train_labels),
        test=Split(stored(test, offset), labels),
        classes=(),
        mean=mean,
        std=std,
        offset=offset,
        encoder=TableEncoder(Columns.named(box), ()),
        targets=tuple(outputs),
        target_mean=(0.0,) * len(outputs),
        target_std=(1.0,) * len(outputs),
    )


def stored(points: np.ndarray, offset: Sequence[float]) -> np.ndarray:
    """Points (N, variables) as images (N, variables, 1, 1) in float32, without `offset`."""
    shift = np.array(offset) if offset else 0.0
    return np.ascontiguousarray((points - shift).astype(np.float32)[:, :, np.newaxis, np.newaxis])


def order(rows: int, batch_size: int, steps: int, epoch: int) -> np.ndarray:
    """The rows of the steps of an epoch (from 1), int64 (steps * batch_size,): batch after batch, repeatedly."""
    first = (epoch - 1) * steps * batch_size
    return (first + np.arange(steps * batch_size, dtype=np.int64)) % rows


def sobol(count: int, dimensions: int) -> np.ndarray:
    """The first points of the Sobol sequence in [0, 1), in the order of the Gray code, float64 (count, dimensions)."""
    numbers = np.arange(count, dtype=np.uint64)
    gray = numbers ^ (numbers >> np.uint64(1))
    found = np.zeros((count, dimensions), np.uint64)
    for d in range(dimensions):
        for bit, direction in enumerate(_direction_numbers(d)):
            chosen = (gray >> np.uint64(bit)) & np.uint64(1)
            found[:, d] ^= chosen * np.uint64(direction)
    return found * 2.0**-BITS


def _direction_numbers(dimension: int) -> list[int]:
    """The direction numbers of a dimension, as integers below 2^BITS."""
    if dimension == 0:
        return [1 << (BITS - 1 - i) for i in range(BITS)]
    polynomial, initial = DIRECTIONS[dimension - 1]
    degree = polynomial.bit_length() - 1
    found = [m << (BITS - 1 - i) for i, m in enumerate(initial)]
    for i in range(degree, BITS):
        value = found[i - degree] ^ (found[i - degree] >> degree)
        for k in range(1, degree):
            if polynomial >> (degree - k) & 1:
                value ^= found[i - k]
        found.append(value)
    return found


def latin_hypercube(count: int, dimensions: int) -> np.ndarray:
    """Points in [0, 1), float64 (count, dimensions): one for each of `count` equal parts of each axis."""
    rng = np.random.default_rng(SEED)
    parts = np.stack([rng.permutation(count) for _ in range(dimensions)], axis=1)
    return (parts + rng.random((count, dimensions))) / count


def grid(box: Box, most: int) -> np.ndarray:
    """At most `most` points of a grid with the corners of the box, the last variable fastest, float64 (N, variables).

    The corners are in the grid even if they are more than `most`.
    Points of a Latin hypercube with more than MOST_GRID_DIMENSIONS variables.
    """
    if len(box) > MOST_GRID_DIMENSIONS:
        low, high = np.array(list(box.values())).T
        return low + (high - low) * latin_hypercube(most, len(box))
    side = max(2, int(most ** (1 / len(box)) + 1e-9))
    axes = [np.linspace(low, high, side) for low, high in box.values()]
    return np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], axis=1)


def read_table(path: Path, names: Sequence[str]) -> np.ndarray:
    """The columns `names` of a table, float64 (N, columns): .csv or .tsv with a header, or .npy with these columns.

    Raises DataError if the file cannot be read, or has other columns or numbers that are not finite.
    """
    if path.suffix.lower() == ".npy":
        expected = f"shape (N, {len(names)}): variables, then outputs"
        found = read_npy(path, expected, lambda shape: shape[1:] == (len(names),)).astype(np.float64)
    else:
        found = csv_table.read_columns(path, names)
    if not len(found):
        raise DataError(f"{path}: found no rows, expected columns {', '.join(names)} with at least one row")
    if not np.isfinite(found).all():
        row = np.isfinite(found).all(axis=1).argmin()
        raise DataError(f"{path}: found a number that is not finite in row {row}, expected finite ones")
    return found


def warn_outside(found: np.ndarray, box: Sequence[tuple[float, float]], place: str, reason: str) -> None:
    """Warn of points (N, variables) outside the box, with the reason why they should be inside."""
    low, high = np.array(box).T
    if (outside := ((found < low) | (found > high)).any(axis=1)).any():
        intervals = " x ".join(f"[{a:g}, {b:g}]" for a, b in box)
        first = f"such as {found[outside.argmax()].tolist()} in row {outside.argmax()}"
        warn(place, f"found {counted(int(outside.sum()), 'points')} outside {intervals}, {first}: {reason}")


FieldKind: TypeAlias = Literal["image", "volume"]
IMAGE_AXES: tuple[str, ...] = ("y", "x")
VOLUME_AXES = ("x", "y", "z", "t")
CHANNELS: dict[int, tuple[str, ...]] = {1: ("grey",), 3: ("red", "green", "blue")}
KIND_SUFFIXES: dict[FieldKind, tuple[str, ...]] = {"image": (".png", ".jpg", ".jpeg"), "volume": (".npy",)}
CENTRE = 0.5
"""The mean and half the length of the unit interval: networks get coordinates in [-1, 1]."""


def load_field(path: Path, kind: FieldKind) -> DataSet:
    """The data set of a field: an example is an element, its label float32 (outputs,) the numbers there.

    Images are PNG or JPEG files; a label has the grey value or the colours in [0, 1]. A volume is an .npy file of 1 to
    4 axes with one number for each element. Training and test part are the same elements.

    Raises:
        DataError: the file is missing, damaged, transparent, of the other kind, or has another shape or other numbers.
    """
    suffix = path.suffix.lower()
    if suffix in (KIND_SUFFIXES["volume"] if kind == "image" else KIND_SUFFIXES["image"]):
        other = "volume" if kind == "image" else "image"
        expected = "a PNG or JPEG file" if kind == "image" else "an .npy file"
        raise DataError(f"{path}: found the extension {suffix}, expected {expected}; data.{other} takes this one")
    if kind == "image":
        pixels = read_image(path)
        axes, outputs = IMAGE_AXES, CHANNELS[len(pixels)]
        values = np.moveaxis(pixels, 0, -1).astype(np.float32) / PIXEL_MAX
    else:
        found = read_npy(path, "1 to 4 axes, none of them empty", lambda shape: len(shape) > 0 and min(shape) > 0)
        with np.errstate(over="ignore"):
            values = found[..., np.newaxis].astype(np.float32)
        axes, outputs = VOLUME_AXES[: found.ndim], ("value",)
        if not np.isfinite(values).all():
            raise DataError(f"{path}: found a number that is not finite in float32, expected finite ones")
    require_memory(str(path), 4 * (values.ndim + 1) * values.size)
    return _field_of(path.stem, axes, outputs, values)


def field_placeholder(name: str, count: int, coordinates: int, outputs: int) -> DataSet:
    """A data set of `count` zeros, with the types of one that `load_field` returns."""
    axes, zero = VOLUME_AXES[:coordinates], np.zeros((), np.float32)
    names = tuple(map(str, range(outputs)))
    return _field_of(name, axes, names, np.broadcast_to(zero, (count, *(1,) * (coordinates - 1), outputs)))


def _field_of(name: str, axes: Sequence[str], outputs: tuple[str, ...], values: np.ndarray) -> DataSet:
    """The data set of an array (*shape, outputs)."""
    split = Split(places(values.shape[:-1]), values.reshape(-1, len(outputs)))
    return DataSet(
        name=name,
        train=split,
        test=split,
        classes=(),
        mean=(CENTRE,) * len(axes),
        std=(CENTRE,) * len(axes),
        encoder=TableEncoder(Columns.named(axes), ()),
        targets=outputs,
    ).with_train(split)


def places(shape: tuple[int, ...]) -> np.ndarray:
    """The places of the elements of an array, the last axis fastest, as images float32 (N, axes, 1, 1)."""
    axes = [((np.arange(n) + 0.5) / n).astype(np.float32) for n in shape]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    return grid.reshape(-1, len(shape), 1, 1)


def shape_of(images: np.ndarray) -> tuple[int, ...]:
    """The shape of the array whose elements have these places."""
    return tuple(len(np.unique(images[:, i])) for i in range(images.shape[1]))
