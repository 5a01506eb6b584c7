"""The CUDA kernels for pooling (`kernels/cuda/pool/pool.cu`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel

CELL = 16
"""Elements of a stride, or of a window, up to which a thread has several."""
VECTOR = 16
"""Bytes that it writes at once."""
SUMMING, WARP = 256, 32
"""Threads of a block that sums, and of a warp."""
CELLS, MANY_BLOCKS = 4, 2048
"""Cells of the image that a thread which sums should have, at least, and blocks that there should be, if possible."""


def kernel(
    name: str, shapes: Callable[..., tuple[Sequence[int], Sequence[int]]], gathers: bool = False
) -> LegacyKernel:
    """A kernel: ``shapes`` of the image and the pooled one from the arguments, a thread for each element of the pooled
    one or, if it ``gathers``, for each cell of the image."""

    def at_once(*args: Any, windows: Any, **params: Any) -> int:
        """Neighbouring outputs of a thread: AT_ONCE of `pool/pool.cu`."""
        columns = shapes(*args, windows=windows, **params)[1][3]
        return 1 if math.prod(windows.kernel) > CELL else math.gcd(columns, 2)

    def definitions(*args: Any, windows: Any, **params: Any) -> dict[str, int]:
        found = _macros(windows)
        return found if gathers else {**found, "AT_ONCE": at_once(*args, windows=windows, **params)}

    def numbers(*args: Any, **params: Any) -> tuple[int, ...]:
        x, y = shapes(*args, **params)
        return (x[0] * x[1], *x[2:], *y[2:])

    def elements(*args: Any, windows: Any, **params: Any) -> int:
        x, y = shapes(*args, windows=windows, **params)
        if not gathers:
            return math.prod(y) // at_once(*args, windows=windows, **params)
        few = math.prod(windows.stride) <= CELL
        return -(-math.prod(x) // (math.prod(_cell(windows, args[0].dtype.itemsize)) if few else 1))

    return LegacyKernel("pool/pool.cu", name, numbers, elements=elements, definitions=definitions)


def put_sum(ct: Any, where: Any, windows: Any, shape: tuple[int, ...]) -> tuple[LegacyKernel, ...]:
    """The kernel for max_pool2d_put with the sums of ct, where all windows lie in the image and a thread has cells."""
    if windows.padding != (0, 0) or math.prod(windows.stride) > CELL or ct.size == 0:
        return ()
    images, channels, *image = shape
    rows, columns = (-(-n // cell) for n, cell in zip(image, _cell(windows, ct.dtype.itemsize), strict=True))
    parts = min(-(-images * rows * columns // (SUMMING * CELLS)), -(-MANY_BLOCKS // channels))
    put = LegacyKernel(
        "pool/pool.cu",
        "max_pool2d_put_sum",
        lambda *_, **__: (images * channels, *image, *ct.shape[2:], channels, parts),
        blocks=lambda *_, **__: (channels, parts),
        threads=lambda *_, **__: SUMMING,
        definitions=lambda *_, **__: _macros(windows),
        scratch=lambda *_, **__: channels * parts * ct.dtype.itemsize,
    )
    add = replace(
        put,
        name="max_pool2d_put_sum_parts",
        numbers=lambda *_, **__: (channels, parts),
        blocks=None,
        threads=None,
        elements=lambda *_, **__: channels * WARP,
    )
    return (replace(put, then=add),)


def _cell(windows: Any, itemsize: int) -> tuple[int, int]:
    """Rows and columns of the image that a thread gathers."""
    rows, columns = windows.stride
    wide = VECTOR // itemsize
    return rows, columns if wide % columns else wide


def _macros(windows: Any) -> dict[str, int]:
    values = (*windows.kernel, *windows.stride, *windows.padding)
    return dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), values, strict=True))
