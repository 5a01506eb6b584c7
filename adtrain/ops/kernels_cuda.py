"""The CUDA kernels of all operations but products, convolutions and pooling: which of `kernels/cuda`, and when.

How work is divided follows from the shapes alone, so that every device computes the same bits; how it is spread over a
device is the backend's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import CudaKernel
from adtrain.ops.kernels import alternating, around

WARP = 32
FEW = 1024
"""Elements that a warp goes through by itself; more are for a block."""
MANY_BLOCKS = 1024
"""As many blocks keep the largest GPU busy; a reduction of fewer is divided into parts."""
LEAST_ROW, LEAST_COLUMN = 8192, 512
"""Elements of an output in a part that is worth a block of its own."""
MOST_PARTS = 1024
VECTOR = 16
"""Bytes that a thread reads at once."""
BLOCK = 256
"""Threads of a block that reads a row from end to end: enough loads under way, and a barrier costs little."""
SHARED_ROW = 64 << 10
"""Bytes of a row that softmax keeps in shared memory: what every device gives a block."""


def _lanes(count: int) -> int:
    """The lanes of a warp for so many elements: a power of two."""
    return min(1 << max(count - 1, 0).bit_length(), WARP)


def reduction(operation: int, dtypes: Callable[..., Any]) -> tuple[CudaKernel, ...]:
    """The candidates of sum (0), max (1) and min (2): functions of an array and axes."""

    def lengths(x: Any, axes: Any) -> tuple[int, ...]:
        return alternating(x.shape, axes, 8)

    def size(x: Any, axes: Any) -> tuple[int, int]:
        found = lengths(x, axes)
        return math.prod(found[::2]), math.prod(found[1::2])

    def rows(x: Any, axes: Any) -> bool:
        return lengths(x, axes)[-1] > 1 or size(x, axes)[0] == 1

    def types(x: Any, axes: Any) -> tuple[Any, Any]:
        return x.dtype, dtypes(x, axes=axes)[-1]

    def parts(x: Any, axes: Any) -> tuple[int, int]:
        """How many, and the elements in each."""
        outputs, count = size(x, axes)
        blocks, least = (outputs, LEAST_ROW) if rows(x, axes) else (-(-outputs // WARP), LEAST_COLUMN)
        wanted = max(1, min(-(-MANY_BLOCKS // max(blocks, 1)), count // least, MOST_PARTS))
        chunk = -(-count // wanted)
        chunk += -chunk % 16  # starts of parts stay aligned
        return -(-count // max(chunk, 1)), chunk

    def divided(x: Any, axes: Any) -> bool:
        return parts(x, axes)[0] > 1

    def short(x: Any, axes: Any) -> bool:
        return rows(x, axes) and size(x, axes)[1] <= FEW

    def lanes(x: Any, axes: Any) -> int:
        return _lanes(-(-size(x, axes)[1] * x.dtype.itemsize // VECTOR))

    def macros(x: Any, axes: Any) -> dict[str, int]:
        return {"OPERATION": operation}

    whole = CudaKernel("reduce.cu", "", lengths, types, definitions=macros)
    combine = CudaKernel(
        "reduce.cu",
        "combine",
        lambda x, axes: (size(x, axes)[0], parts(x, axes)[0]),
        types,
        elements=lambda x, axes: size(x, axes)[0] * WARP,
        definitions=macros,
    )
    in_parts = replace(
        whole,
        numbers=lambda x, axes: (*lengths(x, axes), *parts(x, axes)),
        scratch=lambda x, axes: size(x, axes)[0] * parts(x, axes)[0] * types(x, axes)[1].itemsize,
        then=combine,
    )
    return (
        replace(
            whole,
            name="reduce_lanes",
            elements=lambda x, axes: size(x, axes)[0] * lanes(x, axes),
            definitions=lambda x, axes: {"OPERATION": operation, "LANES": lanes(x, axes)},
            applies=short,
        ),
        replace(
            in_parts,
            name="reduce_block_parts",
            blocks=lambda x, axes: size(x, axes)[0] * parts(x, axes)[0],
            threads=lambda x, axes: BLOCK,
            applies=lambda x, axes: rows(x, axes) and divided(x, axes),
        ),
        replace(
            whole,
            name="reduce_block",
            blocks=lambda x, axes: size(x, axes)[0],
            threads=lambda x, axes: BLOCK,
            applies=rows,
        ),
        replace(
            in_parts,
            name="reduce_columns_parts",
            blocks=lambda x, axes: -(-size(x, axes)[0] // WARP) * parts(x, axes)[0],
            threads=lambda x, axes: WARP * WARP,
            applies=divided,
        ),
        replace(
            whole,
            name="reduce_columns",
            blocks=lambda x, axes: -(-size(x, axes)[0] // WARP),
            threads=lambda x, axes: WARP * WARP,
            applies=lambda x, axes: size(x, axes)[1] >= WARP,
        ),
        replace(whole, name="reduce_thread", elements=lambda x, axes: size(x, axes)[0]),
    )


def softmax(logarithm: bool) -> tuple[CudaKernel, ...]:
    """The candidates of softmax or its logarithm."""

    def row_bytes(x: Any, axis: int) -> int:
        return int(x.shape[axis] * x.dtype.itemsize)

    def width(x: Any, axis: int) -> int:
        """Elements of the widest vector that rows are made of."""
        return math.gcd(x.shape[axis], VECTOR // x.dtype.itemsize)

    def vectors(x: Any, axis: int) -> int:
        return int(x.shape[axis]) // width(x, axis)

    def items(x: Any, axis: int) -> int:
        """Vectors of each lane: a power of two."""
        each = -(-vectors(x, axis) // _lanes(vectors(x, axis)))
        return 1 << (each - 1).bit_length()

    def macros(x: Any, axis: int) -> dict[str, int]:
        return {"LOGARITHM": int(logarithm)}

    def neighbours(x: Any, axis: int) -> bool:
        return around(x.shape, axis)[2] == 1

    def cached(x: Any, axis: int) -> bool:
        return row_bytes(x, axis) <= SHARED_ROW

    general = CudaKernel("softmax.cu", "", lambda x, axis: around(x.shape, axis), definitions=macros)
    return (
        replace(
            general,
            name="softmax_lanes",
            numbers=lambda x, axis: around(x.shape, axis)[:2],
            elements=lambda x, axis: around(x.shape, axis)[0] * _lanes(vectors(x, axis)),
            definitions=lambda x, axis: {
                **macros(x, axis),
                "LANES": _lanes(vectors(x, axis)),
                "ITEMS": items(x, axis),
                "WIDTH": width(x, axis),
            },
            applies=lambda x, axis: neighbours(x, axis) and x.shape[axis] <= FEW,
        ),
        replace(
            general,
            name="softmax_block",
            numbers=lambda x, axis: (*around(x.shape, axis)[:2], cached(x, axis)),
            blocks=lambda x, axis: around(x.shape, axis)[0],
            threads=lambda x, axis: FEW if x.shape[axis] > SHARED_ROW // x.dtype.itemsize // 2 else BLOCK,
            shared=lambda x, axis: row_bytes(x, axis) if cached(x, axis) else 0,
            applies=neighbours,
        ),
        replace(
            general,
            name="softmax_columns",
            elements=lambda x, axis: around(x.shape, axis)[0] * around(x.shape, axis)[2],
        ),
    )


def _kept(x: Any, axes: Sequence[int]) -> int:
    return math.prod(n for i, n in enumerate(x.shape) if i not in axes)


def _reduced(x: Any, axes: Sequence[int]) -> int:
    return math.prod(x.shape[i] for i in axes)


LOGSUMEXP = CudaKernel(
    "softmax.cu",
    "logsumexp",
    lambda x, axes: alternating(x.shape, axes, 4),
    blocks=_kept,
    threads=lambda x, axes: min(_reduced(x, axes), FEW),
)
STANDARDIZE = CudaKernel(
    "norm.cu",
    "standardize",
    lambda x, axes, eps: (*alternating(x.shape, axes, 4), float(eps)),
    blocks=lambda x, axes, eps: _kept(x, axes),
    threads=lambda x, axes, eps: min(max(_reduced(x, axes) // 8, 1), FEW),
)


def _lines(x: Any, axis: int, **params: Any) -> int:
    outer, _, inner = around(x.shape, axis)
    return outer * inner


def _neighbours(x: Any, axis: int, **params: Any) -> bool:
    """Whether lines along an axis are of neighbouring elements, and long enough to be shared."""
    _, length, inner = around(x.shape, axis)
    return inner == 1 and length > WARP


ARGMAX = (
    CudaKernel(
        "argmax.cu",
        "argmax_warp",
        lambda x, axis: around(x.shape, axis),
        elements=lambda x, axis: _lines(x, axis) * WARP,
        applies=_neighbours,
    ),
    CudaKernel("argmax.cu", "argmax_thread", lambda x, axis: around(x.shape, axis), elements=_lines),
)


def cumsum(dtypes: Callable[..., Any]) -> tuple[CudaKernel, CudaKernel]:
    def numbers(x: Any, axis: int, reverse: bool) -> tuple[int, ...]:
        return *around(x.shape, axis), reverse

    return (
        CudaKernel(
            "cumsum.cu", "cumsum_block", numbers, dtypes, blocks=_lines, threads=lambda x, **_: FEW, applies=_neighbours
        ),
        CudaKernel("cumsum.cu", "cumsum_thread", numbers, dtypes, elements=_lines),
    )


def indexing(name: str, numbers: Callable[..., tuple[int, ...]], along: int) -> CudaKernel:
    """A kernel of an array and indices; ``along`` is the number, among its own, of the lengths beside outer and inner
    that make up its result."""

    def elements(*args: Any, **params: Any) -> int:
        found = numbers(*args, **params)
        return found[0] * found[2] * found[along]

    types = lambda x, indices, **params: (x.dtype, indices.dtype)  # noqa: E731
    return CudaKernel("index.cu", name, numbers, types, elements=elements, checked=True)


ONE_HOT = CudaKernel(
    "index.cu",
    "one_hot",
    lambda indices, num_classes, dtype: (math.prod(indices.shape), num_classes),
    lambda indices, num_classes, dtype: (dtype, indices.dtype),
    elements=lambda indices, num_classes, dtype: math.prod(indices.shape) * num_classes,
    checked=True,
)
RANDOM_UNIFORM = CudaKernel(
    "random.cu",
    "random_uniform",
    lambda rng, shape, stream, dtype: (math.prod(shape), stream),
    lambda rng, shape, stream, dtype: (dtype,),
    elements=lambda rng, shape, stream, dtype: -(-math.prod(shape) // 4),
)
