"""Matrix products and convolutions as equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.matmul import matmul_p


def equation_of(
    primitive: Primitive, shapes: Sequence[tuple[int, ...]], dtype: str | Sequence[str] = "float32", **params: Any
) -> Equation:
    """The primitive on arguments of these shapes, and of this type or these types."""
    dtypes = [dtype] * len(shapes) if isinstance(dtype, str) else dtype
    types = [ArrayType(shape, np.dtype(name)) for shape, name in zip(shapes, dtypes, strict=True)]
    inputs = tuple(Variable(t, "gpu") for t in types)
    return Equation(primitive, inputs, params, tuple(Variable(t, "gpu") for t in primitive.output_types(types, params)))


def matmul(a: tuple[int, ...], b: tuple[int, ...], ta: bool = False, tb: bool = False, **options: Any) -> Equation:
    params = {"transpose_a": ta, "transpose_b": tb, "precision": options.pop("precision", "full")}
    return equation_of(matmul_p, (a, b), **options, **params)


PRODUCT = matmul((64, 48), (48, 32))


WINDOWS = [
    ((2, 4, 7, 9), (6, 2, 3, 2), Window((2, 1), (1, 0), (1, 2), 2)),
    ((3, 3, 6, 5), (4, 3, 3, 3), Window((1, 1), (1, 1), (1, 1), 1)),
]


def convolutions(
    image: tuple[int, ...], weight: tuple[int, ...], window: Window, precision: str = "full", dtype: str = "float32"
) -> list[Equation]:
    types = [ArrayType(shape, np.dtype(dtype)) for shape in (image, weight)]
    out = conv2d_p.shape(*types, window=window).shape
    params: dict[str, Any] = {"dtype": dtype, "window": window, "precision": precision}
    return [
        equation_of(conv2d_p, (image, weight), **params),
        equation_of(input_grad_p, (out, weight), **params, size=image[2:]),
        equation_of(weight_grad_p, (image, out), **params, size=weight[2:]),
    ]
