"""The terms, accumulators and results of a `map_reduce` equation, for C and CUDA C++."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from adtrain.codegen.elementwise import c_type
from adtrain.codegen.scalars import Index, Scalar, Scalars, first_and_step, named
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_map_reduce import Pair, pair_axes, reduced_axis

STARTS = {"sum": ("0",), "max": ("-INFINITY",), "min": ("INFINITY",), "logsumexp": ("-INFINITY", "0")}
"""The states of each kind of empty accumulator. Those of logsumexp are the maximum m and the sum of exp(x - m)."""


def fold(kind: str, c: str, states: Sequence[str], term: str) -> list[str]:
    """Statements that join a term to the states, which are numbers of type ``c``. NaN stays NaN."""
    return join(kind, c, states, (term, "1"))


def join(kind: str, c: str, states: Sequence[str], others: Sequence[str]) -> list[str]:
    """Statements that join the states of another accumulator to the states."""
    m, other = states[0], others[0]
    if kind == "sum":
        return [f"{m} += {other};"]
    if kind != "logsumexp":
        return [f"{m} = {other} {'>' if kind == 'max' else '<'} {m} || {other} != {other} ? {other} : {m};"]
    return [
        "{",
        f"    const {c} top = {other} > {m} ? {other} : {m};",
        # Equal maxima may be infinite; then their difference is NaN.
        f"    const {c} scale = {m} == top ? 1 : exp({m} - top), added = {other} == top ? 1 : exp({other} - top);",
        f"    {states[1]} = fma({states[1]}, scale, {others[1]} * added);",
        f"    {m} = top;",
        "}",
    ]


def value(kind: str, states: Sequence[str]) -> str:
    """The result of an accumulator."""
    return f"{states[0]} + log({states[1]})" if kind == "logsumexp" else states[0]


class Accumulator(NamedTuple):
    """A reduction over the columns of a row: its kind, the nodes that it combines, and their type."""

    kind: str
    terms: tuple[int, ...]
    dtype: np.dtype


class Result(NamedTuple):
    """Elements ``first + step * row`` of an output: a power of two, with a sign, times an accumulator's value."""

    output: Variable
    first: int
    step: int
    accumulator: int
    factor: float = 1.0

    def value(self, total: str) -> str:
        """C text of the element, for the accumulator's value. A sum of zeros is +0 with any sign of the factor."""
        scaled = total if abs(self.factor) == 1 else f"{abs(self.factor)!r} * ({total})"
        return scaled if self.factor > 0 else f"0 - ({scaled})"


@dataclass
class MapReduce:
    """What a kernel computes for each row i, along the kept axis, from all columns j, along the reduced axis."""

    rows: int
    columns: int
    scalars: Scalars
    accumulators: Sequence[Accumulator]
    results: Sequence[Result]

    def nodes(self, over: str) -> Iterator[tuple[int, str, str]]:
        """Number, type and text of each computed node that depends on these indices."""
        for number in self.used:
            node = self.scalars.nodes[number]
            if node.over == over and node.load is None:
                yield number, c_type(node.dtype), node.text

    def loads(self, over: str) -> Iterator[tuple[int, str, Variable, int, int]]:
        """Number and type of each loaded node that depends on these indices, with its argument, step and first."""
        for number in self.used:
            node = self.scalars.nodes[number]
            if node.over == over and node.load is not None:
                yield number, c_type(node.dtype), *node.load

    def column_nodes(self) -> list[tuple[int, str]]:
        """Number and type of each node of a column, which depends on j alone, that its pairs need."""
        nodes = self.scalars.nodes
        found = set(self._folded_nodes())
        found |= {n for _, _, text in self.nodes("ij") for n in named(text)}
        return [(n, c_type(nodes[n].dtype)) for n in sorted(found) if nodes[n].over == "j"]

    def folded(self, accumulator: Accumulator, states: Sequence[str]) -> Iterator[str]:
        """Statements that join a column to the states of an accumulator. A product is added by a fused multiply-add."""
        for term in accumulator.terms:
            factors = self._added_factors(accumulator, term)
            if factors:
                yield f"{states[0]} = fma(t{factors[0]}, t{factors[1]}, {states[0]});"
            else:
                yield from fold(accumulator.kind, c_type(accumulator.dtype), states, f"t{term}")

    def _added_factors(self, accumulator: Accumulator, term: int) -> tuple[int, int] | None:
        return self.scalars.nodes[term].product if accumulator.kind == "sum" else None

    def _folded_nodes(self) -> Iterator[int]:
        """The nodes that are joined to accumulators."""
        for a in self.accumulators:
            for term in a.terms:
                yield from self._added_factors(a, term) or (term,)

    @cached_property
    def used(self) -> Sequence[int]:
        """The nodes that the accumulators need, each after its operands."""
        found = set(self._folded_nodes())
        for number in range(len(self.scalars.nodes) - 1, -1, -1):
            if number in found:
                found.update(named(self.scalars.nodes[number].text))
        return sorted(found)


