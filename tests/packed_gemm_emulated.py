"""The arithmetic of `gemm/packed_gemm.cu` and of sequential float32 FMA in NumPy, and inputs to compare them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from adtrain.ops.rounding import rounded

PACKED_ROWS, PACKED_K, FALLBACK_CAPACITY, FEW_TILES, VOTES_SHARE = 128, 64, 126, 512, 16
CHECKED_TILES, STATISTICS_TILES = 32, 16
"""As in `gemm/packed.cuh`."""
LEVEL, MIN_PRODUCTS, SPARSE, MIN_ROUNDINGS, SINGLE_ELEMENTS, SKIP_RATIO = 5.5, 24, 32, 8, 6, 2
"""As in `gemm/pack.cu`."""
LOW_ORDER_PAIRS = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0))
"""Products of terms with accumulators of their own, as in `sm90/bf16x3.cuh`."""
BITS = 25
"""Bits that tensor cores keep of the addends of a sum, counted from the largest one."""
NOISE = 1.05
"""The ratio up to which two errors count as equal."""
ROUNDINGS = 6 * 2.0**-24
"""Errors below six roundings of the sum of magnitudes are negligible."""
OF_TENSOR_CORES, TWO_ROUNDINGS = 17 * 2.0**-25, 2 * 2.0**-24
"""What tensor cores may truncate of 17 addends; errors of the norm below two roundings are negligible."""
OF_FP16X2 = 2.0**-21
"""The largest relative error of a product in fp16x2: 2^-23 by each operand, 2^-22 by low x low. A result with few
products, of a sparse row among others, may be off as much, where the whole is as exact as sequential FMA."""


@dataclass(frozen=True)
class RowStats:
    """The statistics of `gemm/pack.cu` for the rows of a matrix, each an array of one column.

    Attributes:
        scale: the power of two by which a row is multiplied.
        participation: the same for all rows of a row block.
    """

    scale: np.ndarray
    error_floor: np.ndarray
    cancellation_level: np.ndarray
    participation: np.ndarray
    fallback: np.ndarray
    skip_cancellation: np.ndarray


def row_stats(x: np.ndarray) -> RowStats:
    """The statistics of the rows of ``x``."""
    k = x.shape[1]
    target = 14 - next(i for i in range(16) if 4**i >= k)
    sizes = abs(x.astype(float))
    mean = np.sqrt((sizes**2).mean(1, keepdims=True))
    zero = mean == 0
    count = sizes.sum(1, keepdims=True) ** 2 / np.where(zero, 1, k * mean**2)
    exponent = target - np.floor(np.log2(np.where(zero, 2.0**target, mean)))
    held = abs(exponent) <= 63
    squares = np.where(held & ~zero, mean**2, 0)
    participation = np.full((len(x), 1), np.inf)
    for i in range(0, len(x), PACKED_ROWS):
        block = slice(i, i + PACKED_ROWS)
        if (weight := squares[block].sum()) > 0:
            participation[block] = np.where(squares[block] > 0, count[block] * squares[block], 0).sum() / weight
    skip = count < participation / SKIP_RATIO
    participation *= np.sqrt(min(k, STATISTICS_TILES * PACKED_K) / k / MIN_PRODUCTS / k)
    scale = 2.0 ** np.where(held, exponent, 0)
    lossy = ((sizes > 0) & (sizes * scale < 2**-12)).sum(1, keepdims=True)
    error_floor = np.where(held, lossy * 2.0 ** (target - 11), np.inf)
    before, after = np.zeros((len(x), 1)), np.zeros((len(x), 1))
    depth = -(-k // PACKED_K)
    chunks = min(-(-depth // 2), 16)
    for i in range(chunks):
        part = sizes[:, depth * i // chunks * PACKED_K : depth * (i + 1) // chunks * PACKED_K]
        after += (part > 0).sum(1, keepdims=True) * before
        before += (part**2).sum(1, keepdims=True)
    single = sizes.sum(1, keepdims=True) ** 2 < (2 if chunks > 2 else SINGLE_ELEMENTS * chunks) * before
    at_end = (after < MIN_ROUNDINGS * before) & (chunks > 1)
    fallback = (single | at_end) & ((sizes > 0).sum(1, keepdims=True) * SPARSE > k) | ~held
    return RowStats(scale, error_floor, LEVEL * mean * scale * 2.0**target, participation, fallback, skip)


def uses_bf16x3(rows: RowStats, columns: RowStats) -> bool:
    """Whether the votes are for bf16x3 (`row_stats`, PackedLayout::use_bf16x3)."""
    down, across = -(-len(rows.scale) // PACKED_ROWS), -(-len(columns.scale) // PACKED_ROWS)
    voting = max(down, across)
    left, right = rows.participation[::PACKED_ROWS, 0], columns.participation[::PACKED_ROWS, 0]
    votes = sum(int(left[i % down] * right[i % across] < 1) for i in range(voting))
    return votes > 0 and (down * across <= FEW_TILES or VOTES_SHARE * votes > voting)


def split_bf16x3(x: np.ndarray) -> list[np.ndarray]:
    """Three bfloat16 terms whose sum is x."""
    found, rest = [], x.astype(np.float32)
    for _ in range(3):
        found.append(rounded(rest, "bfloat16"))
        rest = rest - found[-1]
    return [term.astype(float) for term in found]


def split_fp16x2(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The high term, and 2^11 times the low term."""
    high = x.astype(np.float16).astype(float)
    return high, ((x - high) * 2**11).astype(np.float16).astype(float)


