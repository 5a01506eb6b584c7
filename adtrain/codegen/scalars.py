"""Scalar expressions of a row i and a column j as C text. Equal expressions are computed once.

The sign of an expression, and its factors that are the same for all pairs, are kept apart from the rest. So a sum over
pairs does not multiply by them in its loop, and expressions that differ between (i, j) and (j, i) in the sign only are
computed once. Products and sums of two terms have the same bits in either order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain.codegen.expressions import c_type, element, literal
from adtrain.core.program import Equation, Variable

Index: TypeAlias = "tuple[int | str, ...]"
"""The index of an element: for each axis a number, "i" or "j"."""


class Scalar(NamedTuple):
    """``sign`` times the factors times a node; None stands for the number 1.

    Factors are nodes that depend on neither row nor column, each with its power.
    """

    node: int | None
    sign: int = 1
    factors: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Node:
    """A number in the generated code.

    Attributes:
        text: a C expression of other nodes, called t0, t1, ...
        over: the indices that it depends on: "", "i", "j" or "ij".
        load: for an element of an argument, the argument, its step from one index to the next, and the first element.
    """

    dtype: np.dtype
    over: str
    text: str = ""
    load: tuple[Variable, int, int] | None = None


@dataclass
class Scalars:
    """The nodes that expressions need, each after its operands."""

    nodes: list[Node] = field(default_factory=list)
    _known: dict[object, int] = field(default_factory=dict)

    def load(self, v: Variable, index: Index) -> Scalar:
        """An element of a thin argument."""
        first, step = first_and_step(index, v.type.shape)
        over = "".join(at for at in index if isinstance(at, str))
        return self._scalar(("load", v, over, step, first), Node(v.type.dtype, over, load=(v, step, first)))

    def apply(self, e: Equation, arguments: Sequence[Scalar]) -> Scalar:
        """An element of an elementwise equation."""
        dtype, name = e.outputs[0].type.dtype, e.primitive.name
        exponent = e.params.get("exponent")
        if name == "full" or exponent == 0:
            text = f"({c_type(dtype)}){literal(e.params.get('value', 1))}"
            return self._scalar((text, dtype), Node(dtype, "", text))
        if dtype.kind == "f":
            if name == "stop_gradient" or (name == "power_scalar" and exponent == 1):
                return arguments[0]
            if name == "neg":
                return arguments[0]._replace(sign=-arguments[0].sign)
            if name == "mul":
                return self.multiply(arguments[0], arguments[1], dtype)
            if name == "square" or (name == "power_scalar" and exponent == 2):
                return self.multiply(arguments[0], arguments[0], dtype)
            if name == "div":
                return self._divide(arguments[0], arguments[1], dtype)
            if name in ("add", "sub"):
                a, b = arguments
                return self.add(a, b if name == "add" else b._replace(sign=-b.sign), dtype)
        types = [v.type.dtype for v in e.inputs]
        names = [self.name(x, t) for x, t in zip(arguments, types, strict=True)]
        text = element(e, names)
        return self._scalar((text, dtype), Node(dtype, self._over(names), text))

    def multiply(self, a: Scalar, b: Scalar, dtype: np.dtype) -> Scalar:
        factors = _product(a.factors, b.factors, 1)
        if a.node is None or b.node is None:
            return Scalar(b.node if a.node is None else a.node, a.sign * b.sign, factors)
        node = self._commutative("*", a.node, b.node, dtype)
        return Scalar(node, a.sign * b.sign, factors)

    def add(self, a: Scalar, b: Scalar, dtype: np.dtype) -> Scalar:
        """a + b. Factors that are the same in both stay factors of the sum."""
        if a.node is None or b.node is None or a.factors != b.factors:
            a, b = (Scalar(self.node(x, dtype)) for x in (a, b))
        assert a.node is not None
        assert b.node is not None
        node = self._commutative("+" if a.sign == b.sign else "-", a.node, b.node, dtype)
        # The text has the lower node first, without its sign.
        return self._as_scalar(node, a.sign if a.node <= b.node else b.sign, a.factors)

    def node(self, x: Scalar, dtype: np.dtype) -> int:
        """A node for a Scalar, with its sign and factors."""
        if x.sign == 1 and not x.factors and x.node is not None:
            return x.node
        if x.sign == 1 and x.node is None and len(x.factors) == 1 and x.factors[0][1] == 1:
            return x.factors[0][0]
        text = self.factor(x, dtype)
        over = ""
        if x.node is not None:
            if x.factors:
                number = self._add((text, dtype), Node(dtype, "", text))
                text = f"t{number} * t{x.node}"
            else:
                text = f"-t{x.node}"
            over = self.nodes[x.node].over
        return self._add((text, dtype), Node(dtype, over, text))

    def factor(self, x: Scalar, dtype: np.dtype) -> str:
        """C text: the sign and factors of a Scalar as one number."""
        factors = [f"t{n}" for n, power in x.factors for _ in range(power)]
        divisors = [f"t{n}" for n, power in x.factors for _ in range(-power)]
        one = f"({c_type(dtype)})1"
        text = " * ".join(factors) or one
        return ("-" if x.sign < 0 else "") + (f"({text})" if divisors else text) + "".join(f" / {t}" for t in divisors)

    def name(self, x: Scalar, dtype: np.dtype) -> str:
        return f"t{self.node(x, dtype)}"

    def _divide(self, a: Scalar, b: Scalar, dtype: np.dtype) -> Scalar:
        sign, factors = a.sign * b.sign, _product(a.factors, b.factors, -1)
        if b.node is None:
            return Scalar(a.node, sign, factors)
        dividend = f"({c_type(dtype)})1" if a.node is None else f"t{a.node}"
        over = self._over([f"t{n}" for n in (a.node, b.node) if n is not None])
        text = f"{dividend} / t{b.node}"
        return Scalar(self._add((text, dtype), Node(dtype, over, text)), sign, factors)

    def _commutative(self, operator: str, a: int, b: int, dtype: np.dtype) -> int:
        low, high = sorted((a, b))
        text = f"t{low} {operator} t{high}"
        return self._add((text, dtype), Node(dtype, self._over([f"t{low}", f"t{high}"]), text))

    def _over(self, names: Sequence[str]) -> str:
        return "".join(sorted({at for name in names for at in self.nodes[int(name[1:])].over}))

    def _scalar(self, key: object, node: Node) -> Scalar:
        return self._as_scalar(self._add(key, node))

    def _as_scalar(self, number: int, sign: int = 1, factors: tuple[tuple[int, int], ...] = ()) -> Scalar:
        node = self.nodes[number]
        if node.over or node.dtype.kind != "f":
            return Scalar(number, sign, factors)
        return Scalar(None, sign, _product(factors, ((number, 1),), 1))

    def _add(self, key: object, node: Node) -> int:
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]


def _product(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...], power: int) -> tuple[tuple[int, int], ...]:
    powers = Counter(dict(a))
    for node, times in b:
        powers[node] += power * times
    return tuple(sorted((node, times) for node, times in powers.items() if times))


def first_and_step(index: Index, shape: Sequence[int]) -> tuple[int, int]:
    """The position of an array's first element at an index, and the step from one row or column to the next."""
    first, step, stride = 0, 0, 1
    for length, at in zip(reversed(shape), reversed(index), strict=True):
        if isinstance(at, str):
            step = stride
        else:
            first += at * stride
        stride *= length
    return first, step
