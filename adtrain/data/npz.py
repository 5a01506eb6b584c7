"""NPZ files: a ZIP archive of NPY arrays, as numpy.savez writes them.

Nothing is executed (no pickle) and nothing is extracted. Sizes in headers are compared with the archive's size before
memory is allocated. Sources: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and the ZIP
specification (PKWARE APPNOTE), 4.3.7 for local headers.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from adtrain.data.errors import DataError, reading
from adtrain.data.file_array import DataFile, FileArray, require_memory, stays_in_file
from adtrain.data.part import (
    MAX_DEFLATE_RATIO,
    NOTHING,
    Format,
    Known,
    Part,
    Parts,
    ShapeOptions,
    as_images,
    as_labels,
    numbered,
)
from adtrain.files import open_regular

NAMES = (
    (("x_train", "y_train"), ("X_train", "y_train"), ("images", "labels"), ("X", "y")),
    (("x_test", "y_test"), ("X_test", "y_test")),
)
"""Names of the arrays (images, labels) of the training part, with alternatives, and of the test part."""

NAMES_OF_IMAGES = ("X", "images", "x_test", "X_test")
"""Names of an array of images without labels, the first one before others."""

NPY_MAGIC = b"\x93NUMPY"
MAX_NPY_HEADER = 10_000
LOCAL_HEADER = 30
ENCRYPTED = 0x1
HEADER = re.compile(
    r"\{\s*'descr':\s*'([<>|=]?[a-zA-Z]\d*)',\s*'fortran_order':\s*(True|False),\s*'shape':\s*\(([\d\s,]*)\),?\s*\}\s*"
)
ELEMENTS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[US]\d{1,4})")
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, ValueError, struct.error)


def read(path: Path, options: ShapeOptions, known: Known = NOTHING) -> Parts:
    """Read x_train, y_train and, if present, x_test, y_test; or images, labels. `part.as_images` lists the shapes.

    The other names in NAMES are read in the same way. Large uncompressed arrays (`stays_in_file`) stay in the
    file; their checksums are not verified. Raises DataError that names the file and the array.
    """
    with _opened(path) as found:
        train, test = (_part(path, found, names, options) for names in NAMES)
        members = found.members
    if train is None:
        expected = "expected x_train and y_train (x_test, y_test), images and labels, or X and y"
        raise DataError(f"{path}: found {_listed(members)}, {expected}")
    if (half := set(members) & {"x_test", "X_test", "y_test"}) and test is None:
        raise DataError(f"{path}: found {half.pop()} only, expected both x_test and y_test or neither")
    return Parts(train, test)


def read_rows(path: Path, options: ShapeOptions, known: Known = NOTHING) -> np.ndarray:
    """The images of a file without regard to labels: the first array in NAMES_OF_IMAGES, or the only array.

    Raises DataError that names the file and the array.
    """
    with _opened(path) as found:
        names = [name for name in NAMES_OF_IMAGES if name in found.members]
        if not names and len(found.members) != 1:
            expected = f"expected {', '.join(NAMES_OF_IMAGES)}, or a single array"
            raise DataError(f"{path}: found {_listed(found.members)}, {expected}")
        info = found.members[names[0] if names else next(iter(found.members))]
        return np.asarray(as_images(_array(path, found.file, found.archive, info), f"{path}:{info.filename}", options))


class _Opened(NamedTuple):
    """An open archive, and its members by the names of their arrays."""

    file: BinaryIO
    archive: zipfile.ZipFile
    members: dict[str, zipfile.ZipInfo]


@contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    """The open archive. Errors of reading it during the `with` block become DataError."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            yield _Opened(file, archive, {info.filename.removesuffix(".npy"): info for info in archive.infolist()})
    except DAMAGED as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read as an NPZ file ({cause})") from error


def _listed(members: Mapping[str, object]) -> str:
    return ", ".join(map(repr, sorted(members)[:10])) or "nothing"


def _part(path: Path, found: _Opened, names: tuple[tuple[str, str], ...], options: ShapeOptions) -> Part | None:
    """The part with one of these pairs of names; None if the archive has neither."""
    pair = next((pair for pair in names if set(pair) <= set(found.members)), None)
    if pair is None:
        return None
    infos = [found.members[name] for name in pair]
    stored, labels = (_array(path, found.file, found.archive, info) for info in infos)
    place, label_place = (f"{path}:{info.filename}" for info in infos)
    images = as_images(stored, place, options)
    checked = as_labels(labels, len(images), label_place)
    return Part(images, checked, label_place, targets=numbered(pair[1], checked))


