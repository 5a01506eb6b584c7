"""Matrix products, batched, with transposition as a flag instead of a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.batching_rules import all_mapped, fold, unfold
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.precision import FULL, precision_of, rounded
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import ArrayLike, broadcast_shapes, broadcast_to, promote, require_float, reshape
from adtrain.ops.shape import transpose

__all__ = ["matmul"]

BLOCK = 512
"""Number of products that BLAS sums, if an operand is a vector or there are more than LONG."""
LONG = 4096


def _shape(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL) -> ArrayType:
    require_float("matmul", a, b)
    return _product_type(a, b, transpose_a, transpose_b)


def _product_type(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> ArrayType:
    if len(a.shape) < 2 or a.shape[:-2] != b.shape[:-2] or a.dtype != b.dtype:
        raise ShapeError(f"matmul: found {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    k_b, n = b.shape[:-3:-1] if transpose_b else b.shape[-2:]
    if k != k_b:
        flags = "".join(f", {name} transposed" for name, t in (("a", transpose_a), ("b", transpose_b)) if t)
        raise ShapeError(f"matmul: inner lengths {k} and {k_b} differ in {a.shape} @ {b.shape}{flags}")
    return ArrayType((*a.shape[:-2], m, n), a.dtype)


def _reference(a: np.ndarray, b: np.ndarray, transpose_a: bool, transpose_b: bool, precision: str) -> np.ndarray:
    a, b = rounded(a, precision), rounded(b, precision)
    a, b = a.swapaxes(-1, -2) if transpose_a else a, b.swapaxes(-1, -2) if transpose_b else b
    if a.dtype != np.float32:
        return np.matmul(a, b)
    if 1 in (a.shape[-2], b.shape[-1]):
        return _by_blocks(a, b) if a.shape[-1] > BLOCK else np.matmul(a, b)
    return _one_by_one(a, b) if a.shape[-1] > LONG else np.matmul(a, b)


def _one_by_one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same as `_by_blocks`, one block after another: the results of all blocks would take too much memory."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]))
    for i in range(0, a.shape[-1], BLOCK):
        total += np.matmul(a[..., i : i + BLOCK], b[..., i : i + BLOCK, :])
    return total.astype(a.dtype)


def _by_blocks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in blocks of the inner axis. The results of the blocks are added in float64.

    For a vector and a matrix the sums of BLAS are sequential: their error grows with the inner length.
    """
    whole = a.shape[-1] // BLOCK * BLOCK
    columns = np.moveaxis(a[..., :whole].reshape(*a.shape[:-1], -1, BLOCK), -2, -3)
    rows = b[..., :whole, :].reshape(*b.shape[:-2], -1, BLOCK, b.shape[-1])
    total = np.matmul(columns, rows).sum(-3, dtype=np.float64) + np.matmul(a[..., whole:], b[..., whole:, :])
    return total.astype(a.dtype)


def _product(a: Value, b: Value, transpose_a: bool, transpose_b: bool, precision: str) -> Value:
    if a.dtype.kind != "f":
        _product_type(a, b, transpose_a, transpose_b)
        return bind(matmul_integers_p, _transposed(a) if transpose_a else a, _transposed(b) if transpose_b else b)
    return bind(matmul_p, a, b, transpose_a=transpose_a, transpose_b=transpose_b, precision=precision)


def _vjp_a(out: Value, a: Value, b: Value, transpose_a: bool, transpose_b: bool, precision: str) -> Any:
    # C = A B: dA = dC Bᵀ; of a transposed A the transpose, dAᵀ = B dCᵀ
    if transpose_a:
        return lambda ct: _product(b, ct, transpose_b, True, precision)
    return lambda ct: _product(ct, b, False, not transpose_b, precision)


def _vjp_b(out: Value, a: Value, b: Value, transpose_a: bool, transpose_b: bool, precision: str) -> Any:
    # C = A B: dB = Aᵀ dC; of a transposed B the transpose, dBᵀ = dCᵀ A
    if transpose_b:
        return lambda ct: _product(ct, a, True, transpose_a, precision)
    return lambda ct: _product(a, ct, not transpose_a, False, precision)


