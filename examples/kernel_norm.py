"""The Gaussian kernel norm of N points q with momenta p, and its gradients, without an array of N x N numbers.

    H(q, p) = 1/2 sum_ij exp(-|q_i - q_j|^2 / (2 s^2)) p_i . p_j

    python examples/kernel_norm.py [--points N] [--device cpu|gpu]

`ad.jit` runs the formula as one map-reduce kernel: memory and results have N rows, and what the gradients need of the
pairs is computed again.
"""

from __future__ import annotations

from time import perf_counter

import click
import numpy as np

import adtrain as ad
from adtrain import ops

SAMPLE = 64
"""Rows that are compared with float64."""


def norm(q: ad.Value, p: ad.Value, s: ad.Value) -> ad.Value:
    """H of q (N, 3), p (N, 3) and the width s."""
    d = ops.sum((q[:, None] - q[None]) ** 2, axis=2)
    return 0.5 * ops.sum(p * (ops.exp(-d / (2 * s * s)) @ p))


def exact_rows(q: np.ndarray, p: np.ndarray, s: float, rows: np.ndarray) -> np.ndarray:
    """The gradient by p at some rows, in float64."""
    q, p = q.astype(np.float64), p.astype(np.float64)
    d = ((q[rows, None] - q[None]) ** 2).sum(2)
    return np.asarray(np.exp(-d / (2 * s * s)) @ p)


@click.command()
@click.option("--points", default=1_000_000, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="gpu", show_default=True)
def main(points: int, device: str) -> None:
    """Compute the norm and its gradients by q and p; print the value, the error and the speed."""
    rng = np.random.default_rng(0)
    q, p = (rng.normal(size=(points, 3)).astype(np.float32) for _ in range(2))
    width = 0.5
    arrays = [ad.array(x, device=device) for x in (q, p, np.float32(width))]
    f = ad.jit(ad.value_and_grad(norm, argnums=(0, 1)))
    for run in ("compile and run", "run"):
        start = perf_counter()
        value, (_, by_p) = f(*arrays)
        result, found = value.item(), by_p.numpy()
        seconds = perf_counter() - start
        click.echo(f"{run:16} {seconds:.4f} s, {points * points / seconds / 1e9:.1f} billion pairs a second")
    rows = rng.choice(points, min(SAMPLE, points), replace=False)
    expected = exact_rows(q, p, width, rows)
    error = np.abs(found[rows] - expected).max() / np.abs(expected).max()
    click.echo(f"{'value':16} {result:.6e}, largest error of the gradient by p {error:.1e} of its largest element")


if __name__ == "__main__":
    main()
