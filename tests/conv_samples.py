"""Operands of convolutions as products, convolutions with stride 1, and convolution by a flat index in NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
from product_samples import hard, usual
from test_gpu_products import adversarial

from adtrain.core.precision import FULL
from adtrain.lowering.cuda.conv.problem import ConvProblem, PaddedIndex

DECADES = 1.25
"""Factor by which the norm of the error may be larger for numbers of thirty decades: docs/gpu.md."""


@cache
def cases(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs of all kinds but for numbers below 2^-110, of which pieces lose the last bits."""
    found = {**usual(m, n, k), **adversarial(m, n, k), **hard(m, n, k)}
    del found["denormal numbers"], found["rectified, with rows of zeros"]
    return {name: (a.astype(np.float32), b.astype(np.float32)) for name, (a, b) in found.items()}


def stride_one(
    images: tuple[int, ...],
    outputs: tuple[int, ...],
    kernel: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    precision: str = FULL,
) -> ConvProblem:
    """A float32 convolution with stride 1 and one group."""
    return ConvProblem(images, outputs, kernel, (1, 1), padding, dilation, precision=precision)


def by_flat_index(x: np.ndarray, w: np.ndarray, problem: ConvProblem) -> np.ndarray:
    """The convolution of images with weights as products in the padded flat index."""
    index = PaddedIndex(problem)
    (count, channels, rows, columns), pitch, image = x.shape, index.pitch, index.image_pitch
    before = index.before
    lines = np.zeros((channels, before + count * image + index.reach))
    placed = np.zeros((channels, count, image // pitch, pitch))
    placed[..., :rows, :columns] = x.transpose(1, 0, 2, 3)
    lines[:, before : before + count * image] = placed.reshape(channels, -1)
    found = np.zeros((len(w), count * image))
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            shift = i * problem.dilation[0] * pitch + j * problem.dilation[1]
            found += w[:, :, i, j] @ lines[:, shift : shift + count * image]
    _, _, out_rows, out_columns = problem.outputs
    return found.reshape(len(w), count, -1, pitch)[:, :, :out_rows, :out_columns].transpose(1, 0, 2, 3)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of normal float32 numbers."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
