"""The solution of Burgers' equation with viscosity 0.01/pi and u(0, x) = -sin(pi x), as a table for `data.reference`.

    python examples/burgers_solution.py burgers.npy
    adtrain train burgers --set data.reference=burgers.npy

The transformation of Cole and Hopf makes the heat equation of it, whose solution is an integral over a normal
distribution. Gauss-Hermite quadrature computes it at a grid; rows are t, x, u.
"""

from __future__ import annotations

import sys

import numpy as np

VISCOSITY = 0.01 / np.pi


def solution(t: np.ndarray, x: np.ndarray, nodes: int = 150) -> np.ndarray:
    """u at the points (t, x)."""
    at, weights = np.polynomial.hermite.hermgauss(nodes)
    y = x[:, np.newaxis] - 2 * np.sqrt(VISCOSITY * t)[:, np.newaxis] * at
    exponent = -np.cos(np.pi * y) / (2 * np.pi * VISCOSITY)
    heat = weights * np.exp(exponent - exponent.max(axis=1, keepdims=True))
    found: np.ndarray = -(np.sin(np.pi * y) * heat).sum(axis=1) / heat.sum(axis=1)
    return found


def table(times: int = 51, places: int = 201) -> np.ndarray:
    """The rows t, x, u at a grid."""
    t, x = (axis.ravel() for axis in np.meshgrid(np.linspace(0, 1, times), np.linspace(-1, 1, places), indexing="ij"))
    return np.stack([t, x, solution(t, x)], axis=1)


if __name__ == "__main__":
    np.save(sys.argv[1], table())
