"""Sums of products of Gram matrices: which equations share a launch, and the kernel on the CPU against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, check_kernels, host
from program_samples import for_gpu

import adtrain as ad
from adtrain import nn, ops
from adtrain.backends.cuda.forms.gram_norms import GRAM_NORMS
from adtrain.core import tree
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.curvature import FACTORED

__all__ = ["host"]

TOLERANCE = 1e-6
"""Of the norm of the difference over the norm."""


def gram(x: Any) -> Any:
    return ops.matmul(x, x, transpose_b=True)


def of_pairs(x: Any, y: Any, z: Any) -> Any:
    """Three sums that need two Gram matrices of x, and one that needs another matrix."""
    a, b = gram(x), gram(y)
    sums = [ops.sum(found, axis=(1, 2)) for found in (a * b, a, b)]
    return sums, ops.sum(gram(z), axis=(1, 2))


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def program_of(f: Callable[..., Any], *arrays: Any) -> Program:
    return for_gpu(stage(f, FACTORED).program(*arrays))


@pytest.mark.parametrize(
    ("rows", "widths"),
    [
        (5, (8, 6, 64)),  # a tile that is not whole; loads of one, two and four elements
        pytest.param(16, (49, 192, 4), marks=pytest.mark.exhaustive),
        pytest.param(29, (28, 70, 3), marks=pytest.mark.exhaustive),  # a thread has several tiles
        pytest.param(32, (1, 130, 8), marks=pytest.mark.exhaustive),
    ],
)
def test_sums_of_products_are_right(host: Host, rows: int, widths: tuple[int, ...]) -> None:
    arrays = drawn(*((3, rows, n) for n in widths))
    assert check_kernels(program_of(of_pairs, *arrays), arrays, host, GRAM_NORMS, TOLERANCE) == 1


def norms(params: Any, x: Any, model: nn.Module) -> Any:
    """The squared norm of the gradient of each example by each parameter."""
    of_one = lambda params, x: ops.mean(ops.square(model(params, ops.reshape(x, (1, *x.shape)))))  # noqa: E731
    return tree.map(lambda g: ops.sum(g * g, axis=tuple(range(1, g.ndim))), ad.per_example_grad(of_one)(params, x))


def test_norms_of_all_layers_and_biases_are_one_launch() -> None:
    model = nn.Sequential(nn.Linear(64), nn.Tanh(), nn.Linear(48), nn.Tanh(), nn.Linear(40))
    params, _ = model.init((9, 32))
    program = program_of(lambda params, x: norms(params, x, model), params, *drawn((7, 9, 32)))
    (e,) = [e for e in program.equations if e.form == GRAM_NORMS]
    assert len(e.outputs) == 6
    assert all(v.type.shape[1] == 9 for v in e.inputs)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: (ops.sum(gram(x) * gram(y), axis=(1, 2)), gram(x)),
        lambda x, y: ops.sum(gram(x) * gram(y) * gram(y), axis=(1, 2)),
        lambda x, y: ops.sum(gram(x) * ops.exp(gram(y)), axis=(1, 2)),
        lambda x, y: ops.sum(gram(x) * gram(y), axis=(0, 2)),
    ],
    ids=["result", "three", "function", "other axes"],
)
def test_matrices_that_are_needed_elsewhere_are_computed(f: Any) -> None:
    program = program_of(f, *drawn((3, 5, 8), (3, 5, 16)))
    assert GRAM_NORMS not in {e.form for e in program.equations}


def test_matrices_of_many_rows_are_computed() -> None:
    program = program_of(of_pairs, *drawn((3, 33, 8), (3, 33, 8), (3, 40, 2)))
    assert GRAM_NORMS not in {e.form for e in program.equations}
