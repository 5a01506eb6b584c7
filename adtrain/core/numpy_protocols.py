"""NumpyProtocols: what NumPy and Python's `format` do with values."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.types import Shape

_OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "floor_divide": "floor_divide",
    "remainder": "remainder", "power": "power", "matmul": "matmul", "equal": "equal", "not_equal": "not_equal",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "less": "less", "less_equal": "less_equal", "greater": "greater", "greater_equal": "greater_equal",
}  # fmt: skip
"""NumPy's functions behind the operators of arrays, and the operations of `adtrain.ops` that compute the same."""
_OTHER_NAMES = {"invert": "bitwise_not", "negative": "neg", "absolute": "abs", "fabs": "abs", "rint": "round"}
"""Operations that have another name in NumPy."""


class NumpyProtocols:
    """A base of values: ``numpy_array * value`` is an operation, and NumPy's other functions say what to use."""

    __slots__ = ()
    __array_priority__ = 1000.0

    shape: Shape
    dtype: np.dtype
    _ops: Any

    def numpy(self) -> np.ndarray:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        elements = self.numpy()
        return elements.astype(dtype) if dtype is not None or copy else elements

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions, such as np.sum, take the elements and return NumPy arrays; a tracer has none."""
        args, kwargs = tree.map(lambda x: x.numpy() if isinstance(x, NumpyProtocols) else x, (args, kwargs))
        return function(*args, **kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        """The operator of a NumPy array and a value.

        Raises:
            DTypeError: for all other universal functions, with the operation to use.
        """
        name = ufunc.__name__
        if method == "__call__" and name in _OPERATORS and not kwargs:
            return getattr(self._ops, _OPERATORS[name])(*args)
        if kwargs.get("out") is not None:
            if any(isinstance(out, NumpyProtocols) for out in kwargs["out"]):
                raise DTypeError(f"np.{name}: found an adtrain array as output, which does not change; write y = x + 1")
            raise DTypeError(f"np.{name}: found an adtrain array and a NumPy array as output; write y = y + x")
        own = _OTHER_NAMES.get(name, name)
        same = method == "__call__" and hasattr(self._ops, own)
        advice = f"use ad.ops.{own}" if same else "convert it with x.numpy()"
        raise DTypeError(f"np.{name}: found an adtrain array, expected NumPy arrays; {advice}")

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.shape:
            raise ShapeError(f"format: found shape {self.shape} for {spec!r}, expected a 0-d array")
        return format(self.numpy().item(), spec)
