"""The GPU: convolutions by positions are right for all shapes, and as exact as plain float32."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planes_emulated import cases
from packed_gemm_emulated import NOISE, ROUNDINGS, chain, errors
from test_cuda_planes import DECADES, WIDTHS, convolutions
from test_gpu_products import computed, distance, rounded

from adtrain import ops
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import PRECISIONS
from adtrain.core.staging import stage
from adtrain.lowering.cuda.conv.fp16x2_weight_grad import HalvesWeightGrad
from adtrain.lowering.cuda.conv.padded_index import CAPABILITY, Positions
from adtrain.lowering.cuda.conv.shifted import PlaneConvolution
from adtrain.lowering.cuda.conv.shifted_weight_grad import PlaneWeightGrad
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p
from adtrain.passes import ALL

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TOLERANCE = 3e-7
"""Of the norm of the difference over the norm."""
ROUNDED = 1e-5
"""The same where operands are rounded, and their products summed up by the matrix units."""
M, N, K = 48, 80, 288
WeightGrad: TypeAlias = "PlaneWeightGrad | HalvesWeightGrad"


@pytest.fixture(autouse=True)
def hopper(gpu: Any) -> None:
    if gpu.device.device.compute_capability() != CAPABILITY:
        pytest.skip("positions are for GPUs of compute capability 9.0 alone")


def window(positions: Positions) -> Window:
    return Window((1, 1), positions.padding, positions.dilation, 1)


def fitted(positions: Positions, turned: bool, halves: bool) -> CudaKernel:
    """With the tiles of the rule."""
    found = PlaneConvolution(positions, turned, halves).fitted()
    assert found is not None
    return found.kernel()


def forward(gpu: Any, positions: Positions, x: np.ndarray, w: np.ndarray, halves: bool) -> np.ndarray:
    return computed(gpu, conv2d_p, fitted(positions, False, halves), [x, w], window=window(positions))


def input_grad(gpu: Any, positions: Positions, g: np.ndarray, w: np.ndarray, halves: bool) -> np.ndarray:
    kernel, size = fitted(positions.turned(), True, halves), positions.images[2:]
    return computed(gpu, input_grad_p, kernel, [g, w], window=window(positions), size=size)


def weight_grad(gpu: Any, grad: WeightGrad, positions: Positions, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    params = {"size": positions.kernel}
    return computed(gpu, weight_grad_p, grad.kernel(), [x, g], window=window(positions), **params)


def drawn(positions: Positions) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, weights, and gradients of the outputs."""
    rng = np.random.default_rng(positions.count)
    weights = (positions.outputs[1], positions.images[1], *positions.kernel)
    x, w, g = (rng.standard_normal(shape, np.float32) for shape in (positions.images, weights, positions.outputs))
    x.flat[:3], g.flat[:2] = 1e-9, -3e-10  # small beside the others of their images
    return x, w, g


