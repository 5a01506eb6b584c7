"""The bases of values: operators and methods, which call the functions of ``adtrain.ops``; what NumPy does with values.

For attributes that arrays of other libraries have, there is advice on what to write here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from adtrain.core import tree
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.types import Shape

V = TypeVar("V")


class _OpsWhenUsed:
    """The functions of adtrain.ops, a module that this one cannot import, which calls `bind_operators`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("adtrain.ops"), name)


class Arithmetic(Generic[V]):
    """The arithmetic operators and comparisons, which give V."""

    __slots__ = ()
    __hash__ = object.__hash__

    _ops: Any = _OpsWhenUsed()

    def __add__(self, other: Any) -> V:
        return self._ops.add(self, other)

    def __radd__(self, other: Any) -> V:
        return self._ops.add(other, self)

    def __sub__(self, other: Any) -> V:
        return self._ops.sub(self, other)

    def __rsub__(self, other: Any) -> V:
        return self._ops.sub(other, self)

    def __mul__(self, other: Any) -> V:
        return self._ops.mul(self, other)

    def __rmul__(self, other: Any) -> V:
        return self._ops.mul(other, self)

    def __truediv__(self, other: Any) -> V:
        return self._ops.div(self, other)

    def __rtruediv__(self, other: Any) -> V:
        return self._ops.div(other, self)

    def __floordiv__(self, other: Any) -> V:
        return self._ops.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> V:
        return self._ops.floor_divide(other, self)

    def __mod__(self, other: Any) -> V:
        return self._ops.remainder(self, other)

    def __rmod__(self, other: Any) -> V:
        return self._ops.remainder(other, self)

    def __pow__(self, other: Any) -> V:
        return self._ops.power(self, other)

    def __rpow__(self, other: Any) -> V:
        return self._ops.power(other, self)

    def __neg__(self) -> V:
        return self._ops.neg(self)

    def __abs__(self) -> V:
        return self._ops.abs(self)

    def __eq__(self, other: Any) -> V:  # type: ignore[override]
        return self._ops.equal(self, other)

    def __ne__(self, other: Any) -> V:  # type: ignore[override]
        return self._ops.not_equal(self, other)

    def __lt__(self, other: Any) -> V:
        return self._ops.less(self, other)

    def __le__(self, other: Any) -> V:
        return self._ops.less_equal(self, other)

    def __gt__(self, other: Any) -> V:
        return self._ops.greater(self, other)

    def __ge__(self, other: Any) -> V:
        return self._ops.greater_equal(self, other)


