"""The GPU: a convolution with a pooling epilogue gives the bytes of separate convolution and pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, hopper, poisoned
from program_samples import everywhere, names
from test_pooling_epilogue import LAYERS, PAIRS, Layer, alone, arguments, pooled_layer, pooling, rectified

import adtrain as ad
from adtrain import ops, passes
from adtrain.core import kernel as registry
from adtrain.core.array import array
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.ops.conv import conv2d_p
from adtrain.ops.pool import max_pool2d_p

__all__ = ["gpu", "hopper", "poisoned", "pooling"]

pytestmark = pytest.mark.gpu

MORE: tuple[Layer, ...] = (
    ((140, 32, 26, 26), 64, 0),
    ((40, 64, 32, 32), 130, 1),
    ((33, 40, 57, 49), 70, 1),
    ((200, 17, 13, 24), 32, 1),
    ((70, 33, 31, 29), 24, 0),
)


@pytest.mark.parametrize("layer", [*LAYERS, *MORE])
def test_maxima_and_positions_equal_those_of_two_launches(gpu: Any, pooling: None, layer: Layer) -> None:
    def f(x: Any, w: Any, bias: Any) -> Any:
        return pooled_layer(x, w, bias, layer[2])

    x, w, bias = arguments(layer)
    program = stage(f, passes.ALL)
    on_gpu = [array(v, device="gpu") for v in (x, w, bias)]
    (convolution,) = [e for e in everywhere(program.program(*on_gpu)) if e.primitive is conv2d_p]
    params = {"window": convolution.params["window"]}
    (y,) = run_twice(gpu, conv2d_p, alone(convolution, gpu.lowering.target), [x, w], **params)
    rectified_y = array(rectified(y, bias), device="gpu")
    expected = [v.numpy() for v in bind(max_pool2d_p, rectified_y, windows=PAIRS)]
    for _ in range(3):
        found = [v.numpy() for v in program(*on_gpu)]
        assert [v.tobytes() for v in found] == [v.tobytes() for v in expected]
    assert np.isnan(expected[0]).any()
    assert set(np.unique(expected[1])) == {0, 1, 2, 3}


def test_gradients_equal_those_of_two_launches(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(x: Any, w: Any, bias: Any, v: Any) -> Any:
        def loss(x: Any, w: Any, bias: Any) -> Any:
            return ops.sum(ops.max_pool2d(ops.relu(ops.conv2d(x, w, bias)), 2) * v)

        return ad.value_and_grad(loss, (0, 1, 2))(x, w, bias)

    x, w, bias = arguments(((140, 32, 26, 26), 64, 0))
    v = np.random.default_rng(2).standard_normal((140, 64, 12, 12)).astype(np.float32)
    args = [array(a, device="gpu") for a in (np.nan_to_num(x, posinf=1), w, bias, v)]
    together, apart = (stage(gradients, passes.ALL) for _ in range(2))
    assert "conv_pool" in names(together.program(*args))
    value, found = together(*args)
    monkeypatch.setitem(registry._CUDA_RULES, "conv_pool", lambda *types, **params: [])
    assert "conv_pool" not in names(apart.program(*args))
    expected_value, expected = apart(*args)
    assert value.numpy().tobytes() == expected_value.numpy().tobytes()
    assert [g.numpy().tobytes() for g in found] == [g.numpy().tobytes() for g in expected]
