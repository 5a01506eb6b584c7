"""The C text of types, literals and elements."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from adtrain.core.program import Equation, Variable


@functools.cache  # the name of a NumPy type is slow to get
def c_type(dtype: np.dtype) -> str:
    """How C spells an element type: "float" for float32, "int64_t" for int64."""
    return {"float32": "float", "float64": "double", "bool": "bool"}.get(dtype.name, f"{dtype.name}_t")


def literal(x: float) -> str:
    """A Python number in C."""
    if isinstance(x, (bool, int, np.integer)):
        if x == -(2**63):
            return "(-9223372036854775807 - 1)"  # 2^63 without the sign is not an int64
        return str(int(x))
    if math.isnan(x):
        return "NAN"
    return repr(float(x)) if math.isfinite(x) else "INFINITY" if x > 0 else "-INFINITY"


def element(equation: Equation, arguments: Sequence[str], expressions: Mapping[str, str] | None = None) -> str:
    """One element of an elementwise equation's result, as a C expression of the elements of its arguments.

    Args:
        expressions: by primitive name, what replaces the primitive's own expression.
    """
    text = (expressions or {}).get(equation.primitive.name, equation.primitive.expression)
    if callable(text):
        text = text(**equation.params)
    assert text is not None
    t = equation.inputs[-1].type.dtype if equation.inputs else equation.outputs[0].type.dtype
    names = dict(zip("abc", arguments, strict=False))
    names |= {"T": c_type(t), "U": c_type(equation.outputs[0].type.dtype)}

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return f"({literal(equation.params[match[1]])})"
        return names.get(match[0], match[0])

    return re.sub(r"\{(\w+)\}|\b\w+\b", replaced, text)


def pointer(v: Variable, const: bool = False) -> str:
    """The C type of a pointer to the elements of `v`."""
    return f"{'const ' if const else ''}{c_type(v.type.dtype)} *"
