"""Convolutions by positions as far as they need no GPU: where things lie, how exact they are, and that they compile."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planes_emulated import (
    BESIDE,
    DEPTH,
    FEW,
    FOR_SMALL,
    LEAST,
    MOST_SMALL,
    NORMAL,
    TINY,
    TOP,
    by_positions,
    cases,
    in_halves,
    in_pieces,
)
from packed_gemm_emulated import NOISE, ROUNDINGS, chain, errors

from adtrain.assets import asset_path
from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import CudaCompilerError, Source, architecture, file_source
from adtrain.core.chip import CHIP
from adtrain.core.kernel import CudaKernel
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv import conv as conv_cuda
from adtrain.lowering.cuda.conv.fp16x2_weight_grad import HalvesWeightGrad
from adtrain.lowering.cuda.conv.packed_images import LAYING_BLOCKS, MOST_PARTS
from adtrain.lowering.cuda.conv.padded_index import Positions
from adtrain.lowering.cuda.conv.shifted import CHANNELS, PlaneConvolution
from adtrain.lowering.cuda.conv.shifted_weight_grad import PlaneWeightGrad
from adtrain.ops.conv import Window
from adtrain.ops.conv_reference import conv2d_reference, input_grad_reference

M, N, K = 24, 20, 288
DECADES = 1.25
"""Of numbers spread over thirty decades, as much larger may the norm of the error be: README.md of the kernels."""
HOPPER_SHARED = 227 << 10
WIDTHS = (64, 72, 104, 112)
"""Some of those that a warpgroup's positions may have."""

pairs = st.tuples(st.integers(0, 2), st.integers(0, 2))


@st.composite
def convolutions(draw: Any) -> Positions:
    kernel, dilation = (draw(st.tuples(st.integers(1, 4), st.integers(1, 4))) for _ in range(2))
    padding = draw(pairs)
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    assume(all(p <= r for p, r in zip(padding, reach, strict=True)))
    size = [draw(st.integers(max(1, r + 1 - 2 * p), r + 9)) for r, p in zip(reach, padding, strict=True)]
    out = [n + 2 * p - r for n, p, r in zip(size, padding, reach, strict=True)]
    count, channels, filters = (draw(st.integers(1, 3)) for _ in range(3))
    return Positions((count, channels, *size), (count, filters, *out), kernel, padding, dilation)


def of(
    x: tuple[int, ...], w: tuple[int, ...], window: Window, dtype: str = "float32", precision: str = "full"
) -> list[list[CudaKernel]]:
    """The candidates for a convolution and both of its gradients."""
    out = [window.output_length(i, x[i + 2], w[i + 2]) for i in (0, 1)]
    image, weight, y = (ArrayType(tuple(s), np.dtype(dtype)) for s in (x, w, (x[0], w[0], *out)))
    return [
        list(conv_cuda.forward(image, weight, window, precision)),
        list(conv_cuda.input_grad(y, weight, window, (x[2], x[3]), precision)),
        list(conv_cuda.weight_grad(image, y, window, (w[2], w[3]), precision)),
    ]


def by_planes(kernels: Sequence[CudaKernel]) -> list[bool]:
    return ["planes" in kernel.file or in_halves_first(kernel) for kernel in kernels]


def in_halves_first(kernel: CudaKernel) -> bool:
    """Whether it multiplies halves, and pieces where these do not hold the operands."""
    return kernel.names[:1] in (["begin_halves"], ["begin_operands"])


def window(stride: int = 1, padding: int = 0, groups: int = 1) -> Window:
    return Window((stride, stride), (padding, padding), (1, 1), groups)


@given(convolutions())
def test_what_a_window_reads_beyond_an_image_are_zeros(positions: Positions) -> None:
    rng = np.random.default_rng(0)
    filters = positions.outputs[1]
    x, w = rng.standard_normal(positions.images), rng.standard_normal((filters, positions.images[1], *positions.kernel))
    geometry = Window((1, 1), positions.padding, positions.dilation, 1)
    np.testing.assert_allclose(by_positions(x, w, positions), conv2d_reference(x, w, geometry, "full"), atol=1e-12)
    g = rng.standard_normal(positions.outputs)
    turned = by_positions(g, w.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1], positions.turned())
    rows, columns = positions.images[2:]
    expected = input_grad_reference(g, w, geometry, (rows, columns), "full")
    np.testing.assert_allclose(turned, expected, atol=1e-12)


