"""The C functions whose time is mostly that of memory: copies, indices, sorting, reductions, softmax, norms.

Also: random numbers, and the hash encoding of points. All are in `kernels/cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adtrain.core.kernel import CKernel, register
from adtrain.lowering import shapes
from adtrain.lowering.shapes import Layout, alternating, hash_grid, hash_grid_add, output_type, split_at


def item_and_team(
    file: str,
    name: str,
    numbers: Callable[..., Sequence[int | float]],
    dtypes: Callable[..., tuple[np.dtype, ...]] | None = None,
    scratch: int = 0,
    checked: bool = False,
    each: bool = False,
) -> tuple[CKernel, CKernel]:
    """The function ``name`` for items, and ``name_team``, which all threads call and which gets ``scratch``."""
    return (
        CKernel(file, name, numbers, dtypes, items=True, several_items=True, each=each, checked=checked),
        CKernel(file, f"{name}_team", numbers, dtypes, team=True, scratch=scratch, each=each, checked=checked),
    )


MAX_AXES = 8
"""Axes that `kernels/cpu/copy.c` iterates over."""


def copy_numbers(layout: Layout) -> tuple[int, ...]:
    """The numbers that `kernels/cpu/copy.c` takes. Axes are in the target's order.

    Raises:
        NotImplementedError: more than MAX_AXES axes are left after neighbouring ones are merged.
    """
    axes: list[tuple[int, int, int]] = []
    for length, source, target in zip(layout.lengths, layout.source_strides, layout.target_strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (source * length, target * length):
            length *= axes.pop()[0]
        axes.append((length, source, target))
    if len(axes) > MAX_AXES:
        raise NotImplementedError(f"a copy of shape {tuple(layout.lengths)}")
    rows = [axis for axis in axes[:-1] if axis[1] == 1]  # contiguous in the source, and not in the target
    if rows:
        axes.remove(rows[0])
        axes.insert(-1, rows[0])
    axes = [(1, 0, 0)] * (MAX_AXES - len(axes)) + axes
    if axes[-1] == (1, 0, 0):  # one element
        axes[-1] = (1, 1, 1)
    return (*(axis[k] for k in range(3) for axis in axes), layout.source_offset, layout.target_offset)


def _numbers(layout: Callable[..., Layout]) -> Callable[..., tuple[int, ...]]:
    return lambda *args, **params: copy_numbers(layout(*args, **params))


def _pad_numbers(x: Any, **params: Any) -> tuple[int | float, ...]:
    return *copy_numbers(shapes.pad(x, **params)), output_type("pad", x, **params).size, params["value"]


register("transpose", "cpu", item_and_team("copy.c", "copy", _numbers(shapes.transpose)))
register("flip", "cpu", item_and_team("copy.c", "copy", _numbers(shapes.flip)))
register("concatenate", "cpu", item_and_team("copy.c", "copy", _numbers(shapes.concatenate), each=True))
register("slice", "cpu", item_and_team("copy.c", "copy", _numbers(shapes.slice)))
register("pad", "cpu", item_and_team("copy.c", "pad", _pad_numbers))


def _index_kernels(name: str, numbers: Any) -> tuple[CKernel, CKernel]:
    """C functions of an array and indices."""
    return item_and_team("index.c", name, numbers, _index_dtypes, checked=True)


def _index_dtypes(x: Any, indices: Any, **params: Any) -> tuple[np.dtype, ...]:
    return x.dtype, indices.dtype


def _scatter_add_scratch(ct: Any, indices: Any, axis: int, length: int) -> int:
    """Bytes for a counting sort: where each row ends in the order, and the order."""
    return 8 * (length + 1 + math.prod(indices.shape))


register("take", "cpu", _index_kernels("take", shapes.take))
register(
    "scatter_add",
    "cpu",
    (
        CKernel("index.c", "scatter_add", shapes.scatter_add, _index_dtypes, items=True,
                scratch=_scatter_add_scratch, checked=True),
        CKernel("index.c", "scatter_add_team", shapes.scatter_add, _index_dtypes, team=True,
                scratch=_scatter_add_scratch, checked=True),
    ),
)  # fmt: skip
register("take_along_axis", "cpu", _index_kernels("take_along_axis", shapes.take_along_axis))
register("scatter_along_axis", "cpu", _index_kernels("scatter_along_axis", shapes.scatter_along_axis))
register(
    "put_rows",
    "cpu",
    item_and_team("index.c", "put_rows", shapes.put_rows, lambda x, _, positions, axis: (x.dtype, positions.dtype),
                  checked=True),
)  # fmt: skip
register(
    "one_hot",
    "cpu",
    item_and_team(
        "index.c",
        "one_hot",
        lambda indices, num_classes, dtype: (math.prod(indices.shape), num_classes),
        lambda indices, num_classes, dtype: (dtype, indices.dtype),
        checked=True,
    ),
)


INDEX_BYTES = 8


def _sort_numbers(x: Any, count: int, descending: bool) -> tuple[int, ...]:
    return math.prod(x.shape[:-1]), x.shape[-1], count, int(descending)


def _sort_scratch(x: Any, count: int, descending: bool) -> int:
    """Bytes for each thread: two lists of the positions of a row."""
    return 2 * INDEX_BYTES * int(x.shape[-1])


register("argsort", "cpu", CKernel("sort.c", "argsort_team", _sort_numbers, team=True, scratch=_sort_scratch))


register(
    "random_uniform",
    "cpu",
    CKernel(
        "random.c",
        "random_uniform_team",
        lambda rng, shape, stream, dtype: (math.prod(rng.shape[:-1]), math.prod(shape), stream),
        lambda rng, shape, stream, dtype: (dtype,),
        team=True,
    ),
)


TEAM_SCRATCH = 64 * 64 * 8
"""Bytes that all threads need for a reduction: MAX_SPLIT_OUTPUTS * PARTS doubles in `kernels/cpu/reduce.h`."""


def lengths(x: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths that `kernels/cpu/reduce.h` takes."""
    return alternating(x.shape, axes, 6)


