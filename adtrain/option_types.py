"""Types of options: a Python type, its bounds, and a description for error messages.

The annotations of a layer, a loss or another class that a config names::

    @dataclass(frozen=True)
    class ELU(Module):
        alpha: Number = 1.0

Type checkers see `float`. A config's values are checked by pydantic, which calls the methods of the metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

LARGEST = 3.4e38
"""The largest number of an option: a step in float32 cannot hold more."""


@dataclass(frozen=True)
class Expected:
    """A description of the values of a type, which replaces pydantic's error messages."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "custom-error",
            "schema": handler(source),
            "custom_error_type": "expected",
            "custom_error_message": self.words,
        }


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number. true is not an integer, "3" is not a number, and NaN is within no bounds."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        schema = {**handler(source), "strict": True}
        if schema["type"] == "float":
            schema["allow_inf_nan"] = False
        return schema | {name: bound for name, bound in vars(self).items() if bound is not None}


@dataclass(frozen=True)
class Items:
    """The least number of items of a tuple."""

    least: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "min_length": self.least}


@dataclass(frozen=True)
class InConfig:
    """The type of the option in a config, where that differs from the type in Python."""

    type: Any


_Size = Annotated[int, Bounds(ge=1, lt=2**31)]
_Count = Annotated[int, Bounds(ge=0, lt=2**31)]
_Fraction = Annotated[float, Bounds(ge=0, lt=1)]
_Epochs = Annotated[float, Bounds(gt=0, lt=2**31)]

Size = Annotated[_Size, Expected("a positive integer below 2^31")]
Count = Annotated[_Count, Expected("an integer in [0, 2^31)")]
SizePair = Annotated[_Size | tuple[_Size, _Size], Expected("a positive integer or a list of two")]
CountPair = Annotated[_Count | tuple[_Count, _Count], Expected("an integer of at least 0 or a list of two")]
Padding = Annotated[
    _Count | tuple[_Count, _Count] | Literal["same"], Expected("an integer of at least 0, a list of two, or 'same'")
]
Shape = Annotated[tuple[_Size, ...], Items(1), Expected("a list of positive integers")]
SizeOrShape = Annotated[
    _Size | Annotated[tuple[_Size, ...], Items(1)], Expected("a positive integer or a list of them")
]
Indices = Annotated[tuple[_Count, ...], Items(1), Expected("a list of integers of at least 0")]
OpenShape = Annotated[
    tuple[_Size | Literal[-1], ...], Items(1), Expected("a list of positive integers, of which one may be -1")
]
Axis = Annotated[int, Bounds(ge=-64, le=64), Expected("an integer, the number of an axis")]

Number = Annotated[float, Bounds(ge=-LARGEST, le=LARGEST), Expected("a finite number, at most 3.4e38 in size")]
Positive = Annotated[float, Bounds(gt=0, le=LARGEST), Expected("a finite number above 0, at most 3.4e38")]
NonNegative = Annotated[float, Bounds(ge=0, le=LARGEST), Expected("a finite number of at least 0, at most 3.4e38")]
AtLeastOne = Annotated[float, Bounds(ge=1, le=LARGEST), Expected("a finite number of at least 1, at most 3.4e38")]
Fraction = Annotated[_Fraction, Expected("a number in [0, 1)")]
Fractions = Annotated[tuple[_Fraction, _Fraction], Expected("a list of two numbers in [0, 1)")]
Probability = Annotated[float, Bounds(ge=0, le=1), Expected("a number in [0, 1]")]
Degrees = Annotated[float, Bounds(ge=0, le=360), Expected("a number of degrees in [0, 360]")]
ClassWeights = Annotated[
    tuple[Annotated[float, Bounds(ge=0, le=LARGEST)], ...],
    Items(1),
    Expected("a list of finite numbers of at least 0, at most 3.4e38, one for each class"),
]

Steps = Annotated[int, InConfig(Annotated[_Epochs, Expected("a number above 0 and below 2^31")])]
"""A number of steps. A config has it in epochs."""
StepList = Annotated[
    tuple[int, ...],
    InConfig(Annotated[tuple[_Epochs, ...], Items(1), Expected("a list of numbers above 0 and below 2^31")]),
]
"""Numbers of steps. A config has them in epochs."""
