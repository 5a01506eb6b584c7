"""Gathers, scatters and one_hot: `index.c`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register
from adtrain.lowering import indexing
from adtrain.lowering.cpu.shapes import item_and_team


def _kernels(name: str, numbers: Any) -> tuple[CKernel, CKernel]:
    """C functions of an array and indices."""
    return item_and_team("index.c", name, numbers, _dtypes, checked=True)


def _dtypes(x: Any, indices: Any, **params: Any) -> tuple[np.dtype, ...]:
    return x.dtype, indices.dtype


def _scatter_add_scratch(ct: Any, indices: Any, axis: int, length: int) -> int:
    """Bytes for a counting sort: where each row ends in the order, and the order."""
    return 8 * (length + 1 + math.prod(indices.shape))


register("take", "cpu", _kernels("take", indexing.take))
register(
    "scatter_add",
    "cpu",
    (
        CKernel("index.c", "scatter_add", indexing.scatter_add, _dtypes, items=True,
                scratch=_scatter_add_scratch, checked=True),
        CKernel("index.c", "scatter_add_team", indexing.scatter_add, _dtypes, team=True,
                scratch=_scatter_add_scratch, checked=True),
    ),
)  # fmt: skip
register("take_along_axis", "cpu", _kernels("take_along_axis", indexing.take_along_axis))
register("scatter_along_axis", "cpu", _kernels("scatter_along_axis", indexing.scatter_along_axis))
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
