"""Operators: the operators and methods of values, which call the functions of ``adtrain.ops``."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Generic, TypeVar

from adtrain.core.errors import DTypeError

V = TypeVar("V")


class _OpsWhenUsed:
    """The functions of adtrain.ops, a module that this one cannot import, which calls `bind_operators`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("adtrain.ops"), name)


class Operators(Generic[V]):
    """A base of `Value`, which is V, the type of the results. The methods have the names and the meaning of NumPy's."""

    __slots__ = ()
    __hash__ = object.__hash__

    _ops: Any = _OpsWhenUsed()  # bind_operators replaces it by adtrain.ops

    @property
    def T(self) -> V:
        """The axes in reversed order."""
        return self._ops.transpose(self)

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
