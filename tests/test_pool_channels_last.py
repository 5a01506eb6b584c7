"""Pooling of images that are channels last: references against those of other images, and kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from hypothesis import given
from hypothesis import strategies as st

from adtrain.backends.cuda.narrow_values import in_bfloat16
from adtrain.core.primitive import CHANNELS_LAST, PRIMITIVES
from adtrain.core.program import Equation, Variable
from adtrain.core.types import BITS, NCHW, NHWC, ArrayType, permuted
from adtrain.ops.channels_last import from_bits, to_bfloat16_p
from adtrain.ops.pool import Windows

__all__ = ["host"]

WINDOWS = {
    "disjoint": Windows((2, 2), (2, 2), (0, 0)),
    "overlapping": Windows((3, 3), (2, 2), (1, 1)),
    "every pixel": Windows((3, 2), (1, 1), (1, 0)),
    "gaps": Windows((2, 1), (3, 2), (0, 0)),
    "long stride": Windows((5, 5), (4, 4), (2, 2)),
    "large": Windows((17, 16), (2, 2), (0, 0)),
}
SIZE = 21, 18


def equations(windows: Windows, channels: int, seed: int = 0) -> list[tuple[Equation, list[np.ndarray]]]:
    """An equation of each primitive, channels last, with arguments."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (2, *SIZE, channels)).astype(np.float32) / 2
    pooled, where = PRIMITIVES["max_pool2d" + CHANNELS_LAST].reference(x, windows=windows)
    ct = rng.normal(size=pooled.shape).astype(np.float32)
    calls: dict[str, tuple[list[np.ndarray], dict[str, Any]]] = {
        "max_pool2d": ([x], {}),
        "max_pool2d_pick": ([x, where], {}),
        "max_pool2d_put": ([ct, where], {"shape": x.shape}),
        "avg_pool2d": ([x], {}),
        "avg_pool2d_put": ([ct], {"shape": x.shape}),
    }
    return [(equation(name + CHANNELS_LAST, xs, {"windows": windows, **p}), xs) for name, (xs, p) in calls.items()]


def equation(name: str, arrays: list[np.ndarray], params: dict[str, Any]) -> Equation:
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    types = PRIMITIVES[name].output_types([v.type for v in inputs], params)
    return Equation(PRIMITIVES[name], inputs, params, tuple(Variable(t, "gpu") for t in types))


def references(e: Equation, arrays: list[np.ndarray]) -> list[np.ndarray]:
    found = e.primitive.reference(*arrays, **e.params)
    return list(found) if isinstance(found, tuple) else [found]


@given(windows=st.sampled_from([*WINDOWS.values()]), channels=st.integers(1, 5), seed=st.integers(0, 99))
def test_references_are_those_of_transposed_images(windows: Windows, channels: int, seed: int) -> None:
    for e, arrays in equations(windows, channels, seed):
        first = PRIMITIVES[e.primitive.name.removesuffix(CHANNELS_LAST)]
        params = {**e.params, "shape": permuted(e.params["shape"], NCHW)} if "shape" in e.params else e.params
        expected = first.reference(*(x.transpose(NCHW) for x in arrays), **params)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for found, one, v in zip(references(e, arrays), expected, e.outputs, strict=True):
            np.testing.assert_array_equal(found, one.transpose(NHWC))
            assert ArrayType(found.shape, found.dtype) == v.type


@pytest.mark.exhaustive
@pytest.mark.parametrize("channels", [16, pytest.param(6, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", WINDOWS)
def test_kernels_agree_with_references(host: Host, name: str, channels: int) -> None:
    for e, arrays in equations(WINDOWS[name], channels):
        for found, expected in zip(host.computed(e, None, arrays), references(e, arrays), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param("disjoint", marks=pytest.mark.exhaustive), "overlapping"])
def test_kernels_of_bfloat16_agree_with_references(host: Host, name: str) -> None:
    for e, arrays in equations(WINDOWS[name], 24):
        bits = {v: v.like(ArrayType(v.type.shape, BITS)) for v in (e.inputs[0], e.outputs[0])}
        narrow = in_bfloat16(e, bits)
        given = [to_bfloat16_p.reference(arrays[0]), *arrays[1:]]
        for found, expected in zip(host.computed(narrow, None, given), references(narrow, given), strict=True):
            a, b = (from_bits(x) if x.dtype == BITS else x for x in (found, expected))
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-6)  # neighbours, where sums have another order


def test_infinities_and_nan_are_chosen_as_in_other_images(host: Host) -> None:
    (e, (x,)), *_ = equations(WINDOWS["overlapping"], 8)
    x.reshape(-1)[::7] = np.nan
    x[0] = -np.inf
    for found, expected in zip(host.computed(e, None, [x]), references(e, [x]), strict=True):
        np.testing.assert_array_equal(found, expected)