@given(convolutions(), st.integers(1, 300), st.integers(1, 300))
def test_the_launches_fit_and_cover_all_positions(positions: Positions, channels: int, filters: int) -> None:
    count, _, *size = positions.images
    _, _, *out = positions.outputs
    wide = Positions((count, channels, *size), (count, filters, *out), *(
        positions.kernel, positions.padding, positions.dilation
    ))  # fmt: skip
    for turned, halves in itertools.product((False, True), repeat=2):
        convolution = PlaneConvolution(wide.turned() if turned else wide, turned, halves).fitted()
        if convolution is None:
            assert halves  # whose stages take 32 channels
            continue
        assert all(step.shared() + 1024 <= HOPPER_SHARED for step in launches(convolution.kernel()))
        assert convolution.products >= convolution.positions.images[1] * wide.kernel[0] * wide.kernel[1]
    for grad in PlaneWeightGrad(wide).choices():
        if grad.suits():
            assert 1 <= grad.splits <= grad.steps
            assert grad.steps * grad.step >= count * ((out[0] - 1) * wide.pitch + out[1])
            assert grad.kernel().shared() + 1024 <= HOPPER_SHARED
    in_halves = HalvesWeightGrad(wide)
    if in_halves.suits():
        assert all(step.shared() + 1024 <= HOPPER_SHARED for step in launches(in_halves.kernel()))


@pytest.mark.parametrize(
    ("image", "weight", "padding", "precision", "halves"),
    [
        ((1024, 32, 26, 26), (64, 32, 3, 3), 0, "full", [False, False, False]),
        ((128, 32, 26, 26), (64, 32, 3, 3), 0, "full", [False, False, False]),
        ((256, 64, 56, 56), (64, 64, 3, 3), 1, "full", [True, True, True]),
        ((64, 256, 28, 28), (256, 256, 3, 3), 1, "full", [True, True, True]),
        ((256, 64, 56, 56), (64, 64, 3, 3), 1, "tf32", [True, True, True]),
        ((64, 256, 28, 28), (256, 256, 3, 3), 1, "bfloat16", [True, True, True]),
    ],
)
def test_convolutions_of_many_channels_are_computed_by_positions(
    image: tuple[int, ...], weight: tuple[int, ...], padding: int, precision: str, halves: list[bool]
) -> None:
    """Forward, by the images, by the weights: in halves where that should be faster."""
    found = of(image, weight, window(padding=padding), precision=precision)
    assert all(by_planes(kernels)[0] for kernels in found)
    assert [in_halves_first(kernels[0]) for kernels in found] == halves
    assert [any(map(in_halves_first, kernels)) for kernels in found] == [True, True, True]


def test_few_channels_strides_groups_and_float64_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    large = (256, 64, 56, 56), (64, 64, 3, 3)
    assert not any(by_planes(of((128, 1, 28, 28), (32, 1, 3, 3), window())[0]))
    others = [*of(*large, window(stride=2)), *of(*large, window(), "float64")]
    others += of((256, 64, 56, 56), (64, 32, 3, 3), window(groups=2))
    monkeypatch.setattr(CHIP, "capability", (10, 0))
    others += of(*large, window(padding=1))
    assert not any(any(by_planes(kernels)) for kernels in others)
    assert all(others)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", cases(M, N, K))
def test_pieces_are_as_exact_as_one_chain_of_multiply_adds(case: str, stacked: bool) -> None:
    a, b = cases(M, N, K)[case]
    taken, expected = errors(in_pieces(a, b, stacked), a, b), errors(chain(a, b), a, b)
    assert taken[0] <= max(NOISE * expected[0], ROUNDINGS)
    assert taken[1] <= max((DECADES if "decades" in case else NOISE) * expected[1], ROUNDINGS)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", cases(M, N, K))