def tensor_core_sum(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """sums + A B^T by tensor cores, 16 k at once: addends are aligned to the largest one and truncated."""
    terms = np.empty((17, len(a), len(b)))
    a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    for i in range(0, len(a), 16):
        terms[0] = sums
        products = np.multiply(a[i : i + 16, :, None], b[i : i + 16, None, :], out=terms[1 : 1 + len(a) - i])
        addends = terms[: 1 + len(products)]
        unit = np.ldexp(1.0, np.frexp(np.maximum(addends.max(0), -addends.min(0)))[1] - BITS)
        addends /= unit
        total = np.trunc(addends, out=addends).sum(0) * unit
        cut = np.ldexp(1.0, np.frexp(total)[1] - 24)
        sums = np.trunc(total / cut) * cut
    return sums


def sequential_fma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B by float32 FMA, one k after another."""
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for column, row in zip(a.T.astype(float), b.astype(float), strict=True):
        sums = (sums + np.multiply.outer(column, row)).astype(np.float32)
    return sums


@np.errstate(over="ignore", invalid="ignore")  # in rows that are left to the fallback
def packed_gemm(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A B in fp16x2 or bf16x3, and which elements the float32 fallback computes."""
    rows, columns = row_stats(a), row_stats(b.T)
    a, b = a * rows.scale, b * columns.scale.T
    sums, left = (_in_bf16x3 if uses_bf16x3(rows, columns) else _in_fp16x2)(a, b, rows, columns)
    return (sums / rows.scale / columns.scale.T).astype(np.float32), left


def _in_bf16x3(a: np.ndarray, b: np.ndarray, rows: RowStats, columns: RowStats) -> tuple[np.ndarray, np.ndarray]:
    left, right = split_bf16x3(a), split_bf16x3(b.T)
    main, low_order = np.zeros((len(a), b.shape[1]), np.float32), np.zeros((len(a), b.shape[1]))
    for i in range(0, a.shape[1], PACKED_K):
        k = slice(i, i + PACKED_K)
        main += tensor_core_sum(np.zeros(main.shape), left[0][:, k], right[0][:, k]).astype(np.float32)
        for p, q in LOW_ORDER_PAIRS:
            low_order = tensor_core_sum(low_order, left[p][:, k], right[q][:, k])
    return (main + low_order).astype(np.float32), rows.fallback | columns.fallback.T


def _in_fp16x2(a: np.ndarray, b: np.ndarray, rows: RowStats, columns: RowStats) -> tuple[np.ndarray, np.ndarray]:
    (a_high, a_low), (b_high, b_low) = split_fp16x2(a), split_fp16x2(b.T)
    main = np.zeros((len(a), b.shape[1]), np.float32)
    low_order = np.zeros(main.shape)
    small = np.ones(main.shape, bool)
    for step, i in enumerate(range(0, a.shape[1], PACKED_K)):
        k = slice(i, i + PACKED_K)
        main += tensor_core_sum(np.zeros(main.shape), a_high[:, k], b_high[:, k]).astype(np.float32)
        low_order = tensor_core_sum(low_order, a_high[:, k], b_low[:, k])
        low_order = tensor_core_sum(low_order, a_low[:, k], b_high[:, k])
        if step < CHECKED_TILES:
            small &= abs(main) < rows.cancellation_level
    sums = (main + low_order * 2.0**-11).astype(np.float32)
    again = small & (sums != 0) & ~rows.skip_cancellation & ~columns.skip_cancellation.T
    again |= ~(abs(sums) >= rows.error_floor + columns.error_floor.T)
    again |= ~(rows.participation * columns.participation.T >= 1)
    return sums, again


@cache
def usual(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs as networks have them."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    some = rng.uniform(size=(m, k))
    return {
        "normal": (a, b),
        "uniform": (rng.uniform(-1, 1, (m, k)), rng.uniform(-1, 1, (k, n))),
        "rectified": (np.maximum(a, 0), b),
        "rectified, by gradients of rectified": (np.maximum(a, 0), b * (rng.uniform(size=(k, n)) < 0.5)),
        "pixels, a fifth not zero": (rng.uniform(size=(m, k)) * (some < 0.19), b),
        "some units rarely active": (
            np.maximum(a, 0) * (rng.uniform(size=(m, k)) < np.where(np.arange(m)[:, None] % 16 == 0, 0.01, 1)),
            b * (rng.uniform(size=(k, n)) < 0.5),
        ),
        "thin digits": (rng.uniform(0.1, 1, (m, k)) * (some < 0.075), b),
    }


@cache
def hard(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs at the limits of fp16x2, or beyond, or whose sums sequential FMA hardly rounds."""
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    def pairs(off: float) -> tuple[np.ndarray, np.ndarray]:
        a, b = normal(m, k), normal(k, n)
        a[:, 1::2] = -a[:, ::2] * (1 + off * normal(m, k // 2))
        b[1::2] = b[::2]
        return a, b

    def sparse(share: float, *shape: int) -> np.ndarray:
        return normal(*shape) * (rng.uniform(size=shape) < share)

    def some_sparse(share: float, times: float, cancel: bool) -> tuple[np.ndarray, np.ndarray]:
        """One row in sixteen is sparse, and ``times`` as large."""
        (a, b), (x, _) = (normal(m, k), normal(k, n)), pairs(0.01)
        sparser = np.repeat(rng.uniform(size=(m, k // 2)) < share, 2, axis=1) * (x if cancel else a) * times
        return np.where(np.arange(m)[:, None] % 16 == 0, sparser, a), np.repeat(b[::2], 2, axis=0) if cancel else b

    def large_near_the_end(times: float) -> np.ndarray:
        a = normal(m, k)
        a[:, -5] *= times
        return a

    def barely_overlapping(products: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = normal(m, k), normal(k, n)
        a[:, k // 2 + products // 2 :] = 0
        b[: k // 2 - products // 2] = 0
        return a, b

    columns, some = np.exp(8 * normal(1, k)), rng.uniform(size=(m, k)) < 0.1
    growing = 1e4 ** np.linspace(0, 1, k)
    return {
        "cancelling to 0.03": pairs(0.03),
        "cancelling to 0.1": pairs(0.1),
        "cancelling to 0.3": pairs(0.3),
        "large columns by small rows": (normal(m, k) * columns, normal(k, n) / columns.T),
        "denormal numbers": (normal(m, k) * 1e-40, normal(k, n) * 1e36),
        "denormal among normal numbers": (normal(m, k) * np.where(some, 1e-39, 1), normal(k, n) * 1e30),
        "many zeros": (normal(m, k) * some, normal(k, n)),
        "rectified, with rows of zeros": (np.maximum(normal(m, k), 0) * (np.arange(m)[:, None] > 60), normal(k, n)),
        "gradients of a trained net": (
            np.maximum(normal(m, k), 0),
            normal(k, n) * np.exp(-8 * np.abs(normal(k, 1))),
        ),
        **{f"one of {1 / share:g} not zero": (sparse(share, m, k), normal(k, n)) for share in (0.01, 0.02, 0.05)},
        **{f"one of {1 / share:g} of both": (sparse(share, m, k), sparse(share, k, n)) for share in (0.02, 0.1, 0.2)},
        **{f"some rows sparse, {times} times as large": some_sparse(0.01, times, False) for times in (0.01, 1, 100)},
        **{f"some rows sparse, {times} times, cancelling": some_sparse(0.02, times, True) for times in (1, 100)},
        **{
            f"an element near the end {times} times as large": (large_near_the_end(times), normal(k, n))
            for times in (30, 100, 200, 1000)
        },
        **{f"rows and columns that overlap in {products}": barely_overlapping(products) for products in (32, 64)},
        "growing": (normal(m, k) * growing, normal(k, n)),
        "both growing": (normal(m, k) * growing, normal(k, n) * growing[:, None]),
    }


def errors(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Errors of A B: the largest of an element, relative to the sum of magnitudes of its products; and of the norm."""
    exact, sizes = a.astype(float) @ b.astype(float), abs(a).astype(float) @ abs(b).astype(float)
    off = abs(found - exact)
    share = float(np.divide(off, sizes, where=sizes > 0, out=off.copy()).max())
    return share, float(np.linalg.norm(off) / np.linalg.norm(exact))