def _flops(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    m, n = _shape(a, b, transpose_a, transpose_b).shape[-2:]
    return 2 * math.prod(a.shape[:-2]) * m * n * a.shape[-2 if transpose_a else -1]


def _batch(
    op: Any, mapped: Sequence[bool], a: Value, b: Value, transpose_a: bool, transpose_b: bool, precision: str
) -> Value:
    """The members are one more leading axis. If they share a matrix, the rows of the others are one matrix."""
    if not mapped[1] and b.ndim == 2:
        rows = fold(_transposed(a) if transpose_a else a)
        return unfold(op(rows, b, transpose_a=False, transpose_b=transpose_b, precision=precision), a.shape[0])
    if not mapped[0] and a.ndim == 2:  # A B is the transpose of Bᵀ Aᵀ
        rows = fold(b if transpose_b else _transposed(b))
        out = op(rows, a, transpose_a=False, transpose_b=not transpose_a, precision=precision)
        return _transposed(unfold(out, b.shape[0]))
    a, b = all_mapped(mapped, (a, b))
    return op(a, b, transpose_a=transpose_a, transpose_b=transpose_b, precision=precision)


def _axes(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> str:
    return f"*{'km' if transpose_a else 'mk'},*{'nk' if transpose_b else 'kn'}->*mn"


matmul_p: Primitive = Primitive(
    "matmul",
    _shape,
    _reference,
    [_vjp_a, _vjp_b],
    _flops,
    traits=(Trait.MATMUL, Trait.BILINEAR),
    batch=_batch,
    axes=_axes,
)


def _transposed(x: Value) -> Value:
    return transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _integers_shape(a: Any, b: Any) -> ArrayType:
    if a.dtype == np.bool_:
        raise DTypeError("matmul: found bool, expected numbers; use astype")
    return _product_type(a, b)


matmul_integers_p: Primitive = Primitive(
    "matmul_integers",
    _integers_shape,
    np.matmul,
    flops=lambda a, b: 2 * a.size * b.shape[-1],
    axes="*mk,*kn->*mn",
)


def matmul(a: ArrayLike, b: ArrayLike, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """Matrix product of the last two axes, as `numpy.matmul`, leading axes broadcast; see `matmul_precision`.

    Args:
        a: (..., M, K), or (..., K, M) with ``transpose_a``; or a vector (K,).
        b: (..., K, N), or (..., N, K) with ``transpose_b``; or a vector (K,).

    Returns:
        (..., M, N), without the axis of a vector. Of integers: integers of the same type; sums wrap around.

    Raises:
        ShapeError: the inner lengths differ, or the leading axes do not broadcast. DTypeError: both are bool.
    """
    a, b = promote(a, b)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"matmul: found shapes {a.shape} and {b.shape}, expected at least one axis each")
    if a.ndim == 1 or b.ndim == 1:
        return _with_vectors(a, b, transpose_a, transpose_b)
    if a.ndim > 2 and b.ndim == 2 and not transpose_a:  # one large product instead of many small ones
        rows = reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))
        flat = _product(rows, b, False, transpose_b, precision_of(a.dtype))
        return reshape(flat, (*a.shape[:-1], flat.shape[-1]))
    leading = broadcast_shapes("matmul", a.shape[:-2], b.shape[:-2])
    a = broadcast_to(a, leading + a.shape[-2:])
    b = broadcast_to(b, leading + b.shape[-2:])
    return _product(a, b, transpose_a, transpose_b, precision_of(a.dtype))


def _with_vectors(a: Value, b: Value, transpose_a: bool, transpose_b: bool) -> Value:
    if (a.ndim == 1 and transpose_a) or (b.ndim == 1 and transpose_b):
        raise ShapeError("matmul: a vector cannot be transposed")
    row = reshape(a, (1, -1)) if a.ndim == 1 else a
    column = reshape(b, (-1, 1)) if b.ndim == 1 else b
    out = matmul(row, column, transpose_a, transpose_b)
    shape = list(out.shape)
    if b.ndim == 1:
        del shape[-1]
    if a.ndim == 1:
        del shape[-1 if b.ndim == 1 else -2]
    return reshape(out, shape)
