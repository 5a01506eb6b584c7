"""Products in tf32 and bfloat16 on a GPU round operands to nearest, as on the CPU, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_parity import TOLERANCE, check, gpu, poisoned

from adtrain import ops
from adtrain.core.array import array
from adtrain.core.autodiff import vjp

__all__ = ["gpu", "poisoned"]

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("precision", ["tf32", "bfloat16"])]

PRODUCTS: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
    *((ops.matmul, (m, k), (k, n)) for m, n, k in [(1, 1, 1), (5, 7, 3), (33, 130, 65), (128, 10, 784), (256,) * 3]),
    *((lambda a, b: ops.matmul(a, b, True, True), (k, m), (n, k)) for m, n, k in [(5, 7, 3), (131, 66, 257)]),
    (ops.matmul, (3, 40, 24), (3, 24, 17)),
    (lambda x, w: ops.conv2d(x, w, padding=1), (4, 3, 9, 11), (8, 3, 3, 3)),
    (lambda x, w: ops.conv2d(x, w), (8, 32, 14, 14), (64, 32, 3, 3)),
    (lambda x, w: ops.conv2d(x, w, padding=1), (40, 96, 28, 28), (96, 96, 3, 3)),
    (lambda x, w: ops.conv2d(x, w, stride=2, padding=2, groups=2), (3, 8, 12, 10), (6, 4, 5, 5)),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(PRODUCTS)))
def test_products_and_gradients_round_operands_as_on_the_cpu(precision: str, which: int) -> None:
    f, *shapes = PRODUCTS[which]
    rng = np.random.default_rng(which)
    # Truncating, or not rounding, differs by far more than the tolerance.
    drawn = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def results(device: str) -> list[np.ndarray]:
        with ops.matmul_precision(precision):
            out, pullback = vjp(f, *(array(x, device=device) for x in drawn))
        ct = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
        return [x.numpy() for x in (out, *pullback(array(ct, device=device)))]

    check(results("gpu"), results("cpu"), TOLERANCE["float32"])
