"""Convolutions by positions, and what is fused with convolutions: the kernels, on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host, new_host
from program_samples import ON_GPU

from adtrain import ops
from adtrain.backends.cuda.tasks import candidates
from adtrain.core.array import ArrayType, array
from adtrain.core.chip import CHIP
from adtrain.core.fused import convolution_p
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import stage
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.halves_weight_grad_cuda import HalvesWeightGrad
from adtrain.ops.planes_cuda import PlaneConvolution
from adtrain.ops.planes_weight_grad_cuda import PlaneWeightGrad
from adtrain.ops.positions import Positions
from adtrain.ops.rounding import rounded

__all__ = ["host", "new_host"]

TOLERANCE = 5e-7
"""Of the norm of the difference over the norm."""


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that blocks go from tile to tile."""
    monkeypatch.setattr(CHIP, "multiprocessors", 2)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def equation(primitive: Primitive, arrays: list[np.ndarray], params: dict[str, Any]) -> Equation:
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = primitive.shape(*(v.type for v in inputs), **params)
    assert isinstance(out, ArrayType)
    return Equation(primitive, inputs, params, (Variable(out, "gpu"),))


def agree(found: np.ndarray, expected: np.ndarray) -> bool:
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    return bool(np.linalg.norm(found[held] - expected[held]) <= TOLERANCE * np.linalg.norm(expected[held]))


def directions(
    positions: Positions, x: np.ndarray, w: np.ndarray, g: np.ndarray
) -> Iterator[tuple[Equation, Any, Any]]:
    """The convolution and its gradients: the equation, its arguments, and the kernel by positions."""
    window = {"window": Window((1, 1), positions.padding, positions.dilation, 1), "precision": positions.precision}
    sized = {**window, "size": positions.images[2:]}
    for halves in (False, True):
        yield equation(conv2d_p, [x, w], window), (x, w), PlaneConvolution(positions, False, halves)
        yield equation(input_grad_p, [g, w], sized), (g, w), PlaneConvolution(positions.turned(), True, halves)
    sized = {**window, "size": positions.kernel}
    grads: list[PlaneWeightGrad | HalvesWeightGrad] = [*PlaneWeightGrad(positions).choices()]
    for planes in [*grads, HalvesWeightGrad(positions)]:
        if planes.suits():
            yield equation(weight_grad_p, [x, g], sized), (x, g), planes


