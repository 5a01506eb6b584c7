"""Scalar expressions of a row i and a column j as C text. Equal expressions are computed once.

The sign of an expression and a small power of two are kept apart from the rest. So expressions that differ between
(i, j) and (j, i) in the sign only are computed once, and so are sums over pairs that differ in a factor of two.
Products and sums of two terms have the same bits in either order.

An element is computed in the order in which the function is written, so it overflows where the function does. There are
two exceptions:

- An element over a number that is the same for all pairs is multiplied by the reciprocal. This is exact for a divisor
  of 0, infinity or NaN. If the divisor is below the smallest normal number, its reciprocal is infinite.
- A power of two is multiplied last if it is above 1. Then what it multiplies is smaller than in the order of the
  function, by up to 2^MAX_SHIFT, and can lose bits if it is below the smallest normal number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain.codegen.elementwise import c_type, element, literal
from adtrain.core.program import Equation, Variable

Index: TypeAlias = "tuple[int | str, ...]"
"""The index of an element: for each axis a number, "i" or "j"."""

MAX_SHIFT = 2
"""The largest exponent of a power of two that is kept apart."""


class Scalar(NamedTuple):
    """``sign`` times 2^``shift`` times a node; None stands for the number 1.

    A shift below 0 belongs to a node that depends on i or j alone, or to a product of two nodes of which one does.

    Attributes:
        exact: the node of the whole number, if it may differ from the above in the sign of zero: x - y is 0 and
            -(y - x) is -0 where x = y.
    """

    node: int | None
    sign: int = 1
    shift: int = 0
    exact: int | None = None


@dataclass(frozen=True)
class Node:
    """A number in the generated code.

    Attributes:
        text: a C expression of other nodes, called t0, t1, ...
        over: the indices that it depends on: "", "i", "j" or "ij".
        load: for an element of an argument, the argument, its step from one index to the next, and the first element.
        product: the nodes of which it is the product.
    """

    dtype: np.dtype
    over: str
    text: str = ""
    load: tuple[Variable, int, int] | None = None
    product: tuple[int, int] | None = None


@dataclass
class Scalars:
    """The nodes that expressions need, each after its operands."""

    nodes: list[Node] = field(default_factory=list)
    _known: dict[object, int] = field(default_factory=dict)

    def load(self, v: Variable, index: Index) -> Scalar:
        """An element of a thin argument."""
        first, step = first_and_step(index, v.type.shape)
        over = "".join(at for at in index if isinstance(at, str))
        return Scalar(self._add(("load", v, over, step, first), Node(v.type.dtype, over, load=(v, step, first))))

    def apply(self, e: Equation, arguments: Sequence[Scalar]) -> Scalar:
        """An element of an elementwise equation."""
        dtype, name = e.outputs[0].type.dtype, e.primitive.name
        exponent = e.params.get("exponent")
        if name == "full" or exponent == 0:
            return self._constant(e.params.get("value", 1), dtype)
        if dtype.kind == "f":
            if name == "stop_gradient" or (name == "power_scalar" and exponent == 1):
                return arguments[0]
            if name == "neg":
                return self._negative(arguments[0], dtype)
            if name == "mul":
                return self.multiply(arguments[0], arguments[1], dtype)
            if name == "square" or (name == "power_scalar" and exponent == 2):
                return self.multiply(arguments[0], arguments[0], dtype)
            if name == "div":
                return self._divide(arguments[0], arguments[1], dtype)
            if name == "add":
                return self.add(arguments[0], arguments[1], dtype)
            if name == "sub":
                return self.add(arguments[0], self._negative(arguments[1], dtype), dtype)
        numbers = [self.node(x, v.type.dtype) for x, v in zip(arguments, e.inputs, strict=True)]
        return Scalar(self._text(element(e, [f"t{n}" for n in numbers]), dtype))

    def node(self, x: Scalar, dtype: np.dtype) -> int:
        """A node for the whole number."""
        if x.exact is not None:
            return x.exact
        if x.node is None:
            return self._text(f"({c_type(dtype)})({literal(x.sign * 2.0**x.shift)})", dtype)
        number = self.shifted(x.node, x.shift)
        return number if x.sign > 0 else self._text(f"-t{number}", dtype)

    def shifted(self, number: int, shift: int) -> int:
        """A node times 2^shift. Below 1 it multiplies the factor of a product that depends on i or j alone."""
        factors = self.nodes[number].product
        if shift >= 0 or factors is None:
            return self._times(number, shift)
        thin, other = sorted(factors, key=lambda n: len(self.nodes[n].over))
        return self._product(self._times(thin, shift), other, self.nodes[number].dtype)

    def multiply(self, a: Scalar, b: Scalar, dtype: np.dtype) -> Scalar:
        if a.node is None:
            a, b = b, a
        if b.node is None:
            return self._times_power(a, b.sign, b.shift, dtype)
        same = a == b
        smaller, larger = sorted((a, b), key=lambda x: x.shift)
        halved = smaller.shift < 0 == larger.shift and self._is_thin(smaller)
        if not halved and (smaller.shift < 0 or a.shift + b.shift > MAX_SHIFT):
            a, b = self._unshifted(a, dtype), self._unshifted(b, dtype)
        assert a.node is not None
        assert b.node is not None
        exact = None
        if not same and (a.exact, b.exact) != (None, None):
            exact = self._product(self.node(a, dtype), self.node(b, dtype), dtype)
        return Scalar(self._product(a.node, b.node, dtype), a.sign * b.sign, a.shift + b.shift, exact)

    def add(self, a: Scalar, b: Scalar, dtype: np.dtype) -> Scalar:
        """a + b. A power of two that is the same in both stays one of the sum."""
        if a.shift != b.shift or a.shift < 0 or a.node is None or b.node is None:
            a, b = self._unshifted(a, dtype), self._unshifted(b, dtype)
        assert a.node is not None
        assert b.node is not None
        low, high = sorted((a, b), key=lambda x: x.node or 0)
        text = f"t{low.node} {'+' if a.sign == b.sign else '-'} t{high.node}"
        exact = None
        if low.sign < 0 or (a.exact, b.exact) != (None, None):
            first, second = self.node(a, dtype), self.node(b._replace(sign=abs(b.sign)), dtype)
            sign = "+" if b.sign > 0 or b.exact is not None else "-"
            exact = self._text(f"t{first} {sign} t{second}", dtype)
        return Scalar(self._text(text, dtype), low.sign, a.shift, exact)

    def total(self, parts: Iterable[Scalar], dtype: np.dtype, products: bool = False) -> Scalar:
        """The sum of the parts. Squares, and all products if ``products``, are added by fused multiply-adds."""
        result, *others = parts
        for x in others:
            result, x = (self._unshifted(y, dtype) if y.shift < 0 else y for y in (result, x))
            result = self._fused_sum(result, x, dtype, products) or self.add(result, x, dtype)
        return result

    def _fused_sum(self, a: Scalar, b: Scalar, dtype: np.dtype, products: bool) -> Scalar | None:
        """a + b for a product b that may be fused; None for others."""
        if a.node is None or b.node is None or a[1:] != b[1:] or a.sign < 0 or a.exact is not None:
            return None
        of = self.nodes[b.node].product
        if of is None or not (products or of[0] == of[1]):
            return None
        return a._replace(node=self._text(f"fma(t{of[0]}, t{of[1]}, t{a.node})", dtype))

    def _divide(self, a: Scalar, b: Scalar, dtype: np.dtype) -> Scalar:
        if b.node is None and a.node is not None:
            return self._times_power(a, b.sign, -b.shift, dtype)
        if a.node is None or a.shift < 0:
            a = self._unshifted(a, dtype)
        b = self._unshifted(b, dtype)
        assert a.node is not None
        assert b.node is not None
        if self.nodes[a.node].over and not self.nodes[b.node].over:
            inverse = self._text(f"({c_type(dtype)})1 / t{self.node(b, dtype)}", dtype)
            return self.multiply(a, Scalar(inverse), dtype)
        exact = None
        if (a.exact, b.exact) != (None, None):
            exact = self._text(f"t{self.node(a, dtype)} / t{self.node(b, dtype)}", dtype)
        return Scalar(self._text(f"t{a.node} / t{b.node}", dtype), a.sign * b.sign, a.shift, exact)

    def _constant(self, value: float, dtype: np.dtype) -> Scalar:
        fraction, exponent = math.frexp(value) if dtype.kind == "f" else (0.0, 0)
        if abs(fraction) == 0.5 and abs(exponent - 1) <= MAX_SHIFT:
            return Scalar(None, 1 if value > 0 else -1, exponent - 1)
        return Scalar(self._text(f"({c_type(dtype)})({literal(value)})", dtype))

    def _negative(self, x: Scalar, dtype: np.dtype) -> Scalar:
        exact = None if x.exact is None else self._text(f"-t{x.exact}", dtype)
        return x._replace(sign=-x.sign, exact=exact)

    def _times_power(self, x: Scalar, sign: int, shift: int, dtype: np.dtype) -> Scalar:
        """``x`` times ``sign`` times 2^shift."""
        if sign < 0:
            x = self._negative(x, dtype)
        together = x.shift + shift
        least = -MAX_SHIFT if x.node is None or self._is_thin(x) else 0
        if least <= together <= MAX_SHIFT and (x.node is None or self.nodes[x.node].over):
            exact = None if x.exact is None else self._times(x.exact, shift)
            return x._replace(shift=together, exact=exact)
        return Scalar(self._times(self.node(x, dtype), shift))

    def _is_thin(self, x: Scalar) -> bool:
        """Whether its node depends on i or j alone."""
        return x.node is not None and len(self.nodes[x.node].over) == 1

    def _times(self, number: int, shift: int) -> int:
        if shift == 0:
            return number
        dtype = self.nodes[number].dtype
        return self._text(f"t{number} * ({c_type(dtype)}){literal(2.0**shift)}", dtype)

    def _unshifted(self, x: Scalar, dtype: np.dtype) -> Scalar:
        """The same number without a shift."""
        if x.node is None:
            return Scalar(self.node(x, dtype))
        return x._replace(node=self.shifted(x.node, x.shift), shift=0)

    def _product(self, a: int, b: int, dtype: np.dtype) -> int:
        low, high = sorted((a, b))
        return self._text(f"t{low} * t{high}", dtype, (low, high))

    def _text(self, text: str, dtype: np.dtype, product: tuple[int, int] | None = None) -> int:
        over = "".join(sorted({at for n in named(text) for at in self.nodes[n].over}))
        return self._add((text, dtype), Node(dtype, over, text, product=product))

    def _add(self, key: object, node: Node) -> int:
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]


def named(text: str) -> list[int]:
    """The nodes that a text names."""
    return [int(n) for n in re.findall(r"\bt(\d+)\b", text)]


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
