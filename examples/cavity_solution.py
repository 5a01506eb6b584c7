"""The flow of the config `navier-stokes`, a cavity with a moving lid, as a table for `data.reference`.

    python examples/cavity_solution.py cavity.npy

Finite differences on a staggered grid (Harlow and Welch 1965) and steps in time with a projection (Chorin 1968) until
the flow is steady. Rows are x, y, u, v, p at cell centres, with p = 0 at the lower left corner. The pressure is
infinite in the upper corners, so points near them are left out.
"""

from __future__ import annotations

import sys

import numpy as np

VISCOSITY, STEADY, CORNER = 0.01, 1e-6, 0.1
"""The last two: the largest acceleration at the end; the distance from the upper corners that is left out."""


def flow(cells: int = 80) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The velocities through the sides of cells, u (N + 1, N) and v (N, N + 1), and the pressure (N, N), by x, y."""
    h, dt = 1 / cells, 0.2 / cells**2 / VISCOSITY
    u, v = np.zeros((cells + 1, cells)), np.zeros((cells, cells + 1))
    k = np.arange(cells)
    cosines = np.cos(np.pi * np.outer(k, k + 0.5) / cells) * np.where(k[:, np.newaxis] == 0, 1, 2**0.5) / cells**0.5
    eigenvalues = (2 * np.cos(np.pi * k / cells) - 2) / h**2
    inverse = 1 / np.where(k[:, np.newaxis] + k > 0, eigenvalues[:, np.newaxis] + eigenvalues, np.inf)
    while True:
        before = u, v
        u, v = u + dt * acceleration(u, v, 1.0, h), v + dt * acceleration(v.T, u.T, 0.0, h).T
        divergence = (np.diff(u, axis=0) + np.diff(v, axis=1)) / h
        p = cosines.T @ (inverse * (cosines @ divergence @ cosines.T)) @ cosines / dt
        u[1:-1] -= dt * np.diff(p, axis=0) / h
        v[:, 1:-1] -= dt * np.diff(p, axis=1) / h
        if max(np.abs(u - before[0]).max(), np.abs(v - before[1]).max()) < STEADY * dt:
            return u, v, p


def acceleration(u: np.ndarray, v: np.ndarray, lid: float, h: float) -> np.ndarray:
    """Of u, by convection and friction; 0 at the walls. The wall at the end of the second axis moves at `lid`."""
    wide = np.concatenate([-u[:, :1], u, 2 * lid - u[:, -1:]], axis=1)
    at_centres, at_corners = (u[1:] + u[:-1]) / 2, (wide[:, 1:] + wide[:, :-1])[1:-1] / 2
    across = (v[1:] + v[:-1]) / 2
    convection = np.diff(at_centres**2, axis=0) + np.diff(at_corners * across, axis=1)
    friction = np.diff(u, n=2, axis=0) + np.diff(wide, n=2, axis=1)[1:-1]
    return np.pad(VISCOSITY * friction / h**2 - convection / h, ((1, 1), (0, 0)))


def table(cells: int = 80) -> np.ndarray:
    u, v, p = flow(cells)
    x, y = (np.indices((cells, cells)) + 0.5) / cells
    corner = 1.5 * p[0, 0] - 0.5 * p[1, 1]
    columns = x, y, (u[1:] + u[:-1]) / 2, (v[:, 1:] + v[:, :-1]) / 2, p - corner
    far = np.minimum(np.hypot(x, y - 1), np.hypot(x - 1, y - 1)) > CORNER
    return np.stack([column[far] for column in columns], axis=1)


if __name__ == "__main__":
    np.save(sys.argv[1], table())
