"""Gathers, scatters along an axis and one_hot: `index/index.cu`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register
from adtrain.lowering import indexing as lengths
from adtrain.lowering.cuda.reduce import vector


def indexing(name: str, numbers: Callable[..., tuple[int, ...]], along: int, rows: bool = False) -> LegacyKernel:
    """A kernel of an array and indices; ``along`` is the number, among its own, of the lengths beside outer and inner
    that make up its result; with ``rows`` it moves vectors of inner elements."""

    def width(*args: Any, **params: Any) -> int:
        return vector(numbers(*args, **params)[2], args[0].dtype.itemsize) if rows else 1

    def elements(*args: Any, **params: Any) -> int:
        found = numbers(*args, **params)
        return found[0] * found[2] * found[along] // width(*args, **params)

    return LegacyKernel(
        "index/index.cu",
        name,
        numbers,
        lambda x, indices, **params: (x.dtype, indices.dtype),
        elements=elements,
        definitions=lambda *args, **params: {"WIDTH": width(*args, **params)},
        checked=True,
    )


def scatter_along(numbers: Callable[..., tuple[int, ...]]) -> tuple[LegacyKernel, LegacyKernel]:
    """The candidates of a scatter along an axis; ``numbers``: outer, length, inner and positions along the axis."""

    def width(ct: Any, indices: Any, **params: Any) -> int:
        _, length, inner, _ = numbers(ct, indices, **params)
        return vector(inner if inner > 1 else length, ct.dtype.itemsize)

    def vectors(*args: Any, **params: Any) -> int:
        return math.prod(numbers(*args, **params)[:3]) // width(*args, **params)

    def lines(*args: Any, **params: Any) -> int:
        return math.prod(numbers(*args, **params)[:3:2])

    added = replace(indexing("scatter_along_axis", numbers, along=1), elements=lines)
    whole = replace(added, elements=vectors, definitions=lambda *args, **params: {"WIDTH": width(*args, **params)})
    one = replace(whole, name="scatter_one", applies=lambda *args, **params: numbers(*args, **params)[3] == 1)
    return one, replace(whole, name="clear_along_axis", then=added)


ONE_HOT = LegacyKernel(
    "index/index.cu",
    "one_hot",
    lambda indices, num_classes, dtype: (math.prod(indices.shape), num_classes),
    lambda indices, num_classes, dtype: (dtype, indices.dtype),
    elements=lambda indices, num_classes, dtype: math.prod(indices.shape) * num_classes,
    checked=True,
)


register("take", "cuda", legacy(indexing("take", lengths.take, along=3, rows=True)))
register("take_along_axis", "cuda", legacy(indexing("take_along_axis", lengths.take_along_axis, along=3)))
register("scatter_along_axis", "cuda", legacy(scatter_along(lengths.scatter_along_axis)))
register("one_hot", "cuda", legacy(ONE_HOT))
