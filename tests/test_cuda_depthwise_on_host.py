"""The kernels for depthwise convolutions of channels-last images, emulated on the CPU, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host

from adtrain.backends.cuda import H200
from adtrain.backends.cuda.tuner.measure import terms_of
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.problem import Direction
from adtrain.ops.conv import Window

__all__ = ["host"]

TARGET = H200._replace(multiprocessors=3)
"""A block computes several tiles."""
TOLERANCE = 5e-7
"""Of the norm of the difference from the reference, divided by the norm of the reference."""
WINDOWS = {
    "3x3": ((3, 3), Window((1, 1), (1, 1), (1, 1), 1)),
    "5x5 of stride 2": ((5, 5), Window((2, 2), (2, 2), (1, 1), 1)),
    "2x7, stride 3x1, dilation 1x2": ((2, 7), Window((3, 1), (0, 5), (1, 2), 1)),
    "3x2, stride 2x3, dilation 2": ((3, 2), Window((2, 3), (1, 0), (2, 2), 1)),
}
"""Kernels and windows. With a stride and dilation of 2, some phases have no taps."""
FORMATS = "bfloat16", "float32"
"""Formats of the operands."""


def depthwise(
    direction: Direction,
    images: tuple[int, int, int, int],
    kernel: tuple[int, int],
    window: Window,
    operand_format: str = "bfloat16",
) -> tuple[Primitive, list[np.ndarray], dict[str, Any]]:
    """A depthwise convolution or gradient of a window, random operands, and the parameters of the primitive."""
    channels, window = images[3], window._replace(groups=images[3])
    out = (window.output_length(i, images[1 + i], kernel[i]) for i in (0, 1))
    shapes = {"x": images, "w": (channels, *kernel, 1), "g": (images[0], *out, channels)}
    of, given, size = {
        Direction.FORWARD: ("conv2d", "xw", {}),
        Direction.INPUT_GRAD: ("conv2d_input_grad", "gw", {"size": images[1:3]}),
        Direction.WEIGHT_GRAD: ("conv2d_weight_grad", "xg", {"size": kernel}),
    }[direction]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shapes[each], np.float32) for each in given]
    if operand_format == "bfloat16":
        arrays = [x for each in arrays for x in terms_of(each, 1)]
    return PRIMITIVES[f"{of}_{operand_format}"], arrays, {"window": window, **size, "precision": operand_format}


def kernel_of(primitive: Primitive, arrays: list[np.ndarray], params: dict[str, Any], target: Target) -> CudaKernel:
    """The kernel of the problem, the only candidate."""
    (found,) = cuda_kernels(primitive.name, target, *(ArrayType(x.shape, x.dtype) for x in arrays), **params)
    assert found.launches[0].file == "conv/depthwise.cu"
    return found


KINDS = [(direction, name, operand_format) for direction in Direction for name in WINDOWS for operand_format in FORMATS]


def _is_plain(direction: Direction, name: str, operand_format: str) -> bool:
    """Whether plain pytest runs it."""
    return name.startswith("2x7" if operand_format == "float32" else "3x") or direction is Direction.INPUT_GRAD


@pytest.mark.parametrize(
    ("direction", "name", "operand_format"),
    [pytest.param(*kind, marks=() if _is_plain(*kind) else pytest.mark.exhaustive) for kind in KINDS],
)
def test_depthwise_convolutions_and_gradients_are_right(
    host: Host, direction: Direction, name: str, operand_format: str
) -> None:
    """Neither columns, rows nor channels fill the blocks."""
    primitive, arrays, params = depthwise(direction, (3, 11, 18, 80), *WINDOWS[name], operand_format)
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    out = Variable(primitive.shape(*arrays, **params), "gpu")
    kernel = kernel_of(primitive, arrays, params, TARGET)
    found = host.computed(Equation(primitive, inputs, params, (out,)), kernel, arrays)[0]
    expected = primitive.reference(*arrays, **params)
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)


def test_filters_of_several_channels_have_no_depthwise_kernel() -> None:
    x, w = ArrayType((2, 8, 8, 16), np.dtype(np.uint16)), ArrayType((16, 3, 3, 2), np.dtype(np.uint16))
    window = Window((1, 1), (1, 1), (1, 1), 8)
    assert not cuda_kernels("conv2d_bfloat16", H200, x, w, window=window, precision="bfloat16")
