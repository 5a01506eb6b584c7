"""Weight initialisers, with the names and distributions of torch.nn.init.

A weight of shape (out, in, *receptive field) has fan_in = in * field and fan_out = out * field, counted from the shape
as PyTorch does, for transposed convolutions too.

The filters of `whitening` are computed from the network's input. The others are drawn.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod, sqrt
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from adtrain.core.array import Array, array, from_numpy
from adtrain.core.memory import empty_aligned
from adtrain.nn.module import Module, Params, Shape, State
from adtrain.option_types import NonNegative

WeightInit = Literal[
    "kaiming_uniform", "kaiming_normal", "xavier_uniform", "xavier_normal", "orthogonal", "trunc_normal", "normal",
    "identity", "dirac", "partial_dirac",
]  # fmt: skip

WHITENING = "whitening"
ConvInit = Literal[WeightInit, "whitening"]

WHITENING_EPS = 5e-4
"""What `whitening` adds to each eigenvalue, so that directions in which patches hardly differ are not amplified."""

Draw = np.ndarray[Any, np.dtype[np.float64]]
Sampler: TypeAlias = Callable[[np.random.Generator, int], Draw]
"""Draws a number of elements. The next call draws those that follow."""


def fans(shape: Shape) -> tuple[int, int]:
    """fan_in and fan_out of a weight of two or more axes."""
    field = prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _uniform(bound: float) -> Sampler:
    return lambda rng, count: rng.uniform(-bound, bound, count)


def _normal(std: float) -> Sampler:
    return lambda rng, count: rng.normal(0, std, count)


def kaiming_uniform(shape: Shape) -> Sampler:
    """U(-b, b), b = √(6 / fan_in): variance 2 / fan_in, for relu (He et al. 2015, "Delving deep into rectifiers")."""
    return _uniform(sqrt(6 / fans(shape)[0]))


def kaiming_normal(shape: Shape) -> Sampler:
    """N(0, 2 / fan_in), for relu (He et al. 2015)."""
    return _normal(sqrt(2 / fans(shape)[0]))


def xavier_uniform(shape: Shape) -> Sampler:
    """U(-b, b), b = √(6 / (fan_in + fan_out)) (Glorot and Bengio 2010, "Understanding the difficulty ...")."""
    return _uniform(sqrt(6 / sum(fans(shape))))


def xavier_normal(shape: Shape) -> Sampler:
    """N(0, 2 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    return _normal(sqrt(2 / sum(fans(shape))))


def normal(shape: Shape) -> Sampler:
    """N(0, 1), as torch.nn.Embedding."""
    return _normal(1)


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
    weight = kaiming_uniform(shape)(rng, prod(shape)).reshape(shape)
    own = min(shape[:2])
    weight[:own] = dirac((own, *shape[1:]), rng)
    return weight


BY_ELEMENT: dict[str, Callable[[Shape], Sampler]] = {
    f.__name__: f for f in (kaiming_uniform, kaiming_normal, xavier_uniform, xavier_normal, normal)
}
"""The initialisers whose elements are drawn independently, one after another."""

WHOLE: dict[str, Callable[[Shape, np.random.Generator], Draw]] = {
    f.__name__: f for f in (orthogonal, trunc_normal, identity, dirac, partial_dirac)
}
"""The initialisers that make a weight as a whole."""

INITIALIZERS: dict[str, Callable[..., Any]] = {**BY_ELEMENT, **WHOLE}

UNIFORM = ("kaiming_uniform", "xavier_uniform")
"""Those of `BY_ELEMENT` that take one word of 64 bits of the generator for each element."""

DRAWN_AT_ONCE = 1 << 20
"""Elements of `BY_ELEMENT` that a thread draws at a time, without Python's lock."""
MAX_THREADS, LEAST_DRAWN = 8, 1 << 18
"""The largest number of threads that draw a weight, and the least number of elements of each."""


class TypesOnly(np.random.Generator):
    """A generator for callers that need types alone: with it `drawn` returns zeros, a broadcast view of one number."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))


def drawn(init: str, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any], gain: float = 1.0) -> Array:
    """The numbers of an initialiser, drawn in float64, multiplied by `gain` and rounded to `dtype`."""
    if isinstance(rng, TypesOnly):
        return Array(np.broadcast_to(np.zeros((), dtype), shape), shape, dtype, "cpu")
    if init in WHOLE:
        return array((WHOLE[init](shape, rng) * gain).astype(dtype))
    sampler, result = BY_ELEMENT[init](shape), empty_aligned(shape, dtype)
    threads = min(os.cpu_count() or 1, MAX_THREADS, result.size // LEAST_DRAWN) if init in UNIFORM else 1
    parts = np.array_split(result.reshape(-1), max(threads, 1))

    def draw(own: np.random.Generator, part: np.ndarray) -> None:
        for first in range(0, part.size, DRAWN_AT_ONCE):
            piece = part[first : first + DRAWN_AT_ONCE]
            piece[:] = sampler(own, piece.size) * gain

    if len(parts) == 1:
        draw(rng, parts[0])
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(draw, [_split_off(rng, part.size) for part in parts], parts))
    return from_numpy(result, "cpu")


def _split_off(rng: np.random.Generator, count: int) -> np.random.Generator:
    """A generator that draws the next `count` uniform numbers of `rng`, which goes on with those that follow."""
    bits = rng.bit_generator
    own = copy.deepcopy(bits)
    kept = {name: own.state[name] for name in ("has_uint32", "uinteger")}  # `advance` would drop half of a word
    bits.advance(count)  # type: ignore[attr-defined]
    bits.state = {**bits.state, **kept}
    return np.random.Generator(own)


def whitening(count: int, kernel: Shape, dilation: Shape, images: np.ndarray) -> Draw:
    """Filters whose outputs for patches of the images have variance 1 and no correlation.

    They are the eigenvectors of the patches' covariance, each divided by the root of its eigenvalue, and then their
    negatives (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds"). The largest eigenvalues come first. The largest
    component of each of the eigenvectors is positive.
    """
    values, vectors = np.linalg.eigh(patch_covariance(images, kernel, dilation))
    filters = (vectors / np.sqrt(values + WHITENING_EPS)).T[::-1]
    largest = np.take_along_axis(filters, np.abs(filters).argmax(axis=1, keepdims=True), axis=1)
    filters = filters * np.sign(largest)
    half = -(-count // 2)
    return np.concatenate([filters[:half], -filters[: count - half]]).reshape(count, images.shape[1], *kernel)


def patch_covariance(images: np.ndarray, kernel: Shape, dilation: Shape) -> Draw:
    """The covariance of the patches of images (N, C, H, W) that a filter sees without padding, each as (C, *kernel)."""
    channels, size = images.shape[1], tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    numbers, count = channels * prod(kernel), 0
    total, squares = np.zeros(numbers), np.zeros((numbers, numbers))
    for start in range(0, len(images), 64):
        windows = sliding_window_view(images[start : start + 64].astype(np.float64), size, axis=(2, 3))
        spread = windows[..., :: dilation[0], :: dilation[1]]
        patches = spread.transpose(1, 4, 5, 0, 2, 3).reshape(numbers, -1)
        total += patches.sum(axis=1)
        squares += patches @ patches.T
        count += patches.shape[1]
    mean = total / count
    covariance: Draw = squares / count - np.outer(mean, mean)
    return covariance


class WeightLayer(Module):
    """A layer whose "weight" is what `weight_init` draws, times `init_gain`; its "bias" starts at zero.

    With `whitening` the weight is zero in `new_arrays`; `input_weights` has its numbers.
    """

    weight_init: ConvInit
    init_gain: NonNegative

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        params: Params = {}
        for name, size in self.parameter_shapes(shape).items():
            if name == "weight" and self.weight_init != WHITENING:
                params[name] = drawn(self.weight_init, size, rng, dtype, self.init_gain)
            else:
                params[name] = array(np.zeros(size, dtype))
        return params, {}
