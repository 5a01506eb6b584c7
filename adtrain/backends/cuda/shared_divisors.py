"""Shared divisors: elements that share a divisor are multiplied by its reciprocal.

A division takes the time of about ten multiplications. That matters where a kernel computes many quotients from small
arrays. A kernel that loads or stores an array of as many elements waits for memory, and a division costs no time there.

x / d becomes (x * r) * s with r = 1 / (d * s). Here s is a power of two for which r is a normal number. So a quotient
has an error of at most 1.5 units in the last place, also if x, d or the quotient is subnormal or near the largest
number. A divisor of 0, infinity or NaN gives the same zeros, infinities and NaN as a division.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.fusion import elementwise

MIN_ELEMENTS = 1 << 22
"""Minimum quotients. The reciprocals may take a launch of their own, which few quotients do not repay."""
MIN_REUSE = 4
"""Minimum quotients for each element of the largest array that they are computed from."""
MAX_DIVISORS = 1 << 16
"""Maximum different divisors."""


@keeps(Results.ROUNDING)
def multiply_by_reciprocals(program: Program) -> Program:
    """``program`` with products in place of quotients of small arrays by few divisors."""
    divisors = {e.outputs[0]: e.inputs[0] for e in program.equations if e.name == "broadcast_to"}
    largest: dict[Variable, int] = {}  # size of the largest array that a value is computed from
    result = _Reciprocals()
    for e in program.equations:
        if elementwise(e):
            largest[e.outputs[0]] = max((largest.get(v, v.size) for v in e.inputs), default=1)
        d = divisors.get(e.inputs[1]) if e.primitive.name == "div" else None
        if d is not None and _pays(e.outputs[0], d, largest[e.outputs[0]]):
            result.divide(e, d)
        else:
            result.equations.append(e)
    return replace(program, equations=tuple(result.equations))


def _pays(quotient: Variable, divisor: Variable, largest: int) -> bool:
    """Whether products are faster. Divisors that differ along axis 0 are left out: each of them has few quotients."""
    shape, own = quotient.type.shape, divisor.type.shape
    shared = len(own) < len(shape) or own[0] < shape[0]
    few = divisor.size <= MAX_DIVISORS and max(largest, divisor.size) * MIN_REUSE <= quotient.size
    return shared and few and quotient.size >= MIN_ELEMENTS and quotient.type.dtype.kind == "f"


@dataclass
class _Reciprocals:
    """The equations of the new Program."""

    equations: list[Equation] = field(default_factory=list)
    factors: dict[Variable, tuple[Variable, Variable]] = field(default_factory=dict)
    """For each divisor the reciprocal r and the power of two s."""

    def divide(self, e: Equation, divisor: Variable) -> None:
        """Add products in place of an equation that divides by a broadcast of `divisor`."""
        if divisor not in self.factors:
            self.factors[divisor] = self._factors(divisor, e)
        shape, value = e.outputs[0].type.shape, e.inputs[0]
        reciprocal, power = (self._add(e, "broadcast_to", v, shape=shape) for v in self.factors[divisor])
        value = self._add(e, "mul", value, reciprocal)
        self.equations.append(replace(e, primitive=PRIMITIVES["mul"], inputs=(value, power)))

    def _factors(self, d: Variable, like: Equation) -> tuple[Variable, Variable]:
        """The variables r and s of a divisor."""
        dtype = d.type.dtype
        numbers = np.finfo(dtype)

        def number(value: float) -> Variable:
            return self._add(like, "full", shape=d.type.shape, value=value, dtype=dtype, device=d.device)

        smallest, one = float(numbers.smallest_normal), number(1.0)
        size = self._add(like, "abs", d)
        is_large = self._add(like, "less", number(1 / smallest), size)
        is_small = self._add(like, "less", size, number(smallest))
        power = self._add(like, "where", is_large, number(0.25), one)
        power = self._add(like, "where", is_small, number(2.0 ** (numbers.nmant + 1)), power)
        return self._add(like, "div", one, self._add(like, "mul", d, power)), power

    def _add(self, like: Equation, name: str, *inputs: Variable, **params: Any) -> Variable:
        """The result of an added equation with the scope and phase of another one."""
        primitive, (y,) = PRIMITIVES[name], like.outputs
        (type_,) = primitive.output_types([v.type for v in inputs], params)
        out = inputs[0].like(type_) if inputs else y.like(type_)
        self.equations.append(Equation(primitive, inputs, params, (out,), like.scope, like.phase))
        return out
