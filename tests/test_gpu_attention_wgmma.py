"""`attention/wgmma_*.cu` on a GPU: every candidate against float64, and the same bytes in two runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attention_bounds import wgmma_sample
from gpu_kernels import run_twice
from gpu_parity import gpu, poisoned

from adtrain.core.primitive import Primitive
from adtrain.core.types import BITS
from adtrain.lowering.cuda.attention import wgmma
from adtrain.ops.attention import attention_grad_p, attention_p, self_attention_grad_p, self_attention_p
from adtrain.ops.channels_last import from_bfloat16_p, to_bfloat16_p

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


def check(
    gpu: Any,
    primitive: Primitive,
    count: int,
    arrays: list[np.ndarray],
    params: dict[str, Any],
    stored: bool = False,
) -> None:
    """All candidates on ``arrays``, of which the first ``count`` hold q, k and v.

    Args:
        stored: whether the arrays are bfloat16 in memory.
    """
    equation, problem, given, exact = wgmma_sample(primitive, count, arrays, params, stored)
    found = wgmma.candidates(gpu.lowering.target, problem)
    if found is None:
        pytest.skip("this GPU has no wgmma")
    for kernel in found.kernels:
        results = run_twice(gpu, equation.primitive, kernel, given, **equation.params)
        for x, (expected, bound) in zip(results, exact, strict=True):
            value = from_bfloat16_p.reference(x) if x.dtype == BITS else x
            assert np.linalg.norm(value - expected) <= bound, kernel.label


SIZES = (3, 2, 3), (5, 130, 70), (150, 100, 256), (20, 1000, 1000), (2, 65, 5000), (1, 300, 17_000)
"""Heads, queries and keys."""
WIDTHS = 31, 64, 128


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_wgmma_computes_values_and_gradients(gpu: Any, width: int, causal: bool) -> None:
    """There are fewer and more tiles of keys than tiles of queries, than blocks, and than units of shared memory.

    The kernels depend on the width and the mask. Every second size is tested with each mask.
    """
    full = {"causal": causal, "scale": 1 / math.sqrt(width), "dropout": 0.0, "stream": 0, "precision": "full"}
    for heads, queries, keys in SIZES[(WIDTHS.index(width) + causal) % 2 :: 2]:
        keys = queries if causal else keys
        rng = np.random.default_rng(0)
        q, k, v, ct = (rng.normal(size=(heads, n, width)) for n in (queries, keys, keys, queries))
        check(gpu, attention_p, 3, [q, k, v], full | {"precision": "bfloat16"})
        grad = [q, k, v, *attention_p.reference(q, k, v, **full), ct]
        check(gpu, attention_grad_p, 3, grad, full | {"precision": "bfloat16"})
        if width <= 64:
            check(gpu, attention_grad_p, 3, grad, full)


@pytest.mark.parametrize(("length", "width"), [(100, 16), (500, 128)])
def test_wgmma_reads_and_writes_the_heads_of_one_array(gpu: Any, length: int, width: int) -> None:
    rng = np.random.default_rng(0)
    x, ct = rng.normal(size=(3, length, 9 * width)), rng.normal(size=(3, length, 3 * width))
    full = {"heads": 3, "causal": True, "scale": 0.2, "dropout": 0.0, "stream": 0, "precision": "full"}
    check(gpu, self_attention_p, 1, [x], full | {"precision": "bfloat16"})
    grad = [x, *self_attention_p.reference(x, **full), ct]
    check(gpu, self_attention_grad_p, 1, grad, full | {"precision": "bfloat16"})
    if width <= 64:
        check(gpu, self_attention_grad_p, 1, grad, full)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "width", "causal"),
    [(100, 16, True), (500, 64, False), (500, 128, True), (1024, 64, True), (2100, 128, False)],
)
def test_wgmma_reads_and_writes_arrays_of_bfloat16(gpu: Any, length: int, width: int, causal: bool) -> None:
    """TMA reads heads of 64 and 128 columns as they are in memory. Others are packed."""
    rng = np.random.default_rng(0)
    x, ct = (rng.standard_normal((3, length, heads * width), np.float32) for heads in (9, 3))
    full = {"heads": 3, "causal": causal, "scale": 0.2, "dropout": 0.0, "stream": 0, "precision": "full"}
    forward = self_attention_p.reference(from_bfloat16_p.reference(to_bfloat16_p.reference(x)), **full)
    check(gpu, self_attention_p, 1, [x], full | {"precision": "bfloat16"}, stored=True)
    check(gpu, self_attention_grad_p, 1, [x, *forward, ct], full | {"precision": "bfloat16"}, stored=True)