class Operators(Arithmetic[V]):
    """A base of `Value`, which is V, the type of the results. The methods have the names and the meaning of NumPy's.

    `bind_operators` replaces `_ops` by adtrain.ops.
    """

    __slots__ = ()

    @property
    def T(self) -> V:
        """The axes in reversed order."""
        return self._ops.transpose(self)

    def __matmul__(self, other: Any) -> V:
        return self._ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> V:
        return self._ops.matmul(other, self)

    def __and__(self, other: Any) -> V:
        return self._ops.bitwise_and(self, other)

    def __rand__(self, other: Any) -> V:
        return self._ops.bitwise_and(other, self)

    def __or__(self, other: Any) -> V:
        return self._ops.bitwise_or(self, other)

    def __ror__(self, other: Any) -> V:
        return self._ops.bitwise_or(other, self)

    def __xor__(self, other: Any) -> V:
        return self._ops.bitwise_xor(self, other)

    def __rxor__(self, other: Any) -> V:
        return self._ops.bitwise_xor(other, self)

    def __invert__(self) -> V:
        return self._ops.bitwise_not(self)

    def __getitem__(self, index: Any) -> V:
        return self._ops.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise DTypeError("x[...] = y: the elements of an adtrain array do not change; write x = ops.where(mask, y, x)")

    def sum(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.sum(self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.mean(self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.max(self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.min(self, axis, keepdims)

    def prod(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.prod(self, axis, keepdims)

    def var(self, axis: Any = None, keepdims: bool = False, correction: int = 0) -> V:
        return self._ops.var(self, axis, keepdims, correction)

    def std(self, axis: Any = None, keepdims: bool = False, correction: int = 0) -> V:
        return self._ops.std(self, axis, keepdims, correction)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> V:
        return self._ops.argmax(self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> V:
        return self._ops.argmin(self, axis, keepdims)

    def argsort(self, axis: int = -1) -> V:
        return self._ops.argsort(self, axis)

    def any(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.any(self, axis, keepdims)

    def all(self, axis: Any = None, keepdims: bool = False) -> V:
        return self._ops.all(self, axis, keepdims)

    def reshape(self, *shape: Any) -> V:
        return self._ops.reshape(self, shape[0] if len(shape) == 1 else shape)

    def ravel(self) -> V:
        return self._ops.reshape(self, -1)

    def squeeze(self, axis: Any = None) -> V:
        return self._ops.squeeze(self, axis)

    def repeat(self, repeats: Any, axis: int | None = None) -> V:
        return self._ops.repeat(self, repeats, axis)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> V:
        return self._ops.diagonal(self, offset, axis1, axis2)

    def clip(self, min: Any = None, max: Any = None) -> V:
        return self._ops.clip(self, min, max)

    def transpose(self, *axes: Any) -> V:
        return self._ops.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def astype(self, dtype: Any) -> V:
        return self._ops.astype(self, dtype)


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


_GRADIENT = "functions are differentiated, not arrays: write ad.grad(f)(x)"
_UNCHANGED = "arrays do not change: use x itself"
_NEW = "arrays do not change: write x = ops.where(mask, y, x)"
_ADVICE = {
    "assign": "arrays do not change: write x = y",
    "assign_add": "arrays do not change: write x = x + y",
    "assign_sub": "arrays do not change: write x = x - y",
    "at": _NEW,
    "backward": _GRADIENT,
    "bmm": "write x @ y",
    "bool": "write x.astype('bool')",
    "chunk": "write ops.split(x, parts, axis)",
    "clone": _UNCHANGED,
    "contiguous": _UNCHANGED,
    "copy": _UNCHANGED,
    "cpu": "write x.to('cpu')",
    "cuda": "write x.to('gpu')",
    "detach": "write ops.stop_gradient(x)",
    "dim": "write x.ndim",
    "dot": "write x @ y",
    "double": "write x.astype('float64')",
    "expand": "write ops.broadcast_to(x, shape)",
    "flatten": "write x.ravel()",
    "float": "write x.astype('float32')",
    "gather": "write ops.take_along_axis(x, indices, axis)",
    "grad": _GRADIENT,
    "index_select": "write ops.take(x, indices, axis)",
    "int": "write x.astype('int32')",
    "long": "write x.astype('int64')",
    "masked_fill": "write ops.where(mask, value, x)",
    "mm": "write x @ y",
    "numel": "write x.size",
    "permute": "write x.transpose(axes)",
    "pow": "write x ** y",
    "requires_grad": _GRADIENT,
    "requires_grad_": _GRADIENT,
    "scatter": _NEW,
    "swapaxes": "write x.transpose(axes)",
    "t": "write x.T",
    "tolist": "write x.numpy().tolist()",
    "type": "write x.astype(dtype)",
    "unsqueeze": "write ops.expand_dims(x, axis)",
    "view": "write x.reshape(shape)",
}

_TREES = "its arrays are a tree: write params, state = model.init(shape)"
_MODE = "the mode is an argument: model.forward(params, state, x, mode)"
_DEVICE = "arrays have the device: write tree.map(lambda x: x.to('gpu'), params)"

OF_PYTORCH_MODULES = {
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "load_state_dict"), _TREES),
    **dict.fromkeys(("train", "eval"), _MODE),
    **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
}
"""What to write instead of attributes of PyTorch's modules."""

OF_PYTORCH_OPTIMIZERS = {
    "step": "write params, state = optimizer.update(params, grads, state)",
    "zero_grad": "gradients are not stored: remove it",
    "param_groups": "the learning rate is an argument: optimizer.update(params, grads, state, lr)",
}
"""What to write instead of attributes of PyTorch's optimizers."""


def advice(name: str, ops: ModuleType) -> str | None:
    """What to write instead of the attribute ``name`` of an array; None if that is unknown."""
    if name in _ADVICE:
        return _ADVICE[name]
    if name in ops.__all__:
        return f"write ops.{name}(x, ...)"
    if name.endswith("_") and not name.startswith("_"):
        return "arrays do not change: write x = x + y"
    return None