def check(host: Host, positions: Positions, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> None:
    for e, arrays, planes in directions(positions, x, w, g):
        wide = [rounded(v, positions.precision).astype(float) for v in arrays]
        with np.errstate(invalid="ignore"):
            expected = e.primitive.implementations["cpu"](*wide, **{**e.params, "precision": "full"})
        assert agree(host.computed(e, planes.kernel(), arrays)[0], expected), e.primitive.name


@pytest.mark.parametrize(
    ("image", "filters", "kernel", "padding", "dilation", "precision"),
    [
        ((2, 20, 9, 8), 33, (3, 3), (1, 1), (1, 1), "full"),
        ((2, 20, 9, 8), 33, (3, 3), (1, 1), (1, 1), "tf32"),
        pytest.param((2, 66, 8, 7), 65, (3, 3), (0, 2), (1, 1), "full", marks=pytest.mark.exhaustive),
        pytest.param((1, 9, 12, 21), 5, (3, 2), (2, 0), (2, 1), "full", marks=pytest.mark.exhaustive),
        ((1, 9, 12, 21), 5, (3, 2), (2, 0), (2, 1), "bfloat16"),
    ],
)
def test_convolutions_by_positions_are_right(
    host: Host,
    image: tuple[int, ...],
    filters: int,
    kernel: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    precision: str,
) -> None:
    size = [n + 2 * p - (k - 1) * d for n, p, k, d in zip(image[2:], padding, kernel, dilation, strict=True)]
    positions = Positions(image, (image[0], filters, *size), kernel, padding, dilation, precision)
    check(host, positions, *drawn(image, (filters, image[1], *kernel), positions.outputs))


@pytest.mark.parametrize("filters", [40, 20])
def test_tiles_of_all_widths_give_the_same(host: Host, filters: int) -> None:
    positions = Positions((2, 8, 9, 13), (2, filters, 7, 11), (3, 3), (0, 0), (1, 1))
    x, w = drawn(positions.images, (filters, 8, 3, 3))
    e = equation(conv2d_p, [x, w], {"window": Window((1, 1), (0, 0), (1, 1), 1), "precision": "full"})
    tiles = [t for t in PlaneConvolution(positions, False).choices() if t.columns in (64, 104, 128)]
    found = [host.computed(e, t.kernel(), [x, w])[0] for t in tiles]
    assert agree(found[0], e.primitive.implementations["cpu"](x.astype(float), w.astype(float), **e.params))
    assert len({y.tobytes() for y in found}) == 1


def test_what_is_laid_out_has_been_measured_in_front_of_it(new_host: Host) -> None:
    """Else the kernel would wait for ever."""
    source = new_host.folder / "laid.cuh"
    text = source.read_text()
    assert text.count("AHEAD = 1 << 21;") == 1
    source.write_text(text.replace("AHEAD = 1 << 21;", "AHEAD = 1;"))
    positions = Positions((21, 35, 7, 8), (21, 3, 7, 8), (3, 3), (1, 1), (1, 1))
    x, w, g = drawn(positions.images, (3, 35, 3, 3), positions.outputs)
    for e, arrays, planes in directions(positions, x, w, g):
        if planes.kernel().file in ("prepare_halves.cu", "conv_halves_weight_grad.cu"):
            expected = e.primitive.implementations["cpu"](*(v.astype(float) for v in arrays), **e.params)
            assert agree(new_host.computed(e, planes.kernel(), arrays)[0], expected), e.primitive.name


def test_gradients_by_the_weights_of_numbers_whose_squares_are_none_are_right(host: Host) -> None:
    positions = Positions((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1), (1, 1))
    x, _, g = drawn(positions.images, (33, 20, 3, 3), positions.outputs)
    x, g = x * np.float32(1e-18), g * np.float32(3e-19)
    params = {"window": Window((1, 1), (1, 1), (1, 1), 1), "size": (3, 3), "precision": "full"}
    e, kernel = equation(weight_grad_p, [x, g], params), HalvesWeightGrad(positions).kernel()
    expected = weight_grad_p.implementations["cpu"](x.astype(float), g.astype(float), **params)
    assert agree(host.computed(e, kernel, [x, g])[0], expected)


@pytest.mark.parametrize("precision", ["full", "tf32"])
def test_infinity_and_nan_go_where_they_go_in_plain_sums(host: Host, precision: str) -> None:
    positions = Positions((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1), (1, 1), precision)
    x, w, g = drawn(positions.images, (33, 20, 3, 3), positions.outputs)
    x[0, 1, 2, 3], x[1, 19, 5, 6], g[1, 3, 4, 5], g[0, 32, 0, 3] = np.inf, -np.inf, np.nan, np.inf
    check(host, positions, x, w, g)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.__setitem__((2, 1, 3), 1e-30),
        lambda x: x.__setitem__((0, 0, 0), np.inf),
        lambda x: x.__imul__(1e-35),
        lambda x: x.__imul__(np.arange(x.size).reshape(x.shape) % 50 == 0),
        lambda x: x.__setitem__(slice(1, None, 2), x[::2]),
    ],
    ids=["small among large numbers", "infinity", "denormal numbers", "few numbers", "products that cancel"],
)
def test_images_that_halves_do_not_hold_are_computed_in_pieces(host: Host, spoil: Callable[[np.ndarray], Any]) -> None:
    """The second of three images, which are so large that each has a tile of its own; the third one is zero."""
    positions = Positions((3, 8, 18, 18), (3, 5, 18, 18), (3, 3), (1, 1), (1, 1))
    x, w = drawn(positions.images, (5, 8, 3, 3))
    w[:, 1::2] = -w[:, ::2]
    x[2] = 0
    spoil(x[1])
    params = {"window": Window((1, 1), (1, 1), (1, 1), 1), "precision": "full"}
    e = equation(conv2d_p, [x, w], params)
    halves, pieces = (
        host.computed(e, PlaneConvolution(positions, False, h).kernel(), [x, w])[0] for h in (True, False)
    )
    np.testing.assert_array_equal(halves[1, :, 9], pieces[1, :, 9])
    np.testing.assert_array_equal(halves[2], pieces[2])
    assert not np.array_equal(halves[0, :, 5], pieces[0, :, 5])
    with np.errstate(invalid="ignore"):
        assert agree(halves, conv2d_p.implementations["cpu"](x.astype(float), w.astype(float), **params))


