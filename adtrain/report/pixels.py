"""Converts images of a data set to displayable pixels and to PNG files."""

from __future__ import annotations

import io

import numpy as np


def shown(images: np.ndarray) -> np.ndarray:
    """Images (N, C, H, W) as uint8 (N, H, W, 1 or 3): RGB for three channels, otherwise grey.

    Floats are scaled from [0, 1], or from their minimum and maximum if they exceed that range. Two channels, or more
    than three, are averaged.
    """
    if images.dtype != np.uint8:
        low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 1.0)
        if low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        images = (images.astype(np.float64) - low) / (high - low or 1.0) * 255
    if images.shape[1] not in (1, 3):
        images = images.mean(axis=1, keepdims=True)
    return np.round(images).astype(np.uint8).transpose(0, 2, 3, 1)


def png(pixels: np.ndarray) -> bytes:
    """uint8 (H, W, 1 or 3) as the content of a PNG file."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(content, "PNG")
    return content.getvalue()
