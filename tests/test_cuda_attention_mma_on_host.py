"""Attention on tensor cores, run on the CPU: errors against float64 for any lengths, options, precisions and ranges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from hypothesis import example, given, settings
from hypothesis import strategies as st
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

TOLERANCE = {"full": 1e-6, "tf32": 2e-3, "bfloat16": 2e-2}
"""The largest norm of an error over the norm of the result."""


def computed(
    host: Host, primitive: Primitive, arrays: list[np.ndarray], params: dict[str, Any], form: str = "mma_"
) -> list[np.ndarray]:
    """The results of the first candidate of a form, for float32 arrays."""
    arrays = [x.astype(np.float32) if x.dtype == np.float64 else x for x in arrays]
    types = [ArrayType(x.shape, x.dtype) for x in arrays]
    inputs = tuple(Variable(t, "gpu") for t in types)
    outputs = tuple(Variable(t, "gpu") for t in primitive.output_types(types, params))
    kernels = cuda_kernels(primitive.name, H200, *types, **params)
    kernel = next(k for k in kernels if f"attention/{form}" in k.label)
    return host.computed(Equation(primitive, inputs, params, outputs), kernel, arrays)


def check(
    host: Host,
    primitive: Primitive,
    arrays: list[np.ndarray],
    params: dict[str, Any],
    tolerance: float,
    form: str = "mma_",
) -> None:
    """Against the reference in float64, of the same float32 numbers."""
    arrays = [x.astype(np.float32).astype(np.float64) if x.dtype == np.float64 else x for x in arrays]
    exact = primitive.reference(*arrays, **params | {"precision": "full"})
    expected = exact if isinstance(exact, tuple) else (exact,)
    finite = [np.isfinite(y) for y in expected]
    # The gradients of q and k are small differences where a query has one key that matters.
    sizes = [np.linalg.norm(y[ok]) for y, ok in zip(expected, finite, strict=True)]
    most = max(sizes) if params["scale"] == 1 / math.sqrt(arrays[0].shape[-1]) else 0
    for x, y, ok, size in zip(computed(host, primitive, arrays, params, form), expected, finite, sizes, strict=True):
        np.testing.assert_array_equal(np.isfinite(x), ok)
        assert np.linalg.norm(x[ok] - y[ok]) <= tolerance * max(size, most)


def check_both(
    host: Host, arrays: list[np.ndarray], more: list[np.ndarray], params: dict[str, Any], tolerance: float
) -> None:
    """Attention of q, k, v, and its gradient with the cotangent, the last of the arrays."""
    *inputs, ct = (x.astype(np.float32).astype(np.float64) for x in arrays)
    check(host, attention_p, [*inputs, *more], params, tolerance)
    kept = attention_p.reference(*inputs, *more, **params | {"precision": "full"})
    check(host, attention_grad_p, [*inputs, *kept, ct, *more], params, tolerance)


def options_of(width: int, **more: Any) -> dict[str, Any]:
    return {"causal": False, "scale": 1 / math.sqrt(width), "dropout": 0.0, "stream": 7, "precision": "full"} | more


@pytest.mark.parametrize(
    ("width", "options", "precision"),
    [
        pytest.param(64, "", "full", marks=pytest.mark.exhaustive),
        pytest.param(33, "mask dropout", "full", marks=pytest.mark.exhaustive),
        pytest.param(24, "causal", "tf32", marks=pytest.mark.exhaustive),
        (16, "causal starts", "full"),
        pytest.param(24, "causal starts mask dropout", "bfloat16", marks=pytest.mark.exhaustive),
        (7, "mask dropout", "bfloat16"),
    ],
)
@settings(max_examples=1)
@example(queries=70, keys=140, seed=0)  # two and three tiles of 64
@given(queries=st.integers(1, 100), keys=st.integers(1, 100), seed=st.integers(0, 99))
def test_errors_are_those_of_the_precision(
    host: Host, width: int, options: str, precision: str, queries: int, keys: int, seed: int
) -> None:
    queries = keys if "causal" in options else queries
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(2, n, width)) for n in (queries, keys, keys, queries)]
    more = []
    if "mask" in options:
        mask = rng.random((2, keys)) < 0.6
        mask[0, 0] = False  # if it is causal, the first query has no key
        more.append(mask)
    if "starts" in options:
        more.append(documents(2, keys))
    dropout = 0.3 if "dropout" in options else 0.0
    if dropout:
        more.append(ops.rng_state(4, 1).numpy())
    params = options_of(width, causal="causal" in options, dropout=dropout, precision=precision)
    check_both(host, arrays, more, params, TOLERANCE[precision])


def test_the_heads_of_one_array_are_read_and_written_in_place(host: Host) -> None:
    rng, width, heads = np.random.default_rng(0), 12, 3
    x, ct = rng.normal(size=(2, 70, 3 * heads * width)), rng.normal(size=(2, 70, heads * width))
    params = options_of(width, causal=True, heads=heads)
    check(host, self_attention_p, [x], params, TOLERANCE["full"])
    exact = self_attention_p.reference(x.astype(np.float32).astype(np.float64), **params)
    check(host, self_attention_grad_p, [x, *exact, ct], params, TOLERANCE["full"])


@pytest.mark.parametrize(
    ("examples", "length", "heads", "width", "causal"),
    [(4, 4, 10, 16, True), pytest.param(16, 1, 3, 64, False, marks=pytest.mark.exhaustive)],
)
def test_short_sequences_take_one_launch(
    host: Host, examples: int, length: int, heads: int, width: int, causal: bool
) -> None:
    rng = np.random.default_rng(0)
    x, ct = (rng.normal(size=(examples, length, count * heads * width)) for count in (3, 1))
    params = options_of(width, causal=causal, heads=heads)
    check(host, self_attention_p, [x], params, TOLERANCE["full"], "short")
    exact = self_attention_p.reference(x.astype(np.float32).astype(np.float64), **params)
    check(host, self_attention_grad_p, [x, *exact, ct], params, TOLERANCE["full"], "short")


@pytest.mark.exhaustive
@settings(max_examples=2)
@given(st.lists(st.integers(-30, 30), min_size=3, max_size=3), st.sampled_from([-0.125, 0.125]), st.booleans())
def test_magnitudes_of_the_arrays_do_not_matter(host: Host, powers: list[int], scale: float, by_group: bool) -> None:
    """Arrays and groups of 64 rows have scales of their own. Scores stay small, so the gradients are not zero."""
    rng = np.random.default_rng(0)
    q, k, v, ct = (rng.normal(size=(2, 80, 64)) for _ in range(4))
    of_keys, of_values, of_cotangent = (2.0**power for power in powers)
    groups = np.where(np.arange(80) < 64, 1, 2.0**-20 if by_group else 1)[:, None]
    arrays = [q / of_keys, k * of_keys, v * of_values * groups, ct * of_cotangent]
    check_both(host, arrays, [], options_of(64, scale=scale), 2e-6)


def test_a_large_gradient_of_one_query_leaves_the_others_exact(host: Host) -> None:
    rng = np.random.default_rng(0)
    q, k, v, ct = (rng.normal(size=(1, 64, 64)) for _ in range(4))
    ct[0, 5] *= 2.0**12
    arrays = [x.astype(np.float32).astype(np.float64) for x in (q, k, v, ct)]
    params = options_of(64)
    kept = attention_p.reference(*arrays[:3], **params)
    found, *_ = computed(host, attention_grad_p, [*arrays[:3], *kept, arrays[3]], params)
    exact, *_ = attention_grad_p.reference(*arrays[:3], *kept, arrays[3], **params)
    errors = np.linalg.norm(found - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert errors.max() < 2e-6


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_reaches_every_query_that_attends_to_it(host: Host, value: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 70, 64)) for _ in range(3))
    v[1, 3, 5] = value
    with np.errstate(invalid="ignore"):
        out, _ = computed(host, attention_p, [q, k, v], options_of(64))
    assert np.isfinite(out[0]).all()
    assert not np.isfinite(out[1, :, 5]).any()