def same(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Whether what is not finite is where it is expected, and all else right."""
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(found), test(expected))
    held = np.isfinite(expected)
    return distance(found[held], expected[held]) < tolerance


def check(gpu: Any, positions: Positions, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> None:
    wide = [rounded(v, positions.precision).astype(float) for v in (x, w, g)]
    tolerance = TOLERANCE if positions.precision == "full" else ROUNDED
    params: dict[str, Any] = {"window": window(positions), "precision": "full"}
    with np.errstate(invalid="ignore"):
        y = conv2d_p.reference(*wide[:2], **params)
        dx = input_grad_p.reference(wide[2], wide[1], size=positions.images[2:], **params)
        dw = weight_grad_p.reference(wide[0], wide[2], size=positions.kernel, **params)
    for halves in (False, True):
        if PlaneConvolution(positions, False, halves).suits():
            assert same(forward(gpu, positions, x, w, halves), y, tolerance)
        if PlaneConvolution(positions.turned(), True, halves).suits():
            assert same(input_grad(gpu, positions, g, w, halves), dx, tolerance)
    grads: list[WeightGrad] = [*PlaneWeightGrad(positions).choices(), HalvesWeightGrad(positions)]
    for grad in grads:
        if grad.suits():
            assert same(weight_grad(gpu, grad, positions, x, g), dw, tolerance)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(convolutions(), st.integers(1, 80), st.integers(1, 140), st.sampled_from(PRECISIONS))
def test_convolutions_of_all_shapes_are_right(
    gpu: Any, small: Positions, channels: int, filters: int, precision: str
) -> None:
    (count, _, *size), (_, _, *out) = small.images, small.outputs
    shapes = (count, channels, *size), (count, filters, *out)
    positions = Positions(*shapes, small.kernel, small.padding, small.dilation, precision)
    check(gpu, positions, *drawn(positions))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("image", "filters", "padding"),
    [((140, 32, 26, 26), 64, 0), ((9, 70, 31, 45), 33, 1), ((2, 16, 5, 190), 130, 1), ((300, 64, 7, 7), 20, 2)],
)
def test_large_convolutions_are_right(
    gpu: Any, image: tuple[int, ...], filters: int, padding: int, precision: str
) -> None:
    size = [n + 2 * padding - 2 for n in image[2:]]
    positions = Positions(image, (image[0], filters, *size), (3, 3), (padding, padding), (1, 1), precision)
    check(gpu, positions, *drawn(positions))


@pytest.mark.parametrize("filters", [40, 20])
def test_tiles_of_all_widths_give_the_same(gpu: Any, filters: int) -> None:
    """With filters whose parts lie apart, and stacked."""
    positions = Positions((30, 24, 19, 21), (30, filters, 19, 21), (3, 3), (1, 1), (1, 1))
    x, w, _ = drawn(positions)
    tiles = [t for t in PlaneConvolution(positions, False).choices() if t.columns in WIDTHS]
    found = [computed(gpu, conv2d_p, t.kernel(), [x, w], window=window(positions)) for t in tiles]
    assert len({y.tobytes() for y in found}) == 1
    assert (
        distance(found[0], conv2d_p.reference(x.astype(float), w.astype(float), window(positions), "full")) < TOLERANCE
    )


def test_infinity_and_nan_go_where_they_go_in_plain_sums(gpu: Any) -> None:
    positions = Positions((3, 40, 12, 13), (3, 70, 12, 13), (3, 3), (1, 1), (1, 1))
    x, w, g = drawn(positions)
    x[0, 1, 2, 3], x[1, 2, 0, 0], x[2, 39, 11, 12] = np.inf, np.nan, -np.inf
    g[1, 3, 4, 5], g[2, 69, 0, 12] = np.inf, np.nan
    check(gpu, positions, x, w, g)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("filters", [M, M // 2])
@pytest.mark.parametrize("case", cases(M, N, K))
def test_they_are_as_exact_as_one_chain_of_multiply_adds(gpu: Any, case: str, filters: int, halves: bool) -> None:
    """With filters whose parts lie apart, and stacked."""
    a, b = cases(filters, N, K)[case]
    positions = Positions((1, K, 1, N), (1, filters, 1, N), (1, 1), (0, 0), (1, 1))
    found = forward(gpu, positions, b.reshape(1, K, 1, N), a.reshape(filters, K, 1, 1), halves)
    found = found.reshape(filters, N)
    taken, expected = errors(found, a, b), errors(chain(a, b), a, b)
    assert taken[0] <= max(NOISE * expected[0], ROUNDINGS)
    assert taken[1] <= max((DECADES if "decades" in case else NOISE) * expected[1], ROUNDINGS)


def test_the_same_bytes_each_time(gpu: Any) -> None:
    """Some images are held by halves, some left to pieces."""
    positions = Positions((60, 40, 27, 26), (60, 70, 27, 26), (3, 3), (1, 1), (1, 1))
    x, w, _ = drawn(positions)
    x[::3, ::2] *= np.float32(1e-20)
    first = forward(gpu, positions, x, w, True)
    assert all(np.array_equal(forward(gpu, positions, x, w, True), first) for _ in range(5))


def test_what_is_done_to_a_convolution_is_done_to_each_element_once(gpu: Any) -> None:
    """In one launch with it: bias and activation, and the mask on the gradient by the images."""
    positions = Positions((40, 32, 26, 26), (40, 64, 24, 24), (3, 3), (0, 0), (1, 1))
    x, w, _ = drawn(positions)
    bias = np.linspace(-1, 1, 64, dtype=np.float32)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, bias))
        return y, ops.where(ops.less(0, x), ops.conv_transpose2d(y, w), 0)

    found = [v.numpy() for v in stage(layer, ALL)(*(array(v, device="gpu") for v in (x, w, bias)))]
    expected = [v.numpy() for v in layer(*(array(v.astype(float)) for v in (x, w, bias)))]
    assert all(distance(*both) < TOLERANCE for both in zip(found, expected, strict=True))
