"""The Gaussian kernel norm of N points q with momenta p, and its gradients, without an array of N x N numbers.

    H(q, p) = 1/2 sum_ij exp(-|q_i - q_j|^2 / (2 s^2)) p_i . p_j

`ad.jit` runs the formula as one map-reduce kernel. `python examples/kernel_norm.py --device gpu --points 1000000`
"""

from __future__ import annotations

from time import perf_counter

import click
import numpy as np

import adtrain as ad
from adtrain import ops

WIDTH = 0.5


def norm(q: ad.Value, p: ad.Value, s: ad.Value) -> ad.Value:
    """H of q (N, 3), p (N, 3) and the width s."""
    d = ops.sum((q[:, None] - q[None]) ** 2, axis=2)
    return 0.5 * ops.sum(p * (ops.exp(-d / (2 * s * s)) @ p))


def exact_gradients(q: np.ndarray, p: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The closed form of the gradients by q and p at some rows, in float64."""
    q, p = q.astype(np.float64), p.astype(np.float64)
    apart = q[rows, None] - q[None]
    kernel = np.exp(-(apart**2).sum(2) / (2 * WIDTH * WIDTH))
    return -((kernel * (p[rows] @ p.T))[:, :, None] * apart).sum(1) / WIDTH**2, kernel @ p


@click.command()
@click.option("--points", type=click.IntRange(min=2), default=4000, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
def main(points: int, device: str) -> None:
    """Print the norm, the speed, and the errors of the gradients on 64 rows, or all if there are fewer."""
    rng = np.random.default_rng(0)
    q, p = (rng.normal(size=(points, 3)).astype(np.float32) for _ in range(2))
    arrays = [ad.array(x, device=device) for x in (q, p, np.float32(WIDTH))]
    f = ad.jit(ad.value_and_grad(norm, argnums=(0, 1)))
    f(*arrays)[0].item()  # compiles
    start = perf_counter()
    value, gradients = f(*arrays)
    print(f"norm {value.item():.6e}, {points**2 / (perf_counter() - start) / 1e9:.2f} billion pairs a second")
    rows = rng.choice(points, min(points, 64), replace=False)
    for name, found, exact in zip("qp", gradients, exact_gradients(q, p, rows), strict=True):
        error = np.abs(found.numpy()[rows] - exact).max() / np.abs(exact).max()
        print(f"gradient by {name}: largest error {error:.1e} of the largest element")


if __name__ == "__main__":
    try:
        main()
    except ad.AdtrainError as error:  # such as a GPU without PyCUDA
        click.echo(f"kernel_norm: error: {error}", err=True)
        raise SystemExit(2) from None
