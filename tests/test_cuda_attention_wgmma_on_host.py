"""`attention/wgmma_*.cu`, run on the CPU, against float64: every candidate, with one block for all tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attention_bounds import wgmma_sample
from cuda_on_host import Host, host

from adtrain.backends.cuda import H200
from adtrain.core.primitive import Primitive
from adtrain.lowering.cuda.attention import wgmma
from adtrain.ops.attention import attention_grad_p, attention_p, self_attention_grad_p, self_attention_p
from adtrain.ops.channels_last import from_bfloat16_p, to_bfloat16_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TARGET = H200._replace(multiprocessors=1)
"""A block runs to its end before the next one starts, so no block may wait for another one."""


def check(
    host: Host,
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
    found = wgmma.candidates(TARGET, problem)
    assert found is not None
    for kernel in found.kernels:
        for x, (expected, bound) in zip(host.computed(equation, kernel, given), exact, strict=True):
            value = from_bfloat16_p.reference(x) if x.dtype == np.uint16 else x
            assert np.linalg.norm(value - expected) <= bound, kernel.label


@pytest.mark.parametrize(
    ("queries", "keys", "width", "causal"),
    [
        pytest.param(70, 300, 128, False, marks=pytest.mark.exhaustive),
        pytest.param(200, 200, 33, True, marks=pytest.mark.exhaustive),
    ],
)
def test_wgmma_computes_values_and_gradients(host: Host, queries: int, keys: int, width: int, causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v, ct = (rng.normal(size=(2, n, width)) for n in (queries, keys, keys, queries))
    full = {"causal": causal, "scale": 1 / math.sqrt(width), "dropout": 0.0, "stream": 0, "precision": "full"}
    check(host, attention_p, 3, [q, k, v], full | {"precision": "bfloat16"})
    grad = [q, k, v, *attention_p.reference(q, k, v, **full), ct]
    check(host, attention_grad_p, 3, grad, full | {"precision": "bfloat16"})
    if width <= 64:
        check(host, attention_grad_p, 3, grad, full)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("length", "width", "causal"), [(70, 128, False), (135, 64, True)])
def test_wgmma_reads_and_writes_arrays_of_bfloat16(host: Host, length: int, width: int, causal: bool) -> None:
    """TMA reads heads of 64 and 128 columns as they are in memory. Others are packed."""
    rng = np.random.default_rng(0)
    x, ct = (rng.standard_normal((2, length, heads * width), np.float32) for heads in (6, 2))
    params = {"heads": 2, "causal": causal, "scale": 0.2, "dropout": 0.0, "stream": 0, "precision": "full"}
    forward = self_attention_p.reference(from_bfloat16_p.reference(to_bfloat16_p.reference(x)), **params)
    params |= {"precision": "bfloat16"}
    check(host, self_attention_p, 1, [x], params, stored=True)
    check(host, self_attention_grad_p, 1, [x, *forward, ct], params, stored=True)


@pytest.mark.exhaustive
def test_wgmma_reads_queries_keys_and_values_of_bfloat16(host: Host) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, length, 64), np.float32) for length in (70, 300, 300))
    params = {"causal": False, "scale": 0.2, "dropout": 0.0, "stream": 0, "precision": "bfloat16"}
    check(host, attention_p, 3, [q, k, v], params, stored=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "precision"), [(72, "bfloat16"), (20, "full")])
def test_wgmma_reads_and_writes_the_heads_of_one_array(host: Host, width: int, precision: str) -> None:
    rng = np.random.default_rng(0)
    x, ct = rng.normal(size=(2, 135, 6 * width)), rng.normal(size=(2, 135, 2 * width))
    full = {"heads": 2, "causal": True, "scale": 0.2, "dropout": 0.0, "stream": 0, "precision": "full"}
    params = full | {"precision": precision}
    if precision == "bfloat16":
        check(host, self_attention_p, 1, [x], params)
    check(host, self_attention_grad_p, 1, [x, *self_attention_p.reference(x, **full), ct], params)
