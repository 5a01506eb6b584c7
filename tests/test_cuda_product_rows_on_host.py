"""Products with row-wise equations (`product_rows`), emulated on the CPU, against the Program without fusion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host
from program_samples import for_gpu, names

from adtrain import ops
from adtrain.cache import Cache
from adtrain.core.fused import product_rows_p
from adtrain.core.staging import stage
from adtrain.core.target import H200

TOLERANCE = 1e-6
"""The largest norm of the difference from the reference, divided by the norm of the reference."""
TARGET = H200._replace(multiprocessors=6)


def layer_norm_of_sum(x: Any, w: Any, bias: Any, residual: Any, scale: Any, shift: Any) -> Any:
    y = ops.matmul(x, w, transpose_b=True) + bias + residual
    return y, ops.layer_norm(y, y.shape[-1], scale, shift)


def gradient_of_norm(x: Any, w: Any, scale: Any, normal: Any, inverse: Any, residual: Any) -> Any:
    """The gradient of a norm whose output goes to a linear layer with weight w, beside a residual sum."""
    c = ops.matmul(x, w)
    n = c.shape[1]
    ct = c * scale
    mean = ops.sum(ct, 1, keepdims=True) / n
    slope = ops.sum(ct * normal, 1, keepdims=True) / n
    return c, residual + inverse * (ct - mean - normal * slope)


@pytest.mark.parametrize(
    ("function", "m", "n", "k", "weight"),
    [
        (layer_norm_of_sum, 200, 128, 96, (128, 96)),
        (layer_norm_of_sum, 256, 68, 65, (68, 65)),
        (gradient_of_norm, 200, 128, 64, (64, 128)),
        (gradient_of_norm, 193, 100, 130, (130, 100)),
    ],
)
def test_products_with_rows_match_the_program_without_fusion(
    function: Any, m: int, n: int, k: int, weight: tuple[int, int], tmp_path: Path, compiled_code: Cache
) -> None:
    """Rows of the last block may be missing, and columns of a row that a team of threads shares."""
    rng = np.random.default_rng(n)
    shapes = {
        layer_norm_of_sum: ((m, k), weight, (n,), (m, n), (n,), (n,)),
        gradient_of_norm: ((m, k), weight, (n,), (m, n), (m, 1), (m, n)),
    }[function]
    given = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    program = stage(function, ()).program(*given)
    fused = for_gpu(program, TARGET)
    assert "product_rows" in names(fused)
    equation = next(e for e in fused.equations if e.primitive is product_rows_p)
    known = dict(zip(fused.inputs, given, strict=True)) | {v: x.numpy() for v, x in fused.constants.items()}
    for e in fused.equations:
        if e is not equation:
            found = e.primitive.reference(*(known[v] for v in e.inputs), **e.params)
            known |= dict(zip(e.outputs, found if len(e.outputs) > 1 else (found,), strict=True))
            continue
        arrays = [known[v] for v in e.inputs]
        found = Host(tmp_path, compiled_code, TARGET).computed(e, None, arrays)
        with np.errstate(all="ignore"):
            expected = e.primitive.reference(*(x.astype(np.float64) for x in arrays), **e.params)
        for x, y in zip(found, expected if len(e.outputs) > 1 else (expected,), strict=True):
            assert np.linalg.norm(x - y) <= TOLERANCE * np.linalg.norm(y)
        known |= dict(zip(e.outputs, found, strict=True))
