"""Pairs: values with an element for each row i and column j, computed from arrays with one of the two axes."""

from __future__ import annotations

import math
from typing import NamedTuple

from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import Shape
from adtrain.passes.fuse_elementwise import elementwise

MIN_LENGTH = 256
"""Least number of rows, and of columns."""

MIN_PAIRS = 1_000_000
"""Least number of pairs that are not stored. Fewer fit into a cache, and computing them again takes longer."""

MAX_WIDTH = 32
"""Largest number of elements of a pair, and of terms of a product for a pair: loops over them are unrolled."""


class Pair(NamedTuple):
    """The axes of a value along which rows and columns lie, the smaller one first."""

    first: int
    second: int


def pair_axes(program: Program) -> dict[Variable, Pair]:
    """The values that are pairs: broadcasts and products of thin arrays, and values computed from these elementwise.

    Other arrays are thin. Sums of pairs over axes other than rows and columns are pairs too.
    """
    found: dict[Variable, Pair] = {}
    for e in program.equations:
        if len(e.outputs) == 1 and not e.form and (pair := _axes(e, found)):
            found[e.outputs[0]] = pair
    return found


def _axes(e: Equation, known: dict[Variable, Pair]) -> Pair | None:
    shape = e.outputs[0].type.shape
    ends = {_followed(e, i, known.get(v)) for i, v in enumerate(e.inputs) if v.type.shape}
    pair = ends.pop() if len(ends) == 1 else None
    if e.has(Trait.BROADCAST):
        return _of_broadcast(e, pair)
    if e.has(Trait.MATMUL):
        return _longest(shape) if known.keys().isdisjoint(e.inputs) and _thin_product(e) else None
    if e.has(Trait.RESHAPE):  # one that only adds and removes axes of length 1
        lengths = ([n for n in v.type.shape if n != 1] for v in (e.inputs[0], e.outputs[0]))
        return pair if next(lengths) == next(lengths) else None
    return pair if elementwise(e) or e.primitive.name in ("transpose", "sum") else None


def _followed(e: Equation, argument: int, pair: Pair | None) -> Pair | None:
    """The axes of the result that move with a pair of axes of an argument."""
    ends = [axis for at in pair or () if (axis := e.axes.follow(argument, at)[0]) is not None]
    return Pair(*sorted(ends)) if len(ends) == 2 else None


def _longest(shape: Shape) -> Pair | None:
    """The two longest axes of a shape, if both are long and the others short."""
    if len(shape) < 2:
        return None
    first, second = sorted(sorted(range(len(shape)), key=lambda axis: -shape[axis])[:2])
    pairs = shape[first] * shape[second]
    long = min(shape[first], shape[second]) >= MIN_LENGTH and pairs >= MIN_PAIRS
    return Pair(first, second) if long and math.prod(shape) <= MAX_WIDTH * pairs else None


def _of_broadcast(e: Equation, pair: Pair | None) -> Pair | None:
    """The axes of pairs that a broadcast makes of a thin array, or keeps."""
    found = _longest(e.outputs[0].type.shape)
    if found is None or pair is not None:
        return found if found == pair else None
    given = e.axes.arguments[0] if e.inputs else ()
    return found if any(e.axes.results[0][at] not in given for at in found) else None


def _thin_product(e: Equation) -> bool:
    """Whether a matrix product has few terms for each pair, in full precision."""
    a = e.inputs[0]
    full = e.params["precision"] == "full" or a.type.dtype.itemsize == 8
    return full and len(a.type.shape) == 2 and a.type.shape[0 if e.params["transpose_a"] else 1] <= MAX_WIDTH
