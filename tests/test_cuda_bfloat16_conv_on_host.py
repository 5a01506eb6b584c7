"""The kernel for convolutions of images that are bfloat16 in memory, emulated on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conv_samples import cases
from cuda_on_host import Host, host
from product_samples import NOISE, ROUNDINGS, errors, sequential_fma

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.tuner.measure import terms_of
from adtrain.backends.cuda.write_channels_last import BY_FILTER
from adtrain.core.kernel import CudaKernel, Target
from adtrain.core.precision import FLOAT32, TERMS, TF32
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.types import BITS, ArrayType
from adtrain.lowering.cuda.conv.bfloat16 import MAX_POSITION, Bfloat16Conv, Loader, conv2d, input_grad
from adtrain.lowering.cuda.conv.problem import Direction
from adtrain.lowering.cuda.gemm.bfloat16 import (
    GATHER_TILES,
    GATHER_TILES_OF_TERMS,
    TF32_TILES,
    TILES,
    TILES_OF_TERMS,
    Bfloat16Tile,
)
from adtrain.ops.conv import Window

__all__ = ["host"]

TARGET: Target = H200._replace(multiprocessors=5)
"""A block computes several tiles."""
TOLERANCES = {1: 5e-7, 2: 2e-5, 3: 5e-7}
"""By the terms of an operand, the largest norm of the difference from the reference, divided by the norm of the
reference. With two terms, kernels leave out the product of second terms."""
NAMES = {
    Direction.FORWARD: "conv2d",
    Direction.INPUT_GRAD: "conv2d_input_grad",
    Direction.WEIGHT_GRAD: "conv2d_weight_grad",
}
WINDOWS = {
    "3x3": ((3, 3), Window((1, 1), (1, 1), (1, 1), 1)),
    "1x1 of stride 2": ((1, 1), Window((2, 2), (0, 0), (1, 1), 1)),
    "3x3 of stride 2": ((3, 3), Window((2, 2), (1, 1), (1, 1), 1)),
    "2x3, stride 3x1, dilation 1x2": ((2, 3), Window((3, 1), (0, 2), (1, 2), 1)),
    "3x2, stride 2, dilation 2": ((3, 2), Window((2, 2), (1, 0), (2, 2), 1)),
}
"""Kernels and windows. With a stride and dilation of 2, some phases have no taps."""


def product_of_pixels(a: np.ndarray, b: np.ndarray) -> tuple[Bfloat16Conv, list[np.ndarray], dict[str, Any]]:
    """A 1 x 1 convolution in bf16x3 that computes the transpose of a b, its operands, and its primitive's parameters.

    Its pixels are the columns of b, its filters the rows of a.
    """
    (m, k), n = a.shape, b.shape[1]
    arrays = [*terms_of(b.T.reshape(1, 1, n, k), 3), *terms_of(a.reshape(m, 1, 1, k), 3)]
    window = Window((1, 1), (0, 0), (1, 1), 1)
    conv = Bfloat16Conv(Direction.FORWARD, (1, 1, n, k), (1, 1, n, m), (1, 1), window, 3)
    return conv, arrays, {"window": window, "precision": "bf16x3"}


def problem(
    direction: Direction,
    images: tuple[int, int, int, int],
    channels: int,
    kernel: tuple[int, int],
    window: Window,
    operand_format: str = "bfloat16",
) -> tuple[Bfloat16Conv, list[np.ndarray], dict[str, Any]]:
    """A convolution or gradient, random operands, and the parameters of its primitive."""
    n, h, w, c = images
    oh, ow = (window.output_length(i, (h, w)[i], kernel[i]) for i in (0, 1))
    shapes = {"x": images, "w": (channels, *kernel, c), "g": (n, oh, ow, channels)}
    operands = {Direction.FORWARD: "xw", Direction.INPUT_GRAD: "gw", Direction.WEIGHT_GRAD: "xg"}[direction]
    sizes = {Direction.FORWARD: {}, Direction.INPUT_GRAD: {"size": (h, w)}, Direction.WEIGHT_GRAD: {"size": kernel}}
    rng = np.random.default_rng(channels)
    arrays: list[np.ndarray] = []
    for x in (rng.standard_normal(shapes[each], np.float32) for each in operands):
        if operand_format == TF32:
            by_filter = direction == Direction.INPUT_GRAD and arrays
            arrays.append(np.ascontiguousarray(x.transpose(BY_FILTER)) if by_filter else x)
        else:
            arrays += terms_of(x, TERMS[operand_format])
    terms, in_tf32 = TERMS[operand_format], operand_format == TF32
    conv = Bfloat16Conv(direction, images, (n, oh, ow, channels), kernel, window, terms, in_tf32)
    return conv, arrays, {"window": window, **sizes[direction], "precision": operand_format}


def primitive_of(conv: Bfloat16Conv, params: dict[str, Any]) -> Primitive:
    return PRIMITIVES[f"{NAMES[conv.direction]}_{params['precision']}"]


def tiles(operand_format: str) -> tuple[Bfloat16Tile, ...]:
    return TF32_TILES if operand_format == TF32 else TILES_OF_TERMS[TERMS[operand_format]]


def computed(
    host: Host, conv: Bfloat16Conv, kernel: CudaKernel, arrays: list[np.ndarray], params: dict[str, Any]
) -> np.ndarray:
    primitive = primitive_of(conv, params)
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = Variable(primitive.shape(*arrays, **params), "gpu")
    return host.computed(Equation(primitive, inputs, params, (out,)), kernel, arrays)[0]


def check(host: Host, conv: Bfloat16Conv, kernel: CudaKernel, arrays: list[np.ndarray], params: dict[str, Any]) -> None:
    found = computed(host, conv, kernel, arrays, params)
    expected = primitive_of(conv, params).reference(*arrays, **params)
    assert np.linalg.norm(found - expected) <= TOLERANCES[conv.terms] * np.linalg.norm(expected)


def _is_plain(direction: Direction, name: str) -> bool:
    """Whether plain pytest runs it: the most general window, and for input gradients one with phases without taps."""
    general, without_taps = "2x3, stride 3x1, dilation 1x2", "3x2, stride 2, dilation 2"
    return name == general or (direction is Direction.INPUT_GRAD and name == without_taps)


@pytest.mark.parametrize(
    ("direction", "name"),
    [
        pytest.param(each, name, marks=() if _is_plain(each, name) else pytest.mark.exhaustive)
        for each in Direction
        for name in WINDOWS
    ],
)
def test_convolutions_and_gradients_are_right(host: Host, direction: Direction, name: str) -> None:
    """Neither the pixels nor the channels fill the tiles."""
    conv, arrays, params = problem(direction, (3, 9, 7, 104), 56, *WINDOWS[name])
    check(host, conv, conv.cuda_kernel(conv.product(TARGET, TILES[-1])), arrays, params)


@pytest.mark.parametrize(
    ("direction", "channels"),
    [
        (Direction.FORWARD, (24, 64)),
        pytest.param(Direction.INPUT_GRAD, (72, 32), marks=pytest.mark.exhaustive),
        pytest.param(Direction.WEIGHT_GRAD, (96, 40), marks=pytest.mark.exhaustive),
    ],
)
def test_boxes_of_few_channels_are_right(host: Host, direction: Direction, channels: tuple[int, int]) -> None:
    conv, arrays, params = problem(direction, (3, 7, 8, channels[0]), channels[1], *WINDOWS["3x3"])
    check(host, conv, conv.cuda_kernel(conv.product(TARGET, TILES[-1])), arrays, params)


@pytest.mark.parametrize(
    ("direction", "name"),
    [
        pytest.param(each, name, marks=() if _is_plain(each, name) else pytest.mark.exhaustive)
        for each in Direction
        for name in WINDOWS
    ],
)
def test_gathered_images_are_right(host: Host, direction: Direction, name: str) -> None:
    """Neither the pixels nor the channels of all taps fill the tiles."""
    conv, arrays, params = problem(direction, (3, 9, 7, 24), 40, *WINDOWS[name])
    size = (64, 128) if direction is Direction.WEIGHT_GRAD else (128, 32)
    tile = next(x for x in GATHER_TILES if (x.m, x.n) == size)
    conv = conv._replace(loader=Loader.GATHER)
    check(host, conv, conv.cuda_kernel(conv.product(TARGET, tile)), arrays, params)


@pytest.mark.parametrize("operand_format", ["bfloat16", "bf16x2"])
@pytest.mark.parametrize(("filters", "gathered"), [(40, (True, True)), (72, (False, True))])
def test_a_weight_gradient_of_many_filters_gathers_only_the_images(
    host: Host, filters: int, gathered: tuple[bool, bool], operand_format: str
) -> None:
    conv, arrays, params = problem(Direction.WEIGHT_GRAD, (3, 9, 7, 24), filters, *WINDOWS["3x3"], operand_format)
    conv = conv._replace(loader=Loader.GATHER)
    tile = next(x for x in GATHER_TILES_OF_TERMS[conv.terms] if (x.m, x.n) == (64, 64))
    work = conv.product(TARGET, tile, 2)
    assert work.gathered == gathered
    check(host, conv, conv.cuda_kernel(work), arrays, params)


@pytest.mark.parametrize("operand_format", ["bfloat16", TF32])
@pytest.mark.parametrize(
    ("direction", "channels", "kernel", "window"),
    [
        pytest.param(Direction.FORWARD, (24, 40), *WINDOWS["3x3"], marks=pytest.mark.exhaustive),
        (Direction.INPUT_GRAD, (24, 64), *WINDOWS["3x3"]),
        pytest.param(
            Direction.FORWARD, (8, 24), (2, 2), Window((1, 1), (0, 0), (1, 1), 1), marks=pytest.mark.exhaustive
        ),
        (Direction.FORWARD, (40, 72), (3, 2), Window((1, 1), (4, 0), (2, 1), 1)),
        pytest.param(
            Direction.INPUT_GRAD, (16, 8), (2, 3), Window((1, 1), (0, 2), (3, 2), 1), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_images_that_are_copied_once_for_all_taps_are_right(
    host: Host,
    direction: Direction,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    window: Window,
    operand_format: str,
) -> None:
    """Zeros follow lines and images, or only one of them, or none. Channels do not fill the tiles."""
    conv, arrays, params = problem(direction, (3, 9, 7, channels[0]), channels[1], kernel, window, operand_format)
    conv = conv._replace(loader=Loader.SHIFT)
    works = conv.products(TARGET)
    assert {x.tile.pingpong for x in works} == {True, False}
    assert all(x.tile.n >= conv.lengths[2] for x in works)
    for work in works[-2:]:
        check(host, conv, conv.cuda_kernel(work), arrays, params)


def test_strides_and_wide_padding_need_several_copies() -> None:
    conv, _, _ = problem(Direction.FORWARD, (3, 9, 7, 24), 40, *WINDOWS["3x3"])
    shifting = conv._replace(loader=Loader.SHIFT)
    assert shifting.fits()
    assert shifting.products(H200)
    assert not shifting._replace(window=WINDOWS["3x3 of stride 2"][1]).fits()
    assert not shifting._replace(window=Window((1, 1), (3, 1), (1, 1), 1)).fits()
    assert not shifting._replace(direction=Direction.WEIGHT_GRAD).fits()


def test_large_filters_are_not_kept_in_shared_memory() -> None:
    conv, _, _ = problem(Direction.FORWARD, (3, 9, 7, 256), 64, *WINDOWS["3x3"])
    assert conv._replace(loader=Loader.SHIFT).products(H200) == []


@pytest.mark.parametrize(
    "direction",
    [pytest.param(x, marks=() if x is Direction.WEIGHT_GRAD else pytest.mark.exhaustive) for x in Direction],
)
def test_splits_of_k_are_added(host: Host, direction: Direction) -> None:
    conv, arrays, params = problem(direction, (2, 10, 10, 136), 72, *WINDOWS["3x3 of stride 2"])
    kernel = conv.cuda_kernel(conv.product(TARGET, TILES[-1], 2))
    assert len(kernel.launches) == 2
    check(host, conv, kernel, arrays, params)


KINDS = [
    (x, name) for name in TERMS if name != FLOAT32 for x in Direction if (x, name) != (Direction.WEIGHT_GRAD, TF32)
]
"""All directions and operand formats that there are kernels for."""


@pytest.mark.parametrize(
    ("direction", "operand_format"),
    [
        pytest.param(*kind, marks=pytest.mark.exhaustive if kind[0] is Direction.FORWARD else ())
        for kind in KINDS
        if kind[1] != "bfloat16"
    ],
)
def test_operands_in_tf32_and_of_several_terms_are_right(host: Host, direction: Direction, operand_format: str) -> None:
    conv, arrays, params = problem(direction, (2, 6, 7, 72), 40, *WINDOWS["3x3 of stride 2"], operand_format)
    check(host, conv, conv.cuda_kernel(conv.product(TARGET, tiles(operand_format)[-1], 2)), arrays, params)


@pytest.mark.parametrize("case", ["normal", "cancelling to 0.03", "growing", "one of 20 not zero"])
def test_three_terms_are_as_exact_as_sequential_fma_sums(host: Host, case: str) -> None:
    a, b = cases(40, 24, 96)[case]
    conv, arrays, params = product_of_pixels(a, b)
    kernel = conv.cuda_kernel(conv.product(TARGET))
    found = computed(host, conv, kernel, arrays, params).T
    taken, expected = errors(found, a, b), errors(sequential_fma(a, b), a, b)
    assert taken[0] <= max(NOISE * expected[0], ROUNDINGS)
    assert taken[1] <= max(NOISE * expected[1], ROUNDINGS)


def files(kernels: Sequence[CudaKernel]) -> set[str]:
    return {kernel.launches[0].file for kernel in kernels}


def test_windows_that_a_tensor_map_cannot_describe_are_gathered() -> None:
    x = ArrayType((2, 300, 300, 8), BITS)
    w = ArrayType((8, 3, 3, 8), BITS)
    wide = Window((1, 1), (MAX_POSITION + 1, 1), (1, 1), 1)
    assert files(conv2d(H200, x, w, window=wide, precision="bfloat16")) == {"conv/bfloat16_gather.cu"}
    narrow = w._replace(shape=(9, 3, 3, 8))
    assert conv2d(H200, x, narrow, window=WINDOWS["3x3"][1], precision="bfloat16") == []
    many = Window((5, 5), (0, 0), (1, 1), 1)
    g = ArrayType((2, 60, 60, 8), BITS)
    assert files(input_grad(H200, g, w, window=many, precision="bfloat16", size=(300, 300))) == {
        "conv/bfloat16_gather.cu"
    }


def test_an_input_gradient_has_fewer_pixels_than_32_bits_count() -> None:
    """With a stride of 2 a phase has a quarter of them, and the pixels of all phases are counted."""
    w = ArrayType((8, 1, 1, 8), BITS)
    halved = WINDOWS["1x1 of stride 2"][1]
    for count, kernels in ((511, True), (512, False)):
        g = ArrayType((count, 1024, 1024, 8), BITS)
        assert bool(input_grad(H200, g, w, window=halved, precision="bfloat16", size=(2048, 2048))) == kernels
