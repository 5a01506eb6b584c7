"""Matrix products by cuBLASLt, through the bindings of nvmath-python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from adtrain.backends.cuda.vendor.call import CHOICES, NotOffered, Plan, translated, workspace_limit
from adtrain.core.precision import FULL
from adtrain.core.program import Equation
from adtrain.passes.plan_memory import ALIGNMENT

COMPUTE = {
    ("float32", "full"): "COMPUTE_32F",
    ("float32", "tf32"): "COMPUTE_32F_FAST_TF32",
    ("float32", "bfloat16"): "COMPUTE_32F_FAST_16BF",
    ("float64", "full"): "COMPUTE_64F",
}
"""cublasComputeType_t by element type and precision. COMPUTE_32F rounds no operand; the FAST types permit rounding."""

KINDS = {"float32": "CUDA_R_32F", "float64": "CUDA_R_64F"}
NOT_SUPPORTED = "NOT_SUPPORTED"
"""In the message of cuBLAS's error where it has no algorithm for a problem."""


class Matrices(NamedTuple):
    """Column-major matrices, as cuBLAS takes them. A row-major matrix is the transpose of one."""

    rows: int
    columns: int
    batch: int


class Gemm(NamedTuple):
    """D = op(X) op(Y), column-major. With X = B and Y = A it is C = op(A) op(B), row-major."""

    dtype: str
    compute: str
    transposed: tuple[bool, bool]
    x: Matrices
    y: Matrices
    d: Matrices


def matrices(shape: Sequence[int]) -> Matrices:
    """A row-major array of this shape, (..., m, n), as column-major matrices."""
    *batch, columns, rows = shape
    return Matrices(rows, columns, math.prod(batch))


class Cublas:
    """cuBLASLt as a source of candidates; see `call.Library`. Its handle, layouts and preferences are never freed."""

    def __init__(self, version: str) -> None:
        self.name = f"cublasLt {version}"
        self.plans: dict[Gemm, list[Plan]] = {}

    def problem(self, equation: Equation) -> Gemm | None:
        if equation.primitive.name != "matmul":
            return None
        (a, b), (c,), params = equation.inputs, equation.outputs, equation.params
        dtype = a.type.dtype.name
        compute = COMPUTE.get((dtype, params.get("precision", FULL)))
        if compute is None:
            return None
        transposed = (params["transpose_b"], params["transpose_a"])
        return Gemm(dtype, compute, transposed, *(matrices(v.type.shape) for v in (b, a, c)))

    def plan(self, equation: Equation, choice: int) -> Plan:
        gemm = self.problem(equation)
        assert gemm is not None
        found = self.plans.get(gemm)
        if found is None:
            with translated(self):
                found = self.plans[gemm] = self._plans(gemm, workspace_limit(equation))
        if choice >= len(found):
            raise NotOffered(f"{self.name} has {len(found)} algorithms for it")
        return found[choice]

    @cached_property
    def _bindings(self) -> tuple[Any, Any, Any]:
        from nvmath import CudaDataType
        from nvmath.bindings import cublas, cublasLt

        return cublasLt, cublas.ComputeType, CudaDataType

    @cached_property
    def _handle(self) -> int:
        return int(self._bindings[0].create())

    def _plans(self, gemm: Gemm, workspace: int) -> list[Plan]:
        lt, compute_types, kinds = self._bindings
        kind = kinds[KINDS[gemm.dtype]]
        description = lt.matmul_desc_create(compute_types[gemm.compute], kind)
        for name, transposed in zip(("TRANSA", "TRANSB"), gemm.transposed, strict=True):
            _set(lt.matmul_desc_set_attribute, description, lt.MatmulDescAttribute[name], np.int32(transposed))
        x, y, d = (self._layout(kind, each) for each in (gemm.x, gemm.y, gemm.d))
        preference = lt.matmul_preference_create()
        limits: dict[str, np.generic] = {"MAX_WORKSPACE_BYTES": np.uint64(workspace)}
        limits |= {f"MIN_ALIGNMENT_{operand}_BYTES": np.uint32(ALIGNMENT) for operand in "ABCD"}
        for name, limit in limits.items():
            _set(lt.matmul_preference_set_attribute, preference, lt.MatmulPreferenceAttribute[name], limit)
        results = np.zeros(CHOICES, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, description, x, y, d, d, preference, CHOICES, results.ctypes.data, count.ctypes.data
            )
        except lt.cuBLASLtError as error:
            if NOT_SUPPORTED not in str(error):
                raise
        one, zero = np.ones(1, gemm.dtype), np.zeros(1, gemm.dtype)

        def plan(result: np.ndarray) -> Plan:
            size = int(result["workspace_size"][0])

            def enqueue(addresses: Sequence[int], workspace: int, stream: int) -> None:
                a, b, c = addresses
                lt.matmul(
                    self._handle, description, one.ctypes.data, b, x, a, y, zero.ctypes.data, c, d, c, d,
                    result["algo"].ctypes.data, workspace, size, stream,
                )  # fmt: skip

            return Plan(size, enqueue)

        return [plan(results[i : i + 1]) for i in range(int(count[0])) if not results["state"][i]]

    def _layout(self, kind: int, each: Matrices) -> int:
        lt, _, _ = self._bindings
        layout = int(lt.matrix_layout_create(kind, each.rows, each.columns, each.rows))  # from column to column
        _set(lt.matrix_layout_set_attribute, layout, lt.MatrixLayoutAttribute.BATCH_COUNT, np.int32(each.batch))
        stride = lt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET
        _set(lt.matrix_layout_set_attribute, layout, stride, np.int64(each.rows * each.columns))
        return layout


def _set(setter: Callable[..., object], of: int, attribute: int, value: np.generic) -> None:
    content = np.array([value])
    setter(of, attribute, content.ctypes.data, content.nbytes)
