"""Converts images of a data set to displayable pixels and to PNG files."""

from __future__ import annotations

import io
from base64 import b64encode

import numpy as np

POSITIVE, NEGATIVE = np.array([39.0, 102.0, 200.0]), np.array([217.0, 102.0, 26.0])
"""RGB of the largest weights above and below 0."""


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


def signed(weights: np.ndarray) -> np.ndarray:
    """Weights (N, C, H, W) as uint8 (N, H, W, 3): blue above 0, orange below, white at 0, in one scale for all.

    The sum over the channels is shown.
    """
    values = weights.sum(axis=1).astype(np.float64)
    strength = values / (np.abs(values).max() or 1.0)
    end = np.where(strength[..., None] > 0, POSITIVE, NEGATIVE)
    return np.round(255 + (end - 255) * np.abs(strength)[..., None]).astype(np.uint8)


def data_url(pixels: np.ndarray) -> str:
    """A picture as the address of an image."""
    return f"data:image/png;base64,{b64encode(png(pixels)).decode()}"


def png(pixels: np.ndarray) -> bytes:
    """uint8 (H, W, 1 or 3) as the content of a PNG file."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(content, "PNG")
    return content.getvalue()
