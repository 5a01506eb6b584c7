"""The squared norm of a weighted point cloud under a Gaussian kernel, and its gradients by points and weights.

    E(x, b) = Σᵢⱼ exp(-|xᵢ - xⱼ|² / (2 s²)) bᵢ bⱼ

The printed differences compare both gradients with their closed forms.
"""

from __future__ import annotations

import numpy as np

import adtrain as ad
from adtrain import ops

SCALE = 0.5


def kernel(x: ad.Value) -> ad.Value:
    """(n, d) points -> (n, n) kernel matrix; |xᵢ - xⱼ|² = |xᵢ|² + |xⱼ|² - 2 xᵢ·xⱼ needs no (n, n, d) array."""
    norms = ops.square(x).sum(axis=1, keepdims=True)
    distances = norms + norms.T - 2.0 * ops.matmul(x, x, transpose_b=True)
    return ops.exp(-distances / (2 * SCALE**2))


def energy(x: ad.Value, b: ad.Value) -> ad.Value:
    return (b * (kernel(x) @ b)).sum()


def main() -> None:
    rng = np.random.default_rng(0)
    x = ad.array(rng.normal(size=(500, 3)))
    b = ad.array(rng.normal(size=(500, 1)))
    value, (by_x, by_b) = ad.value_and_grad(energy, argnums=(0, 1))(x, b)

    k = kernel(x)
    exact_by_b = 2.0 * (k @ b)
    weights = k * b * b.T
    exact_by_x = -2.0 / SCALE**2 * (weights.sum(axis=1, keepdims=True) * x - weights @ x)
    print(f"energy {value.item():.6f} of {x.shape[0]} points")
    print(f"gradient by points  {by_x.shape}  largest difference {ops.abs(by_x - exact_by_x).max().item():.1e}")
    print(f"gradient by weights {by_b.shape}  largest difference {ops.abs(by_b - exact_by_b).max().item():.1e}")


if __name__ == "__main__":
    main()
