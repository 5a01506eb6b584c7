"""Compiled convolutions by Winograd's method: an outlier changes only the results that read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core.kernel import value_for
from adtrain.core.types import ArrayType
from adtrain.lowering.cpu import conv
from adtrain.ops.conv import Window

pytestmark = pytest.mark.compiled

CHANNELS = {"an image at a time": 17, "all images at once": 65}
OUT, HEIGHT, WIDTH = 18, 11, 9
OUTLIERS = (np.nan, np.inf, -np.inf, 1e30, 1e12, 1e5)


def results(padding: int, x: Any, w: Any, g: Any) -> Any:
    """A convolution, and its gradients for the output's gradient g."""
    out, pullback = ad.vjp(lambda x, w: ops.conv2d(x, w, padding=padding), x, w)
    return out, *pullback(g)


def check(arrays: list[np.ndarray], padding: int, compiled: Any) -> None:
    """Each compiled element has the relative error of a sum, or is infinite or NaN where NumPy's is."""
    dtype = arrays[0].dtype
    with np.errstate(all="ignore"):
        found = [np.array(y.numpy(), np.float64) for y in compiled(*map(ad.array, arrays))]
        exact = [y.numpy() for y in results(padding, *(ad.array(a.astype(np.float64)) for a in arrays))]
        size = [y.numpy() for y in results(padding, *(ad.array(np.abs(a).astype(np.float64)) for a in arrays))]
        for name, a, e, s in zip(("output", "input gradient", "weight gradient"), found, exact, size, strict=True):
            finite = np.isfinite(e) & (s < np.finfo(dtype).max / 1e3)
            assert (np.isfinite(a) | ~finite).all(), name
            assert (np.isfinite(e) | ~np.isfinite(a)).all(), name
            assert (np.abs(a - e)[finite] <= 2**13 * np.finfo(dtype).eps * s[finite]).all(), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", list(CHANNELS))
@pytest.mark.parametrize(("padding", "dtype"), [(1, "float32"), (0, "float64"), (2, "float32")])
def test_an_outlier_changes_only_the_results_that_read_it(padding: int, dtype: str, form: str) -> None:
    rng = np.random.default_rng(padding)
    size = 2, CHANNELS[form], HEIGHT, WIDTH
    x, w = rng.normal(size=size).astype(dtype), rng.normal(size=(OUT, CHANNELS[form], 3, 3)).astype(dtype)
    x[rng.random(size) < 0.3] = 0
    g = rng.normal(size=(2, OUT, HEIGHT + 2 * padding - 2, WIDTH + 2 * padding - 2)).astype(dtype)
    g[rng.random(g.shape) < 0.5] = 0
    types, window = [ArrayType(a.shape, a.dtype) for a in (x, w, g)], Window((1, 1), (padding, padding), (1, 1), 1)
    options = {"window": window, "precision": "full"}
    kernels = [conv.FORWARD_WINOGRAD, conv.INPUT_GRAD_WINOGRAD, conv.WEIGHT_GRAD_WINOGRAD]
    if form == "all images at once":
        kernels = [conv.FORWARD_BATCH, conv.INPUT_GRAD_BATCH, conv.WEIGHT_GRAD_BATCH]
    sides: tuple[Any, ...] = (
        ((types[0], types[1]), {}),
        ((types[2], types[1]), {"size": size[2:]}),
        ((types[0], types[2]), {"size": (3, 3)}),
    )
    for kernel, (found, more) in zip(kernels, sides, strict=True):
        assert value_for(kernel.suits if kernel.team else kernel.items, *found, **more, **options)

    compiled = ad.jit(lambda x, w, g: results(padding, x, w, g))
    check([x, w, g], padding, compiled)
    for i, outlier in enumerate(OUTLIERS):
        for changed in range(3):
            if changed == 1 and not np.isfinite(outlier):
                continue  # times the zeros around an image it is NaN, which an element may or may not add
            arrays = [a.copy() for a in (x, w, g)]
            for _ in range(1 + i % 3):
                arrays[changed][tuple(map(rng.integers, arrays[changed].shape))] = outlier
            check(arrays, padding, compiled)
    for rows in (slice(0, 1), slice(4, 6), slice(0, 11, 4)):
        arrays = [x.copy(), w, g]
        arrays[0][0, :, rows] = np.nan if rows.step else 1e12
        check(arrays, padding, compiled)
