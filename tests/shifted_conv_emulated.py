"""Products of three bfloat16 pieces as in `conv/shifted_bf16x3.cu`, of halves where these hold the operands as in
`conv/shifted_fp16x2.cu`, and convolution by positions, in NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
from packed_gemm_emulated import hard, split_bf16x3, split_fp16x2, tensor_core_sum, usual
from test_gpu_products import adversarial

from adtrain.core.precision import FULL
from adtrain.lowering.cuda.conv.problem import ConvProblem, PaddedIndex

DEPTH = 32
"""Channels of a stage, whose largest products the matrix units add up."""
LOW_PAIRS = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0))
"""As in `sm90/bf16x3.cuh`."""
STACKED = (((0, 0), (0, 2), (2, 0), (0, 1)), ((1, 0), (1, 2), (1, 1)))
"""As in `shifted_bf16x3.cu`, of the first and second half of the rows: products of single stages, then others."""
MAX_EXPONENT, EXPONENTS, MIN_PRODUCTS, MAX_CANCELLATION = 14, (-16, 89), 8, 8
MIN_NORMAL, MIN_SUBNORMAL, MAX_SMALL, SMALL_ELEMENT_LOSS = 2.0**-14, 2.0**-24, 16, 16
"""As in `conv/fp16x2.cuh`."""


@cache
def cases(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs of all kinds but for numbers below 2^-110, of which pieces lose the last bits."""
    found = {**usual(m, n, k), **adversarial(m, n, k), **hard(m, n, k)}
    del found["denormal numbers"], found["rectified, with rows of zeros"]
    return {name: (a.astype(np.float32), b.astype(np.float32)) for name, (a, b) in found.items()}


def in_bf16x3(a: np.ndarray, b: np.ndarray, stacked: bool = False) -> np.ndarray:
    """A B."""
    if stacked:
        first, second = (_summed(a, b, *pairs) for pairs in STACKED)
        return first + second
    return _summed(a, b, (0, 0), *LOW_PAIRS)


def _summed(a: np.ndarray, b: np.ndarray, large: tuple[int, int], *others: tuple[int, int]) -> np.ndarray:
    """Products of pieces of both: large ones summed over each stage, others over all of them."""
    left, right = split_bf16x3(a), split_bf16x3(b.T)
    main = np.zeros((len(a), b.shape[1]), np.float32)
    beside = np.zeros(main.shape)
    for i in range(0, a.shape[1], DEPTH):
        k = slice(i, i + DEPTH)
        main += tensor_core_sum(np.zeros(main.shape), left[large[0]][:, k], right[large[1]][:, k]).astype(np.float32)
        for p, q in others:
            beside = tensor_core_sum(beside, left[p][:, k], right[q][:, k])
    return (main + beside.astype(np.float32)).astype(np.float32)


def in_sparse_bf16x3(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B as in `sparse_pool_input_grad.cu`, A being the gradient: what is not summed over stages has sums of its own
    for neighbouring pieces of B."""
    left, right = split_bf16x3(a), split_bf16x3(b.T)
    main = np.zeros((len(a), b.shape[1]), np.float32)
    others = [np.zeros(main.shape), np.zeros(main.shape)]
    for i in range(0, a.shape[1], DEPTH):
        k = slice(i, i + DEPTH)
        main += tensor_core_sum(np.zeros(main.shape), left[0][:, k], right[0][:, k]).astype(np.float32)
        for p, first in ((0, 1), (1, 0)):
            others = [tensor_core_sum(sums, left[p][:, k], right[first + q][:, k]) for q, sums in enumerate(others)]
        last = tensor_core_sum(np.zeros(main.shape), left[2][:, k], right[0][:, k])
        others[1] = (others[1].astype(np.float32) + last.astype(np.float32)).astype(float)
    return (main + (others[0].astype(np.float32) + others[1].astype(np.float32))).astype(np.float32)


def known(x: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of operands, the rows of ``x``: scales, 0 where left to pieces, as those are with elements that are smaller when
    scaled; shares; and squares of scaled elements."""
    sizes = abs(x.astype(float))
    most = sizes.max(1)
    least = np.where(sizes > 0, sizes, np.inf).min(1)
    exponent = MAX_EXPONENT - np.floor(np.log2(np.where(most > 0, most, 2.0**MAX_EXPONENT)))
    up = 2.0**exponent
    held = (exponent >= EXPONENTS[0]) & (exponent <= EXPONENTS[1]) & (least * up >= smallest)
    squares = (sizes**2).sum(1)
    share = np.divide(sizes.sum(1) ** 2, squares, where=squares > 0, out=np.full(len(x), np.inf))
    return np.where(held, up, 0), np.where(held, share, 0), squares * up**2


def in_fp16x2(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, bool]:
    """A B of filters by the positions of one image, and whether halves were right for it."""
    (up, share, squares), (image_up, image_share, image_squares) = (
        known(a, MIN_NORMAL),
        known(b.reshape(1, -1), MIN_SUBNORMAL),
    )
    small = np.count_nonzero((b != 0) & (abs(b) * image_up < MIN_NORMAL))
    if not (share.min() * image_share[0] / b.size >= MIN_PRODUCTS) or small > MAX_SMALL:
        return in_bf16x3(a, b), False
    left, right = split_fp16x2(a * up[:, None]), split_fp16x2(b.T * image_up)
    shape = len(a), b.shape[1]
    sums, beside = np.zeros(shape, np.float32), np.zeros(shape)
    for i in range(0, a.shape[1], DEPTH):
        k = slice(i, i + DEPTH)
        sums += tensor_core_sum(np.zeros(shape), left[0][:, k], right[0][:, k]).astype(np.float32)
        beside = tensor_core_sum(beside, left[0][:, k], right[1][:, k])
        beside = tensor_core_sum(beside, left[1][:, k], right[0][:, k])
    sums = (sums + beside * 2.0**-11).astype(np.float32)
    if (sums.astype(float) ** 2).sum() < squares.sum() * image_squares[0] / len(b) / MAX_CANCELLATION:
        return in_bf16x3(a, b), False
    if np.any((sums != 0) & (abs(sums) < small * SMALL_ELEMENT_LOSS)):
        return in_bf16x3(a, b), False
    return (sums / up[:, None] / image_up).astype(np.float32), True


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
