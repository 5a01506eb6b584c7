"""Reductions over any axes, normalisation, softmax, running sums and pooling: the folders `reduce` and `pool` of
`kernels/cuda`.

How work is divided follows from shapes alone, so that every GPU computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import WARP, CudaKernel, CudaLaunch, Target, memory_layout, register
from adtrain.core.primitive import BFLOAT16, CHANNELS_LAST, PRIMITIVES
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.problem import window_macros
from adtrain.lowering.shapes import alternating, element_types, output_type, split_at

MAX_WARP_ROW, MAX_WARP_ROW_OF_MANY = 1024, 8192
"""Maximum of elements of a row that one warp reduces, in general and with MANY_ROWS. A block reduces a longer row."""
MANY_ROWS = 8192
"""Rows, one per warp, that keep the largest GPU busy."""
MIN_BLOCKS = 1024
"""Blocks that keep the largest GPU busy. A reduction with fewer blocks is split into parts."""
MIN_ROW_PART, MIN_COLUMN_PART = 8192, 512
"""Minimum of elements of an output in a part, for a block per part."""
MAX_PARTS = 1024
VECTOR = 16
"""Bytes that a thread loads or stores at once."""
THREADS = 256
"""Threads per block in reduce/reduce.cu, norm.cu and cumsum.cu."""
MIN_UNALIGNED_ROW = 128
"""Minimum of bytes of a row whose unaligned ends a warp reads apart from the vectors between them."""
MAX_COLUMN_VECTOR = 4
"""Maximum of columns that a thread loads at once."""
LOADS_IN_FLIGHT = 4
"""Elements of a column that a thread loads before it adds any."""

SUM, MAX, MIN, ARGMAX, LOGSUMEXP = range(5)
"""OPERATION in kernels/cuda/reduce/accumulators.cuh."""
COMBINE = "combine"
"""The kernel that combines the parts of an output. It does not read the argument."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least ``least``."""
    return 1 << max(least - 1, 0).bit_length()


