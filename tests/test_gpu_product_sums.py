"""The GPU: products that add the columns of their results are right with every tile, and give equal bits twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, hopper, poisoned
from program_samples import everywhere, for_gpu
from test_cuda_product_sums_on_host import KINDS, SAMPLES
from test_narrow_values import small_arrays_as_large_ones

from adtrain import ops
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda.forms import FORMS
from adtrain.backends.cuda.forms.product_sums import PRODUCT_SUMS
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel, Target
from adtrain.core.program import Equation
from adtrain.core.staging import stage
from adtrain.lowering.cuda.gemm.bfloat16 import TF32_TILES, TILES, Bfloat16Tile
from adtrain.passes import ALL, SIMPLIFY

__all__ = ["gpu", "hopper", "poisoned", "small_arrays_as_large_ones"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_arrays_as_large_ones")]

IMAGES = 90
"""More than in SAMPLES."""
TOLERANCE = 2e-3
"""The largest norm of a difference over the norm. A number that is rounded to another neighbour changes later ones."""
WITHOUT_TILES = "depthwise"
"""The one of SAMPLES whose convolutions have kernels without these tiles."""


def tiles_of(name: str, precision: str) -> Sequence[Bfloat16Tile]:
    """The tiles with which one of SAMPLES is computed."""
    return TF32_TILES if precision == "tf32" else TILES[:1] if name == WITHOUT_TILES else TILES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "tile"), [(*kind, tile) for kind in KINDS for tile in tiles_of(*kind)])
def test_products_with_sums_are_right(
    gpu: Any, name: str, precision: str, tile: Bfloat16Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[PRODUCT_SUMS]
    candidates = form.candidates
    assert candidates is not None

    def of_tile(equation: Equation, target: Target) -> list[CudaKernel]:
        """The candidates with the tile, or all if it has none."""
        macros = {"TILE_M": tile.m, "TILE_N": tile.n, "PINGPONG": int(tile.pingpong)}
        found = candidates(equation, target)
        return [x for x in found if macros.items() <= x.launches[0].definitions.items()] or [*found]

    monkeypatch.setitem(FORMS, PRODUCT_SUMS, replace(form, candidates=of_tile))
    rng = np.random.default_rng(0)
    f, ((count, *image), *shapes), _ = SAMPLES[name]
    arrays = [rng.standard_normal(shape, np.float32) / 4 for shape in ((max(count, IMAGES), *image), *shapes)]
    given = [array(x, device="gpu") for x in arrays]
    with ops.matmul_precision(precision):
        staged = stage(f, ALL)
        program = staged.program(*given)
        runs = [[x.numpy() for x in tree.leaves(staged(*given))] for _ in range(2)]
        on_cpu = for_gpu(stage(f, SIMPLIFY).program(*arrays), gpu.lowering.target)
    assert PRODUCT_SUMS in {e.form for e in everywhere(program)}
    for first, second, expected in zip(*runs, NumpyProgram(on_cpu).run(arrays)[0], strict=True):
        np.testing.assert_array_equal(first, second)
        assert np.linalg.norm(first - expected) <= TOLERANCE * np.linalg.norm(expected)
