"""The CUDA kernels for matrix products: `kernels/cuda/gemm.cu`, with k whole or cut into parts."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CudaKernel
from adtrain.core.precision import FULL
from adtrain.ops.tiles_cuda import Tile, chosen


def _lengths(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL) -> tuple[int, int, int, int]:
    """Batch, M, N and K."""
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    return math.prod(a.shape[:-2]), m, b.shape[-2 if transpose_b else -1], k


def _choice(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL) -> tuple[Tile, int]:
    return chosen(a.dtype, *_lengths(a, b, transpose_a, transpose_b))


def _tile(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL) -> Tile:
    return _choice(a, b, transpose_a, transpose_b)[0]


def _is_cut(*args: Any, **params: Any) -> bool:
    return _choice(*args, **params)[1] > 1


def _in_full(*args: Any, precision: str = FULL, **params: Any) -> bool:
    return precision == FULL


def _numbers(*args: Any, **params: Any) -> tuple[int, ...]:
    return (*_lengths(*args, **params), _choice(*args, **params)[1])


def _blocks(*args: Any, **params: Any) -> tuple[int, int]:
    batch, m, n, _ = _lengths(*args, **params)
    tile, parts = _choice(*args, **params)
    return batch * -(-m // tile.m) * -(-n // tile.n), parts


def _definitions(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str = FULL) -> dict[str, int]:
    _, m, n, _ = _lengths(a, b, transpose_a, transpose_b)
    tile, parts = _choice(a, b, transpose_a, transpose_b)
    vector = 16 // a.dtype.itemsize
    return {
        "TRANSPOSE_A": int(transpose_a),
        "TRANSPOSE_B": int(transpose_b),
        "WIDE_A": math.gcd(vector, m) if transpose_a else 1,
        "WIDE_B": 1 if transpose_b else math.gcd(vector, n),
        "WIDE_C": tile.columns_at_once(a.dtype.itemsize, n),
        "SPLIT": int(parts > 1),
        **tile.definitions(),
    }


def _size(*args: Any, **params: Any) -> int:
    batch, m, n, _ = _lengths(*args, **params)
    return batch * m * n


def _sum_numbers(*args: Any, **params: Any) -> tuple[int, ...]:
    batch, m, n, _ = _lengths(*args, **params)
    return batch * m * n, m, n, _choice(*args, **params)[1]


GEMM = CudaKernel(
    "gemm.cu",
    "gemm_tiled",
    _numbers,
    blocks=_blocks,
    threads=lambda *args, **params: _tile(*args, **params).threads,
    shared=lambda a, *args, **params: _tile(a, *args, **params).shared(a.dtype.itemsize),
    definitions=_definitions,
    applies=lambda *args, **params: _in_full(**params) and not _is_cut(*args, **params),
)
SPLIT_GEMM = CudaKernel(
    "gemm.cu",
    "gemm_tiled",
    _numbers,
    blocks=_blocks,
    threads=GEMM.threads,
    shared=GEMM.shared,
    definitions=_definitions,
    scratch=lambda a, *args, **params: _choice(a, *args, **params)[1] * _size(a, *args, **params) * a.dtype.itemsize,
    applies=lambda *args, **params: _in_full(*args, **params) and _is_cut(*args, **params),
    then=CudaKernel("sum_splits.cu", "sum_splits", _sum_numbers, elements=_size),
)