def vector_width(length: int, itemsize: int) -> int:
    """Elements of the widest vector that divides rows of ``length``."""
    return math.gcd(length, VECTOR // itemsize)


def unaligned(length: int, itemsize: int) -> bool:
    """Whether rows of ``length`` do not divide into vectors of VECTOR bytes."""
    return vector_width(length, itemsize) * itemsize < VECTOR


def of_one_member(target: Target, x: Any, outputs: int) -> int:
    """The outputs of an operation on x for which the kernel is chosen: all, or in a Program by member those of one
    member. Axis 0 then has the members."""
    return outputs // x.shape[0] if target.by_member and x.shape and x.shape[0] else outputs


def reduction(target: Target, operation: int, x: Any, axes: Sequence[int], result: np.dtype) -> list[CudaKernel]:
    """The candidates for one of the operations above, over ``axes``, with elements of type ``result``."""
    lengths = alternating(x.shape, axes, 8)
    outputs, count = math.prod(lengths[::2]), math.prod(lengths[1::2])
    many = MANY_ROWS if target.by_member else outputs
    """The outputs that the choice is made for."""
    itemsize = x.dtype.itemsize
    rows = lengths[-1] > 1 or many == 1
    contiguous = rows and math.prod(lengths[1:-2:2]) == 1  # the elements of an output are one row
    if rows:
        name, definitions, blocks = "reduce_block", {}, outputs
    else:
        width, lanes = _column_tile(many, count, lengths[-2], itemsize)
        name, definitions, blocks = "reduce_columns", {"LANES": lanes, "WIDTH": width}, -(-outputs // (lanes * width))
    parts, part = _parts(
        max(blocks, MIN_BLOCKS) if target.by_member else blocks, count, MIN_ROW_PART if rows else MIN_COLUMN_PART
    )
    scratch = memory_layout("SCRATCH", {"STATES": (_state_bytes(operation, x.dtype, result), outputs * parts)})

    def launch(
        name: str, numbers: tuple[int, ...], definitions: dict[str, int] | None = None, **work: Any
    ) -> CudaLaunch:
        macros = {"OPERATION": operation, **(definitions or {})}
        dtypes = x.dtype, result
        return CudaLaunch("reduce/reduce.cu", name, numbers, dtypes, definitions=macros, layouts=(scratch,), **work)

    found: list[tuple[CudaLaunch, ...]] = []
    if contiguous and (
        (MAX_WARP_ROW < count <= MAX_WARP_ROW_OF_MANY and many >= MANY_ROWS)
        or (count <= MAX_WARP_ROW and count * itemsize >= MIN_UNALIGNED_ROW and unaligned(max(count, 1), itemsize))
    ):
        found.append((launch("reduce_warps", (outputs, count), elements=outputs * WARP, threads=THREADS),))
    if contiguous and count <= MAX_WARP_ROW:
        width = vector_width(max(count, 1), itemsize)
        lanes = min(power_of_two(-(-count // width)), WARP)
        macros = {"LANES": lanes, "WIDTH": width}
        lanes_of_all = outputs * lanes
        found.append((launch("reduce_lanes", (outputs, count), macros, elements=lanes_of_all, threads=THREADS),))
    if parts > 1:
        numbers = (*lengths, parts, part)
        of_parts = launch(f"{name}_parts", numbers, definitions, blocks=blocks * parts, threads=THREADS)
        found.append((of_parts, launch(COMBINE, (outputs, parts), elements=outputs * WARP)))
    found.append((launch(name, lengths, definitions, blocks=blocks, threads=THREADS),))
    return [CudaKernel(launches, scratch if len(launches) > 1 else None) for launches in found]


def _column_tile(outputs: int, count: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Columns that a thread loads at once, and threads side by side in a block.

    A block is as wide as a warp. It is narrower for fewer columns, and wider if columns are too short to share.
    """
    width = math.gcd(columns, min(MAX_COLUMN_VECTOR, VECTOR // itemsize))
    lanes = min(power_of_two(-(-outputs // width)), WARP)
    return width, min(max(lanes, power_of_two(-(-THREADS * LOADS_IN_FLIGHT // max(count, 1)))), THREADS)


def _parts(blocks: int, count: int, min_part: int) -> tuple[int, int]:
    """How many parts a reduction of ``count`` elements is split into, and the elements of each."""
    wanted = max(1, min(-(-MIN_BLOCKS // max(blocks, 1)), count // min_part, MAX_PARTS))
    part = -(-count // wanted)
    part += -part % 16  # starts of parts stay aligned
    return -(-count // max(part, 1)), part


def _state_bytes(operation: int, dtype: np.dtype, result: np.dtype) -> int:
    """Bytes of the partial result of a part."""
    number = (result if operation == SUM else dtype).itemsize
    if operation == ARGMAX:
        return 2 * max(number, 8)
    return 2 * number if operation == LOGSUMEXP else number


def _over_axes(operation: int, primitive: str, target: Target, x: Any, axes: tuple[int, ...]) -> list[CudaKernel]:
    return reduction(target, operation, x, axes, output_type(primitive, x, axes=axes).dtype)


for _operation, _name in ((SUM, "sum"), (MAX, "max"), (MIN, "min"), (LOGSUMEXP, "logsumexp")):
    register(_name, "cuda", partial(_over_axes, _operation, _name))
register("argmax", "cuda", lambda target, x, axis: reduction(target, ARGMAX, x, (axis,), np.dtype(np.int64)))


def standardize(target: Target, x: Any, axes: tuple[int, ...], eps: float) -> list[CudaKernel]:
    """The kernel: moments of parts, moments, and the elements.

    ``x`` and the result may be bfloat16 in memory.
    """
    dtypes = computed, _ = element_types(x.dtype)
    lengths = k0, r0, k1, r1 = alternating(x.shape, axes, 4)
    outputs = k0 * k1
    across = WARP if r1 == 1 else 1  # neighbouring outputs of a block
    tiles = k0 * -(-k1 // across)
    wanted = min(-(-MIN_BLOCKS // max(of_one_member(target, x, tiles), 1)), r0 * r1 * across // MIN_ROW_PART, r0)
    runs = -(-r0 // max(wanted, 1))  # of r1 elements, per part
    parts = -(-r0 // runs)
    width = {"WIDTH": vector_width(r1 if r1 > 1 else k1, x.dtype.itemsize)}
    scratch = memory_layout("SCRATCH", {"MOMENTS": (3 * computed.itemsize, outputs * parts)})

    def launch(name: str, numbers: tuple[int | float, ...], **work: Any) -> CudaLaunch:
        return CudaLaunch("reduce/norm.cu", name, numbers, dtypes, layouts=(scratch,), **work)

    moments_of_parts = launch(
        "standardize_parts",
        (*lengths, across, parts, runs),
        definitions=width,
        blocks=tiles * parts,
        threads=THREADS,
    )
    moments = launch("standardize_combine", (outputs, parts), elements=outputs * WARP)
    apply = launch(
        "standardize_apply", (*lengths, float(eps)), definitions=width, elements=math.prod(lengths) // width["WIDTH"]
    )
    return [CudaKernel((moments_of_parts, moments, apply), scratch)]


register("standardize", "cuda", standardize)
register("standardize_bfloat16", "cuda", standardize)


ROW_THREADS, COLUMN_THREADS, IN_FLIGHT = 256, 1024, 8
"""Threads of a block, for contiguous lines and for others; elements that a thread loads at once."""


def softmax(logarithm: bool, target: Target, x: Any, axis: int) -> list[CudaKernel]:
    """The kernel for softmax, or for its logarithm. ``x`` may be bfloat16 in memory."""
    outer, length, inner = split_at(x.shape, axis)
    threads, least = (ROW_THREADS, 1) if inner == 1 else (COLUMN_THREADS, WARP)
    lines, across = outer * inner, max(threads // power_of_two(-(-length // IN_FLIGHT)), least)
    macros = {"LOGARITHM": int(logarithm), "THREADS": threads, "ACROSS": across, "IN_FLIGHT": IN_FLIGHT}
    launch = CudaLaunch(
        "reduce/softmax.cu",
        "softmax",
        (lines, length, inner),
        element_types(x.dtype),
        blocks=-(-lines // across),
        threads=threads,
        definitions=macros,
    )
    return [CudaKernel((launch,))]


for _name, _logarithm in (("softmax", False), ("log_softmax", True)):
    register(_name, "cuda", partial(softmax, _logarithm))
    register(f"{_name}_bfloat16", "cuda", partial(softmax, _logarithm))


MANY_COLUMNS, MIN_THREAD_PART = 1 << 18, 64
"""Threads, one per column, that keep the largest GPU busy; minimum of elements in a thread's part."""
TOTAL_BYTES = 8
"""Bytes of the sum of a part: double or int64_t."""


def cumsum(target: Target, x: Any, axis: int, reverse: bool) -> list[CudaKernel]:
    """The candidates: a block per row, or a thread per row or column.

    If there are too few of them, each is split into parts, and a first launch computes the sums of the parts.
    """
    outer, length, inner = split_at(x.shape, axis)
    dtypes = (x.dtype, output_type("cumsum", x, axis=axis, reverse=reverse).dtype)
    rows = inner == 1 and length > WARP  # contiguous, and long enough for a block
    wanted, min_part = (MIN_BLOCKS, MIN_ROW_PART) if rows else (MANY_COLUMNS, MIN_THREAD_PART)
    parts = max(1, min(-(-wanted // max(of_one_member(target, x, outer * inner), 1)), length // min_part))
    part = max(-(-length // parts), 1)
    parts = -(-length // part)
    count = outer * inner * parts
    scratch = memory_layout("SCRATCH", {"SUMS": (TOTAL_BYTES, count)})

    def kernel(sums: str, name: str, **work: Any) -> CudaKernel:
        numbers = outer, length, inner, reverse, parts, part
        first = CudaLaunch("reduce/cumsum.cu", sums, numbers, dtypes, layouts=(scratch,), **work)
        last = replace(first, name=name)
        return CudaKernel((first, last), scratch) if parts > 1 else CudaKernel((last,), 0)

    columns = kernel("cumsum_column_sums", "cumsum_columns", elements=count)
    return [kernel("cumsum_sums", "cumsum_block", blocks=count, threads=THREADS), columns] if rows else [columns]


register("cumsum", "cuda", cumsum)


MAX_CELL, MAX_CELL_LAST = 16, 9
"""Maximum elements of a window, or of a stride, for which a thread computes several pixels (with channels last)."""


class _Images(NamedTuple):
    """Images as planes of pixels. A pixel has one element, or all channels if they are last."""

    planes: int
    height: int
    width: int
    channels: int

    @property
    def size(self) -> int:
        return math.prod(self)


def _images(shape: Sequence[int], last: bool) -> _Images:
    return _Images(*shape) if last else _Images(shape[0] * shape[1], shape[2], shape[3], 1)


def _pooling(
    name: str, last: bool, target: Target, first: Any, *others: Any, windows: Any, shape: Sequence[int] = ()
) -> list[CudaKernel]:
    """The rule of pooling, or of its gradient.

    A thread reads the windows of a vector of channels, or of one or two neighbouring outputs; or it writes a cell of
    the image.

    Args:
        last: whether channels are last.
        first, others: an image; a gradient by the pooled image if the name ends in "put"; then positions of maxima for
            "pick" and for the "put" of a maximum.
        shape: of the image for "put".
    """
    puts = name.endswith("put")
    positions: Any = others[0] if others else None
    pooled_type: Any = first if puts else positions
    if pooled_type is None:
        primitive = PRIMITIVES["max_pool2d" + (CHANNELS_LAST if last else "")]
        image = ArrayType(first.shape, element_types(first.dtype)[0])
        pooled_type, positions = primitive.output_types([image], {"windows": windows})
    images, pooled = _images(shape if puts else first.shape, last), _images(pooled_type.shape, last)
    macros = window_macros(windows.kernel, windows.stride, windows.padding)
    if name.startswith("max") and positions.dtype == np.uint8:
        macros["BYTE_POSITIONS"] = 1
    if puts:
        small = math.prod(windows.stride) <= (MAX_CELL_LAST if last else MAX_CELL)
        rows, columns = windows.stride if small else (1, 1)
        if small and not last:
            wide = VECTOR // element_types(first.dtype)[0].itemsize
            columns = columns if wide % columns else wide
        elements = -(-images.size // (rows * columns))
    else:
        at_once = 1 if last or math.prod(windows.kernel) > MAX_CELL else math.gcd(pooled.width, 2)
        macros["AT_ONCE"] = at_once
        elements = pooled.size // at_once
    if last:
        lanes = math.gcd(images.channels, VECTOR // first.dtype.itemsize)
        macros |= {"CHANNELS": images.channels, "LANES": lanes}
        elements = -(-elements // lanes)
    lengths = (*images[:3], *pooled[1:3])  # POOL_NUMBERS
    return [
        CudaKernel(
            (CudaLaunch("pool/pool.cu", name, lengths, element_types(first.dtype), elements, definitions=macros),)
        )
    ]


for _name in ("max_pool2d", "max_pool2d_pick", "max_pool2d_put", "avg_pool2d", "avg_pool2d_put"):
    for _arrays in ("", BFLOAT16):
        register(_name + _arrays, "cuda", partial(_pooling, _name, False))
        register(_name + CHANNELS_LAST + _arrays, "cuda", partial(_pooling, _name, True))
