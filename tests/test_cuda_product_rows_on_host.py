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


def row_arguments(function: Any, m: int, n: int, k: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    shapes = {
        layer_norm_of_sum: ((m, k), (n, k), (n,), (m, n), (n,), (n,)),
        gradient_of_norm: ((m, k), (k, n), (n,), (m, n), (m, 1), (m, n)),
    }[function]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("function", "m", "n", "k"),
    [
        (layer_norm_of_sum, 200, 128, 96),
        (layer_norm_of_sum, 256, 104, 65),
        (gradient_of_norm, 200, 128, 64),
        (gradient_of_norm, 193, 100, 130),
    ],
)
def test_products_with_rows_match_the_program_without_fusion(
    function: Any, m: int, n: int, k: int, tmp_path: Path, compiled_code: Cache
) -> None:
    """Rows of the last block may be missing, and columns of a row that a team of threads shares."""
    given = row_arguments(function, m, n, k)
    program = for_gpu(stage(function, ()).program(*given), TARGET)
    assert "product_rows" in names(program)
    known = dict(zip(program.inputs, given, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    host = Host(tmp_path, compiled_code, TARGET)
    for e in program.equations:
        arrays = [known[v] for v in e.inputs]
        reference = e.primitive.reference(*(x.astype(np.float64) for x in arrays), **e.params)
        expected = reference if len(e.outputs) > 1 else (reference,)
        found = host.computed(e, None, arrays) if e.primitive is product_rows_p else expected
        for x, y in zip(found, expected, strict=True):
            assert np.linalg.norm(x - y) <= TOLERANCE * np.linalg.norm(y)
        known |= {v: np.asarray(x, np.float32) for v, x in zip(e.outputs, found, strict=True)}


def test_rows_that_are_read_by_index_stay_apart_from_their_product() -> None:
    """The epilogue of a product has no flag for an index out of range."""

    def loss(x: Any, w: Any, labels: Any) -> Any:
        return ops.take_along_axis(ops.log_softmax(ops.matmul(x, w), 1), labels, 1)

    given = np.zeros((512, 64), np.float32), np.zeros((64, 128), np.float32), np.zeros((512, 1), np.int64)
    assert names(for_gpu(stage(loss, ()).program(*given), TARGET)) == ["matmul", "row_fused"]
