"""Loops that read a transpose, compiled for the CPU, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_host import Host, check_kernels, host
from program_samples import ON_GPU

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.program import GATHER
from adtrain.core.staging import stage

__all__ = ["host"]

CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((64, 68, 3, 3), CHANNELS_LAST), ((64, 67, 3, 3), CHANNELS_LAST), ((64, 3, 3, 68), CHANNELS_FIRST)],
)
def test_loops_read_each_element_of_a_transpose(
    shape: tuple[int, ...], axes: tuple[int, ...], others: int, host: Host
) -> None:
    """Neighbouring threads read neighbours in the transpose if it is alone, else in the other arrays."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32)]
    arrays += [rng.normal(size=[shape[axis] for axis in axes]).astype(np.float32) for _ in range(others)]

    def f(x: Value, *ys: Value) -> Value:
        result = ops.transpose(x, axes) * 2 + 1
        for y in ys:
            result = result * y
        return result

    program = stage(f, ON_GPU).program(*arrays)
    assert check_kernels(program, arrays, host, GATHER, 1e-7) == 1
