"""The CUDA kernels of scatter_add: one that looks at all positions for each element, and for many a sort first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register
from adtrain.lowering import indexing as lengths_of
from adtrain.lowering.cuda.indexing import indexing
from adtrain.lowering.cuda.reduce import vector

BLOCK = 256
"""Threads of a block of a sort."""
MANY, MUCH = 256, 1 << 27
"""Positions, and comparisons of positions with elements, from which on sorting pays."""
DIGITS, VALUES, PIECE = 8, 256, 32
"""Of kernels/cuda/index/scatter.cu: bits of a sort's digit, how many there are of them, positions of a piece."""
CHUNK, MOST_BLOCKS = 4096, 512
"""Positions that are worth a block of a sort, and the most blocks."""
OFFSETS = 1024
"""Threads of the block that adds the counts up."""


def scatter_add(numbers: Callable[..., tuple[int, ...]]) -> tuple[LegacyKernel, ...]:
    """The candidates; ``numbers``: outer, length, inner and how many positions there are."""

    def lengths(*args: Any, **params: Any) -> tuple[int, ...]:
        found = numbers(*args, **params)
        blocks = max(min(-(-found[3] // CHUNK), MOST_BLOCKS), 1)
        return *found, blocks, -(-found[3] // blocks)

    def blocks(*args: Any, **params: Any) -> int:
        return lengths(*args, **params)[4]

    def width(ct: Any, indices: Any, **params: Any) -> int:
        return vector(numbers(ct, indices, **params)[2], ct.dtype.itemsize)

    def pieces(*args: Any, **params: Any) -> int:
        return -(-numbers(*args, **params)[3] // PIECE)

    def sums(*args: Any, **params: Any) -> int:
        """Threads that add up."""
        outer, _, inner, _ = numbers(*args, **params)
        return outer * pieces(*args, **params) * (inner // width(*args, **params))

    def passes(*args: Any, **params: Any) -> int:
        """Sorts until all bits of an index, and of the length, are in order."""
        return -(-numbers(*args, **params)[1].bit_length() // DIGITS)

    def scratch(ct: Any, indices: Any, **params: Any) -> int:
        outer, _, inner, count = numbers(ct, indices, **params)
        sorts = 4 * (4 * (count + -count % 4) + VALUES * blocks(ct, indices, **params))
        return sorts + outer * pieces(ct, indices, **params) * 2 * inner * int(ct.dtype.itemsize)

    def chain(sorts: int) -> LegacyKernel:
        """All kernels of so many sorts."""

        def step(name: str, done: int, **fields: Any) -> LegacyKernel:
            macros = lambda *args, **params: {"PASS": done, "WIDTH": width(*args, **params)}  # noqa: E731
            types = lambda ct, indices, **params: (ct.dtype, indices.dtype)  # noqa: E731
            return LegacyKernel("index/scatter.cu", name, lengths, types, definitions=macros, checked=True, **fields)

        threads = lambda *args, **params: BLOCK  # noqa: E731
        elements = lambda *args, **params: math.prod(numbers(*args, **params)[:3]) // width(*args, **params)  # noqa: E731
        steps = [step("clear", 0, elements=elements)]
        for done in range(sorts):
            steps += [
                step("sort_count", done, blocks=blocks, threads=threads),
                step("sort_offsets", done, blocks=lambda *args, **params: 1, threads=lambda *args, **params: OFFSETS),
                step("sort_place", done, blocks=blocks, threads=threads),
            ]
        steps += [step("sum_pieces", sorts, elements=sums), step("join_pieces", sorts, elements=sums)]
        first = reduce(lambda after, kernel: replace(kernel, then=after), reversed(steps[:-1]), steps[-1])
        return replace(first, scratch=scratch)

    def many(sorts: int) -> Callable[..., bool]:
        def applies(*args: Any, **params: Any) -> bool:
            found = numbers(*args, **params)
            return passes(*args, **params) == sorts and found[3] >= MANY and math.prod(found) >= MUCH

        return applies

    sorted_ = [replace(chain(sorts), applies=many(sorts)) for sorts in range(1, 5)]
    return *sorted_, indexing("scatter_add", numbers, along=1)


register("scatter_add", "cuda", legacy(scatter_add(lengths_of.scatter_add)))
