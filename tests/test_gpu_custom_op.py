"""Operations with the user's own CUDA kernels are checked on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gpu_parity import gpu

from adtrain.cli.main import cli

__all__ = ["gpu"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PLUGIN = '''
import adtrain as ad

KERNEL = """
#include "common/common.cuh"
KERNEL squared(const T *x, T *out, int64_t size) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < size; i += grid_size()) out[i] = x[i] * x[i];
}
"""
squared = ad.custom_op(
    "squared",
    shape=lambda x: ad.ArrayType(x.shape, x.dtype),
    numpy=lambda x: x * x,
    cuda=KERNEL,
    vjp=lambda ct, out, x: (2.0 * ct * x,),
    samples=lambda rng: (rng.normal(size=7),),
)
'''


def checked(tmp_path: Path, text: str) -> Any:
    (tmp_path / "mine.py").write_text(text)
    return CliRunner().invoke(cli, ["gradcheck", "--device", "gpu", "--plugin", str(tmp_path / "mine.py")])


def test_a_right_kernel_passes(tmp_path: Path) -> None:
    result = checked(tmp_path, PLUGIN)
    assert result.exit_code == 0, result.output


def test_a_wrong_kernel_fails(tmp_path: Path) -> None:
    result = checked(tmp_path, PLUGIN.replace("x[i] * x[i]", "2 * x[i]"))
    assert result.exit_code == 1, result.output
    assert "squared kernel float32" in result.output


@pytest.mark.parametrize("index", ["-1", "size", "size + 500"])
def test_a_kernel_that_writes_outside_its_output_is_told_in_one_line(tmp_path: Path, index: str) -> None:
    result = checked(tmp_path, PLUGIN.replace("out[i] = x[i]", f"out[{index}] = out[i] = x[i]"))
    assert result.exit_code == 2, result.output
    mine = tmp_path / "mine.py"
    assert f"kernel squared of {mine} wrote outside its output" in result.output.strip().splitlines()[-1]