def test_a_few_small_elements_of_an_image_are_held(host: Host) -> None:
    positions = Positions((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1), (1, 1))
    x, w, g = drawn(positions.images, (33, 20, 3, 3), positions.outputs)
    x[0, 2, 1, 3] = x[1, 7, 8, 7] = g[1, 2, 3, 4] = 1e-9
    computed: dict[Any, np.ndarray] = {}
    for e, arrays, planes in directions(positions, x, w, g):
        found = computed[planes] = host.computed(e, planes.kernel(), arrays)[0]
        assert agree(found, e.primitive.implementations["cpu"](*(v.astype(float) for v in arrays), **e.params))
        if isinstance(planes, PlaneConvolution) and planes.halves:
            assert not np.array_equal(found[:, :, 5], computed[replace(planes, halves=False)][:, :, 5])
        elif isinstance(planes, HalvesWeightGrad):
            pieces = next(y for p, y in computed.items() if isinstance(p, PlaneWeightGrad))
            assert np.mean(found != pieces) > 0.1


@pytest.mark.parametrize("precision", ["full", "tf32"])
def test_sums_of_small_elements_alone_lose_no_bits(host: Host, precision: str) -> None:
    """Such an element that has neighbours neither in its channel nor in others, in an image of normal numbers."""
    positions = Positions((2, 20, 9, 8), (2, 33, 9, 8), (3, 3), (1, 1), (1, 1), precision)
    x, w, g = drawn(positions.images, (33, 20, 3, 3), positions.outputs)
    for images in (x, g):
        images[0, :, 5:] = images[:, 3] = 0
        images[0, 3, 7, 4] = 2.0123e-11
    for e, arrays, planes in directions(positions, x, w, g):
        wide = [rounded(v, precision).astype(float) for v in arrays]
        expected = e.primitive.implementations["cpu"](*wide, **{**e.params, "precision": "full"})
        small = (expected != 0) & (abs(expected) < 1e-8)
        assert small.any()
        tolerance = 1e-6 if precision == "full" else 2**-10
        np.testing.assert_allclose(host.computed(e, planes.kernel(), arrays)[0][small], expected[small], tolerance)


@pytest.mark.parametrize("where", [(0, 0, 0), (65, 15, 16)])
def test_all_parts_of_an_image_must_be_held(host: Host, where: tuple[int, int, int]) -> None:
    """Of images that are measured in three parts."""
    positions = Positions((3, 66, 16, 17), (3, 5, 16, 17), (3, 3), (1, 1), (1, 1))
    x, w = drawn(positions.images, (5, 66, 3, 3))
    x[2][where] = 1e-30
    e = equation(conv2d_p, [x, w], {"window": Window((1, 1), (1, 1), (1, 1), 1), "precision": "full"})
    halves, pieces = (
        host.computed(e, PlaneConvolution(positions, False, h).kernel(), [x, w])[0] for h in (True, False)
    )
    np.testing.assert_array_equal(halves[2, :, -1], pieces[2, :, -1])
    assert not np.array_equal(halves[0, :, 0], pieces[0, :, 0])


def layer(x: Any, w: Any, bias: Any, keep: Any) -> Any:
    y = ops.relu(ops.conv2d(x, w, bias, padding=1))
    return y, ops.where(ops.less(0, x), ops.conv_transpose2d(y, w, padding=1) * keep, 0)


def strided(x: Any, w: Any, bias: Any, keep: Any) -> Any:
    y = ops.relu(ops.conv2d(x, w, bias, stride=2, padding=1))
    up = ops.conv_transpose2d(y, w, stride=2, padding=1, output_padding=1)
    return y, ops.where(ops.less(0, x), up * keep, 0)


def staged(f: Any, *arrays: np.ndarray) -> Program:
    return stage(f, ON_GPU).program(*(array(x) for x in arrays))


def every_kernel(e: Equation) -> list[CudaKernel]:
    """Candidates with different tiles, and the one by positions."""
    found = [k for k in candidates(e) if isinstance(k, CudaKernel)]
    return [*found[:2], *{k.file: k for k in found}.values()]


@pytest.mark.parametrize(
    ("f", "image", "filters"),
    [
        (layer, (2, 20, 7, 6), 33),
        pytest.param(layer, (3, 16, 4, 1), 3, marks=pytest.mark.exhaustive),
        (strided, (2, 3, 6, 8), 5),
    ],
)
def test_what_is_done_to_a_convolution_is_done_to_each_element_once(
    host: Host, f: Any, image: tuple[int, ...], filters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adtrain.ops.conv_cuda.HOPELESS", np.inf)
    program = staged(f, *drawn(image, (filters, image[1], 3, 3), (filters,), (image[0], 1, 1, 1)))
    fused = [e for e in program.equations if e.primitive is convolution_p]
    assert len(fused) == 2
    for e in fused:
        arrays = drawn(*(v.type.shape for v in e.inputs))
        (expected,) = [e.primitive.implementations["cpu"](*arrays, **e.params)]
        for kernel in every_kernel(e):
            assert agree(host.computed(e, kernel, arrays)[0], expected), kernel.definitions()
