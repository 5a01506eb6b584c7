"""The kernel for products with a short K, emulated on the CPU, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import for_gpu

from adtrain import ops
from adtrain.core.precision import matmul_precision
from adtrain.core.program import Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm import narrow
from adtrain.ops.matmul import matmul_p
from adtrain.ops.rounding import rounded

__all__ = ["host"]


@pytest.mark.parametrize(
    ("transposed", "precision", "k"), [((False, False), "tf32", 10), ((True, True), "bfloat16", 16)]
)
def test_products_round_operands_and_add_in_order(
    host: Host, transposed: tuple[bool, bool], precision: str, k: int
) -> None:
    rng = np.random.default_rng(k)
    lengths = batch, m, n, k = 2, 37, 1032, k
    shapes = ((batch, k, m) if transposed[0] else (batch, m, k), (batch, n, k) if transposed[1] else (batch, k, n))
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in (a, b))
    out = Variable(ArrayType((batch, m, n), a.dtype), "gpu")
    params = {"transpose_a": transposed[0], "transpose_b": transposed[1], "precision": precision}
    kernel = narrow.short_k_gemm(lengths, transposed, precision)
    found = host.computed(Equation(matmul_p, inputs, params, (out,)), kernel, [a, b])[0]
    left, right = (rounded(x, precision).astype(float) for x in (a, b))
    left = left.swapaxes(1, 2) if transposed[0] else left
    right = right.swapaxes(1, 2) if transposed[1] else right
    expected = np.zeros((batch, m, n), np.float32)
    for i in range(k):  # a product of two rounded numbers is exact in float64, so this rounds once, as FMA does
        expected = (expected + left[:, :, i, None] * right[:, i, None, :]).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_an_epilogue_of_wider_numbers_stores_every_column(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "MIN_ELEMENTS", 0)
    a, b = (np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32) for shape in ((5, 8), (8, 1024)))

    def f(a: Any, b: Any) -> Any:
        with matmul_precision("tf32"):
            return ops.astype(ops.matmul(a, b), "float64") * 2.0

    program = for_gpu(stage(f, ()).program(a, b))
    (equation,) = program.equations
    known = dict(zip(program.inputs, (a, b), strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    kernel = narrow.short_k_gemm((1, 5, 1024, 8), (False, False), "tf32")
    (found,) = host.computed(equation, kernel, [known[v] for v in equation.inputs])
    np.testing.assert_array_equal(found, 2.0 * (a.astype(float) @ b))
