"""Recurrent networks on a GPU match NumPy in float64, with every division of the work, and repeat bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, poisoned
from test_cuda_recurrent_on_host import arguments, equation

import adtrain as ad
from adtrain import nn, ops
from adtrain.core.array import Array
from adtrain.core.kernel import HOPPER, CudaKernel, cuda_kernels
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.recurrent import Division, GridDivision, divisions, grid_kernel, kernel
from adtrain.lowering.shapes import recurrent_lengths
from adtrain.passes import ALL

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

CELLS = ("rnn_tanh", "rnn_relu", "lstm", "gru")
TOLERANCE = {"float32": 2e-5, "float64": 1e-11}
SIZES = [(128, 28, 128), (64, 28, 256), (33, 9, 512), (1, 28, 128), (7, 1, 1), (5, 3, 33), (1000, 2, 130)]
"""Rows of the batch, steps, hidden units. In float64 only the third to the sixth are tested: their candidates have
kernels of each kind. For two cells in float64 that is exhaustive: they differ from the others in their gates, which are
the same text in both element types."""
REST = ("rnn_relu", "float64"), ("lstm", "float64")


def reference(name: str, given: list[np.ndarray], reverse: bool) -> list[np.ndarray]:
    """In float64."""
    e = equation(name, given, reverse)
    return list(e.primitive.reference(*(x.astype(np.float64) for x in given), **e.params))


def errors(found: list[np.ndarray], expected: list[np.ndarray]) -> list[float]:
    """Of each array the largest error over the largest number."""
    return [float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)) for x, y in zip(found, expected, strict=True)]


def samples(found: list[Division], count: int) -> list[Division]:
    """Divisions of each kind, spread over all of them."""
    kinds: dict[Any, list[Division]] = {}
    for division in found:
        kinds.setdefault((division.resident, division.cluster), []).append(division)
    return [each for kind in kinds.values() for each in kind[:: -(-len(kind) // count)]]


def problem(
    gpu: Any,
    name: str,
    candidate: CudaKernel,
    given: list[np.ndarray],
    expected: list[np.ndarray],
    reverse: bool,
    tolerance: Mapping[str, float] = TOLERANCE,
) -> list[str]:
    """A line if the candidate is wrong."""
    dtype = given[0].dtype.name
    try:
        e = equation(name, given, reverse)
        found = run_twice(gpu, e.primitive, candidate, given, **e.params)
        largest = max(errors(found, expected))
    except Exception as error:  # the other candidates are run all the same
        return [f"{name} {given[0].shape} {dtype}: {type(error).__name__}: {error}: {candidate.label}"]
    right = largest <= tolerance[dtype]
    return [] if right else [f"{name} {given[0].shape} {dtype}: error {largest:.1e}: {candidate.label}"]


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("cell", "dtype"),
    [pytest.param(*each, marks=pytest.mark.exhaustive if each in REST else ()) for each in product(CELLS, TOLERANCE)],
)
def test_every_candidate_is_right(gpu: Any, cell: str, gradient: bool, dtype: str) -> None:
    name, wrong = f"{cell}_grad" if gradient else cell, []
    for i, sizes in enumerate(SIZES if dtype == "float32" else SIZES[2:6]):
        reverse = i % 2 == 1
        given = [x.astype(dtype) for x in arguments(cell, *sizes, gradient, reverse, of_all=not reverse)]
        types = [ArrayType(x.shape, x.dtype) for x in given]
        expected = reference(name, given, reverse)
        for candidate in cuda_kernels(name, gpu.lowering.target, *types, reverse=reverse):
            wrong += problem(gpu, name, candidate, given, expected, reverse)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("of_each", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_kind_of_division_is_right(gpu: Any, cell: str, gradient: bool, of_each: int) -> None:
    name, wrong = f"{cell}_grad" if gradient else cell, []
    given = [x.astype(np.float32) for x in arguments(cell, 5, 4, 61, gradient, False)]
    expected = reference(name, given, False)
    found = divisions(gpu.lowering.target, recurrent_lengths(*given), 4, gradient)
    for division in samples(list(found), of_each):
        candidate = kernel(cell, division, given, False)
        wrong += problem(gpu, name, candidate, given, expected, False)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("sizes", [(300, 5, 512), (129, 3, 128)])
@pytest.mark.parametrize("kind", ["", "_weight_grad"])
@pytest.mark.parametrize("terms", [1, 2])
def test_the_kernels_over_the_grid_are_right(
    gpu: Any, cell: str, sizes: tuple[int, int, int], kind: str, terms: int
) -> None:
    """One term of an operand has 11 bits."""
    target, gradient = gpu.lowering.target, kind != ""
    if target.capability != HOPPER:
        pytest.skip("the kernel needs WGMMA")
    given = [x.astype(np.float32) for x in arguments(cell, *sizes, gradient=gradient, reverse=True)]
    division = GridDivision(cell, recurrent_lengths(*given), gradient, terms, weight_grad=gradient)
    candidate, expected = grid_kernel(division, target, given, True), reference(f"{cell}{kind}", given, True)
    tolerance = TOLERANCE if terms == 2 else {"float32": 2**-9}
    wrong = problem(gpu, f"{cell}{kind}", candidate, given, expected, True, tolerance)
    assert not wrong, "\n".join(wrong)


def loss(layer: nn.Module, params: Any, x: Any) -> Any:
    return ops.sum(ops.square(layer(params, x)))


@pytest.mark.parametrize(("kind", "output"), [*product([nn.RNN, nn.LSTM, nn.GRU], ["last", "all"])])
def test_gradients_of_layers_match_the_cpu(gpu: Any, kind: type[nn.Module], output: str) -> None:
    layer: Any = kind(40, num_layers=2, bidirectional=True, output=output)  # type: ignore[call-arg]
    params, _ = layer.init((9, 5), dtype=np.float64)
    x = ad.array(np.random.default_rng(0).normal(size=(6, 9, 5)))
    step = stage(lambda params, x: ad.value_and_grad(lambda p: loss(layer, p, x))(params), ALL)
    on_gpu = ad.tree.map(lambda a: a.to("gpu"), params)
    expected, found = step(params, x), step(on_gpu, x.to("gpu"))
    for a, b in zip(ad.tree.leaves(expected), ad.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("op", ["rnn", "lstm", "gru"])
def test_second_derivatives_match_the_cpu(gpu: Any, op: str) -> None:
    gates, rng = {"rnn": 1, "lstm": 4, "gru": 3}[op], np.random.default_rng(0)
    given = [ad.array(rng.normal(size=shape)) for shape in ((3, 4, 2), (gates * 5, 2), (gates * 5, 5))]

    def squares(*xs: Array) -> Any:
        found = ad.grad(lambda *a: ops.sum(ops.sin(getattr(ops, op)(*a)[0])), argnums=(0, 1, 2))(*xs)
        return sum((ops.sum(ops.square(g)) for g in found), ops.zeros((), np.float64, xs[0].device))

    f = stage(ad.grad(squares, argnums=(0, 1, 2)), ALL)
    for a, b in zip(f(*given), f(*(x.to("gpu") for x in given)), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-9, atol=1e-10)
