"""The CUDA steps of `examples/kernel_ladder` compute what NumPy does."""

from __future__ import annotations

import pytest
from gpu_parity import gpu
from test_kernel_ladder import SIZES, ladder_steps

__all__ = ["gpu"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TF32 = 1e-3
"""The error of a product of TF32 numbers, which have 10 bits of mantissa."""


@pytest.mark.parametrize("name", SIZES)
def test_gpu_steps_compute_what_numpy_does(name: str) -> None:
    errors = {path.stem: error() for path, _, error in ladder_steps(name, "gpu", SIZES[name])}
    assert errors.pop("gpu_7_tensor_cores", 0.0) < TF32
    assert len(errors) >= 3
    assert max(errors.values()) < 1e-6, errors
