"""IDX files, and folders of them with MNIST's file names.

An IDX file has two zero bytes, a type code, the number of dimensions, the dimensions, the elements. All numbers are
big-endian. Source: the description on the MNIST page, http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

import numpy as np

from adtrain.cache import digest, open_cache
from adtrain.data.errors import DataError
from adtrain.data.file_array import DataFile, FileArray, require_memory, stays_in_file
from adtrain.data.part import MAX_DEFLATE_RATIO, NOTHING, Format, Known, Part, Parts
from adtrain.files import open_regular
from adtrain.text import counted

_log = logging.getLogger(__name__)

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IMAGES, LABELS = ("idx3-ubyte", "idx4-ubyte"), ("idx1-ubyte",)
"""The endings of the names of files in a folder."""
GZIP_MAGIC = b"\x1f\x8b"
MIN_CACHED_BYTES = 1 << 20
"""Decompressed elements of at least this number of bytes are cached."""
# A larger value means that the file is not an IDX file.
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48

Stream: TypeAlias = BufferedReader | gzip.GzipFile


def read(path: str | Path) -> np.ndarray | FileArray:
    """The array in an IDX file, in native byte order; gzip compression is detected by content, not by name.

    Uncompressed one-byte elements stay in the file if they are large (`stays_in_file`). Raises DataError that
    names the file if it is missing, unreadable, not an IDX file, or shorter or longer than its header says.
    """
    path = Path(path)
    with opened(path) as stream:
        return _parse(stream, path)


def encode(array: np.ndarray) -> bytes:
    """The content of an IDX file with a uint8 array."""
    return bytes([0, 0, 0x08, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """A stream of the file's bytes, decompressed if they are gzip; I/O errors in the block become DataErrors."""
    try:
        with open_regular(path) as file:
            compressed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if compressed:
                with gzip.GzipFile(fileobj=file) as stream:
                    yield stream
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(stream: Stream, path: Path) -> np.ndarray | FileArray:
    magic = stream.read(4)
    if len(magic) < 4:
        raise DataError(f"{path}: truncated, found {len(magic)} bytes, expected a header of at least 8")
    code, dimensions = magic[2], magic[3]
    if magic[:2] != b"\0\0" or code not in DTYPES or not 1 <= dimensions <= MAX_DIMENSIONS:
        kind = "neither gzip nor IDX" if path.suffix == ".gz" else "not an IDX file"
        raise DataError(
            f"{path}: {kind}, found magic number 0x{magic.hex()}, "
            "expected 0x00000803 (uint8 images) or 0x00000801 (uint8 labels)"
        )
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError(f"{path}: truncated in its header, found {4 + len(sizes)} bytes, expected {4 + 4 * dimensions}")
    shape = struct.unpack(f">{dimensions}I", sizes)
    dtype = np.dtype(DTYPES[code])
    if math.prod(size or 1 for size in shape) >= MAX_ELEMENTS:
        raise DataError(f"{path}: found the shape {shape}, expected one below {MAX_ELEMENTS} elements")
    expected = math.prod(shape) * dtype.itemsize
    size = path.stat().st_size
    if not isinstance(stream, gzip.GzipFile):
        _check_size(path, size - 4 - 4 * dimensions, expected, shape)
        if dtype.itemsize == 1 and stays_in_file(expected):
            return FileArray(DataFile(path, stream), 4 + 4 * dimensions, dtype, shape)
    elif expected > MAX_DEFLATE_RATIO * size:
        raise DataError(f"{path}: truncated, found {size} compressed bytes for {expected} of shape {shape}")
    require_memory(str(path), expected)
    content = _decompressed(stream, path, expected)
    _check_size(path, len(content), expected, shape)
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _decompressed(stream: Stream, path: Path, count: int) -> bytearray | memoryview:
    """At most `count` + 1 bytes after the header. The cache holds those of large gzip files."""
    if not isinstance(stream, gzip.GzipFile) or count < MIN_CACHED_BYTES:
        return _read_at_most(stream, count + 1)
    key, cache = digest("idx", file_sha256(stream.fileno())), open_cache("data")
    if (cached := cache.content(key, ".bin")) is not None:
        if len(cached) == count:
            return cached
        problem = f"the cached content of {path} has another length"
        _log.warning("adtrain: warning: %s; the file is decompressed again", problem)
        cache.remove(key, ".bin")
    content = _read_at_most(stream, count + 1)
    if len(content) == count:
        cache.store_later(key, ".bin", content)
    return content


