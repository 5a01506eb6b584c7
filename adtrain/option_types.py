"""Types of options: a Python type and its bounds.

The annotations of a layer, a loss or another class that a config names::

    @dataclass(frozen=True)
    class ELU(Module):
        alpha: Number = 1.0

Type checkers see `float`. `adtrain.core.options` checks the arguments of the class by these types, and pydantic the
values of a config.
"""

from __future__ import annotations

from typing import Annotated, Literal

from adtrain.core.options import LARGEST, Bounds, Expected, InConfig, Items, Matches

__all__ = [
    "LARGEST", "AtLeastOne", "Axis", "Bounds", "ClassWeights", "Count", "CountPair", "Degrees", "Expected", "Fraction",
    "Fractions", "InConfig", "Indices", "Items", "Matches", "NonNegative", "Number", "OpenShape", "Padding", "Patterns",
    "Positive",
    "Probability", "Shape", "Size", "SizeOrShape", "SizePair", "StepList", "Steps", "Text",
]  # fmt: skip

Size = Annotated[int, Bounds(ge=1, lt=2**31)]
Count = Annotated[int, Bounds(ge=0, lt=2**31)]
SizePair = Size | tuple[Size, Size]
CountPair = Count | tuple[Count, Count]
Padding = Count | tuple[Count, Count] | Literal["same"]
Shape = Annotated[tuple[Size, ...], Items(1)]
SizeOrShape = Size | Shape
Indices = Annotated[tuple[Count, ...], Items(1)]
OpenShape = Annotated[
    tuple[Size | Literal[-1], ...], Items(1), Expected("a list of positive integers, of which one may be -1")
]
Axis = Annotated[
    Annotated[int, Bounds(ge=-64, le=-1)] | Annotated[int, Bounds(ge=1, le=64)],
    Expected("the number of an axis in [-64, 64], other than 0, the axis of the batch"),
]

Number = Annotated[float, Bounds(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Bounds(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Bounds(ge=0, le=LARGEST)]
AtLeastOne = Annotated[float, Bounds(ge=1, le=LARGEST)]
Fraction = Annotated[float, Bounds(ge=0, lt=1)]
Fractions = tuple[Fraction, Fraction]
Probability = Annotated[float, Bounds(ge=0, le=1)]
Degrees = Annotated[float, Bounds(ge=0, le=360)]
Text = Annotated[str, Matches(r"^[^\x00]+$"), Expected("a string of UTF-8 text, not empty and without NUL")]
Patterns = Annotated[
    Text | Annotated[tuple[Text, ...], Items(1)], Expected("a pattern of paths such as *.bias, or a list of them")
]
ClassWeights = Annotated[tuple[NonNegative, ...], Items(1)]

_Epochs = Annotated[float, Bounds(gt=0, lt=2**31)]
Steps = Annotated[Size, InConfig(_Epochs)]
"""A number of steps. A config has it in epochs."""
StepList = Annotated[Shape, InConfig(Annotated[tuple[_Epochs, ...], Items(1)])]
"""Numbers of steps. A config has them in epochs."""
