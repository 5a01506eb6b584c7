"""A mesh for the config `sdf`: a tube around a trefoil knot, as an OBJ file.

python examples/knot_mesh.py knot.obj
adtrain train sdf
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

RADIUS = 0.14


def centres(t: np.ndarray) -> np.ndarray:
    """The points (N, 3) of the knot at the angles t."""
    columns = [np.sin(t) + 2 * np.sin(2 * t), np.cos(t) - 2 * np.cos(2 * t), -np.sin(3 * t)]
    return np.stack(columns, axis=1) / 4


def tube(length: int = 96, around: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """The vertices (length x around, 3), and the faces: the numbers from 0 of the four corners of each."""
    t = 2 * np.pi * np.arange(length) / length
    along = centres(t + 1e-3) - centres(t - 1e-3)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    outwards = np.cross(along, [0.0, 0.0, 1.0])
    outwards /= np.linalg.norm(outwards, axis=1, keepdims=True)
    upwards = np.cross(outwards, along)
    angle = 2 * np.pi * np.arange(around)[:, np.newaxis] / around
    rings = [
        centre + RADIUS * (np.cos(angle) * x + np.sin(angle) * y)
        for centre, x, y in zip(centres(t), outwards, upwards, strict=True)
    ]
    i, j = (x.ravel() for x in np.meshgrid(np.arange(length), np.arange(around), indexing="ij"))
    here, there = i * around, (i + 1) % length * around
    faces = np.stack([here + j, here + (j + 1) % around, there + (j + 1) % around, there + j], axis=1)
    return np.concatenate(rings), faces


if __name__ == "__main__":
    vertices, faces = tube()
    lines = [f"v {x:.6f} {y:.6f} {z:.6f}" for x, y, z in vertices]
    lines += ["f " + " ".join(map(str, face)) for face in (faces + 1).tolist()]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
