"""Convolution and its gradients in NumPy: for each image the windows as columns of a matrix (im2col), then BLAS.

One image at a time, so that its columns stay in the cache instead of going through memory.
(K. Chellapilla, S. Puri, P. Simard: "High performance convolutional neural networks for document processing", 2006.)
"""

from __future__ import annotations

from typing import Any

import numpy as np


def _padded(x: np.ndarray, padding: tuple[int, int]) -> np.ndarray:
    if padding == (0, 0):
        return x
    ph, pw = padding
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))


def _taps(image: np.ndarray, kernel: tuple[int, int], out: tuple[int, int], window: Any) -> np.ndarray:
    """A view (C, KH, KW, OH, OW) of a padded, contiguous image (C, H, W): what each weight is multiplied with."""
    (sc, sh, sw), (dh, dw), (th, tw) = image.strides, window.dilation, window.stride
    return np.lib.stride_tricks.as_strided(
        image, (image.shape[0], *kernel, *out), (sc, sh * dh, sw * dw, sh * th, sw * tw)
    )


def conv2d_reference(x: np.ndarray, w: np.ndarray, window: Any) -> np.ndarray:
    """(N, C, H, W) and (O, C / groups, KH, KW) to (N, O, OH, OW)."""
    groups, kernel = window.groups, w.shape[2:]
    oh, ow = (window.output_length(i, x.shape[i + 2], kernel[i]) for i in (0, 1))
    xp = np.ascontiguousarray(_padded(x, window.padding))
    rows = w.reshape(groups, w.shape[0] // groups, -1)
    out = np.empty((len(x), w.shape[0], oh, ow), x.dtype)
    for image, result in zip(xp, out, strict=True):
        columns = _taps(image, kernel, (oh, ow), window).reshape(groups, rows.shape[2], oh * ow)
        np.matmul(rows, columns, out=result.reshape(groups, -1, oh * ow))
    return out


def weight_grad_reference(x: np.ndarray, g: np.ndarray, window: Any, size: tuple[int, int]) -> np.ndarray:
    """Images (N, C, H, W) and cotangents (N, O, OH, OW) to (O, C / groups, *size)."""
    groups, out = window.groups, g.shape[2:]
    xp = np.ascontiguousarray(_padded(x, window.padding))
    g = np.ascontiguousarray(g)
    total = np.zeros((groups, g.shape[1] // groups, x.shape[1] // groups * size[0] * size[1]), x.dtype)
    for image, ct in zip(xp, g, strict=True):
        columns = _taps(image, size, out, window).reshape(groups, total.shape[2], -1)
        total += np.matmul(ct.reshape(groups, -1, columns.shape[2]), columns.swapaxes(1, 2))
    return total.reshape(g.shape[1], x.shape[1] // groups, *size)


def input_grad_reference(g: np.ndarray, w: np.ndarray, window: Any, size: tuple[int, int]) -> np.ndarray:
    """Cotangents (N, O, OH, OW) and weights (O, C / groups, KH, KW) to (N, C, *size)."""
    groups, (kh, kw), (oh, ow) = window.groups, w.shape[2:], g.shape[2:]
    (ph, pw), (dh, dw), (sh, sw) = window.padding, window.dilation, window.stride
    channels = w.shape[1] * groups
    g = np.ascontiguousarray(g)
    rows = w.reshape(groups, w.shape[0] // groups, -1).swapaxes(1, 2)
    padded = np.zeros((len(g), channels, size[0] + 2 * ph, size[1] + 2 * pw), g.dtype)
    for ct, image in zip(g, padded, strict=True):
        columns = np.matmul(rows, ct.reshape(groups, -1, oh * ow)).reshape(channels, kh, kw, oh, ow)
        for i in range(kh):
            for j in range(kw):
                top, left = i * dh, j * dw
                image[:, top : top + sh * (oh - 1) + 1 : sh, left : left + sw * (ow - 1) + 1 : sw] += columns[:, i, j]
    return padded[:, :, ph : ph + size[0], pw : pw + size[1]]
