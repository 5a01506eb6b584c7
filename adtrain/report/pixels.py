"""Converts images of a data set to displayable pixels and to PNG files."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np

PNG_COLOURS = {1: 0, 3: 2}
"""Number of channels -> PNG's colour type, grey or RGB."""

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
    if images.shape[1] not in PNG_COLOURS:
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
    height, width, channels = pixels.shape
    header = struct.pack(">2I5B", width, height, 8, PNG_COLOURS[channels], 0, 0, 0)
    unfiltered = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each row begins with its filter, 0 for none
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
