"""Options of windows that move over an image of one, two or three axes: for convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import fits, shown, words
from adtrain.ops.shape import pad
from adtrain.option_types import Count, Size

Ints = int | Sequence[int]
Padding = str | int | Sequence[int | Sequence[int]]
Pairs = tuple[tuple[int, int], ...]

LIMIT = 2**31
"""Images have fewer elements: kernels index an image with 32-bit integers."""


def per_axis(name: str, option: str, value: Ints, axes: int) -> tuple[int, ...]:
    """One integer for each of ``axes`` axes, from one integer for all or one for each."""
    found: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes
    size = Count if option in ("padding", "output_padding") else Size
    if len(found) != axes or not all(fits(n, size) for n in found):
        more = f", or {axes} of them" if axes > 1 else ""
        raise OptionError(f"{name}: {option} is {shown(value)}, expected {words(size)}{more}")
    return tuple(int(n) for n in found)


def paddings(
    name: str, padding: Padding, lengths: Sequence[int], spans: Sequence[int], strides: Sequence[int]
) -> Pairs:
    """The padding (before, after) of each axis.

    Args:
        padding: an integer for all axes, an integer for each axis, a pair (before, after) for each axis, "valid" (no
            padding), or "same": as many zeros as ``ceil(length / stride)`` windows need, the odd one after the image.
        spans: lengths of the windows, dilation included.

    Raises:
        OptionError: ``padding`` has another form, or is negative.
        ShapeError: it makes an image of 2^31 elements or more.
    """
    axes = len(lengths)
    if padding == "valid":
        return ((0, 0),) * axes
    if padding == "same":
        totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(lengths, spans, strides, strict=True)]
        found: Pairs = tuple((total // 2, total - total // 2) for total in totals)
    elif isinstance(padding, str):
        raise OptionError(f'{name}: padding is {shown(padding)}, expected integers, "same" or "valid"')
    elif isinstance(padding, (tuple, list)) and any(isinstance(p, (tuple, list)) for p in padding):
        if len(padding) != axes or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in padding):
            raise OptionError(f"{name}: padding is {shown(padding)}, expected {axes} pairs (before, after)")
        pairs = [per_axis(name, "padding", p, 2) for p in padding if not isinstance(p, int)]
        found = tuple((low, high) for low, high in pairs)
    else:
        found = tuple((p, p) for p in per_axis(name, "padding", padding, axes))  # type: ignore[arg-type]
    if int(np.prod([n + sum(p) for n, p in zip(lengths, found, strict=True)], dtype=object)) >= LIMIT:
        raise ShapeError(f"{name}: the image {tuple(lengths)} with padding {padding} has 2^31 elements or more")
    return found


def pad_image(x: Value, widths: Pairs) -> Value:
    """``x`` with zeros before and after the elements of its last axes."""
    if not any(map(any, widths)):
        return x
    return pad(x, ((0, 0),) * (x.ndim - len(widths)) + widths)
