"""The GPU: chains of rows are as exact as separate kernels, and give equal bits twice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu
from test_cuda_row_chain_on_host import SAMPLES, arrays_of

import adtrain as ad
from adtrain.backends.cuda.codegen import row_chain_layout
from adtrain.backends.cuda.codegen.row_chain_layout import Way
from adtrain.backends.cuda.forms import row_chain

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu

ROWS = 20_011
MOST = 2
"""The largest error over that of separate kernels, where that is not tiny."""
TINY = 1e-6


def results(f: Any, arrays: Any, device: str) -> list[np.ndarray]:
    step = ad.jit(lambda *arrays: f(*arrays))
    found = step(*ad.tree.map(lambda x: ad.array(x, device=device), arrays))
    return [x.numpy() for x in ad.tree.leaves(found)]


def errors(found: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    """Norms of the differences, over the norms of the exact values where these are not 0."""
    norms = [np.linalg.norm(y) or 1.0 for y in exact]
    return [float(np.linalg.norm(x - y) / n) for x, y, n in zip(found, exact, norms, strict=True)]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("way", row_chain_layout.WAYS, ids=("floats", "terms"))
def test_chains_are_as_exact_as_separate_kernels(
    gpu: Any, way: Way, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, shapes = SAMPLES[name]
    arrays = arrays_of(shapes(ROWS), np.random.default_rng(0))
    exact = results(f, ad.tree.map(lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x, arrays), "cpu")
    monkeypatch.setattr(row_chain, "LAUNCH_CYCLES", math.inf)
    monkeypatch.setattr(row_chain_layout, "WAYS", (way,))
    chain = results(f, arrays, "gpu")
    assert all(x.tobytes() == y.tobytes() for x, y in zip(chain, results(f, arrays, "gpu"), strict=True))
    monkeypatch.setattr(row_chain, "MIN_ROWS", 1 << 40)
    separate = results(f, arrays, "gpu")
    for own, other in zip(errors(chain, exact), errors(separate, exact), strict=True):
        assert own <= max(MOST * other, TINY)
