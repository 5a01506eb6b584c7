"""Layers on sequences of tokens, (tokens, width)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.nn.init import drawn
from adtrain.nn.module import (
    IMAGE_AXES,
    TOKEN_AXES,
    Mode,
    Module,
    Params,
    Shape,
    State,
    axis_of,
    check_ndim,
    pair,
    size_text,
)
from adtrain.option_types import Axis, SizePair

LONGEST_WAVE = 10_000.0
"""The wavelength of the slowest sinusoid is 2π times this (Vaswani et al. 2017)."""


@dataclass(frozen=True)
class Patches(Module):
    """An image as tokens, its patches row by row: (C, H, W) -> (H/p * W/p, C p²).

    A patch's numbers are in the order channel, row, column, as in torch.nn.Unfold. With a linear layer after it, this
    is the patch embedding of A. Dosovitskiy et al., "An image is worth 16x16 words", 2021.
    """

    patch_size: SizePair

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        rows, columns = self._count(shape)
        height, width = pair(self.patch_size)
        return rows * columns, shape[0] * height * width

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        images, channels = x.shape[:2]
        (rows, columns), (height, width) = self._count(x.shape[1:]), pair(self.patch_size)
        split = ops.reshape(x, (images, channels, rows, height, columns, width))
        return ops.reshape(ops.transpose(split, (0, 2, 4, 1, 3, 5)), (images, *self.output_shape(x.shape[1:]))), state

    def _count(self, shape: Shape) -> tuple[int, int]:
        """Patches in a column and in a row of an image."""
        height, width = pair(self.patch_size)
        if shape[1] % height or shape[2] % width:
            patch, image = size_text((height, width)), size_text(shape[1:])
            raise ShapeError(f"patches: patches of {patch} do not divide the image of {image}")
        return shape[1] // height, shape[2] // width


@dataclass(frozen=True)
class PositionalEmbedding(Module):
    """x plus a vector for each position: (tokens, width) -> (tokens, width).

    learned: the "weight" (tokens, width), drawn from N(0, 0.02²). sinusoidal: sines and cosines of the position, of
    wavelengths from 2π to 2π * 10,000; no parameters (A. Vaswani et al., "Attention is all you need", 2017).
    """

    encoding: Literal["learned", "sinusoidal"] = "learned"

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, TOKEN_AXES)
        return shape

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": shape} if self.encoding == "learned" else {}

    def new_cache(self, shape: Shape, batch: int, dtype: np.dtype[Any]) -> State:
        return {}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        sizes = self.parameter_shapes(shape)
        return {name: drawn("trunc_normal", size, rng, dtype) for name, size in sizes.items()}, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        if self.encoding == "learned":
            table = params["weight"]
        else:
            tokens = x.shape[1] if mode.token is None else mode.token.length
            table = array(sinusoids(tokens, x.shape[2]).astype(x.dtype), device=x.device)
        if mode.token is not None:
            token = mode.token
            in_document = token if token.start is None else replace(token, position=token.position - token.start)
            table = in_document.row_of(table)
        elif mode.starts is not None:
            table = ops.embedding(ops.arange(x.shape[1], dtype="int32", device=x.device) - mode.starts, table)
        return ops.add(x, table), state


def sinusoids(tokens: int, width: int) -> np.ndarray:
    """(tokens, width): sin(t / f) in even and cos(t / f) in odd columns; f = 10,000^(2 floor(column / 2) / width)."""
    columns = np.arange(width)
    angles = np.arange(tokens)[:, None] * LONGEST_WAVE ** (-(columns - columns % 2) / width)
    return np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))


@dataclass(frozen=True)
class ClassToken(Module):
    """A token more, before the others: (tokens, width) -> (tokens + 1, width).

    It is the "weight" (1, width), drawn from N(0, 0.02²). A classification reads its output (J. Devlin et al., BERT,
    2018): `select: [0]` and `flatten`.
    """

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, TOKEN_AXES)
        return shape[0] + 1, shape[1]

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": (1, shape[1])}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        return {"weight": drawn("trunc_normal", (1, shape[1]), rng, dtype)}, {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        token = ops.broadcast_to(params["weight"], (x.shape[0], 1, x.shape[2]))
        return ops.concatenate([token, x], axis=1), state


@dataclass(frozen=True)
class Mean(Module):
    """The mean over one axis: with `dim` 1 over the tokens, (tokens, width) -> (width,). Axis 0 is the batch."""

    dim: Axis = 1

    def output_shape(self, shape: Shape) -> Shape:
        axis = axis_of(self, self.dim, shape)
        if shape[axis] == 0:
            raise ShapeError(f"mean: the input {shape} has no elements along dim {self.dim}")
        return (*shape[:axis], *shape[axis + 1 :])

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.mean(x, self.dim), state
