"""Operands of products, the errors of a product, and those of sequential float32 FMA, to compare with."""

from __future__ import annotations

from functools import cache

import numpy as np

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
