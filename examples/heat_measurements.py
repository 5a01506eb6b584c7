"""Temperatures of a rod as a table for the config `inverse-heat`: u_t = k u_xx with k = 0.2, and noise.

python examples/heat_measurements.py heat.csv
adtrain train inverse-heat
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

DIFFUSIVITY, NOISE = 0.2, 0.01


def temperatures(t: np.ndarray, x: np.ndarray) -> np.ndarray:
    """u at the points (t, x): two modes of a rod with cold ends."""
    modes = ((1.0, 1), (0.5, 3))
    parts = [a * np.exp(-DIFFUSIVITY * (n * np.pi) ** 2 * t) * np.sin(n * np.pi * x) for a, n in modes]
    found: np.ndarray = np.sum(parts, axis=0)
    return found


def rows(count: int = 400, seed: int = 0) -> np.ndarray:
    """Rows t, x, u at random points, with normal noise."""
    rng = np.random.default_rng(seed)
    t, x = rng.random((2, count))
    return np.stack([t, x, temperatures(t, x) + NOISE * rng.standard_normal(count)], axis=1)


if __name__ == "__main__":
    lines = ["t,x,u", *(f"{t:.6f},{x:.6f},{u:.6f}" for t, x, u in rows())]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
