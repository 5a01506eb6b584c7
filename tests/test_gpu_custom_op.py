"""Operations with the user's own CUDA kernels are checked on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_parity import gpu
from plugin_files import SQUARED, gradcheck

__all__ = ["gpu"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PLUGIN = SQUARED.format(
    language="cuda",
    kernel="""
#include "common/common.cuh"
KERNEL squared(const T *x, T *out, int64_t size) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < size; i += grid_size()) out[i] = x[i] * x[i];
}
""",
)
ON_GPU = ("--device", "gpu")


def test_a_right_kernel_passes(tmp_path: Path) -> None:
    result = gradcheck(tmp_path, PLUGIN, *ON_GPU)
    assert result.exit_code == 0, result.output


def test_a_wrong_kernel_fails(tmp_path: Path) -> None:
    result = gradcheck(tmp_path, PLUGIN.replace("x[i] * x[i]", "2 * x[i]"), *ON_GPU)
    assert result.exit_code == 1, result.output
    assert "squared kernel float32" in result.output


@pytest.mark.parametrize("index", ["-1", "size", "size + 500"])
def test_a_kernel_that_writes_outside_its_output_is_reported_in_one_line(tmp_path: Path, index: str) -> None:
    result = gradcheck(tmp_path, PLUGIN.replace("out[i] = x[i]", f"out[{index}] = out[i] = x[i]"), *ON_GPU)
    assert result.exit_code == 2, result.output
    mine = tmp_path / "mine.py"
    assert f"kernel squared of {mine} wrote outside its output" in result.output.strip().splitlines()[-1]
