"""IDX files for tests, written from the format's description and not by the code under test."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    """The content of an IDX file with the array."""
    header = bytes([0, 0, CODES[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    """Write the array as an IDX file, compressed if the name ends in .gz."""
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def write_folder(folder: Path, train: int = 30, test: int = 10, classes: int = 3, separator: str = "-") -> Path:
    """A folder with MNIST's four files: random images of 4 x 5 pixels, labels 0, 1, ..., classes - 1, 0, ..."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 4, 5), dtype=np.uint8)
        write_idx(folder / f"{part}-images{separator}idx3-ubyte", images)
        write_idx(folder / f"{part}-labels{separator}idx1-ubyte", (np.arange(count) % classes).astype(np.uint8))
    return folder
