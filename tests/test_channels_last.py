"""Channels last: Programs compute the same, images are transposed at borders only, and batch norm is accurate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from sweeps import check_examples, examples
from test_passes_random import assert_consistent

import adtrain as ad
from adtrain import nn, ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda.channels_last import channels_last
from adtrain.backends.cuda.targets import H200
from adtrain.core import tree
from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.program import Program
from adtrain.core.registry import forget, has_kernels, register
from adtrain.core.staging import stage

EXAMPLES, CLASSES = 8, 8
CONVOLUTIONS = "conv2d_bfloat16", "conv2d_input_grad_bfloat16", "conv2d_weight_grad_bfloat16"


@pytest.fixture(autouse=True, scope="module")
def kernels_of_images() -> Iterator[None]:
    """Some kernels for convolutions of images that are channels last, if there are none."""
    own = [name for name in CONVOLUTIONS if not has_kernels(name, "cuda")]
    for name in own:
        register(name, "cuda", lambda *_, **__: [CudaKernel((CudaLaunch("", "", elements=1),))])
    yield
    for name in own:
        forget(name)


def with_channels_last(program: Program) -> Program:
    return channels_last(program, H200)


def simplified(f: Callable[..., Any], *arguments: Any) -> Program:
    with ops.matmul_precision("bfloat16"):
        return stage(f, passes.SIMPLIFY).program(*arguments)


def training(layers: Sequence[nn.Module], shape: tuple[int, ...]) -> tuple[Program, list[np.ndarray]]:
    """The loss of a network with its gradients and new statistics, and arguments."""
    model, rng = nn.Sequential(*layers), np.random.default_rng(0)
    params, statistics = model.init(shape, rng, np.dtype(np.float32))
    x = ad.array(rng.standard_normal((EXAMPLES, *shape), np.float32))
    labels = ad.array(rng.integers(0, CLASSES, EXAMPLES))

    def step(params: Any, statistics: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = model.forward(params, statistics, x, nn.Mode(training=True))
            return ops.cross_entropy(ops.mean(out, (2, 3)), labels), new

        return ad.value_and_grad(loss, has_aux=True)(params)

    arguments = params, statistics, x, labels
    return simplified(step, *arguments), [v.numpy() for v in tree.leaves(arguments)]


def images_transposed(program: Program) -> list[str]:
    """The transposes of images, as the shapes of their results."""
    found = [e for e in program.equations if e.primitive.name == "transpose"]
    return [str(e.outputs[0].type.shape) for e in found if e.outputs[0].type.shape[0] == EXAMPLES]


def assert_same_results(program: Program, given: Sequence[np.ndarray], tolerance: float) -> Program:
    after = with_channels_last(program)
    assert_consistent(after, program)
    pairs = zip(NumpyProgram(after).run(given)[0], NumpyProgram(program).run(given)[0], strict=True)
    for found, expected in pairs:
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected) + 1e-5
    return after


def convolution(channels: int = 8, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels, kernel_size=3, padding=1, stride=stride)


def residual(*body: nn.Module) -> nn.Module:
    return nn.Residual(nn.Sequential(*body))


LAYERS = st.sampled_from(
    [
        convolution(),
        nn.Conv2d(8, kernel_size=1, bias=False),
        nn.ReLU(),
        nn.GELU(),
        nn.BatchNorm2d(),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.GroupNorm(2),
        residual(convolution(), nn.BatchNorm2d(), nn.ReLU()),
        residual(nn.BatchNorm2d(), nn.ReLU(), convolution()),
    ]
)


@examples(20, 200)
def test_random_networks_compute_the_same(examples: int) -> None:
    def check(layers: list[nn.Module]) -> None:
        program, given = training([convolution(), *layers, convolution()], (8, 7, 6))
        assert_same_results(program, given, 0.02)

    check_examples(examples, check, st.lists(LAYERS, min_size=1, max_size=4))
