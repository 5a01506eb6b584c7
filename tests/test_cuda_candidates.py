"""The candidates that CUDA rules return, as plans. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.kernel import cuda_kernels
from adtrain.core.types import ArrayType

__all__ = ["Lowering"]  # imported with the rules

FLOAT, INDEX = np.dtype("float32"), np.dtype("int64")


@pytest.mark.parametrize(("shape", "axis"), [((4, 1 << 20), 1), ((1 << 14, 3), 0), ((300, 70), 1), ((5, 1), 1)])
def test_every_candidate_of_a_split_cumsum_computes_the_sums_of_its_parts_first(
    shape: tuple[int, ...], axis: int
) -> None:
    kernels = cuda_kernels("cumsum", H200, ArrayType(shape, FLOAT), axis=axis, reverse=False)
    assert kernels
    for kernel in kernels:
        *_, parts, _ = kernel.launches[-1].numbers
        names = [launch.name for launch in kernel.launches]
        assert len(names) == (2 if parts > 1 else 1)
        assert all(name.endswith("sums") for name in names[:-1])


@pytest.mark.parametrize(
    ("length", "count", "names"),
    [(10, 100, ["scatter_add"]), (10, 300, ["scatter_add", "clear"]), (1 << 20, 1 << 20, ["clear", "scatter_add"])],
)
def test_scatter_add_sorts_many_positions(length: int, count: int, names: list[str]) -> None:
    ct, indices = ArrayType((count, 8), FLOAT), ArrayType((count,), INDEX)
    kernels = cuda_kernels("scatter_add", H200, ct, indices, axis=0, length=length)
    assert [kernel.launches[0].name for kernel in kernels] == names