def map_reduce(body: Program) -> MapReduce:
    """The terms of a body that `fuse_map_reduce` made.

    If both axes of the pairs are equally long, some equations may reduce the first axis and others the second one. One
    loop computes both: for some equations rows and columns are exchanged.
    """
    axes = pair_axes(body)
    terms = _Terms(body, axes)
    results = set(body.outputs)
    lengths = [terms.reduce(e) for e in body.equations if e.outputs[0] in results]
    terms.accumulate_sums()
    return MapReduce(*lengths[0], terms.scalars, terms.accumulators, terms.results)


class _Terms:
    """Evaluates the elements of a body's values at the row i and the column j of a kernel."""

    def __init__(self, body: Program, axes: dict[Variable, Pair]) -> None:
        self.axes, self.scalars = axes, Scalars()
        self.producer = {v: e for e in body.equations for v in e.outputs}
        self.known: dict[tuple[Variable, Index], Scalar] = {}
        self.accumulators: list[Accumulator] = []
        self.results: list[Result] = []
        self.sums: list[tuple[Variable, Index, Scalar]] = []

    def reduce(self, e: Equation) -> tuple[int, int]:
        """Add the accumulators and results of an equation that reduces pairs. Returns rows and columns."""
        found = reduced_axis(e, self.axes)
        assert found is not None
        pair, reduced = found
        kept = next(axis for axis in self.axes[pair] if axis != reduced)
        if e.has(Trait.MATMUL):
            self._product_results(e, pair)
        else:
            self._reduction_results(e, pair, {kept: "i", reduced: "j"})
        return pair.type.shape[kept], pair.type.shape[reduced]

    def _reduction_results(self, e: Equation, pair: Variable, letters: dict[int, str]) -> None:
        ranges: list[Sequence[int | str]] = [
            [letters[axis]] if axis in letters else range(n) for axis, n in enumerate(pair.type.shape)
        ]
        terms: dict[Index, list[Scalar]] = defaultdict(list)
        for index in product(*ranges):
            kept = tuple(at for axis, at in enumerate(index) if axis not in e.params["axes"])
            terms[kept].append(self._element(pair, index))
        for index, parts in terms.items():
            self._result(e.outputs[0], index, e.primitive.name, parts)

    def _product_results(self, e: Equation, pair: Variable) -> None:
        (out,), pairs_first = e.outputs, pair is e.inputs[0]
        for other in range(out.type.shape[1 if pairs_first else 0]):
            self._result(out, ("i", other) if pairs_first else (other, "i"), "sum", [self._term(e, pair, other)])

    def _term(self, e: Equation, pair: Variable, other: int) -> Scalar:
        """A term of a matrix product of pairs and a thin array, at the row or column ``other`` of the array."""
        a, b = e.inputs
        row, column = ("i", other) if pair is a else (other, "i")
        left: Index = ("j", row) if e.params["transpose_a"] else (row, "j")
        right: Index = (column, "j") if e.params["transpose_b"] else ("j", column)
        return self.scalars.multiply(self._element(a, left), self._element(b, right), e.outputs[0].type.dtype)

    def _result(self, out: Variable, index: Index, kind: str, parts: Sequence[Scalar]) -> None:
        dtype = out.type.dtype
        if kind == "sum":
            total = self.scalars.total(parts, dtype)
            self.sums.append((out, index, Scalar(self.scalars.node(total, dtype)) if total.node is None else total))
        else:
            self._accumulated(out, index, kind, [self.scalars.node(part, dtype) for part in parts])

    def accumulate_sums(self) -> None:
        """Add the accumulators and results of the sums. Those that differ in a power of two share the smallest sum."""
        least: dict[int | None, int] = {}
        for _, _, total in self.sums:
            least[total.node] = min(total.shift, least.get(total.node, 0))
        for out, index, total in self.sums:
            assert total.node is not None
            shift = least[total.node]
            node = self.scalars.shifted(total.node, shift)
            self._accumulated(out, index, "sum", [node], total.sign * 2.0 ** (total.shift - shift))

    def _accumulated(self, out: Variable, index: Index, kind: str, nodes: Sequence[int], factor: float = 1.0) -> None:
        added = Accumulator(kind, tuple(nodes), out.type.dtype)
        if added not in self.accumulators:
            self.accumulators.append(added)
        first, step = first_and_step(index, out.type.shape)
        self.results.append(Result(out, first, step, self.accumulators.index(added), factor))

    def _element(self, v: Variable, index: Index) -> Scalar:
        if (v, index) not in self.known:
            self.known[v, index] = self._computed(v, index)
        return self.known[v, index]

    def _computed(self, v: Variable, index: Index) -> Scalar:
        e = self.producer.get(v)
        if e is None:
            return self.scalars.load(v, index)
        dtype = v.type.dtype
        if e.primitive.name == "broadcast_to":
            (x,) = e.inputs
            own = index[len(index) - len(x.type.shape) :]
            return self._element(x, tuple(0 if n == 1 else at for n, at in zip(x.type.shape, own, strict=True)))
        if e.has(Trait.RESHAPE):
            (x,) = e.inputs
            kept = iter([at for n, at in zip(v.type.shape, index, strict=True) if n != 1])
            return self._element(x, tuple(0 if n == 1 else next(kept) for n in x.type.shape))
        if e.primitive.name == "transpose":
            return self._element(e.inputs[0], tuple(at for _, at in sorted(zip(e.params["axes"], index, strict=True))))
        if e.has(Trait.REDUCTION):
            (x,), kept = e.inputs, iter(index)
            axes = e.params["axes"]
            ranges = [range(n) if axis in axes else [next(kept)] for axis, n in enumerate(x.type.shape)]
            return self.scalars.total((self._element(x, at) for at in product(*ranges)), dtype)
        if e.has(Trait.MATMUL):
            return self._product(e, *index)
        return self.scalars.apply(e, [self._element(x, index if x.type.shape else ()) for x in e.inputs])

    def _product(self, e: Equation, row: int | str, column: int | str) -> Scalar:
        """An element of a product of thin matrices."""
        a, b = e.inputs
        transpose_a, transpose_b = e.params["transpose_a"], e.params["transpose_b"]
        terms = []
        for k in range(a.type.shape[0 if transpose_a else 1]):
            left = self._element(a, (k, row) if transpose_a else (row, k))
            right = self._element(b, (column, k) if transpose_b else (k, column))
            terms.append(self.scalars.multiply(left, right, e.outputs[0].type.dtype))
        return self.scalars.total(terms, e.outputs[0].type.dtype, products=True)
