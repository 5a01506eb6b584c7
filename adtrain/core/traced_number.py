"""TracedNumber: a Python float that is an argument of a traced function."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import TraceError, user_line
from adtrain.core.operators import Arithmetic


class _OpsOfNumbers:
    """The operations by name, for operators of traced numbers."""

    def __getattr__(self, name: str) -> Any:
        return partial(_apply, name)


class TracedNumber(Arithmetic[Any]):
    """Stands for a Python float in a function that is traced, so that another float needs no other Program.

    It behaves like the float that it stands for. With an array it takes the array's dtype. With numbers it gives
    another TracedNumber, computed in float64; comparisons give a bool array of shape (). An operation of numbers alone,
    such as ``ops.exp(number)``, takes it as float32.

    Attributes:
        value: the number as a value of float64, shape ().
    """

    __slots__ = ("value",)
    __array_ufunc__ = None  # numpy_array * number goes to TracedNumber.__rmul__
    _ops = _OpsOfNumbers()

    def __init__(self, value: Value) -> None:
        self.value = value

    @property
    def device(self) -> str:
        return self.value.device

    def array(self, dtype: Any = np.float32) -> Value:
        """The number as a value of ``dtype``, shape ()."""
        return self.value.astype(dtype)

    def __repr__(self) -> str:
        return f"TracedNumber({self.value!r})"

    def _needed(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            f"{user_line()}: the jitted function needs the value of a float argument, which is traced: use ops, or "
            "make the argument static with jit(f, static_argnums=...), which traces the function again for each value"
        )

    __bool__ = __float__ = __int__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _needed
    __array__ = __iter__ = __len__ = _needed


NUMBERS = (bool, int, float, TracedNumber)
"""The types of numbers that take the dtype of the arrays beside them."""


def _apply(name: str, *args: Any) -> Any:
    """The operation ``name``: of numbers alone in float64, as a TracedNumber if it is of floating point."""
    alone = all(isinstance(x, NUMBERS) for x in args)
    given = [x.value if alone and isinstance(x, TracedNumber) else x for x in args]
    found = getattr(Value._ops, name)(*given)
    return TracedNumber(found) if alone and found.dtype.kind == "f" else found
