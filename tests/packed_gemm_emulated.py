"""Products in slabs (`gemm/packed.cuh`) and a chain of multiply-adds in NumPy, and inputs to compare them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adtrain.ops.rounding import rounded

LINES, DEPTH, LISTED, FEW_TILES, MANY_VOTES = 128, 64, 126, 512, 16
"""As in `gemm/packed.cuh`."""
WATCHED, TELLING, LEVEL, FEW, THIN, ROUNDED, SINGLE, SELDOM = 32, 16, 5.5, 24, 32, 8, 6, 2
"""As in `gemm/packed_accumulate.cuh` and `gemm/pack.cu`."""
BESIDE = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0))
"""Products of pieces that are summed beside those of the first ones, as in `sm90/bf16x3.cuh`."""
BITS = 25
"""That matrix units keep of the terms of a sum, counted from the largest one."""
NOISE = 1.05
"""What the larger of two errors of one size may be of the other."""
ROUNDINGS = 6 * 2.0**-24
"""An error that is no more than six roundings of the sum of the magnitudes is as good as none."""
OF_UNITS, TWO_ROUNDINGS = 17 * 2.0**-25, 2 * 2.0**-24
"""What matrix units may cut off 17 terms; and by the norm, an error that is as good as none."""
OF_HALVES = 2.0**-21
"""How far a product of halves may be off: 2^-23 by each operand, 2^-22 by low x low. So may be sums of few products, of
sparse lines among others, where the whole is as exact as a chain."""


@dataclass(frozen=True)
class Lines:
    """What `gemm/pack.cu` knows of the rows of a matrix, each an array of a column.

    Attributes:
        share: alike in all of a block of LINES rows.
    """

    up: np.ndarray
    floor: np.ndarray
    level: np.ndarray
    share: np.ndarray
    late: np.ndarray
    seldom: np.ndarray


def known(x: np.ndarray) -> Lines:
    """Of the rows of ``x``."""
    k = x.shape[1]
    target = 14 - next(i for i in range(16) if 4**i >= k)
    sizes = abs(x.astype(float))
    mean = np.sqrt((sizes**2).mean(1, keepdims=True))
    zero = mean == 0
    count = sizes.sum(1, keepdims=True) ** 2 / np.where(zero, 1, k * mean**2)
    exponent = target - np.floor(np.log2(np.where(zero, 2.0**target, mean)))
    held = abs(exponent) <= 63
    squares = np.where(held & ~zero, mean**2, 0)
    share = np.full((len(x), 1), np.inf)
    for i in range(0, len(x), LINES):
        block = slice(i, i + LINES)
        if (weight := squares[block].sum()) > 0:
            share[block] = np.where(squares[block] > 0, count[block] * squares[block], 0).sum() / weight
    seldom = count < share / SELDOM
    share *= np.sqrt(min(k, TELLING * DEPTH) / k / FEW / k)
    up = 2.0 ** np.where(held, exponent, 0)
    lossy = ((sizes > 0) & (sizes * up < 2**-12)).sum(1, keepdims=True)
    floor = np.where(held, lossy * 2.0 ** (target - 11), np.inf)
    before, after = np.zeros((len(x), 1)), np.zeros((len(x), 1))
    depth = -(-k // DEPTH)
    chunks = min(-(-depth // 2), 16)
    for i in range(chunks):
        part = sizes[:, depth * i // chunks * DEPTH : depth * (i + 1) // chunks * DEPTH]
        after += (part > 0).sum(1, keepdims=True) * before
        before += (part**2).sum(1, keepdims=True)
    single = sizes.sum(1, keepdims=True) ** 2 < (2 if chunks > 2 else SINGLE * chunks) * before
    at_end = (after < ROUNDED * before) & (chunks > 1)
    late = (single | at_end) & ((sizes > 0).sum(1, keepdims=True) * THIN > k) | ~held
    return Lines(up, floor, LEVEL * mean * up * 2.0**target, share, late, seldom)


def many_left(rows: Lines, columns: Lines) -> bool:
    """Whether what is known of the lines speaks for pieces (`know_lines`, Slabs::in_pieces)."""
    down, across = -(-len(rows.up) // LINES), -(-len(columns.up) // LINES)
    asked = max(down, across)
    shares = ((rows.share[i % down * LINES, 0], columns.share[i % across * LINES, 0]) for i in range(asked))
    votes = sum(int(left * right < 1) for left, right in shares)
    return votes > 0 and (down * across <= FEW_TILES or MANY_VOTES * votes > asked)


def pieces(x: np.ndarray) -> list[np.ndarray]:
    found, rest = [], x.astype(np.float32)
    for _ in range(3):
        found.append(rounded(rest, "bfloat16"))
        rest = rest - found[-1]
    return [piece.astype(float) for piece in found]


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = x.astype(np.float16).astype(float)
    return high, ((x - high) * 2**11).astype(np.float16).astype(float)


def added(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What matrix units make of sums + A B^T, 16 of k at once: bits below those of the largest term are cut off."""
    for i in range(0, a.shape[1], 16):
        terms = np.concatenate([sums[..., None], a[:, None, i : i + 16] * b[None, :, i : i + 16]], axis=-1)
        unit = np.ldexp(1.0, np.frexp(abs(terms).max(-1, keepdims=True))[1] - BITS)
        total = np.trunc(terms / unit).sum(-1) * unit[..., 0]
        cut = np.ldexp(1.0, np.frexp(total)[1] - 24)
        sums = np.trunc(total / cut) * cut
    return sums


def chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B by fused multiply-adds, float32."""
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for i in range(a.shape[1]):
        sums = (sums + np.multiply.outer(a[:, i].astype(float), b[i].astype(float))).astype(np.float32)
    return sums


@np.errstate(over="ignore", invalid="ignore")  # of numbers that are left to multiply-adds
def in_slabs(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A B in halves or in pieces, and which elements are left to multiply-adds."""
    rows, columns = known(a), known(b.T)
    a, b = a * rows.up, b * columns.up.T
    sums, left = (_in_pieces if many_left(rows, columns) else _in_halves)(a, b, rows, columns)
    return (sums / rows.up / columns.up.T).astype(np.float32), left


def _in_pieces(a: np.ndarray, b: np.ndarray, rows: Lines, columns: Lines) -> tuple[np.ndarray, np.ndarray]:
    left, right = pieces(a), pieces(b.T)
    main, beside = np.zeros((len(a), b.shape[1]), np.float32), np.zeros((len(a), b.shape[1]))
    for i in range(0, a.shape[1], DEPTH):
        k = slice(i, i + DEPTH)
        main += added(np.zeros(main.shape), left[0][:, k], right[0][:, k]).astype(np.float32)
        for p, q in BESIDE:
            beside = added(beside, left[p][:, k], right[q][:, k])
    return (main + beside).astype(np.float32), rows.late | columns.late.T


def _in_halves(a: np.ndarray, b: np.ndarray, rows: Lines, columns: Lines) -> tuple[np.ndarray, np.ndarray]:
    (a_high, a_low), (b_high, b_low) = halves(a), halves(b.T)
    main = np.zeros((len(a), b.shape[1]), np.float32)
    beside = np.zeros(main.shape)
    small = np.ones(main.shape, bool)
    for step, i in enumerate(range(0, a.shape[1], DEPTH)):
        k = slice(i, i + DEPTH)
        main += added(np.zeros(main.shape), a_high[:, k], b_high[:, k]).astype(np.float32)
        beside = added(beside, a_high[:, k], b_low[:, k])
        beside = added(beside, a_low[:, k], b_high[:, k])
        if step < WATCHED:
            small &= abs(main) < rows.level
    sums = (main + beside * 2.0**-11).astype(np.float32)
    again = small & (sums != 0) & ~rows.seldom & ~columns.seldom.T
    again |= ~(abs(sums) >= rows.floor + columns.floor.T)
    again |= ~(rows.share * columns.share.T >= 1)
    return sums, again


def usual(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs of the kinds that nets have."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    some = rng.uniform(size=(m, k))
    return {
        "normal": (a, b),
        "uniform": (rng.uniform(-1, 1, (m, k)), rng.uniform(-1, 1, (k, n))),
        "rectified": (np.maximum(a, 0), b),
        "rectified, by gradients of rectified": (np.maximum(a, 0), b * (rng.uniform(size=(k, n)) < 0.5)),
        "pixels, a fifth not zero": (rng.uniform(size=(m, k)) * (some < 0.19), b),
        "some units seldom active": (
            np.maximum(a, 0) * (rng.uniform(size=(m, k)) < np.where(np.arange(m)[:, None] % 16 == 0, 0.01, 1)),
            b * (rng.uniform(size=(k, n)) < 0.5),
        ),
        "thin digits": (rng.uniform(0.1, 1, (m, k)) * (some < 0.075), b),
    }


def hard(m: int, n: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs that two float16 numbers cannot hold, or just so, or whose sums a chain hardly rounds."""
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
        """Of sixteen rows one is sparse and so many times as large."""
        (a, b), (x, _) = (normal(m, k), normal(k, n)), pairs(0.01)
        sparser = np.repeat(rng.uniform(size=(m, k // 2)) < share, 2, axis=1) * (x if cancel else a) * times
        return np.where(np.arange(m)[:, None] % 16 == 0, sparser, a), np.repeat(b[::2], 2, axis=0) if cancel else b

    def late(times: float) -> np.ndarray:
        a = normal(m, k)
        a[:, -5] *= times
        return a

    def hardly_meeting(products: int) -> tuple[np.ndarray, np.ndarray]:
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
        **{f"a late one {times} times as large": (late(times), normal(k, n)) for times in (30, 100, 200, 1000)},
        **{f"rows by columns that meet in {products}": hardly_meeting(products) for products in (32, 64)},
        "growing": (normal(m, k) * growing, normal(k, n)),
        "both growing": (normal(m, k) * growing, normal(k, n) * growing[:, None]),
    }


def errors(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Of A B: the largest of an element, as a share of the sum of its products' magnitudes; and the norm's share."""
    exact, sizes = a.astype(float) @ b.astype(float), abs(a).astype(float) @ abs(b).astype(float)
    off = abs(found - exact)
    share = float(np.divide(off, sizes, where=sizes > 0, out=off.copy()).max())
    return share, float(np.linalg.norm(off) / np.linalg.norm(exact))
