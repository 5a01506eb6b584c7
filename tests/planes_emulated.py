"""Products of three bfloat16 pieces as in `kernels/cuda/conv_planes.cu`, and convolution by positions, in NumPy."""

from __future__ import annotations

import numpy as np
from slabs_emulated import added, hard, usual
from test_gpu_products import adversarial

from adtrain.ops.planes_cuda import Positions
from adtrain.ops.rounding import rounded

DEPTH = 32
"""Channels of a stage, whose largest products the matrix units add up."""
BESIDE = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0))
"""As in `planes.cuh`."""
STACKED = (((0, 0), (0, 2), (2, 0), (0, 1)), ((1, 0), (1, 2), (1, 1)))
"""As in `conv_planes.cu`, of the first and the second half of the rows: the products of single stages, then others."""


def cases(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs of all kinds but for numbers below 2^-110, of which pieces lose the last bits."""
    found = {**usual(m, n, k), **adversarial(m, n, k), **hard(m, n, k)}
    del found["denormal numbers"], found["rectified, with rows of zeros"]
    return {name: (a.astype(np.float32), b.astype(np.float32)) for name, (a, b) in found.items()}


def pieces(x: np.ndarray) -> list[np.ndarray]:
    found, rest = [], x.astype(np.float32)
    for _ in range(3):
        found.append(rounded(rest, "bfloat16"))
        rest = rest - found[-1]
    return [piece.astype(float) for piece in found]


def in_pieces(a: np.ndarray, b: np.ndarray, stacked: bool = False) -> np.ndarray:
    """A B."""
    if stacked:
        first, second = (_summed(a, b, *pairs) for pairs in STACKED)
        return first + second
    return _summed(a, b, (0, 0), *BESIDE)


def _summed(a: np.ndarray, b: np.ndarray, large: tuple[int, int], *others: tuple[int, int]) -> np.ndarray:
    """Products of pieces of both: large ones summed over each stage, others over all of them."""
    left, right = pieces(a), pieces(b.T)
    main = np.zeros((len(a), b.shape[1]), np.float32)
    beside = np.zeros(main.shape)
    for i in range(0, a.shape[1], DEPTH):
        k = slice(i, i + DEPTH)
        main += added(np.zeros(main.shape), left[large[0]][:, k], right[large[1]][:, k]).astype(np.float32)
        for p, q in others:
            beside = added(beside, left[p][:, k], right[q][:, k])
    return (main + beside.astype(np.float32)).astype(np.float32)


def by_positions(x: np.ndarray, w: np.ndarray, positions: Positions) -> np.ndarray:
    """The convolution of images with weights, as products of the images' positions."""
    (count, channels, rows, columns), pitch, image = x.shape, positions.pitch, positions.image
    before = positions.padding[0] * pitch + positions.padding[1]
    lines = np.zeros((channels, before + count * image + positions.reach))
    placed = np.zeros((channels, count, image // pitch, pitch))
    placed[..., :rows, :columns] = x.transpose(1, 0, 2, 3)
    lines[:, before : before + count * image] = placed.reshape(channels, -1)
    found = np.zeros((len(w), count * image))
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            shift = i * positions.dilation[0] * pitch + j * positions.dilation[1]
            found += w[:, :, i, j] @ lines[:, shift : shift + count * image]
    _, _, out_rows, out_columns = positions.outputs
    return found.reshape(len(w), count, -1, pitch)[:, :, :out_rows, :out_columns].transpose(1, 0, 2, 3)
