"""The arguments of a staged function: which leaves are traced, which are static, and their types."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.errors import DTypeError
from adtrain.core.staging_trace import StagingTrace
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


class StaticLeaf(NamedTuple):
    """The type of a static value: the value itself, a tree. Another value has another Program.

    Values that compare equal may have different Programs, so the key of a number has its type (1 == 1.0 == True), and
    that of a float its digits (0.0 == -0.0). The digits also make one key of all NaNs, which compare unequal.
    """

    structure: tree.TreeDef
    keys: tuple[Any, ...]

    @classmethod
    def of(cls, x: Any) -> StaticLeaf:
        leaves, structure = tree.flatten(x)
        return cls(structure, tuple((type(v), v.hex() if isinstance(v, float) else v) for v in leaves))

    def matches(self, x: Any) -> bool:
        """Whether ``x`` is this value."""
        return not isinstance(x, (Value, TracedNumber)) and StaticLeaf.of(x) == self


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
        DTypeError: an argument is declared static and holds an array.
    """
    if isinstance(x, Value):
        return ArrayLeaf(x.shape, x.dtype, x.device)
    if isinstance(x, TracedNumber):
        return NumberLeaf(x.device)
    value = x.value if isinstance(x, StaticArgument) else x
    if any(isinstance(v, (Value, TracedNumber, np.ndarray)) for v in tree.leaves(value)):
        raise DTypeError("jit: a static argument holds an array, expected numbers, strings or other objects")
    return StaticLeaf.of(value)


def traced(trace: StagingTrace, x: Any) -> Any:
    """What the function gets for a leaf while it is traced."""
    if isinstance(x, TracedNumber):
        return TracedNumber(trace.input(x.value))
    if isinstance(x, Value):
        return trace.input(x)
    return x.value if isinstance(x, StaticArgument) else x
