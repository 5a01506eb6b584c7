"""Map-reduce fusion: sums over pairs of rows and columns run without the array of pairs.

B. Charlier, J. Feydy, J. A. Glaunès, F.-D. Collin, G. Durif: "Kernel Operations on the GPU, with Autodiff, without
Memory Overflows" (Journal of Machine Learning Research 22, 2021) call this scheme map-reduce. Here a pass finds it in a
Program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import MAP_REDUCE, Equation, Program, Variable, fuse
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType, Shape
from adtrain.passes.fusion import elementwise
from adtrain.passes.groups import MAX_EQUATIONS, producers_first

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
        if len(e.outputs) == 1 and not e.form and (pair := _pair_of(e, found)):
            found[e.outputs[0]] = pair
    return found


def _pair_of(e: Equation, known: dict[Variable, Pair]) -> Pair | None:
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


REDUCTIONS = ("sum", "max", "min", "logsumexp")
"""The reductions that map-reduce kernels compute, beside matrix products with a thin array."""


@keeps(Results.EXACT)
def fuse_map_reduce(program: Program) -> Program:
    """One `map_reduce` equation for all reductions of pairs that can run together.

    These have pairs of the same size and the same depth: the number of reductions that they depend on, on the longest
    path. Each equation computes its pairs again. Pairs that are also needed as arrays are stored: reductions of these,
    and of values computed from these, are not fused.
    """
    program = _sum_rows_first(program)
    axes = pair_axes(program)
    reductions = {i for i, e in enumerate(program.equations) if reduced_axis(e, axes) is not None}
    if not reductions:
        return program
    cones = _Cones(program, axes)
    chosen = _independent(program, axes, reductions, cones)
    if not chosen:
        return program
    return _rewritten(program, axes, chosen, cones)


def reduced_axis(e: Equation, axes: dict[Variable, Pair]) -> tuple[Variable, int] | None:
    """The pairs that an equation reduces to a thin array, and the axis that it reduces; None if it does not."""
    x = next((v for v in e.inputs if v in axes), None)
    if x is None:
        return None
    if e.primitive.name in REDUCTIONS and x.type.dtype.kind == "f":
        both = [at for at in axes[x] if at in e.params["axes"]]
        return (x, both[0]) if len(both) == 1 else None
    if not e.has(Trait.MATMUL) or len(x.type.shape) != 2 or all(v in axes for v in e.inputs):
        return None
    a, b = e.inputs
    transpose_a, transpose_b = e.params["transpose_a"], e.params["transpose_b"]
    thin, free, reduced = (b, not transpose_b, not transpose_a) if x is a else (a, transpose_a, transpose_b)
    full = e.params["precision"] == "full" or thin.type.dtype.itemsize == 8
    return (x, int(reduced)) if full and thin.type.shape[free] <= MAX_WIDTH else None


def _sum_rows_first(program: Program) -> Program:
    """Divide each sum over rows and columns into a sum over columns and a sum of the thin result."""
    axes = pair_axes(program)
    equations: list[Equation] = []
    for e in program.equations:
        if e.primitive.name == "sum" and e.inputs[0] in axes and set(axes[e.inputs[0]]) <= set(e.params["axes"]):
            (x,), row = e.inputs, axes[e.inputs[0]].first
            first = tuple(axis for axis in e.params["axes"] if axis != row)
            shape = tuple(n for axis, n in enumerate(x.type.shape) if axis not in first)
            rows = x.like(ArrayType(shape, x.type.dtype))
            equations.append(replace(e, params={"axes": first}, outputs=(rows,)))
            e = replace(e, inputs=(rows,), params={"axes": (row - sum(axis < row for axis in first),)})
        equations.append(e)
    return replace(program, equations=tuple(equations))


class _Cones:
    """The equations that compute pairs from thin arrays: what a reduction depends on, its cone.

    Reshapes of thin arrays, and their products with a number, belong to it too. So the kernel knows that two arguments
    are the same array, or differ in a factor.
    """

    def __init__(self, program: Program, axes: dict[Variable, Pair]) -> None:
        self.equations, self.axes = program.equations, axes
        self.producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}

    def of(self, starts: Iterable[Variable]) -> set[int]:
        """The positions of the equations that compute these pairs."""
        found: set[int] = set()
        stack = list(starts)
        while stack:
            i = self.producer.get(stack.pop())
            if i is not None and i not in found and (self.equations[i].outputs[0] in self.axes or self._scales(i)):
                found.add(i)
                stack.extend(self.equations[i].inputs)
        return found

    def _scales(self, i: int) -> bool:
        """Whether an equation computes a thin array as a multiple of another one."""
        e = self.equations[i]
        if e.has(Trait.RESHAPE):
            lengths = [[n for n in v.type.shape if n != 1] for v in (e.inputs[0], e.outputs[0])]
            return lengths[0] == lengths[1]
        if e.has(Trait.BROADCAST):
            return all(v.size == 1 for v in e.inputs)
        return e.primitive.name == "neg" or (
            e.primitive.name in ("mul", "div") and any(self._is_number(v) for v in e.inputs)
        )

    def _is_number(self, v: Variable) -> bool:
        """Whether all elements are equal because they are copies of one."""
        i = self.producer.get(v)
        return v.size == 1 or (i is not None and self.equations[i].has(Trait.BROADCAST) and self._scales(i))


def _independent(program: Program, axes: dict[Variable, Pair], reductions: set[int], cones: _Cones) -> set[int]:
    """The reductions of pairs that no other equation needs as arrays."""
    chosen = {i for i in reductions if len(cones.of(program.equations[i].inputs)) < MAX_EQUATIONS}
    while chosen:
        needed = [v for v in program.outputs if v in axes]
        for i, e in enumerate(program.equations):
            if i not in chosen and e.outputs[0] not in axes:
                needed += [v for v in e.inputs if v in axes]
        made = [i for i in cones.of(needed) if program.equations[i].outputs[0] in axes]
        stored = {i for i in made if not program.equations[i].primitive.view}
        dependent = {i for i in chosen if stored & cones.of(program.equations[i].inputs)}
        if not dependent:
            return chosen
        chosen -= dependent
    return chosen


def _rewritten(program: Program, axes: dict[Variable, Pair], chosen: set[int], cones: _Cones) -> Program:
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    depth: dict[Variable, int] = {}
    for i, e in enumerate(program.equations):
        before = max((depth.get(v, 0) for v in e.inputs), default=0)
        depth |= dict.fromkeys(e.outputs, before + (i in chosen))
        if (found := reduced_axis(e, axes)) and i in chosen:
            x, axis = found
            kept = next(at for at in axes[x] if at != axis)
            groups[before, x.type.shape[kept], x.type.shape[axis]].append(i)
    nodes: list[Equation] = [e for i, e in enumerate(program.equations) if i not in chosen]
    for members in groups.values():
        cone = cones.of(v for i in members for v in program.equations[i].inputs)
        nodes.append(_fused([program.equations[i] for i in sorted({*cone, *members})], members, program))
    made = {v: i for i, e in enumerate(nodes) for v in e.outputs}
    order = producers_first(range(len(nodes)), lambda i: {made[v] for v in nodes[i].inputs if v in made})
    return replace(program, equations=tuple(nodes[i] for i in order))


def _fused(equations: Sequence[Equation], members: Sequence[int], program: Program) -> Equation:
    """A `map_reduce` equation, with its own variables for the pairs."""
    results = {v for i in members for v in program.equations[i].outputs}
    names = {v: v.like() for e in equations for v in e.outputs if v not in results}

    def renamed(variables: Sequence[Variable]) -> tuple[Variable, ...]:
        return tuple(names.get(v, v) for v in variables)

    copies = [replace(e, inputs=renamed(e.inputs), outputs=renamed(e.outputs)) for e in equations]
    return fuse(MAP_REDUCE, [*_numbers(copies, program), *copies], results)


def _numbers(equations: Sequence[Equation], program: Program) -> list[Equation]:
    """The constants of one element that the equations read, as equations, so that a kernel has their values."""
    read = dict.fromkeys(v for e in equations for v in e.inputs if v.size == 1 and v in program.constants)
    found = []
    for v in read:
        params = {"shape": v.type.shape, "value": program.constants[v].numpy().item(), "dtype": v.type.dtype}
        found.append(Equation(PRIMITIVES["full"], (), {**params, "device": v.device}, (v,)))
    return found
