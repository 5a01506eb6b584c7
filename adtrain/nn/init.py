"""Weight initialisers, with the names and distributions of torch.nn.init.

A weight of shape (out, in, *receptive field) has fan_in = in * field and fan_out = out * field, counted from the shape
as PyTorch does, for transposed convolutions too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod, sqrt
from typing import Any, Literal

import numpy as np

from adtrain.core.array import array
from adtrain.nn.module import Module, Params, Shape, State
from adtrain.option_types import NonNegative

WeightInit = Literal[
    "kaiming_uniform", "kaiming_normal", "xavier_uniform", "xavier_normal", "orthogonal", "trunc_normal", "normal",
    "identity", "dirac", "partial_dirac",
]  # fmt: skip

Draw = np.ndarray[Any, np.dtype[np.float64]]


def fans(shape: Shape) -> tuple[int, int]:
    """fan_in and fan_out of a weight of two or more axes."""
    field = prod(shape[2:])
    return shape[1] * field, shape[0] * field


def kaiming_uniform(shape: Shape, rng: np.random.Generator) -> Draw:
    """U(-b, b), b = √(6 / fan_in): variance 2 / fan_in, for relu (He et al. 2015, "Delving deep into rectifiers")."""
    bound = sqrt(6 / fans(shape)[0])
    return rng.uniform(-bound, bound, shape)


def kaiming_normal(shape: Shape, rng: np.random.Generator) -> Draw:
    """N(0, 2 / fan_in), for relu (He et al. 2015)."""
    return rng.normal(0, sqrt(2 / fans(shape)[0]), shape)


def xavier_uniform(shape: Shape, rng: np.random.Generator) -> Draw:
    """U(-b, b), b = √(6 / (fan_in + fan_out)) (Glorot and Bengio 2010, "Understanding the difficulty ...")."""
    bound = sqrt(6 / sum(fans(shape)))
    return rng.uniform(-bound, bound, shape)


def xavier_normal(shape: Shape, rng: np.random.Generator) -> Draw:
    """N(0, 2 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    return rng.normal(0, sqrt(2 / sum(fans(shape))), shape)


def orthogonal(shape: Shape, rng: np.random.Generator) -> Draw:
    """Orthonormal rows or columns, whichever are fewer, of the weight as a matrix (out, rest) (Saxe et al. 2014).

    The sign of R's diagonal goes into Q, which makes it uniform over the orthogonal matrices (Mezzadri 2007).
    """
    rows, columns = shape[0], prod(shape[1:])
    q, r = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return (q if rows >= columns else q.T).reshape(shape)


def trunc_normal(shape: Shape, rng: np.random.Generator) -> Draw:
    """N(0, 0.02²); values beyond two standard deviations are drawn again (Devlin et al. 2018, BERT)."""
    z = rng.normal(size=shape)
    while (beyond := np.abs(z) > 2).any():
        z[beyond] = rng.normal(size=int(beyond.sum()))
    return 0.02 * z


def normal(shape: Shape, rng: np.random.Generator) -> Draw:
    """N(0, 1), as torch.nn.Embedding."""
    return rng.normal(size=shape)


def identity(shape: Shape, rng: np.random.Generator) -> Draw:
    """The unit matrix, as torch.nn.init.eye_; for a filter as `dirac`."""
    return dirac(shape, rng)


def dirac(shape: Shape, rng: np.random.Generator) -> Draw:
    """Filters that pass channel i of the input to channel i of the output, as torch.nn.init.dirac_; others are 0."""
    weight = np.zeros(shape)
    centre = tuple(n // 2 for n in shape[2:])
    for i in range(min(shape[:2])):
        weight[(i, i, *centre)] = 1
    return weight


def partial_dirac(shape: Shape, rng: np.random.Generator) -> Draw:
    """`dirac` for the outputs that have an input channel of their number, `kaiming_uniform` for the others."""
    weight = kaiming_uniform(shape, rng)
    own = min(shape[:2])
    weight[:own] = dirac((own, *shape[1:]), rng)
    return weight


INITIALIZERS: dict[str, Callable[[Shape, np.random.Generator], Draw]] = {
    f.__name__: f
    for f in (
        kaiming_uniform, kaiming_normal, xavier_uniform, xavier_normal, orthogonal, trunc_normal, normal, identity,
        dirac, partial_dirac,
    )
}  # fmt: skip


class WeightLayer(Module):
    """A layer whose "weight" is what `weight_init` draws, times `init_gain`; its "bias" starts at zero."""

    weight_init: WeightInit
    init_gain: NonNegative

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        draw = INITIALIZERS[self.weight_init]
        params: Params = {}
        for name, size in self.parameter_shapes(shape).items():
            drawn = draw(size, rng) * self.init_gain if name == "weight" else np.zeros(size)
            params[name] = array(drawn.astype(dtype))
        return params, {}
