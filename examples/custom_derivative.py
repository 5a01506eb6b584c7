"""A custom derivative: the length of a vector. Automatic differentiation gives 0 / 0 for its gradient at 0.

The rule x / max(|x|, tiny) gives 0 there. It is written with public ops, so it can be differentiated again.
"""

from __future__ import annotations

import adtrain as ad
from adtrain import ops

TINY = 1e-12


def length_forward(x: ad.Value) -> tuple[ad.Value, tuple[ad.Value, ad.Value]]:
    length = ops.sqrt(ops.square(x).sum())
    return length, (x, length)


def length_backward(residuals: tuple[ad.Value, ad.Value], ct: ad.Value) -> tuple[ad.Value]:
    x, length = residuals
    return (ct * x / ops.maximum(length, TINY),)


length = ad.custom_vjp(length_forward, length_backward)


def main() -> None:
    for point in ([3.0, 4.0], [0.0, 0.0]):
        x = ad.array(point, "float64")
        print(f"x = {point}  length {length(x).item():.1f}  gradient {ad.grad(length)(x).numpy().tolist()}")
    hessian = ad.hessian(length)(ad.array([3.0, 4.0], "float64"))
    print(f"hessian at [3.0, 4.0]: {hessian.numpy().round(3).tolist()}")


if __name__ == "__main__":
    main()