def file_sha256(file: int) -> str:
    """The hash of an open file, whose position does not change."""
    found, position = hashlib.sha256(), 0
    while chunk := os.pread(file, 1 << 20, position):
        found.update(chunk)
        position += len(chunk)
    return found.hexdigest()


def _check_size(path: Path, found: int, expected: int, shape: tuple[int, ...]) -> None:
    if found != expected:
        words = f"truncated, found {found}" if found < expected else "trailing bytes, found more"
        raise DataError(f"{path}: {words} bytes after the header, expected {expected} for shape {shape}")


def _read_at_most(stream: Stream, count: int) -> bytearray:
    """Up to `count` bytes. The buffer grows with the bytes read, so a false size in the header allocates nothing."""
    content = bytearray()
    while len(content) < count and (chunk := stream.read(min(1 << 20, count - len(content)))):
        content += chunk
    return content


def read_folder(folder: Path, options: object = None, known: Known = NOTHING) -> Parts:
    """Read train-images-idx3-ubyte and train-labels-idx1-ubyte, and t10k-... as the test part if there is one.

    Files may be compressed (train-images-idx3-ubyte.gz) and have a dot in the name (train-images.idx3-ubyte). Images
    with several channels, (N, C, H, W), are named idx4-ubyte. Raises DataError as `read` does, and for images and
    labels that do not match.
    """
    return Parts(_read_part(folder, "train"), _read_part(folder, "t10k") if _has_part(folder, "t10k") else None)


def _read_part(folder: Path, part: str) -> Part:
    image_file, label_file = _find(folder, f"{part}-images", IMAGES), _find(folder, f"{part}-labels", LABELS)
    images, labels = _read_bytes(image_file, (3, 4)), np.asarray(_read_bytes(label_file, (1,)))
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: found {counted(len(labels), 'labels')}, expected {len(images)}, "
            f"one for each image of {image_file.name}"
        )
    if images.size == 0:
        raise DataError(f"{image_file}: found no pixels (shape {images.shape}), expected at least one image")
    shaped = images.reshape(len(images), 1, *images.shape[1:]) if images.ndim == 3 else images
    return Part(shaped, labels.astype(np.int64), str(label_file))


def _has_part(folder: Path, part: str) -> bool:
    return any(any(folder.glob(f"{part}-{kind}[-.]idx?-ubyte*")) for kind in ("images", "labels"))


def _find(folder: Path, stem: str, endings: tuple[str, ...]) -> Path:
    """The file under one of its possible names; an uncompressed file is preferred."""
    names = [f"{stem}{sep}{ending}{suffix}" for ending in endings for suffix in ("", ".gz") for sep in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: found no file {names[0]}, expected it or one of {', '.join(names[1:])}")


def _read_bytes(path: Path, dimensions: tuple[int, ...]) -> np.ndarray | FileArray:
    array = read(path)
    if array.dtype != np.uint8 or array.ndim not in dimensions:
        found, expected = f"{array.dtype} in {array.ndim} dimensions", " or ".join(map(str, dimensions))
        raise DataError(f"{path}: found {found}, expected uint8 in {expected} (magic number 0x0000080{dimensions[0]})")
    return array


FORMAT = Format(
    name="IDX",
    title="a folder of IDX files",
    examples="images",
    read=read_folder,
    content="IDX files such as train-images-idx3-ubyte",
    is_content=lambda folder: _has_part(folder, "train") or _has_part(folder, "t10k"),
)
