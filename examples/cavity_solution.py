"""The flow of the config `navier-stokes`, a cavity with a moving lid, as a table for `data.reference`.

    python examples/cavity_solution.py cavity.npy

Finite differences on a staggered grid (Harlow and Welch 1965) and steps in time with a projection (Chorin 1968) until
the flow is steady. Rows are x, y, u, v, p at cell centres, with p = 0 at the lower left corner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

VISCOSITY, STEADY = 0.01, 1e-6  # the second one: the largest acceleration at the end


def flow(cells: int, lid: Callable[..., np.ndarray] = lambda x: 16 * x**2 * (1 - x) ** 2) -> tuple[np.ndarray, ...]:
    """Velocities u (N + 1, N) and v (N, N + 1) at the sides of cells, and the pressure (N, N). The lid: Shen 1991."""
    h, dt, k = 1 / cells, 0.2 / cells**2 / VISCOSITY, np.arange(cells)
    top, still = lid(np.arange(cells + 1)[:, np.newaxis] * h), np.zeros((cells + 1, 1))
    u, v = np.zeros((cells + 1, cells)), np.zeros((cells, cells + 1))
    cosines = np.cos(np.pi * np.outer(k, k + 0.5) / cells) * np.where(k[:, np.newaxis] == 0, 1, 2**0.5) / cells**0.5
    eigenvalues = (2 * np.cos(np.pi * k / cells) - 2) / h**2
    inverse = 1 / np.where(k[:, np.newaxis] + k > 0, eigenvalues[:, np.newaxis] + eigenvalues, np.inf)
    while True:
        before = u, v
        u, v = u + dt * acceleration(u, v, top, h), v + dt * acceleration(v.T, u.T, still, h).T
        p = cosines @ (np.diff(u, axis=0) + np.diff(v, axis=1)) @ cosines.T / h / dt
        p = cosines.T @ (inverse * p) @ cosines
        u[1:-1] -= dt * np.diff(p, axis=0) / h
        v[:, 1:-1] -= dt * np.diff(p, axis=1) / h
        if max(np.abs(u - before[0]).max(), np.abs(v - before[1]).max()) < STEADY * dt:
            return u, v, p - 1.5 * p[0, 0] + 0.5 * p[1, 1]


def acceleration(u: np.ndarray, v: np.ndarray, lid: np.ndarray, h: float) -> np.ndarray:
    """Of u, by convection and friction; 0 at the walls. The wall at the end of axis 1 moves at `lid`, (N + 1, 1)."""
    wide = np.concatenate([-u[:, :1], u, 2 * lid - u[:, -1:]], axis=1)
    in_cells, at_corners = (u[1:] + u[:-1]) / 2, (wide[:, 1:] + wide[:, :-1])[1:-1] / 2
    convection = np.diff(in_cells**2, axis=0) + np.diff(at_corners * (v[1:] + v[:-1]) / 2, axis=1)
    friction = np.diff(u, n=2, axis=0) + np.diff(wide, n=2, axis=1)[1:-1]
    return np.pad(VISCOSITY * friction / h**2 - convection / h, ((1, 1), (0, 0)))


def at_centres(cells: int) -> np.ndarray:
    """The columns x, y, u, v, p at the centres of cells, by x and y."""
    u, v, p = flow(cells)
    return np.stack([*(np.indices(p.shape) + 0.5) / cells, (u[1:] + u[:-1]) / 2, (v[:, 1:] + v[:, :-1]) / 2, p], axis=2)


def table(cells: int = 27) -> np.ndarray:
    """A row for each cell: solutions on this grid and on one three times as fine, extrapolated (Richardson 1911)."""
    return ((9 * at_centres(3 * cells)[1::3, 1::3] - at_centres(cells)) / 8).reshape(-1, 5)


if __name__ == "__main__":
    np.save(sys.argv[1], table())
