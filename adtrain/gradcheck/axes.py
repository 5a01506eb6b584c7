"""A check of the axes that a primitive states, by execution; see `adtrain.core.axes`.

If the arguments are gathered along the axes of a label, the results with the label are gathered likewise: index i of
these is the same function of index i of those. A label of arguments alone is added: the results for each index alone,
repeated along the axis, sum to the result times the length. A label of results alone repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from adtrain.core.axes import Axes, Labels
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import Primitive
from adtrain.core.types import ArrayType


@dataclass(frozen=True)
class AxesCheck:
    """Checks what a primitive states about the axes of these arguments and of its results."""

    primitive: Primitive
    args: Sequence[np.ndarray]
    params: Mapping[str, Any]

    @cached_property
    def axes(self) -> Axes:
        return self.primitive.related_axes([ArrayType(x.shape, x.dtype) for x in self.args], self.params)

    @cached_property
    def results(self) -> Sequence[np.ndarray]:
        return self._run(self.args)

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """The length of each label.

        Raises:
            ShapeError: two axes with a label have different lengths.
        """
        labels = [*self.axes.arguments, *self.axes.results]
        shapes = [x.shape for x in (*self.args, *self.results)]
        found: dict[str, int] = {}
        for label, n in (pair for pairs in zip(labels, shapes, strict=True) for pair in zip(*pairs, strict=True)):
            if len(label) == 1 and found.setdefault(label, n) != n:
                raise ShapeError(f"{self.primitive.name}: axes {label!r} have lengths {found[label]} and {n}")
        return found

    def errors(self) -> dict[str, float]:
        """For each label the largest difference from what it says, relative to the largest element."""
        return {label: self._error(label, n) for label, n in self.lengths.items() if n}

    def _error(self, label: str, length: int) -> float:
        if label in self.axes.added:
            alone = [self._gathered(label, np.full(length, i)) for i in range(length)]
            by_result = zip(zip(*alone, strict=True), self.results, strict=True)
            sums = [(np.sum(xs, axis=0, dtype=y.dtype), y * y.dtype.type(length), xs) for xs, y in by_result]
            return max(_difference(total, expected, *xs) for total, expected, xs in sums)
        indices = np.random.default_rng(0).integers(length, size=length)
        found = zip(self._gathered(label, indices), self.results, self.axes.results, strict=True)
        pairs = [(x, self._take(y, own, label, indices)) for x, y, own in found if label in "".join(own)]
        return max(_difference(x, expected) for x, expected in pairs)

    def _gathered(self, label: str, indices: np.ndarray) -> Sequence[np.ndarray]:
        """The results for arguments that are gathered along a label."""
        pairs = zip(self.args, self.axes.arguments, strict=True)
        return self._run([self._take(x, labels, label, indices) for x, labels in pairs])

    def _take(self, x: np.ndarray, labels: Labels, label: str, indices: np.ndarray) -> np.ndarray:
        """``x`` gathered along the axis with a label, which may be a part of an axis."""
        axes = zip(labels, x.shape, strict=True)
        parts = [(part, self.lengths.get(part, n)) for own, n in axes for part in own or [""]]
        names, shape = [name for name, _ in parts], [n for _, n in parts]
        return np.take(x.reshape(shape), indices, names.index(label)).reshape(x.shape) if label in names else x

    def _run(self, args: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with np.errstate(all="ignore"):
            found = self.primitive.reference(*args, **self.params)
        return [np.asarray(x) for x in (found if isinstance(found, tuple) else (found,))]


def _difference(found: np.ndarray, expected: np.ndarray, *summands: np.ndarray) -> float:
    """The largest difference, relative to the largest element, also of the summands."""
    same = (found == expected) | ((found != found) & (expected != expected))
    if not np.isfinite(found[~same]).all():
        return math.inf
    finite = (np.abs(x[np.isfinite(x)], dtype=np.float64).max(initial=0.0) for x in (expected, *summands))
    return float(np.abs(found[~same].astype(np.float64) - expected[~same]).max(initial=0.0)) / (max(finite) or 1.0)
