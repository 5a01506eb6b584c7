"""Shifted implicit GEMM convolutions without a GPU: the index, the rules, and compilation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import NvrtcLog
from conv_samples import by_flat_index, stride_one
from hypothesis import assume, given
from hypothesis import strategies as st

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.compiler import Source, architecture
from adtrain.backends.cuda.launch_plan import launch_source
from adtrain.core.errors import DeviceError
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.problem import ConvProblem, PaddedIndex
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv, Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad
from adtrain.ops.conv import Window, conv2d_reference, input_grad_reference

WIDTHS = (64, 72, 104, 112)
"""Some choices for the positions of a warpgroup."""

pairs = st.tuples(st.integers(0, 2), st.integers(0, 2))


@st.composite
def convolutions(draw: Any) -> ConvProblem:
    kernel, dilation = (draw(st.tuples(st.integers(1, 4), st.integers(1, 4))) for _ in range(2))
    padding = draw(pairs)
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    assume(all(p <= r for p, r in zip(padding, reach, strict=True)))
    size = [draw(st.integers(max(1, r + 1 - 2 * p), r + 9)) for r, p in zip(reach, padding, strict=True)]
    out = [n + 2 * p - r for n, p, r in zip(size, padding, reach, strict=True)]
    count, channels, filters = (draw(st.integers(1, 3)) for _ in range(3))
    return stride_one((count, channels, *size), (count, filters, *out), kernel, padding, dilation)


def of(
    x: tuple[int, ...],
    w: tuple[int, ...],
    window: Window,
    dtype: str = "float32",
    precision: str = "full",
    target: Target = H200,
) -> list[Sequence[CudaKernel]]:
    """The candidates for a convolution and both of its gradients."""
    out = [window.output_length(i, x[i + 2], w[i + 2]) for i in (0, 1)]
    image, weight, y = (ArrayType(tuple(s), np.dtype(dtype)) for s in (x, w, (x[0], w[0], *out)))
    params: dict[str, Any] = {"window": window, "precision": precision}
    return [
        cuda_kernels("conv2d", target, image, weight, **params),
        cuda_kernels("conv2d_input_grad", target, y, weight, size=(x[2], x[3]), **params),
        cuda_kernels("conv2d_weight_grad", target, image, y, size=(w[2], w[3]), **params),
    ]


def shifted(kernels: Sequence[CudaKernel]) -> list[bool]:
    return [any("shifted" in launch.file for launch in kernel.launches) for kernel in kernels]


def fp16x2(kernel: CudaKernel) -> bool:
    """Whether it multiplies in fp16x2, with bf16x3 as fallback."""
    return any("fp16x2" in launch.file for launch in kernel.launches)


def window(stride: int = 1, padding: int = 0, groups: int = 1) -> Window:
    return Window((stride, stride), (padding, padding), (1, 1), groups)


@given(convolutions())
def test_windows_read_zeros_beyond_an_image(problem: ConvProblem) -> None:
    rng = np.random.default_rng(0)
    filters = problem.outputs[1]
    x, w = rng.standard_normal(problem.images), rng.standard_normal((filters, problem.images[1], *problem.kernel))
    geometry = Window((1, 1), problem.padding, problem.dilation, 1)
    np.testing.assert_allclose(by_flat_index(x, w, problem), conv2d_reference(x, w, geometry, "full"), atol=1e-12)
    g = rng.standard_normal(problem.outputs)
    found = by_flat_index(g, w.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1], problem.transposed())
    rows, columns = problem.images[2:]
    expected = input_grad_reference(g, w, geometry, (rows, columns), "full")
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(convolutions(), st.integers(1, 300), st.integers(1, 300))
def test_the_launches_fit_and_cover_all_positions(problem: ConvProblem, channels: int, filters: int) -> None:
    count, _, *size = problem.images
    _, _, *out = problem.outputs
    wide = replace(problem, images=(count, channels, *size), outputs=(count, filters, *out))
    index = PaddedIndex(wide)
    made: list[CudaKernel] = []
    for flipped, view in ((False, index), (True, PaddedIndex(wide.transposed()))):
        found = ShiftedConv(view, H200, flipped).best()
        assert found is not None
        assert found.products >= found.index.problem.images[1] * wide.taps
        made += found.kernels()
        split = Fp16x2Conv(view, H200, flipped)
        made += split.kernels() if split.supported() else []
    for grad in ShiftedWeightGrad(index, H200).choices():
        if grad.supported():
            assert 1 <= grad.splits <= grad.stages
            assert grad.stages * grad.stage >= count * ((out[0] - 1) * index.pitch + out[1])
            made += grad.kernels()
    split_grad = Fp16x2WeightGrad(index, H200)
    made += split_grad.kernels() if split_grad.supported() else []
    launches = [launch for kernel in made for launch in kernel.launches]
    assert all(launch.shared + 1024 <= H200.shared for launch in launches)


@pytest.mark.parametrize(
    ("image", "weight", "padding", "precision", "in_fp16x2"),
    [
        ((1024, 32, 26, 26), (64, 32, 3, 3), 0, "full", [False] * 3),
        ((128, 32, 26, 26), (64, 32, 3, 3), 0, "full", [False] * 3),
        ((256, 64, 56, 56), (64, 64, 3, 3), 1, "full", [False] * 3),
        ((64, 128, 28, 28), (128, 128, 3, 3), 1, "full", [True] * 3),
        ((64, 256, 28, 28), (256, 256, 3, 3), 1, "full", [True] * 3),
        ((256, 64, 56, 56), (64, 64, 3, 3), 1, "tf32", [False, False, True]),
        ((64, 256, 28, 28), (256, 256, 3, 3), 1, "bfloat16", [True] * 3),
    ],
)
def test_convolutions_of_many_channels_are_shifted_gemms(
    image: tuple[int, ...], weight: tuple[int, ...], padding: int, precision: str, in_fp16x2: list[bool]
) -> None:
    """Forward, input gradient and weight gradient: in fp16x2 where that should be faster."""
    found = of(image, weight, window(padding=padding), precision=precision)
    assert all(shifted(kernels)[0] for kernels in found)
    assert [fp16x2(kernels[0]) for kernels in found] == in_fp16x2


def test_few_channels_strides_groups_and_float64_use_no_shifted_gemm() -> None:
    large = (256, 64, 56, 56), (64, 64, 3, 3)
    assert not any(shifted(of((128, 1, 28, 28), (32, 1, 3, 3), window())[0]))
    others = [*of(*large, window(stride=2)), *of(*large, window(), "float64")]
    others += of((256, 64, 56, 56), (64, 32, 3, 3), window(groups=2))
    others += of(*large, window(padding=1), target=H200._replace(capability=(10, 0)))
    assert not any(any(shifted(kernels)) for kernels in others)
    assert all(others)


@pytest.mark.parametrize("target", [H200, Target((8, 0), 108, 163 << 10)])
@pytest.mark.parametrize(
    ("x", "w", "stride", "groups"),
    [
        ((1 << 15, 1, 256, 256), (1, 1, 1, 1), 1, 1),  # 2^31 pixels
        ((1, 1 << 16, 4, 4), (1 << 16, 1, 1, 1), 1, 1 << 16),  # more groups than a grid has blocks
    ],
)
def test_convolutions_that_32_bits_cannot_count_are_refused(
    x: tuple[int, ...], w: tuple[int, ...], stride: int, groups: int, target: Target
) -> None:
    with pytest.raises(DeviceError, match=f"{x[0]}x{x[1]}x{x[2]}x{x[3]}.*too large"):
        of(x, w, window(stride, groups=groups), target=target)
    with pytest.raises(DeviceError, match="too large"):
        of(x, w, window(stride, groups=groups), "float64", target=target)


def check_compiled(nvrtc_log: NvrtcLog, kernels: Iterable[CudaKernel]) -> None:
    """Assert that the kernels compile for Hopper, spill no registers, and do not serialise wgmma."""
    sources: dict[Source, None] = {}
    for launch in itertools.chain.from_iterable(kernel.launches for kernel in kernels):
        sources[launch_source(launch)] = None
    for source in sources:
        log = nvrtc_log(source, architecture((9, 0))).splitlines()
        wrong = [line for line in log if "spill" in line and " 0 bytes spill stores" not in line]
        wrong += [line for line in log if "serializ" in line or "setmaxnreg" in line]
        wrong += [line for line in log if "stack frame" in line and " 0 bytes stack frame" not in line]
        assert wrong == [], (source.name, source.options)


@pytest.mark.exhaustive
@pytest.mark.needs_nvrtc
def test_kernels_compile_without_spills_and_serialised_wgmma(nvrtc_log: NvrtcLog) -> None:
    made: list[Any] = []
    for images, filters, padding in (((128, 32, 26, 26), 64, 0), ((2, 64, 99, 99), 20, 2)):
        size = [n + 2 * padding - 2 for n in images[2:]]
        problem = stride_one(images, (images[0], filters, *size), (3, 3), (padding, padding))
        coarse = replace(problem, precision="tf32")
        index = PaddedIndex(problem)
        plain = [ShiftedConv(index, H200, False), ShiftedConv(PaddedIndex(problem.transposed()), H200, True)]
        made += plain
        for p in (problem, coarse) if padding == 0 else (problem,):
            split = [Fp16x2Conv(PaddedIndex(p), H200, False), Fp16x2Conv(PaddedIndex(p.transposed()), H200, True)]
            made += [c for c in split if c.supported()]
            made += [c for c in (Fp16x2WeightGrad(PaddedIndex(p), H200),) if c.supported()]
        if padding == 0:
            narrow = [tiles for tiles in plain[0].choices() if tiles.columns in WIDTHS and not tiles.image_tiles]
            made += {tiles.columns: tiles for tiles in narrow}.values()
            made += [grad for grad in ShiftedWeightGrad(index, H200).choices() if grad.supported()]
        made += [pooled for pooled in (ShiftedConv(index, H200, False, pooled=True).best(),) if pooled]
    check_compiled(nvrtc_log, (kernel for algorithm in made for kernel in algorithm.kernels()))
