"""grad of grad of grad: the first three derivatives of tanh, with the closed form of the third."""

from __future__ import annotations

from math import cosh, tanh

import adtrain as ad
from adtrain import ops


def main() -> None:
    first = ad.grad(ops.tanh)
    second = ad.grad(first)
    third = ad.grad(second)
    print("     x       f'      f''     f'''    closed form of f'''")
    for x in (-1.0, 0.0, 0.5, 2.0):
        point = ad.array(x, "float64")
        exact = (4 * tanh(x) ** 2 - 2 / cosh(x) ** 2) / cosh(x) ** 2
        derivatives = "".join(f"{f(point).item():9.5f}" for f in (first, second, third))
        print(f"{x:6.2f}{derivatives}{exact:9.5f}")


if __name__ == "__main__":
    main()