def _sum_dtypes(x: Any, axes: tuple[int, ...]) -> tuple[np.dtype, ...]:
    return x.dtype, output_type("sum", x, axes=axes).dtype


def _cumsum_numbers(x: Any, axis: int, reverse: bool) -> tuple[int, ...]:
    return *split_at(x.shape, axis), int(reverse)


def _cumsum_dtypes(x: Any, axis: int, reverse: bool) -> tuple[np.dtype, ...]:
    return x.dtype, output_type("cumsum", x, axis=axis, reverse=reverse).dtype


register(
    "sum",
    "cpu",
    (
        *item_and_team("sum.c", "sum", lengths, _sum_dtypes, TEAM_SCRATCH),
        CKernel("sum.c", "sum_into", lengths, _sum_dtypes, items=True, several_items=True, sums=True),
    ),
)
register("max", "cpu", item_and_team("max.c", "max", lengths, scratch=TEAM_SCRATCH))
register("min", "cpu", item_and_team("min.c", "min", lengths, scratch=TEAM_SCRATCH))
register("argmax", "cpu", item_and_team("argmax.c", "argmax", lambda x, axis: split_at(x.shape, axis)))
register("cumsum", "cpu", item_and_team("cumsum.c", "cumsum", _cumsum_numbers, _cumsum_dtypes))


register(
    "softmax",
    "cpu",
    item_and_team("softmax.c", "softmax", lambda x, axis: (*split_at(x.shape, axis), 0)),
)
register(
    "log_softmax",
    "cpu",
    item_and_team("softmax.c", "softmax", lambda x, axis: (*split_at(x.shape, axis), 1)),
)
register("logsumexp", "cpu", item_and_team("softmax.c", "logsumexp", lengths))


def _standardize_numbers(x: Any, axes: tuple[int, ...], eps: float) -> tuple[int | float, ...]:
    return *alternating(x.shape, axes, 4), float(eps)


register("standardize", "cpu", item_and_team("norm.c", "standardize", _standardize_numbers))


def _dtypes(x: Any, *others: Any, **params: Any) -> tuple[Any, ...]:
    return (x.dtype,)


register("hash_grid", "cpu", item_and_team("hash_grid.c", "hash_grid", hash_grid, _dtypes))
register("hash_grid_add", "cpu", CKernel("hash_grid.c", "hash_grid_add_team", hash_grid_add, _dtypes, team=True))
