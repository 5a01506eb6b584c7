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
    pairs = [known.get(v) for v in e.inputs]
    if e.primitive.name == "full":
        return _longest(shape)
    if e.has(Trait.BROADCAST):
        return _of_broadcast(e.inputs[0].type.shape, shape, pairs[0])
    if e.has(Trait.MATMUL):
        return _longest(shape) if not any(pairs) and _thin_product(e) else None
    if elementwise(e):
        whole = {pair for v, pair in zip(e.inputs, pairs, strict=True) if v.type.shape}
        return whole.pop() if len(whole) == 1 else None
    if pairs[0] is None:
        return None
    if e.primitive.name == "transpose":
        return Pair(*sorted(e.params["axes"].index(at) for at in pairs[0]))
    if e.has(Trait.RESHAPE):
        return _of_reshape(e.inputs[0].type.shape, shape, pairs[0])
    if e.has(Trait.REDUCTION) and e.primitive.name == "sum" and not set(pairs[0]) & set(e.params["axes"]):
        return Pair(*(at - sum(axis < at for axis in e.params["axes"]) for at in pairs[0]))
    return None


def _longest(shape: Shape) -> Pair | None:
    """The two longest axes of a shape, if both are long and the others short."""
    if len(shape) < 2:
        return None
    first, second = sorted(sorted(range(len(shape)), key=lambda axis: -shape[axis])[:2])
    pairs = shape[first] * shape[second]
    long = min(shape[first], shape[second]) >= MIN_LENGTH and pairs >= MIN_PAIRS
    return Pair(first, second) if long and math.prod(shape) <= MAX_WIDTH * pairs else None


def _of_broadcast(source: Shape, shape: Shape, pair: Pair | None) -> Pair | None:
    added = len(shape) - len(source)
    found = _longest(shape)
    if pair is not None:
        return found if found == Pair(pair.first + added, pair.second + added) else None
    repeated = found is not None and any(at < added or source[at - added] == 1 for at in found)
    return found if repeated else None


def _of_reshape(source: Shape, shape: Shape, pair: Pair) -> Pair | None:
    """The axes of pairs after a reshape that only adds and removes axes of length 1; None for other reshapes."""
    kept = [axis for axis, length in enumerate(source) if length != 1]
    made = [axis for axis, length in enumerate(shape) if length != 1]
    if [source[axis] for axis in kept] != [shape[axis] for axis in made]:
        return None
    return Pair(*(made[kept.index(at)] for at in pair))


def _thin_product(e: Equation) -> bool:
    """Whether a matrix product has few terms for each pair, in full precision."""
    a = e.inputs[0]
    full = e.params["precision"] == "full" or a.type.dtype.itemsize == 8
    return full and len(a.type.shape) == 2 and a.type.shape[0 if e.params["transpose_a"] else 1] <= MAX_WIDTH
