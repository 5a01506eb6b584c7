"""IDX files for tests, written here from the format's description and not by the code under test."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    """The array as an IDX file's bytes."""
    header = bytes([0, 0, CODES[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, array: np.ndarray) -> Path:
    """Write it, compressed when the name ends in .gz."""
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def write_folder(folder: Path, train: int = 30, test: int = 10, classes: int = 3, separator: str = "-") -> Path:
    """A folder of MNIST's four files with 4 x 5 random images; labels run through the classes in turn."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 4, 5), dtype=np.uint8)
        write_idx(folder / f"{part}-images{separator}idx3-ubyte", images)
        write_idx(folder / f"{part}-labels{separator}idx1-ubyte", (np.arange(count) % classes).astype(np.uint8))
    return folder
