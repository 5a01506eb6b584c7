"""Triangle meshes: Wavefront OBJ and STL files, and points on their surfaces.

Sources: https://www.loc.gov/preservation/digital/formats/fdd/fdd000507.shtml for OBJ, and fdd000504.shtml for STL.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from adtrain.data.errors import DataError, quoted
from adtrain.data.file_array import require_memory
from adtrain.files import open_regular

MESHES = (".obj", ".stl")
"""The endings of the names of files with meshes."""
STL_HEADER, STL_TRIANGLE = 84, 50
"""Bytes of the header of a binary STL file, with the number of triangles, and of a triangle."""
BYTES_EACH = 4
"""Estimated bytes of the triangles in float64 for each byte of a file."""


def read_mesh(path: Path) -> np.ndarray:
    """The triangles of a mesh, float64 (F, 3, 3): their corners, whose last axis is x, y, z.

    Polygons are divided into triangles around their first corner. Triangles without an area are left out.

    Raises:
        DataError: the file is missing, damaged, has another format, numbers that are not finite, or no triangle with an
            area.
    """
    suffix = path.suffix.lower()
    if suffix not in MESHES:
        raise DataError(f"{path}: found the extension {quoted(suffix)}, expected {' or '.join(MESHES)}")
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}, expected a mesh") from None
    require_memory(str(path), BYTES_EACH * len(content))
    found = _obj(path, content) if suffix == ".obj" else _stl(path, content)
    if not np.isfinite(found).all():
        raise DataError(f"{path}: found a coordinate that is not finite, expected finite ones")
    found = found[areas(found) > 0]
    if not len(found):
        raise DataError(f"{path}: found no triangle with an area, expected at least one")
    return found


def areas(triangles: np.ndarray) -> np.ndarray:
    """The areas of triangles (F, 3, 3), float64 (F,)."""
    a, b, c = np.moveaxis(triangles, 1, 0)
    found: np.ndarray = np.linalg.norm(np.cross(b - a, c - a), axis=1) / 2
    return found


def surface_points(triangles: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Independent points with a uniform distribution on the surface, float64 (count, 3)."""
    sizes = areas(triangles)
    a, b, c = np.moveaxis(triangles[rng.choice(len(triangles), count, p=sizes / sizes.sum())], 1, 0)
    u, v = rng.random((2, count, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    found: np.ndarray = a + u * (b - a) + v * (c - a)
    return found


def _obj(path: Path, content: bytes) -> np.ndarray:
    vertices: list[list[float]] = []
    corners: list[tuple[int, int, int]] = []
    for number, line in _lines(content):
        kind, *words = line.split()
        where = f"{path}: line {number}"
        if kind == "v":
            vertices.append(_numbers(where, words[:3]))
        elif kind == "f":
            if len(words) < 3:
                raise DataError(f"{where}: found a face of {len(words)} corners, expected at least 3")
            first, *others = [_vertex(where, word, len(vertices)) for word in words]
            corners += [(first, b, c) for b, c in pairwise(others)]
    if not corners:
        raise DataError(f"{path}: found no faces, expected lines such as f 1 2 3")
    return np.array(vertices)[np.array(corners)]


def _vertex(where: str, word: str, count: int) -> int:
    """The index of a vertex, from 0. `word` is a number such as 3, -1 for the last one, or 3/1/2 with other indices."""
    try:
        number = int(word.partition("/")[0])
    except ValueError:
        raise DataError(f"{where}: found the corner {quoted(word)}, expected the number of a vertex") from None
    index = number - 1 if number > 0 else count + number
    if number == 0 or not 0 <= index < count:
        raise DataError(f"{where}: found the vertex {number}, expected 1 to {count}, the vertices before it")
    return index


def _stl(path: Path, content: bytes) -> np.ndarray:
    if len(content) >= STL_HEADER:
        count = int.from_bytes(content[STL_HEADER - 4 : STL_HEADER], "little")
        if len(content) == STL_HEADER + STL_TRIANGLE * count:
            kind = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
            found: np.ndarray = np.frombuffer(content, kind, offset=STL_HEADER)["corners"].astype(np.float64)
            return found
    if not content.lstrip().startswith(b"solid"):
        raise DataError(
            f"{path}: found {len(content):,} bytes, expected a binary STL file with as many triangles as its header "
            "says, or a text that begins with solid"
        )
    corners = [
        _numbers(f"{path}: line {number}", line.split()[1:4])
        for number, line in _lines(content)
        if line.split()[0] == "vertex"
    ]
    if len(corners) % 3:
        raise DataError(f"{path}: found {len(corners)} lines with a vertex, expected 3 for each triangle")
    return np.array(corners).reshape(-1, 3, 3)


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """The lines that are neither empty nor comments, with their numbers."""
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            yield number, text


def _numbers(where: str, words: list[str]) -> list[float]:
    """Three coordinates."""
    try:
        found = [float(word) for word in words]
    except ValueError:
        found = []
    if len(found) != 3:
        raise DataError(f"{where}: found {quoted(' '.join(words))}, expected the numbers x, y and z")
    return found
