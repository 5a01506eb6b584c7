"""Converts images of a data set to displayable pixels and to PNG files."""

from __future__ import annotations

import struct
import zlib

import numpy as np

PNG_COLOURS = {1: 0, 3: 2}
"""Number of channels -> PNG's colour type, grey or RGB."""


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


def png(pixels: np.ndarray) -> bytes:
    """uint8 (H, W, 1 or 3) as the content of a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">2I5B", width, height, 8, PNG_COLOURS[channels], 0, 0, 0)
    unfiltered = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each row begins with its filter, 0 for none
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
