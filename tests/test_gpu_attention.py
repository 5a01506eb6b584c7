"""Attention on a GPU: every candidate against float64 references, errors, second derivatives, and memory."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import check, gpu, poisoned
from test_attention import documents, key_mask, with_gradients

import adtrain as ad
from adtrain import nn, ops
from adtrain.core.kernel import cuda_kernels
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.attention import attention_grad_p, attention_p, self_attention_grad_p, self_attention_p
from adtrain.passes import ALL

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = {
    ("float32", "full"): 1e-5,
    ("float64", "full"): 1e-12,
    ("float32", "tf32"): 5e-3,
    ("float32", "bfloat16"): 4e-2,
}
"""Relative to the largest element."""
SHAPES = [  # heads, queries, keys, width
    (2, 1, 1, 1), (3, 1, 70, 5), (5, 16, 16, 16), (2, 200, 65, 33), (2, 65, 200, 64), (1, 130, 130, 128),
    (2, 70, 70, 256), (600, 17, 17, 16), (1, 1500, 1500, 64),
]  # fmt: skip
DTYPES = "float32", "float64"
ONE_QUERY = (24, 1, 1024, 64)
PROBLEMS = [
    *(
        (dtype, ("plain", "all")[(i + j) % 2], shape)
        for j, dtype in enumerate(DTYPES)
        for i, shape in enumerate(SHAPES)
    ),
    *product(["float32"], ("causal", "mask", "dropout"), [(5, 16, 16, 16)]),
    *product(DTYPES, ("documents", "all documents"), [(3, 300, 300, 64)]),
    ("float32", "plain", ONE_QUERY),
    ("float32", "mask", ONE_QUERY),
    ("float64", "mask", (3, 5, 70, 33)),
    *product(["float64"], ("causal", "mask", "dropout"), [(1, 130, 130, 128)]),
]
"""Element types, options and shapes. Each option and width is compiled into kernels of its own, which takes most of the
time, and does not depend on the other lengths. So each shape has "plain" in one element type and "all" in the other."""
REST = [
    ("float32", "all", (3, 1, 70, 5)),
    ("float32", "all documents", (3, 300, 300, 64)),
    ("float32", "mask", ONE_QUERY),
    ("float64", "all", (2, 1, 1, 1)),
    ("float64", "all", (5, 16, 16, 16)),
    ("float64", "all", (2, 65, 200, 64)),
    ("float64", "documents", (3, 300, 300, 64)),
    ("float64", "mask", (3, 5, 70, 33)),
    *product(["float64"], ("causal", "mask", "dropout"), [(1, 130, 130, 128)]),
]
"""The exhaustive ones of PROBLEMS: others have their options, widths and lengths in another combination or type."""


def rest(*values: Any) -> Any:
    """Parameters of an exhaustive test."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def params_of(width: int, **more: Any) -> dict[str, Any]:
    return {"causal": False, "scale": 1 / math.sqrt(width), "dropout": 0.0, "stream": 3, "precision": "full"} | more


def check_candidates(gpu: Any, arrays: list[np.ndarray], more: list[np.ndarray], params: dict[str, Any]) -> None:
    """All candidates for attention and its gradient against the references in float64, and twice the same bits."""
    q, k, v, ct = arrays
    exact = params | {"precision": "full"}
    wide = [x.astype(np.float64) for x in arrays]
    out, logsumexp = attention_p.reference(*wide[:3], *more, **exact)
    grads = attention_grad_p.reference(*wide[:3], out, logsumexp, wide[3], *more, **exact)
    kept = [x.astype(q.dtype) for x in (out, logsumexp)]
    tolerance = TOLERANCE[q.dtype.name, params["precision"]]
    for primitive, given, expected in (
        (attention_p, [q, k, v, *more], [out, logsumexp]),
        (attention_grad_p, [q, k, v, *kept, ct, *more], grads),
    ):
        types = [ArrayType(x.shape, x.dtype) for x in given]
        kernels = cuda_kernels(primitive.name, gpu.lowering.target, *types, **params)
        assert kernels
        for kernel in kernels:
            found = run_twice(gpu, primitive, kernel, given, **params)
            check(found, [x.astype(q.dtype) for x in expected], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options", "shape"), [rest(*each) if each in REST else each for each in PROBLEMS], ids=str
)
def test_every_candidate_computes_values_and_gradients(
    gpu: Any, dtype: str, options: str, shape: tuple[int, ...]
) -> None:
    heads, queries, keys, width = shape
    everything = options.startswith("all")
    causal = (everything or options in ("causal", "documents")) and queries == keys
    more = [key_mask(heads, keys)] if options == "mask" or everything else []
    more += [documents(heads, keys)] if "documents" in options else []
    drops = options == "dropout" or everything
    more += [ops.rng_state(4, 1).numpy()] if drops else []
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(heads, n, width)).astype(dtype) for n in (queries, keys, keys, queries)]
    check_candidates(gpu, arrays, more, params_of(width, causal=causal, dropout=0.3 if drops else 0.0))


@pytest.mark.parametrize(
    ("precision", "width"), [rest("tf32", 16), ("tf32", 64), rest("bfloat16", 64), ("bfloat16", 100)]
)
def test_rounded_operands_give_the_errors_of_their_format(gpu: Any, precision: str, width: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, 150, width)).astype(np.float32) for _ in range(4)]
    check_candidates(gpu, arrays, [], params_of(width, causal=True, precision=precision))