def test_halves_or_what_they_leave_to_pieces_are_as_exact_too(case: str, stacked: bool) -> None:
    a, b = cases(M, N, K)[case]
    taken, expected = errors(in_halves(a, b, stacked)[0], a, b), errors(chain(a, b), a, b)
    assert taken[0] <= max(NOISE * expected[0], ROUNDINGS)
    assert taken[1] <= max((DECADES if "decades" in case else NOISE) * expected[1], ROUNDINGS)


@pytest.mark.parametrize("case", ["normal", "uniform", "rectified", "rectified, by gradients of rectified", "positive"])
def test_halves_are_right_for_what_nets_have(case: str) -> None:
    assert in_halves(*cases(M, N, K)[case])[1]


def test_the_limits_are_those_of_the_kernels() -> None:
    text = (asset_path("kernels") / "cuda" / "conv/fp16x2.cuh").read_text()
    assert f"FEW = NUMBERS == 2 ? {FEW} : " in text
    assert f"LEAST = {LEAST};" in text
    assert f"TOP = {TOP};" in text
    assert f"MOST_SMALL = {MOST_SMALL};" in text
    assert f"FOR_SMALL = NUMBERS == 2 ? {FOR_SMALL} : " in text
    assert f"constexpr float NORMAL = 0x1p{np.log2(NORMAL):.0f}f;" in text
    assert f"constexpr float TINY = 0x1p{np.log2(TINY):.0f}f;" in text
    text = (asset_path("kernels") / "cuda" / "conv/packed_images.cuh").read_text()
    assert f"MOST_PARTS = {MOST_PARTS};" in text
    assert f"LAYING_BLOCKS = {LAYING_BLOCKS};" in text


def test_the_products_are_those_of_the_kernels() -> None:
    text = (asset_path("kernels") / "cuda" / "sm90/bf16x3.cuh").read_text()
    assert CHANNELS[0] == DEPTH
    assert "{" + ", ".join(f"{{{a}, {b}}}" for a, b in BESIDE) + "}" in text


def launches(kernel: CudaKernel) -> Iterator[CudaKernel]:
    while True:
        yield kernel
        if kernel.then is None:
            return
        kernel = kernel.then


def check_compiled(kernels: Iterable[CudaKernel]) -> None:
    """They compile for Hopper, spill no registers, and no product waits for the one before."""
    try:
        compiler.version()
    except CudaCompilerError as error:
        pytest.skip(str(error))
    sources: dict[Source, None] = {}
    for step in itertools.chain.from_iterable(map(launches, kernels)):
        macros = tuple(sorted(step.definitions().items()))
        sources[file_source(step.file, (np.dtype("float32"),), macros)] = None
    for source in sources:
        log = compiler.compile_source(source, architecture((9, 0))).log.splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        wrong += [line for line in log if "stack frame" in line and " 0 bytes stack frame" not in line]
        assert wrong == [], (source.name, source.options)


def test_the_kernels_compile_and_neither_spill_registers_nor_wait_for_each_product() -> None:
    made: list[Any] = []
    for images, filters, padding in (((128, 32, 26, 26), 64, 0), ((8, 40, 15, 13), 33, 1), ((2, 64, 99, 99), 20, 2)):
        size = [n + 2 * padding - 2 for n in images[2:]]
        positions = Positions(images, (images[0], filters, *size), (3, 3), (padding, padding), (1, 1))
        plain = [PlaneConvolution(positions, False), PlaneConvolution(positions.turned(), True)]
        made += plain
        coarse = replace(positions, precision="tf32")
        once = [PlaneConvolution(coarse, False), PlaneConvolution(coarse.turned(), True)]
        made += [halves for c in (*plain, *once) if (halves := replace(c, halves=True)).suits()]
        if padding == 0:
            narrow = [tiles for convolution in plain for tiles in convolution.choices() if tiles.columns in WIDTHS]
            made += [tiles for tiles in narrow if not tiles.of_image]
        made += [pooled for pooled in (PlaneConvolution(positions, False, pooled=True).fitted(),) if pooled]
        made += [pieces for pieces in PlaneWeightGrad(positions).choices() if pieces.suits()]
        made += [grad for p in (positions, coarse) if (grad := HalvesWeightGrad(p)).suits()]
    check_compiled(c.kernel() for c in made)
