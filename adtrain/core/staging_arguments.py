"""The arguments of a staged function: which leaves are traced, which are static, and their types."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.errors import DTypeError
from adtrain.core.staging_trace import StagingTrace
from adtrain.core.static_key import is_constant, static_key
from adtrain.core.traced_number import TracedNumber
from adtrain.core.types import Shape

STATIC = (bool, int, str, bytes, type, np.dtype, Enum)
"""The types of leaves that are static without being declared so."""


@dataclass(frozen=True)
class Declared:
    """Arguments of a function, by position and by name."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def __contains__(self, place: int | str) -> bool:
        return place in self.positions or place in self.names


NOTHING = Declared()


@dataclass(frozen=True)
class StaticArgument:
    """A whole argument that is declared static, as one leaf."""

    tree_leaf: ClassVar[bool] = True
    value: Any


class ArrayLeaf(NamedTuple):
    """The type of an array."""

    shape: Shape
    dtype: np.dtype
    device: str


class NumberLeaf(NamedTuple):
    """The type of a Python float: it is passed to the Program as a float64 array of shape () on ``device``."""

    device: str

    def array(self, x: float) -> Array:
        return array(np.float64(x), device=self.device)


@dataclass(frozen=True)
class StaticLeaf:
    """The type of a static value: its `static_key`. Another value has another Program."""

    key: Hashable
    same: Any = field(compare=False)
    """The value if it `is_constant`, which makes `matches` fast; otherwise an object that no value is."""

    @classmethod
    def of(cls, x: Any) -> StaticLeaf:
        key = static_key(x)
        return cls(key, x if is_constant(key) else object())

    def static_parts(self) -> tuple[Any, ...]:
        return (self.key,)

    def matches(self, x: Any) -> bool:
        """Whether ``x`` is this value."""
        if x is self.same:
            return True
        if isinstance(x, (Value, TracedNumber, np.ndarray)):
            return False
        try:
            return static_key(x) == self.key
        except TypeError:  # x is not hashable
            return False


LeafType = ArrayLeaf | NumberLeaf | StaticLeaf


def leaf(x: Any, device: str) -> Any:
    """A leaf as a Value, a TracedNumber, or a static value.

    Args:
        device: where NumPy arrays and floats go.

    Raises:
        DTypeError: it is an object of another type that is not declared static.
    """
    if isinstance(x, (Value, TracedNumber, StaticArgument)):
        return x
    if isinstance(x, float):  # also np.float64, which all operations take as a float
        return TracedNumber(array(np.float64(x), device=device))
    if isinstance(x, (np.ndarray, np.generic)):
        return array(x, device=device)
    if isinstance(x, STATIC):
        return x
    raise DTypeError(
        f"jit: found an argument of type {type(x).__name__}, expected arrays and numbers; if it is a constant of the "
        "function, declare it with jit(f, static_argnums=...)"
    )


def type_of(x: Any) -> LeafType:
    """The type of a leaf.

    Raises:
        DTypeError: an argument is declared static and holds an array, or is not hashable.
    """
    if isinstance(x, Value):
        return ArrayLeaf(x.shape, x.dtype, x.device)
    if isinstance(x, TracedNumber):
        return NumberLeaf(x.device)
    value = x.value if isinstance(x, StaticArgument) else x
    if any(isinstance(v, (Value, TracedNumber, np.ndarray)) for v in tree.leaves(value)):
        raise DTypeError("jit: a static argument holds an array, expected numbers, strings or other objects")
    try:
        return StaticLeaf.of(value)
    except TypeError as error:
        raise DTypeError(f"jit: a static argument is not hashable: {error}") from None


def traced(trace: StagingTrace, x: Any) -> Any:
    """What the function gets for a leaf while it is traced."""
    if isinstance(x, TracedNumber):
        return TracedNumber(trace.input(x.value))
    if isinstance(x, Value):
        return trace.input(x)
    return x.value if isinstance(x, StaticArgument) else x
