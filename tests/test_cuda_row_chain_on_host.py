"""Chains of rows: which equations become one kernel, and these kernels on the CPU against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, check_kernels, host
from cuda_samples import Shaped
from program_samples import for_gpu

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda.forms import row_chain
from adtrain.backends.cuda.forms.row_chain import ROW_CHAIN
from adtrain.backends.cuda.targets import H200
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.target import Target
from adtrain.core.types import Shape

__all__ = ["host"]

TARGET: Target = H200._replace(multiprocessors=2)
"""A block computes several tiles."""
TOLERANCE = 3e-6
"""Maximum norm of the error over the norm of the result."""


def network(weights: Sequence[Any], x: Any, activation: Callable[[Any], Any] = ops.tanh) -> Any:
    *hidden, last = weights
    for w, b in hidden:
        x = activation(x @ w + b)
    return x @ last[0] + last[1]


def layers(*widths: int) -> list[tuple[Shape, Shape]]:
    return [((a, b), (b,)) for a, b in zip(widths, widths[1:], strict=False)]


def burgers(weights: Any, t: Any, x: Any) -> Any:
    """The loss of a physics-informed network with its gradient."""

    def loss(weights: Any) -> Any:
        def u(t: Any, x: Any) -> Any:
            return network(weights, ops.concatenate([t, x], 1))

        value, (by_x, by_xx) = ad.jet(lambda x: u(t, x), (x,), [(ops.ones_like(x),), None])
        by_t = ad.jvp(lambda t: u(t, x), (t,), (ops.ones_like(t),))[1]
        return ops.mean(ops.square(by_t + value * by_x - 0.01 * by_xx))

    return ad.value_and_grad(loss)(weights)


def regression(weights: Any, x: Any, y: Any) -> Any:
    """A network with residual additions, with the gradients of its weights and inputs."""

    def loss(weights: Any, x: Any) -> Any:
        first, *inner, last = weights
        h = ops.relu(x @ first[0] + first[1])
        for w, b in inner:
            h = h + ops.sin(h @ w + b)
        return ops.mean(ops.square(h @ last[0] + last[1] - y))

    return ad.value_and_grad(loss, (0, 1))(weights, x)


def prediction(weights: Any, x: Any) -> Any:
    return network(weights, x, ops.gelu)


Sample = tuple[Callable[..., Any], Callable[[int], Any]]
SAMPLES: dict[str, Sample] = {
    "burgers": (burgers, lambda n: (layers(2, 20, 20, 1), (n, 1), (n, 1))),
    "regression": (regression, lambda n: (layers(9, 24, 24, 24, 3), (n, 9), (n, 3))),
    "prediction": (prediction, lambda n: (layers(7, 64, 33, 5), (n, 7))),
}
COUNTS = {"burgers": 70, "regression": 90, "prediction": 50}


def arrays_of(shapes: Any, rng: np.random.Generator) -> Any:
    """Normal numbers in place of each shape of a tree."""
    if all(isinstance(n, int) for n in shapes):
        return rng.standard_normal(shapes, np.float32) / 2
    return type(shapes)(arrays_of(each, rng) for each in shapes)


def fused(name: str, arrays: Any, target: Target = TARGET) -> Program:
    f, _ = SAMPLES[name]
    return for_gpu(stage(f).program(*arrays), target)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chain, "MIN_ROWS", 40)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", SAMPLES)
def test_chains_match_numpy(name: str, host: Host) -> None:
    rng = np.random.default_rng(0)
    arrays = arrays_of(SAMPLES[name][1](COUNTS[name]), rng)
    program = fused(name, arrays)
    assert check_kernels(program, ad.tree.leaves(arrays), host, ROW_CHAIN, TOLERANCE) == 1
