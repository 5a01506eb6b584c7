"""The GPU: every candidate for a product or a convolution computes it, the same bytes each time."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, poisoned

from adtrain.core.kernel import CudaKernel, cuda_kernels
from adtrain.core.primitive import Primitive
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.gemm import BlockGemm, block_gemms, candidates
from adtrain.lowering.cuda.gemm.tiles import FMA_TILES, MmaKind, SmallTile
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.matmul import matmul_p

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

FLAGS = tuple(product((False, True), repeat=2))
SHAPES = ((2, 67, 45, 83), (3, 130, 140, 260))
PRECISIONS = ("full", "tf32", "bfloat16")
BITS = {"tf32": 11, "bfloat16": 8}
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
"""Of the norm of the difference over the norm, operands rounded beforehand."""

CONVOLUTIONS = (
    ((2, 6, 13, 11), (8, 3, 3, 3), Window((2, 1), (1, 1), (1, 2), 2)),
    ((3, 20, 9, 10), (33, 20, 3, 2), Window((1, 1), (1, 0), (1, 1), 1)),
)


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """To nearest even, of as many bits as the precision has."""
    if precision == "full" or x.dtype == np.float64:
        return x
    rest = 24 - BITS[precision]
    bits = x.view(np.uint32)
    bits = bits + np.uint32((1 << rest - 1) - 1) + (bits >> np.uint32(rest) & np.uint32(1))
    return (bits & np.uint32(2**32 - (1 << rest))).view(np.float32)


def computed(gpu: Any, primitive: Primitive, kernel: CudaKernel, arrays: list[np.ndarray], **params: Any) -> np.ndarray:
    """The result of the primitive with this kernel."""
    return run_twice(gpu, primitive, kernel, arrays, **params)[0]


def types(a: np.ndarray, b: np.ndarray) -> tuple[ArrayType, ArrayType]:
    return ArrayType(a.shape, a.dtype), ArrayType(b.shape, b.dtype)


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """The norm of the difference over the norm of y; of a y of zeros, the norm of the difference."""
    return float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1))


def operands(shape: tuple[int, ...], ta: bool, tb: bool, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    batch, m, n, k = shape
    rng = np.random.default_rng(m)
    a = rng.standard_normal((batch, k, m) if ta else (batch, m, k)).astype(dtype)
    return a, rng.standard_normal((batch, n, k) if tb else (batch, k, n)).astype(dtype)


def exact(a: np.ndarray, b: np.ndarray, ta: bool, tb: bool) -> np.ndarray:
    a, b = a.astype(float), b.astype(float)
    return np.asarray((a.swapaxes(-1, -2) if ta else a) @ (b.swapaxes(-1, -2) if tb else b))


@pytest.mark.parametrize(
    ("dtype", "precision", "shape", "ta", "tb"),
    [
        (dtype, precision, SHAPES[(i + ta + tb) % 2], ta, tb)
        for i, (dtype, precision) in enumerate([*(("float32", p) for p in PRECISIONS), ("float64", "full")])
        for ta, tb in FLAGS
    ],
)
def test_every_candidate_for_a_product_is_right(
    gpu: Any, dtype: str, precision: str, shape: tuple[int, ...], ta: bool, tb: bool
) -> None:
    a, b = operands(shape, ta, tb, dtype)
    expected = exact(rounded(a, precision), rounded(b, precision), ta, tb)
    for kernel in candidates(gpu.lowering.target, *types(a, b), ta, tb, precision):
        found = computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb)
        assert distance(found, expected) < TOLERANCE[dtype], kernel.label


@pytest.mark.parametrize(("ta", "tb"), FLAGS)
@pytest.mark.parametrize(("shape", "dtype"), [((1, 776, 3072, 8), "float32"), ((1, 1030, 513, 13), "float64")])
def test_products_of_few_terms_are_right(
    gpu: Any, shape: tuple[int, int, int, int], dtype: str, ta: bool, tb: bool
) -> None:
    a, b = operands(shape, ta, tb, dtype)
    kernel, *_ = candidates(gpu.lowering.target, *types(a, b), ta, tb)
    assert kernel.launches[0].name == "short_gemm"
    found = computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb, precision="full")
    assert distance(found, exact(a, b, ta, tb)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("shape", "ta", "tb"),
    [
        (shape, ta, ta == (i % 2 == 0))
        for i, shape in enumerate([(2, 77, 1, 1030), (1, 1, 515, 200), (3, 1, 1, 5), (1, 64, 64, 0), (70000, 4, 1, 4)])
        for ta in (False, True)
    ],
)
def test_products_with_vectors_and_empty_sums_are_right(gpu: Any, shape: tuple[int, ...], ta: bool, tb: bool) -> None:
    a, b = operands(shape, ta, tb, "float32")
    for kernel in candidates(gpu.lowering.target, *types(a, b), ta, tb):
        found = computed(gpu, matmul_p, kernel, [a, b], transpose_a=ta, transpose_b=tb)
        np.testing.assert_allclose(found, exact(a, b, ta, tb), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_infinity_and_nan_propagate_as_in_float32(gpu: Any, precision: str) -> None:
    a, b = operands((1, 70, 50, 90), False, False, "float32")
    a[0, 0, 0], a[0, 1, 7], a[0, 2, 9], b[0, 5, 3] = np.inf, np.nan, -np.inf, np.inf
    a[0, 4], a[0, 6] = 0, 3e38
    with np.errstate(all="ignore"):
        expected = np.matmul(a, b)
    for kernel in candidates(gpu.lowering.target, *types(a, b), False, False, precision):
        found = computed(gpu, matmul_p, kernel, [a, b], transpose_a=False, transpose_b=False)
        rows = [i for i in range(70) if i != 6]  # whether row 6 overflows depends on the order of its sums
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(found[0, rows]), test(expected[0, rows]))


@cache
def adversarial(m: int = 128, n: int = 96, k: int = 1000) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    def decades(*shape: int) -> np.ndarray:
        return np.asarray(10 ** rng.uniform(-15, 15, shape) * np.sign(normal(*shape)))

    cancelling, pairs = normal(m, k), normal(k, n)
    cancelling[:, 1::2] = -cancelling[:, ::2] * (1 + 1e-4 * normal(m, k // 2))
    pairs[1::2] = pairs[::2]
    huge = normal(m, k)
    huge[3, 5] = 1e20
    return {
        "normal": (normal(m, k), normal(k, n)),
        "positive": (rng.uniform(size=(m, k)), rng.uniform(size=(k, n))),
        "thirty decades": (decades(m, k), decades(k, n)),
        "positive decades": (np.abs(decades(m, k)), np.abs(decades(k, n))),
        "cancelling": (cancelling, pairs),
        "one huge element": (huge, normal(k, n)),
        "rows of all sizes": (normal(m, k) * np.exp(8 * normal(m, 1)), normal(k, n)),
    }


@pytest.mark.parametrize("case", adversarial())
def test_bf16x3_is_as_accurate_as_sequential_fma(gpu: Any, case: str) -> None:
    a, b = (x.astype(np.float32)[None] for x in adversarial()[case])
    expected, sizes = exact(a, b, False, False), exact(abs(a), abs(b), False, False)

    def error(gemm: BlockGemm) -> float:
        found = computed(gpu, matmul_p, gemm.kernel(), [a, b], transpose_a=False, transpose_b=False)
        return float((abs(found - expected) / sizes).max())

    found = block_gemms(gpu.lowering.target, *types(a, b), False, False)
    bf16x3 = [p for p in found if isinstance(p.tile, SmallTile) and p.tile.kind is MmaKind.BF16X3]
    assert bf16x3
    fma = BlockGemm(bf16x3[0].lengths, a.dtype, FMA_TILES[4][0], 1, (False, False))
    assert max(map(error, bf16x3)) <= error(fma)


@pytest.mark.parametrize(
    ("precision", "image", "weight", "window"),
    [(p, *CONVOLUTIONS[i]) for p, i in (("full", 0), ("full", 1), ("tf32", 1), ("bfloat16", 0))],
)
def test_every_candidate_for_a_convolution_is_right(
    gpu: Any, image: tuple[int, ...], weight: tuple[int, ...], window: Window, precision: str
) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (image, weight))
    size = tuple(window.output_length(i, image[i + 2], weight[i + 2]) for i in (0, 1))
    g = rng.standard_normal((image[0], weight[0], *size)).astype(np.float32)
    cases: tuple[tuple[Primitive, tuple[np.ndarray, np.ndarray], dict[str, Any]], ...] = (
        (conv2d_p, (x, w), {"window": window}),
        (input_grad_p, (g, w), {"window": window, "size": image[2:]}),
        (weight_grad_p, (x, g), {"window": window, "size": weight[2:]}),
    )
    for primitive, arrays, params in cases:
        reference = primitive.reference
        expected = reference(*(rounded(v, precision).astype(float) for v in arrays), **{**params, "precision": "full"})
        target = gpu.lowering.target
        for kernel in cuda_kernels(primitive.name, target, *types(*arrays), **params, precision=precision):
            (found,) = run_twice(gpu, primitive, kernel, list(arrays), **params)
            assert distance(found, expected) < TOLERANCE["float32"], kernel.label
