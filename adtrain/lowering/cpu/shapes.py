"""What the operations' C functions share: the numbers that describe shapes to them, and the two forms they come in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adtrain.core.kernel import CKernel, first_dtype, no_bytes
from adtrain.core.precision import FULL
from adtrain.core.types import Shape

REDUCTION_SCRATCH = 64 * 64 * 8
"""Bytes that a reduction by all threads needs: FEW * PARTS in kernels/cpu/reduce.h."""

COPY_AXES = 8
"""Axes that kernels/cpu/copy.c goes through."""


def both_forms(
    file: str,
    name: str,
    numbers: Callable[..., Sequence[int | float]],
    items: Callable[..., tuple[bool, ...] | None],
    dtypes: Callable[..., tuple[np.dtype, ...]] = first_dtype,
    scratch: Callable[..., int] = no_bytes,
    checked: bool = False,
) -> tuple[CKernel, CKernel]:
    """The function ``name`` for one item, and ``name_team`` for all threads at once, which may need ``scratch``."""
    return (
        CKernel(file, name, numbers, dtypes, items, checked=checked),
        CKernel(file, f"{name}_team", numbers, dtypes, team=True, scratch=scratch, checked=checked),
    )


def kept(x: Any, axes: Sequence[int], **params: Any) -> tuple[bool, ...] | None:
    """Items of a function of one array that reduces ``axes``."""
    return (True,) if x.shape and 0 not in axes else None


def beside(x: Any, axis: int, **params: Any) -> tuple[bool, ...] | None:
    """Items of a function of one array that works along ``axis``."""
    return (True,) if axis > 0 else None


def around(shape: Shape, axis: int) -> tuple[int, int, int]:
    """A shape as three lengths: before ``axis``, along it, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def alternating(shape: Shape, axes: Sequence[int], count: int) -> tuple[int, ...]:
    """A shape as ``count`` lengths, in turns of kept and of reduced axes; the last one is of reduced axes.

    Raises:
        NotImplementedError: they alternate more often.
    """
    lengths = [1]  # from the last one
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] != 1:
            if (i in axes) != (len(lengths) % 2 == 1):
                lengths.append(1)
            lengths[-1] *= shape[i]
    if len(lengths) > count:
        raise NotImplementedError(f"a reduction of shape {shape} over axes {tuple(axes)}")
    return (*[1] * (count - len(lengths)), *reversed(lengths))


def reduction(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The lengths that kernels/cpu/reduce.h takes."""
    return alternating(x.shape, axes, 6)


def contiguous(shape: Shape) -> tuple[int, ...]:
    """Elements from one index to the next, for each axis of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def in_full(name: str, precision: str) -> None:
    """NotImplementedError for rounded products: the C functions compute in full precision only."""
    if precision != FULL:
        raise NotImplementedError(f"{name} in {precision}")


def copy_numbers(
    lengths: Sequence[int], source_steps: Sequence[int], target_steps: Sequence[int], source: int = 0, target: int = 0
) -> tuple[int, ...]:
    """The numbers that kernels/cpu/copy.c takes, for axes in the target's order.

    Raises:
        NotImplementedError: there are more than COPY_AXES axes that cannot be passed through as one.
    """
    axes: list[tuple[int, int, int]] = []
    for length, a, b in zip(lengths, source_steps, target_steps, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (a * length, b * length):
            length *= axes.pop()[0]
        axes.append((length, a, b))
    if len(axes) > COPY_AXES:
        raise NotImplementedError(f"a copy of shape {tuple(lengths)}")
    lines = [axis for axis in axes[:-1] if axis[1] == 1]  # contiguous in the source, and not in the target
    if lines:
        axes.remove(lines[0])
        axes.insert(-1, lines[0])
    axes = [(1, 0, 0)] * (COPY_AXES - len(axes)) + axes
    if axes[-1] == (1, 0, 0):  # one element
        axes[-1] = (1, 1, 1)
    return (*(axis[k] for k in range(3) for axis in axes), source, target)