def _array(path: Path, file: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray | FileArray:
    """The member's array: in memory, or in the file if it is large and stored as it is."""
    place, stored = f"{path}:{info.filename}", info.compress_type == zipfile.ZIP_STORED
    if not stored and info.compress_type != zipfile.ZIP_DEFLATED:
        raise DataError(f"{place}: found compression {info.compress_type}, expected none or deflate (numpy.savez)")
    if info.flag_bits & ENCRYPTED:
        raise DataError(f"{place}: found an encrypted member, expected a plain one")
    most = info.compress_size * (1 if stored else MAX_DEFLATE_RATIO)
    if info.compress_size > path.stat().st_size or info.file_size > most:
        raise DataError(f"{place}: found a size of {info.file_size} bytes, expected at most {most} in this archive")
    with archive.open(info) as stream:
        dtype, fortran, shape, length = npy_header(stream, place)
        nbytes = math.prod(shape) * dtype.itemsize
        if length + nbytes != info.file_size:
            found = f"found {info.file_size} bytes, expected {length + nbytes}"
            raise DataError(f"{place}: {found} for {dtype} of shape {shape}")
        in_order = not fortran or len(shape) < 2
        if stored and in_order and shape and stays_in_file(nbytes):
            return FileArray(DataFile(path, file), _data_offset(path, info) + length, dtype, shape)
        require_memory(place, nbytes, "; arrays in C order in an uncompressed file (numpy.savez) are not loaded")
        flat = np.frombuffer(stream.read(nbytes), dtype)
        stream.read(1)  # zipfile compares the checksum at the end of the member
    return flat.reshape(shape, order="F" if fortran else "C")


def npy_header(stream: IO[bytes], place: str) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """(dtype, whether in Fortran order, shape, length of the header in bytes) of an NPY array."""
    start = stream.read(8)
    size = {1: 2, 2: 4, 3: 4}.get(start[6], 0) if len(start) == 8 and start.startswith(NPY_MAGIC) else 0
    if not size:
        raise DataError(f"{place}: found no NPY header, expected an array as numpy.save or numpy.savez writes it")
    length = int.from_bytes(stream.read(size), "little")
    text = stream.read(min(length, MAX_NPY_HEADER)).decode("latin-1")
    match = HEADER.fullmatch(text)
    if match is None or not ELEMENTS.fullmatch(match[1]):
        if match is not None and match[1].endswith("O"):
            raise DataError(f"{place}: found Python objects (pickle), which are not loaded; expected numbers")
        raise DataError(f"{place}: found the NPY header {text[:60].strip()!r}, expected an array of numbers or strings")
    shape = tuple(int(size) for size in match[3].split(",") if size.strip())
    if len(shape) > 4 or any(size >= 2**40 for size in shape):
        raise DataError(f"{place}: found the shape ({match[3][:60]}), expected at most 4 axes")
    return np.dtype(match[1]), match[2] == "True", shape, 8 + size + length


def read_npy(path: Path, expected: str, fits: Callable[[tuple[int, ...]], bool]) -> np.ndarray:
    """The numbers of an NPY file, whose shape `fits`; `expected` says which shape does.

    Raises DataError if the file cannot be read, is damaged, or has another shape or other elements than numbers.
    """
    with reading(path), open_regular(path) as file:
        dtype, fortran, shape, length = npy_header(file, str(path))
        if dtype.kind not in "iuf" or not fits(shape):
            raise DataError(f"{path}: found {dtype} of shape {shape}, expected numbers of {expected}")
        nbytes = math.prod(shape) * dtype.itemsize
        require_memory(str(path), 8 * math.prod(shape))
        content = file.read(nbytes + 1)
    if len(content) != nbytes:
        raise DataError(f"{path}: found {length + len(content)} bytes or more, expected {length + nbytes}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """The offset of the member's bytes: after its local header, which contains its own length."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name_length, extra_length = struct.unpack("<HH", file.read(LOCAL_HEADER)[26:])
    return info.header_offset + LOCAL_HEADER + int(name_length) + int(extra_length)


FORMAT = Format(
    name="NPZ",
    title="an NPZ file",
    suffixes=(".npz",),
    options=ShapeOptions,
    examples="examples",
    read=read,
    read_rows=read_rows,
)
