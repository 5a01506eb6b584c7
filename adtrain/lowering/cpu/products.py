"""The C functions for matrix products, attention and recurrent networks.

They are in `gemm.c`, `gemm_items.c`, `matmul_integers.c`, `attention.c` and `recurrent.c` of `kernels/cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.cpu.moves import in_full
from adtrain.lowering.shapes import (
    RECURRENT,
    attention_lengths,
    optional_arguments,
    product_lengths,
    reads_all_cotangents,
    recurrent_lengths,
)

SCRATCH = 1 << 20
"""Bytes for each thread: packed blocks of A and B, and a block of C."""
LONG, TOTAL = 1 << 12, 256 * (1024 + 64)
"""From so many summands on there may be groups of slices, and so many more bytes are needed for their total."""
GEMM_MACROS = {"SCRATCH_BYTES": SCRATCH, "TOTAL_BYTES": TOTAL, "LONG_SUM": LONG}
"""Macros of `gemm.c`."""

PANEL = 128
"""Maximum bytes of a row of a panel in `kernels/cpu/tile.h`."""
MIN_ROWS = 1024
"""With fewer rows, packing a small matrix for each thread takes too much of the time."""
MIN_MATRICES = 256
"""With fewer matrices there is too little work for many threads."""
MAX_WEIGHTS = 12 << 10
"""Maximum bytes of a small matrix. With a larger one the product takes most of the time, and `gemm.c` is faster."""
MAX_DEPTH = 2048
"""Maximum bytes of a row; `gemm.c` splits longer sums into slices."""


def _numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """batch, M, N, K and the flags."""
    in_full("matmul", precision)
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    return math.prod(a.shape[:-2]), m, b.shape[-2 if transpose_b else -1], k, transpose_a, transpose_b


def _scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    return SCRATCH + (TOTAL if a.shape[-2 if transpose_a else -1] > LONG else 0)


def _is_small(rows: int, k: int, n: int, itemsize: int) -> bool:
    """Whether a product of so many rows with a (k, n) matrix is fast row by row."""
    return rows >= MIN_ROWS and k <= MAX_DEPTH // itemsize and 0 < k * n * itemsize <= MAX_WEIGHTS


def _by_row(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> bool:
    """Whether it is a product of many rows with a small matrix."""
    if len(a.shape) != 2 or transpose_a:
        return False
    return _is_small(a.shape[0], a.shape[1], b.shape[0 if transpose_b else 1], a.dtype.itemsize)


def _row_numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """rows, N, K and the flag of B."""
    in_full("matmul", precision)
    _, rows, n, k, _, transposed = _numbers(a, b, transpose_a, transpose_b, precision)
    return rows, n, k, transposed


def _prepared(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    _, n, k, _ = _row_numbers(a, b, transpose_a, transpose_b, precision)
    return k * _padded(n, a.dtype.itemsize)


def _sums_rows(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> bool:
    """Whether it is a small product that is a sum over many rows of both factors."""
    if len(a.shape) != 2 or not transpose_a or transpose_b:
        return False
    rows, m = a.shape
    return rows >= MIN_ROWS and 0 < m * _padded(b.shape[1], a.dtype.itemsize) <= MAX_WEIGHTS


def _sum_numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """rows, M and N."""
    in_full("matmul", precision)
    return a.shape[-2], a.shape[-1], b.shape[-1]


def _sum_scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    """Bytes of the rows of B as panels."""
    return int(a.shape[-2]) * _padded(b.shape[-1], a.dtype.itemsize)


def _collected(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    """Bytes of the sums."""
    return int(a.shape[-1]) * _padded(b.shape[-1], a.dtype.itemsize)


def _by_matrix(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> bool:
    """Whether it is products of many small matrices."""
    if len(a.shape) < 3 or a.shape[0] < MIN_MATRICES:
        return False
    _, m, n, k, _, _ = _numbers(a, b, transpose_a, transpose_b, precision)
    return k <= MAX_DEPTH // a.dtype.itemsize and max(m * k, k * n, m * n) * a.dtype.itemsize <= MAX_WEIGHTS


def _matrix_scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    """Bytes of B as panels."""
    _, _, n, k, _, _ = _numbers(a, b, transpose_a, transpose_b, precision)
    return k * _padded(n, a.dtype.itemsize)


def _padded(n: int, itemsize: int) -> int:
    """Bytes of n numbers in whole panels of `kernels/cpu/tile.h`."""
    return -(-n * itemsize // PANEL) * PANEL


register(
    "matmul",
    "cpu",
    (
        CKernel("gemm.c", "gemm", _numbers, team=True, scratch=_scratch, definitions=GEMM_MACROS),
        CKernel("gemm_items.c", "gemm_rows", _row_numbers, items=_by_row, several_items=True, prepared=_prepared),
        CKernel(
            "gemm_items.c",
            "gemm_sum",
            _sum_numbers,
            items=_sums_rows,
            several_items=True,
            sums=True,
            scratch=_sum_scratch,
            collected=_collected,
        ),
        CKernel(
            "gemm_items.c",
            "gemm_matrices",
            _numbers,
            items=_by_matrix,
            several_items=True,
            scratch=_matrix_scratch,
        ),
    ),
)
register("matmul_integers", "cpu", CKernel("matmul_integers.c", "matmul_integers", product_lengths, team=True))


BLOCK, LARGEST_VECTOR, STRUCT = 64, 64, 4096
"""Keys of a block of scores, of which the queries are at most half; bytes of the largest vector register; bytes for the
pointers to the blocks."""
ATTENTION_MACROS = {"KEYS": BLOCK, "LARGEST_VECTOR": LARGEST_VECTOR, "STRUCT_BYTES": STRUCT}
"""Macros of `attention.c`."""


def _attention_numbers(*types: Any, **params: Any) -> tuple[int | float, ...]:
    """NUMBERS in `attention.c`."""
    in_full("attention", params["precision"])
    options = params["causal"], params["scale"], params["dropout"], params["stream"]
    return *attention_lengths(*types, **params), *options


def _attention_scratch(*types: Any, **params: Any) -> int:
    """Bytes for each thread: its Scratch, four blocks of scores of at most half as many queries as keys, and six packed
    blocks."""
    itemsize = types[0].dtype.itemsize
    packed = 6 * BLOCK * (attention_lengths(*types, **params).width + 2 * LARGEST_VECTOR // itemsize)
    return STRUCT + itemsize * (2 * BLOCK * BLOCK + packed)


for _name in ("attention", "attention_grad", "self_attention", "self_attention_grad"):
    register(
        _name,
        "cpu",
        CKernel(
            "attention.c",
            lambda *types, name=_name, **params: "_".join([name, *optional_arguments(*types)]),
            _attention_numbers,
            team=True,
            scratch=_attention_scratch,
            definitions=ATTENTION_MACROS,
        ),
    )


BLOCK_ROWS = 48
"""Rows of a block, a macro of `recurrent.c`."""
PANEL_BYTES = 128
"""Bytes of a row of the widest panel of a packed weight."""
RECURRENT_MACROS = {"BLOCK_ROWS": BLOCK_ROWS, "PANEL_BYTES": PANEL_BYTES}
"""Macros of `recurrent.c`."""
MAX_SCRATCH = 1 << 28
"""Bytes for each thread. A larger network runs on NumPy."""


def _recurrent_scratch(x: Any, weight: Any, *others: Any, **params: Any) -> int:
    """Bytes of a packed weight_hh, and of its products with a block of rows."""
    (sums, hidden), size = weight.shape, x.dtype.itemsize
    return max(_packed(sums, hidden * size), _packed(hidden, sums * size) + BLOCK_ROWS * sums * size)


def _packed(depth: int, row: int) -> int:
    return depth * -(-row // PANEL_BYTES) * PANEL_BYTES


def _recurrent_numbers(*types: Any, reverse: bool, **params: Any) -> tuple[int, ...]:
    """LENGTHS of `recurrent.c`.

    Raises:
        NotImplementedError: the weight is too large for a copy in each thread.
    """
    lengths = recurrent_lengths(*types)
    if _recurrent_scratch(*types) > MAX_SCRATCH:
        raise NotImplementedError(f"a recurrent network of {lengths.hidden} hidden units")
    return lengths.rows, lengths.length, lengths.hidden, int(reverse)


def _grad_name(cell: str) -> Callable[..., str]:
    return lambda *types, **params: f"{cell}_grad{'_all' if reads_all_cotangents(cell, types) else ''}"


IN_PLACE = {
    "rnn_tanh": ((0, 0),),  # the states over x
    "rnn_relu": ((0, 0),),
    "lstm": ((4, 0),),  # what the gradient reads over x
    "rnn_tanh_grad": ((1, 3),),  # the states before each step over those after it
    "rnn_relu_grad": ((1, 3),),
    "lstm_grad": ((0, 7), (1, 5)),  # the cotangent of x over what the forward pass saved; the states as above
    "gru_grad": ((2, 3),),
}
"""Outputs that `recurrent.c` may write over an argument."""

for _cell in RECURRENT:
    for _recurrent_name, _c_name in ((_cell, _cell), (f"{_cell}_grad", _grad_name(_cell))):
        _places = IN_PLACE.get(_recurrent_name, ())
        _kernel = CKernel(
            "recurrent.c",
            _c_name,
            _recurrent_numbers,
            team=True,
            scratch=_recurrent_scratch,
            in_place=_places,
            definitions=RECURRENT_MACROS,
        )
        register(_recurrent_name, "cpu", _kernel)
