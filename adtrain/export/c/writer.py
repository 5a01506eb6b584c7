"""The calls and arrays of a network in C, before its values have places in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from adtrain import nn
from adtrain.core.errors import AdtrainError


class Buffer:
    """A value of a sample that gets a place in memory: `size` elements of `itemsize` bytes. Compared by identity."""

    def __init__(self, size: int, itemsize: int = 4) -> None:
        self.size, self.itemsize = size, itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


class Part(NamedTuple):
    """The elements of a buffer from `start` on."""

    buffer: Buffer
    start: int


class Name(str):
    """C text that stands for itself in a call, such as the name of an array."""


Argument = Buffer | Part | Name | int | float
NULL = Name("NULL")


@dataclass(frozen=True)
class Call:
    """A call of a function of `kernels/export/`, or without a function a comment.

    Attributes:
        reads, writes: the buffers among its arguments. Memory that it uses for itself is among `writes`.
        in_place: whether the result may overwrite the first argument.
        checked: whether it returns 0 where it refuses the input.
    """

    function: str
    arguments: tuple[Argument, ...] = ()
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    in_place: bool = False
    checked: bool = False
    comment: str = ""


@dataclass
class Program:
    """What a network computes for a sample.

    Attributes:
        weights: the trained arrays that layers can use, by name.
        arrays: the constant arrays that the calls use, by their C names: float32, float64, int32 or int8.
        calls: in the order of execution.
        simd: whether arrays are in the layouts of `layers_simd.c`.
        int8: whether the calls are of functions of `layers_int8.c`.
        training: whether weights change: they are in PyTorch's layout, for the functions of `layers_training.c`.
    """

    weights: Mapping[str, np.ndarray]
    simd: bool = False
    int8: bool = False
    training: bool = False
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


class Writer(NamedTuple):
    """Adds the calls of one layer to a program. The names of its arrays are made of the layer's `path`."""

    program: Program
    path: tuple[str, ...] = ()

    def child(self, name: str) -> Writer:
        """The writer for the child module `name`."""
        return Writer(self.program, (*self.path, name))

    @property
    def simd(self) -> bool:
        return self.program.simd

    def comment(self, text: str) -> None:
        self.program.calls.append(Call("", comment=text))

    def call(
        self,
        function: str,
        x: Buffer | Part | Name,
        *arguments: Argument,
        size: int | None = None,
        out: Buffer | Part | Name | None = None,
        scratch: int = 0,
        in_place: bool = False,
        checked: bool = False,
    ) -> Buffer:
        """Add `function(x, arguments..., result[, scratch])` and return the result.

        Args:
            size: elements of the result, a new buffer; without it `out` is where the result is written.
            scratch: elements of memory that the function uses.
        """
        target = out if out is not None else Buffer(size or 0)
        given = (x, *arguments, target, *([Buffer(scratch)] if scratch else []))
        written = given[len(arguments) + 1 :]
        self.program.calls.append(
            Call(function, given, _buffers(given[: len(arguments) + 1]), _buffers(written), in_place, checked)
        )
        return target.buffer if isinstance(target, Part) else target  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        return ".".join((*self.path, name)) in self.program.weights

    def trained(self, name: str) -> np.ndarray:
        """The layer's trained array `name` in float32."""
        return self.program.weights[".".join((*self.path, name))].astype(np.float32)

    def weight(self, name: str) -> Name:
        """Add the layer's trained array `name` and return its C name; NULL where it has none."""
        return self.constant(name, self.trained(name)) if self.has(name) else NULL

    def matrix(self, name: str) -> Name:
        """Add the layer's matrix `name`, (outputs, inputs), in the layout that `linear` reads."""
        weight = self.trained(name)
        if self.program.training:
            return self.constant(name, weight)
        return self.constant(name, blocks_of_outputs(weight) if self.simd else weight.T)

    def constant(self, name: str, value: ArrayLike) -> Name:
        """Add a constant array, int8 as it is, other integers as int32, floats as float32; return its C name."""
        array = np.asarray(value)
        dtype = array.dtype if array.dtype == np.int8 else np.int32 if array.dtype.kind == "i" else np.float32
        return self._add(name, array.astype(dtype))

    def doubles(self, name: str, value: ArrayLike) -> Name:
        """Add a constant array of float64 and return its C name."""
        return self._add(name, np.asarray(value, np.float64))

    def _add(self, name: str, array: np.ndarray) -> Name:
        c_name = re.sub(r"\W", "_", "_".join(("layer", *self.path, name)))
        self.program.arrays[c_name] = array
        return Name(c_name)


def _buffers(arguments: tuple[Argument, ...]) -> tuple[Buffer, ...]:
    found = (x.buffer if isinstance(x, Part) else x for x in arguments)
    return tuple(x for x in found if isinstance(x, Buffer))


def blocks_of_outputs(weight: np.ndarray) -> np.ndarray:
    """A matrix (outputs, inputs) as the vector version of `linear` reads it, with zeros for missing outputs."""
    padded = np.pad(weight, ((0, -len(weight) % 8), (0, 0)))
    return np.concatenate([padded[i : i + 32].T.reshape(-1) for i in range(0, len(padded), 32)])


def vectors_of_filters(weight: np.ndarray) -> np.ndarray:
    """The weight of a convolution as `conv2d_vectors` reads it, with zeros for missing filters."""
    filters = weight.reshape(len(weight), -1)
    padded = np.pad(filters, ((0, -len(filters) % 8), (0, 0)))
    return padded.reshape(-1, 8, filters.shape[1]).transpose(0, 2, 1)


CONV = (
    "channels", "height", "width", "filters", "groups", "out_height", "out_width", "kernel_height", "kernel_width",
    "stride_y", "stride_x", "dilation_y", "dilation_x", "padding_y", "padding_x",
)  # fmt: skip
POOL = (
    "channels", "height", "width", "out_height", "out_width", "kernel_height", "kernel_width", "stride_y", "stride_x",
    "padding_y", "padding_x",
)  # fmt: skip
"""The members of the structs of `layers.c`."""


def struct(name: str, members: Sequence[str], sizes: Sequence[int]) -> Name:
    """The address of a struct as C text; members that are 0 are left out."""
    given = [f".{member} = {size}" for member, size in zip(members, sizes, strict=True) if size]
    return Name(f"&(struct {name}){{{', '.join(given)}}}")


def describe(writer: Writer, module: nn.Module, shape: nn.Shape) -> None:
    """Add a comment with the layer's name, kind, shapes and number of parameters."""
    text = f"{'.'.join(writer.path)} {module.kind()}: {size_text(shape)} -> {size_text(module.output_shape(shape))}"
    parameters = sum(map(prod, module.parameter_shapes(shape).values()))
    writer.comment(text + (f", {parameters:,} parameters" if parameters else ""))


def size_text(shape: nn.Shape) -> str:
    """The shape of a sample: "6x28x28"."""
    return "x".join(map(str, shape)) or "1"


def refuse(path: tuple[str, ...], module: nn.Module, reason: str) -> AdtrainError:
    return AdtrainError(f"layer {'.'.join(path)}: {module.kind()} {reason}")
