"""Signed distances from a mesh, by a Program that goes through all pairs of points and triangles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import pi
from typing import Any, TypeAlias

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.staging import stage
from adtrain.data.meshes import surface_points
from adtrain.passes import ALL

Vector: TypeAlias = Sequence[Value]
"""The coordinates x, y, z of vectors: columns (N, 1), rows (1, F), or both (N, F)."""

PAIRS = 1 << 22
"""Maximum pairs of points and triangles of a call of the Program; a call has at least one point."""
NEAR = 0.02
"""The standard deviation of the distances of points near the surface, relative to the diagonal of the mesh."""


def signed_distances(triangles: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The distances of points (N, 3) from the surface of triangles (F, 3, 3), negative inside, float64 (N,).

    A point is inside if the surface winds around it more than half a time. The winding number is the sum of the solid
    angles of the triangles over 4 pi (A. Van Oosterom, J. Strackee, 1983; A. Jacobson et al.: "Robust inside-outside
    segmentation using generalized winding numbers", 2013). So a mesh may have holes.
    """
    corners = triangles.reshape(-1, 3)
    centre = (corners.min(0) + corners.max(0)) / 2  # float32 has more digits near 0
    a, b, c = np.moveaxis(triangles - centre, 1, 0)
    edges = np.array([b - a, c - b, a - c])
    normal = np.cross(b - a, c - a)
    unit = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    vectors = {"corners": np.array([a, b, c]), "edges": edges, "inwards": np.cross(normal, edges), "normal": unit[None]}
    of_triangles = {name: _columns(x)[:, :, np.newaxis] for name, x in vectors.items()}
    size = max(1, min(len(points), PAIRS // len(triangles)))
    found, of_points = [], stage(_of_points, ALL)
    for start in range(0, len(points), size):
        part = points[start : start + size] - centre
        padded = np.concatenate([part, np.zeros((size - len(part), 3))])  # all calls have one Program
        found.append(of_points(_columns(padded)[..., np.newaxis], of_triangles).numpy()[: len(part)].astype(np.float64))
    return np.concatenate(found)


def samples(triangles: np.ndarray, low: np.ndarray, high: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Points with their signed distances, float64 (count, 4), in a random order.

    A half is near the surface, and a quarter on it. The others have a uniform distribution in the box from `low` to
    `high`, each (3,).
    """
    rng = np.random.default_rng(seed)
    diagonal = np.linalg.norm(np.ptp(triangles.reshape(-1, 3), axis=0))
    on, near = (surface_points(triangles, n, rng) for n in (count // 4, count // 2))
    near = np.clip(near + rng.normal(0, NEAR * diagonal, near.shape), low, high)
    inside = rng.uniform(low, high, (count - len(on) - len(near), 3))
    others = np.concatenate([near, inside])
    distances = np.concatenate([np.zeros(len(on)), signed_distances(triangles, others)])
    rows = np.concatenate([np.concatenate([on, others]), distances[:, np.newaxis]], axis=1)
    return rows[rng.permutation(count)]


def _columns(vectors: np.ndarray) -> np.ndarray:
    """Vectors (..., N, 3) as coordinates float32 (..., 3, N)."""
    return np.ascontiguousarray(np.swapaxes(vectors, -1, -2).astype(np.float32))


def _of_points(points: Value, triangles: dict[str, Value]) -> Value:
    """The signed distances of points (3, N, 1) from triangles, whose vectors are (vectors, 3, 1, F)."""
    here = [points[i] for i in range(3)]
    corners = [_minus(corner, here) for corner in _vectors(triangles["corners"])]
    edges, inwards = _vectors(triangles["edges"]), _vectors(triangles["inwards"])
    (normal,) = _vectors(triangles["normal"])
    to_edges: list[Any] = []  # squares of the distances from the edges
    above: list[Any] = []  # for each edge 1 where the projection of the point is on its inner side, else 0
    for to_corner, edge, inward in zip(corners, edges, inwards, strict=True):
        along = ops.clip(-_dot(to_corner, edge) / _dot(edge, edge), 0.0, 1.0)
        to_edge = [x + along * y for x, y in zip(to_corner, edge, strict=True)]
        to_edges.append(_dot(to_edge, to_edge))
        above.append(ops.where(_dot(to_corner, inward) <= 0, 1.0, 0.0))
    to_plane = _dot(corners[0], normal)
    squares = ops.where(above[0] + above[1] + above[2] > 2.5, to_plane * to_plane, reduce(ops.minimum, to_edges))
    a, b, c = corners
    lengths = [ops.sqrt(_dot(x, x)) for x in corners]
    # The tangent of half of the solid angle is a quotient (Van Oosterom and Strackee, 1983).
    numerator = _dot(a, _cross(b, c))
    denominator = (
        lengths[0] * lengths[1] * lengths[2]
        + _dot(a, b) * lengths[2]
        + _dot(b, c) * lengths[0]
        + _dot(c, a) * lengths[1]
    )
    winding = ops.sum(ops.arctan2(numerator, denominator), 1) / (2 * pi)
    distance = ops.sqrt(ops.min(squares, 1))
    return ops.where(ops.abs(winding) > 0.5, -distance, distance)


def _vectors(x: Value) -> list[Vector]:
    return [[x[k, i] for i in range(3)] for k in range(x.shape[0])]


def _minus(x: Vector, y: Vector) -> Vector:
    return [a - b for a, b in zip(x, y, strict=True)]


def _dot(x: Vector, y: Vector) -> Any:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2]


def _cross(x: Vector, y: Vector) -> Vector:
    return [x[(i + 1) % 3] * y[(i + 2) % 3] - x[(i + 2) % 3] * y[(i + 1) % 3] for i in range(3)]
