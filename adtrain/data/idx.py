"""The IDX format of MNIST: two zero bytes, a type code, the number of dimensions, the dimensions, the elements.

All numbers are big-endian. Source: the description on the MNIST page, http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from adtrain.data.errors import DataError

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
# No array of this package has more; a larger count means that the file is something else.
MAX_DIMENSIONS = 8


def read(path: str | Path) -> np.ndarray:
    """The array in an IDX file, in the machine's byte order, gzip-compressed or not (told by content, not by name).

    Raises DataError, naming the file, when it is missing or unreadable, no IDX, shorter or longer than its header says.
    """
    path = Path(path)
    with opened(path) as stream:
        return _parse(stream, path)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A stream of the file's bytes, decompressed where they are gzip; what goes wrong within is a DataError."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if compressed:
                with gzip.GzipFile(fileobj=file) as stream:
                    yield cast(IO[bytes], stream)
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(stream: IO[bytes], path: Path) -> np.ndarray:
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
    expected = math.prod(shape) * dtype.itemsize
    content = _read_at_most(stream, expected + 1)
    if len(content) != expected:
        found = f"found {len(content)}" if len(content) < expected else "found more"
        fault = "truncated" if len(content) < expected else "trailing bytes"
        raise DataError(f"{path}: {fault}, {found} bytes after the header, expected {expected} for shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _read_at_most(stream: IO[bytes], count: int) -> bytearray:
    """Grows with what is there, so that a header promising terabytes allocates none."""
    content = bytearray()
    while len(content) < count and (chunk := stream.read(min(1 << 20, count - len(content)))):
        content += chunk
    return content