@pytest.mark.parametrize(
    ("dtype", "length", "heads", "width"),
    [("float32", 150, 2, 20), rest("float32", 70, 3, 128), rest("float64", 1, 1, 3), ("float64", 17, 4, 16)],
)
def test_every_candidate_reads_and_writes_the_heads_of_one_array(
    gpu: Any, dtype: str, length: int, heads: int, width: int
) -> None:
    rng, params = np.random.default_rng(0), params_of(width, causal=True, dropout=0.2, heads=heads)
    x, ct = rng.normal(size=(3, length, 3 * heads * width)), rng.normal(size=(3, length, heads * width))
    state = ops.rng_state(4, 1).numpy()
    out, logsumexp = self_attention_p.reference(x, state, **params)
    by_x = self_attention_grad_p.reference(x, out, logsumexp, ct, state, **params)
    for primitive, arrays, expected in (
        (self_attention_p, [x], [out, logsumexp]),
        (self_attention_grad_p, [x, out, logsumexp, ct], [by_x]),
    ):
        given = [*(a.astype(dtype) for a in arrays), state]
        types = [ArrayType(a.shape, a.dtype) for a in given]
        for kernel in cuda_kernels(primitive.name, gpu.lowering.target, *types, **params):
            found = run_twice(gpu, primitive, kernel, given, **params)
            check(found, [a.astype(dtype) for a in expected], TOLERANCE[dtype, "full"])


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_float32_errors_are_those_of_float32_arithmetic(sharpness: float) -> None:
    """A rounded score changes its exponential by the score times the precision. 1e-6 is for sums of 1,024 terms."""
    rng = np.random.default_rng(0)
    q, k, v, ct = (rng.normal(size=(4, 1024, 64)) for _ in range(4))
    q *= sharpness
    bound = 1e-6 + np.finfo(np.float32).eps * np.abs(q @ k.transpose(0, 2, 1) / 8).max()

    def results(dtype: str) -> list[np.ndarray]:
        out, grads = with_gradients(*(ad.array(x.astype(dtype), device="gpu") for x in (q, k, v, ct)))
        return [x.numpy().astype(np.float64) for x in (out, *grads)]

    for found, exact in zip(results("float32"), results("float64"), strict=True):
        assert np.linalg.norm(found - exact) <= bound * np.linalg.norm(exact)


def test_second_derivatives_match_the_cpu() -> None:
    arrays = [np.random.default_rng(i).normal(size=(2, 9, 5)) for i in range(3)]

    def f(q: Any, k: Any, v: Any) -> Any:
        return ops.sum(ops.sin(ops.attention(q, k, v, causal=True)))

    def twice(*x: Any) -> Any:
        return ad.hvp(f, x, tuple(ops.cos(y) for y in x))

    expected, found = (twice(*(ad.array(x, device=device) for x in arrays)) for device in ("cpu", "gpu"))
    check([x.numpy() for x in found], [x.numpy() for x in expected], 1e-11)


def test_a_long_sequence_needs_memory_for_its_tokens_only(gpu: Any) -> None:
    """Queries by keys would be 16 GiB."""
    given = [ad.array(np.random.default_rng(i).normal(size=(1, 65_536, 32)).astype(np.float32)) for i in range(4)]
    staged = stage(with_gradients, ALL)
    on_gpu = [x.to("gpu") for x in given]
    memory = gpu.memory(staged.program(*on_gpu))
    assert memory.values + memory.scratch < 20 * given[0].numpy().nbytes
    out, _ = staged(*on_gpu)
    q, k, v, _ = (x.numpy()[0].astype(np.float64) for x in given)
    rows = np.arange(0, 65_536, 7001)
    powers = np.exp(q[rows] @ k.T / math.sqrt(32))
    np.testing.assert_allclose(out.numpy()[0, rows], powers @ v / powers.sum(1, keepdims=True), rtol=1e-4, atol=1e-6)


LLAMA: dict[str, Any] = {"activation": "swiglu", "norm": "rms_norm", "bias": False, "rotary_base": 100.0}


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(4, dim_feedforward=32, dropout=0.0, activation="gelu", norm_first=True),
        nn.TransformerEncoderLayer(4, dim_feedforward=32, dropout=0.2, activation="gelu", norm_first=True),
        nn.DecoderLayer(4, dropout=0.2, num_key_value_heads=2, **LLAMA),
        nn.DecoderLayer(4, window=5, soft_cap=4.0, qk_norm=True, **LLAMA),
    ],
    ids=["encoder", "dropout", "grouped", "window"],
)
def test_a_transformer_layer_trains_as_on_the_cpu(layer: nn.TransformerLayer) -> None:
    params, _ = layer.init((17, 16), 0, np.float64)
    x = np.random.default_rng(1).normal(size=(3, 17, 16))

    def loss(params: Any, x: Any, rng: Any) -> Any:
        return ops.mean(ops.square(layer.forward(params, {}, x, nn.Mode(training=True, rng=rng))[0] - 1.0))

    staged = stage(ad.value_and_grad(loss), ALL)
    found = []
    for device in ("cpu", "gpu"):
        given = ad.tree.map(lambda a, device=device: a.to(device), params)
        results = staged(given, ad.array(x, device=device), ops.rng_state(2, 1).to(device))
        found.append([a.numpy() for a in ad.tree.leaves(results)])
    check(found[1], found[0], 1e-10)
