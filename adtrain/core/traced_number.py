"""TracedNumber: a Python float that is an argument of a traced function."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import TraceError, user_line


class TracedNumber:
    """Stands for a Python float in a function that is traced, so that another float needs no other Program.

    It behaves like the float that it stands for. With an array it takes the array's dtype. With numbers it gives
    another TracedNumber, computed in float64; comparisons give a bool array of shape (). An operation of numbers alone,
    such as ``ops.exp(number)``, takes it as float32.

    Attributes:
        value: the number as a value of float64, shape ().
    """

    __slots__ = ("value",)
    __array_ufunc__ = None  # numpy_array * number goes to TracedNumber.__rmul__
    __hash__ = object.__hash__

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

    def __add__(self, other: Any) -> Any:
        return _apply("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return _apply("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return _apply("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _apply("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return _apply("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _apply("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _apply("div", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _apply("floor_divide", other, self)

    def __mod__(self, other: Any) -> Any:
        return _apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _apply("remainder", other, self)

    def __pow__(self, other: Any) -> Any:
        return _apply("power", self, other)

    def __rpow__(self, other: Any) -> Any:
        return _apply("power", other, self)

    def __neg__(self) -> Any:
        return _apply("neg", self)

    def __abs__(self) -> Any:
        return _apply("abs", self)

    def __eq__(self, other: Any) -> Any:
        return _compare("equal", self, other)

    def __ne__(self, other: Any) -> Any:
        return _compare("not_equal", self, other)

    def __lt__(self, other: Any) -> Any:
        return _compare("less", self, other)

    def __le__(self, other: Any) -> Any:
        return _compare("less_equal", self, other)

    def __gt__(self, other: Any) -> Any:
        return _compare("greater", self, other)

    def __ge__(self, other: Any) -> Any:
        return _compare("greater_equal", self, other)


NUMBERS = (bool, int, float, TracedNumber)
"""The types of numbers that take the dtype of the arrays beside them."""


def _apply(name: str, *args: Any) -> Any:
    """The operation ``name``: of numbers alone in float64, as a TracedNumber."""
    found = getattr(Value._ops, name)(*_in_float64(args))
    return TracedNumber(found) if all(isinstance(x, NUMBERS) for x in args) else found


def _compare(name: str, *args: Any) -> Any:
    return getattr(Value._ops, name)(*_in_float64(args))


def _in_float64(args: tuple[Any, ...]) -> list[Any]:
    """``args`` with traced numbers as float64 values, if there are no arrays among them."""
    alone = all(isinstance(x, NUMBERS) for x in args)
    return [x.value if alone and isinstance(x, TracedNumber) else x for x in args]
