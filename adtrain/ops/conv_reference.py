"""Convolution and its gradients in NumPy: the windows of an image as columns of a matrix (im2col), then BLAS.

Images are processed in batches whose columns stay in the cache.
(K. Chellapilla, S. Puri, P. Simard: "High performance convolutional neural networks for document processing", 2006.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from adtrain.ops.rounding import rounded

COLUMN_BYTES = 1 << 20
"""Maximum bytes of the columns of a batch of several images: about the size of an L2 cache."""


def _padded(x: np.ndarray, padding: tuple[int, int]) -> np.ndarray:
    if padding == (0, 0):
        return np.ascontiguousarray(x)
    ph, pw = padding
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))


def _batches(count: int, columns_each: int, dtype: np.dtype) -> Iterator[slice]:
    """Slices of ``count`` images such that the columns of a slice fit into COLUMN_BYTES."""
    size = max(1, COLUMN_BYTES // max(1, columns_each * dtype.itemsize))
    return (slice(start, start + size) for start in range(0, count, size))


def _columns(images: np.ndarray, kernel: tuple[int, int], out: tuple[int, int], window: Any) -> np.ndarray:
    """The im2col matrix (N, G, C / G * KH * KW, OH * OW) of padded, contiguous images (N, C, H, W)."""
    (sn, sc, sh, sw), (dh, dw), (th, tw) = images.strides, window.dilation, window.stride
    n, channels = images.shape[:2]
    taps = np.lib.stride_tricks.as_strided(
        images, (n, channels, *kernel, *out), (sn, sc, sh * dh, sw * dw, sh * th, sw * tw)
    )
    return taps.reshape(n, window.groups, channels // window.groups * kernel[0] * kernel[1], out[0] * out[1])


def conv2d_reference(x: np.ndarray, w: np.ndarray, window: Any, precision: str) -> np.ndarray:
    """(N, C, H, W) and (O, C / groups, KH, KW) to (N, O, OH, OW)."""
    x, w = rounded(x, precision), rounded(w, precision)
    groups, kernel = window.groups, w.shape[2:]
    oh, ow = (window.output_length(i, x.shape[i + 2], kernel[i]) for i in (0, 1))
    xp = _padded(x, window.padding)
    rows = w.reshape(groups, w.shape[0] // groups, -1)
    out = np.empty((len(x), groups, rows.shape[1], oh * ow), x.dtype)
    for batch in _batches(len(x), groups * rows.shape[2] * oh * ow, x.dtype):
        np.matmul(rows, _columns(xp[batch], kernel, (oh, ow), window), out=out[batch])
    return out.reshape(len(x), w.shape[0], oh, ow)


def weight_grad_reference(
    x: np.ndarray, g: np.ndarray, window: Any, size: tuple[int, int], precision: str
) -> np.ndarray:
    """Images (N, C, H, W) and cotangents (N, O, OH, OW) to (O, C / groups, *size)."""
    x, g = rounded(x, precision), rounded(g, precision)
    groups, (n, o, oh, ow) = window.groups, g.shape
    xp = _padded(x, window.padding)
    ct = np.ascontiguousarray(g).reshape(n, groups, o // groups, oh * ow)
    length = x.shape[1] // groups * size[0] * size[1]
    total = np.zeros((groups, o // groups, length), x.dtype)
    for batch in _batches(n, groups * length * oh * ow, x.dtype):
        total += np.matmul(ct[batch], _columns(xp[batch], size, (oh, ow), window).swapaxes(-1, -2)).sum(axis=0)
    return total.reshape(o, x.shape[1] // groups, *size)


def weight_grad_by_image_reference(
    x: np.ndarray, g: np.ndarray, window: Any, size: tuple[int, int], precision: str
) -> np.ndarray:
    """Images (N, C, H, W) and cotangents (N, O, OH, OW) to (N, O, C / groups, *size)."""
    one = [weight_grad_reference(x[i : i + 1], g[i : i + 1], window, size, precision) for i in range(len(x))]
    return np.stack(one) if one else np.zeros((0, g.shape[1], x.shape[1] // window.groups, *size), x.dtype)


def input_grad_reference(
    g: np.ndarray, w: np.ndarray, window: Any, size: tuple[int, int], precision: str
) -> np.ndarray:
    """Cotangents (N, O, OH, OW) and weights (O, C / groups, KH, KW) to (N, C, *size).

    Inside, the images are the last axis: so a batch is one matrix product, and the sums of a tap are over contiguous
    numbers even if rows are short.
    """
    g, w = rounded(g, precision), rounded(w, precision)
    groups, (kh, kw), (n, o, oh, ow) = window.groups, w.shape[2:], g.shape
    (ph, pw), (dh, dw), (sh, sw) = window.padding, window.dilation, window.stride
    channels = w.shape[1] * groups
    ct = g.reshape(n, groups, o // groups, oh * ow)
    rows = w.reshape(groups, o // groups, -1).swapaxes(1, 2)
    out = np.empty((n, channels, *size), g.dtype)
    for batch in _batches(n, channels * kh * kw * oh * ow, g.dtype):
        last = np.ascontiguousarray(np.moveaxis(ct[batch], 0, -1))
        columns = np.matmul(rows, last.reshape(groups, o // groups, -1)).reshape(channels, kh, kw, oh, ow, -1)
        padded = np.zeros((channels, size[0] + 2 * ph, size[1] + 2 * pw, last.shape[-1]), g.dtype)
        for i in range(kh):
            for j in range(kw):
                rows_at = slice(i * dh, i * dh + sh * (oh - 1) + 1, sh)
                columns_at = slice(j * dw, j * dw + sw * (ow - 1) + 1, sw)
                padded[:, rows_at, columns_at] += columns[:, i, j]
        out[batch] = np.moveaxis(padded[:, ph : ph + size[0], pw : pw + size[1]], -1, 0)
    return out
