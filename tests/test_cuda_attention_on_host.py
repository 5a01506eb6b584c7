"""The kernels of `attention/`, run on the CPU, against the references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from test_attention import documents

from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.core.kernel import cuda_kernels
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.attention import attention_grad_p, attention_p, self_attention_grad_p, self_attention_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def check(
    host: Host, primitive: Primitive, size: int, arrays: list[np.ndarray], params: dict[str, Any], macro: str = "TILE"
) -> None:
    """The kernel whose macro has the value ``size`` computes the reference."""
    types = [ArrayType(x.shape, x.dtype) for x in arrays]
    inputs = tuple(Variable(t, "gpu") for t in types)
    outputs = tuple(Variable(t, "gpu") for t in primitive.output_types(types, params))
    kernels = cuda_kernels(primitive.name, H200, *types, **params)
    (kernel,) = (k for k in kernels if k.launches[-1].definitions.get(macro) == size)
    found = host.computed(Equation(primitive, inputs, params, outputs), kernel, arrays)
    exact = primitive.reference(*arrays, **params)
    for x, expected in zip(found, exact if isinstance(exact, tuple) else (exact,), strict=True):
        tolerance = TOLERANCE[arrays[0].dtype.name] if params["precision"] == "full" else 2e-2
        np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("tile", "queries", "keys", "width", "dtype", "precision", "options"),
    [
        (64, 130, 130, 64, "float32", "full", "causal"),
        pytest.param(64, 65, 3, 5, "float64", "full", "mask", marks=pytest.mark.exhaustive),
        pytest.param(32, 33, 70, 16, "float64", "full", "dropout", marks=pytest.mark.exhaustive),
        (32, 70, 70, 33, "float32", "full", "causal mask dropout"),
        pytest.param(16, 17, 1, 1, "float32", "full", "", marks=pytest.mark.exhaustive),
        (8, 12, 12, 7, "float64", "full", "causal mask dropout"),
        (16, 70, 70, 12, "float64", "full", "causal starts mask dropout"),
        (32, 150, 150, 12, "float64", "full", "causal starts"),
        pytest.param(32, 40, 50, 16, "float32", "tf32", "", marks=pytest.mark.exhaustive),
        pytest.param(32, 40, 50, 16, "float32", "bfloat16", "", marks=pytest.mark.exhaustive),
    ],
)
def test_every_tile_computes_values_and_gradients(
    host: Host, tile: int, queries: int, keys: int, width: int, dtype: str, precision: str, options: str
) -> None:
    rng = np.random.default_rng(0)
    q, k, v, ct = (rng.normal(size=(2, n, width)).astype(dtype) for n in (queries, keys, keys, queries))
    more = []
    if "mask" in options:
        mask = rng.random((2, keys)) < 0.6
        mask[0, 0] = False  # if it is causal, the first query has no key
        more.append(mask)
    if "starts" in options:
        more.append(documents(2, keys))
    if "dropout" in options:
        more.append(ops.rng_state(4, 1).numpy())
    params = {
        "causal": "causal" in options,
        "scale": 1 / math.sqrt(width),
        "dropout": 0.3 if "dropout" in options else 0.0,
        "stream": 7,
        "precision": precision,
    }
    check(host, attention_p, tile, [q, k, v, *more], params)
    out, logsumexp = attention_p.reference(q, k, v, *more, **params)
    check(host, attention_grad_p, tile, [q, k, v, out, logsumexp, ct, *more], params)


@pytest.mark.parametrize(
    ("queries", "keys", "width", "dtype", "masked"),
    [
        (1, 70, 64, "float32", True),
        (3, 5, 7, "float64", False),
        pytest.param(2, 33, 130, "float32", True, marks=pytest.mark.exhaustive),
        pytest.param(8, 130, 16, "float64", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_few_queries_are_computed_by_one_block(
    host: Host, queries: int, keys: int, width: int, dtype: str, masked: bool
) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(3, n, width)).astype(dtype) for n in (queries, keys, keys)]
    mask = rng.random((3, keys)) < 0.4
    mask[1] = False  # queries without a key
    params = {"causal": False, "scale": 0.3, "dropout": 0.0, "stream": 7, "precision": "full"}
    check(host, attention_p, queries, [*arrays, *([mask] if masked else [])], params, "QUERIES")


@pytest.mark.parametrize(
    ("tile", "width", "dropout", "starts"),
    [(16, 4, 0.3, True), pytest.param(32, 6, 0.0, False, marks=pytest.mark.exhaustive)],
)
def test_self_attention_reads_and_writes_heads_in_place(
    host: Host, tile: int, width: int, dropout: float, starts: bool
) -> None:
    rng = np.random.default_rng(0)
    x, ct = rng.normal(size=(2, 35, 9 * width)), rng.normal(size=(2, 35, 3 * width))
    more = [documents(2, 35)] if starts else []
    more += [ops.rng_state(4, 1).numpy()] if dropout else []
    params = {"heads": 3, "causal": True, "scale": 0.5, "dropout": dropout, "stream": 7, "precision": "full"}
    check(host, self_attention_p, tile, [x, *more], params)
    out, logsumexp = self_attention_p.reference(x, *more, **params)
    check(host, self_attention_grad_p, tile, [x, out, logsumexp, ct, *more], params)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_short_self_attention_computes_infinities_too(host: Host) -> None:
    length, width, causal = 8, 48, True
    rng = np.random.default_rng(0)
    x, ct = (rng.normal(size=(32 // length, length, k * width)).astype(np.float32) for k in (6, 2))
    x[0, -1, -1] = ct[-1, 0, 0] = np.inf
    params = {"heads": 2, "causal": causal, "scale": 0.5, "dropout": 0.0, "stream": 7, "precision": "full"}
    check(host, self_attention_p, length, [x], params, "SEQUENCE_ROWS")
    out, logsumexp = self_attention_p.reference(x, **params)
    check(host, self_attention_grad_p, length, [x, out, logsumexp, ct], params, "SEQUENCE_ROWS")
