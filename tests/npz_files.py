"""NPZ files for tests."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def npz_bytes(arrays: Mapping[str, np.ndarray], compressed: bool = False) -> bytes:
    """The content of an NPZ file with the arrays, as numpy writes it."""
    content, save = io.BytesIO(), np.savez_compressed if compressed else np.savez
    save(content, allow_pickle=True, **arrays)
    return content.getvalue()


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], compressed: bool = False) -> Path:
    path.write_bytes(npz_bytes(arrays, compressed))
    return path


def parts(images: np.ndarray, test: int = 2) -> dict[str, np.ndarray]:
    """The images as the training part, with labels 0, 1, 0, ..., and the first `test` of them as the test part."""
    labels = np.arange(len(images)) % 2
    return {"x_train": images, "y_train": labels, "x_test": images[:test], "y_test": labels[:test]}
