"""The C functions for matrix products, attention and recurrent networks.

They are in `gemm.c`, `gemm_items.c`, `matmul_integers.c`, `attention.c` and `recurrent.c` of `kernels/cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from adtrain.core.kernel import CKernel, register
from adtrain.core.precision import FULL
from adtrain.lowering.shapes import (
    RECURRENT,
    attention_lengths,
    optional_arguments,
    product_lengths,
    reads_all_cotangents,
    recurrent_lengths,
)


def in_full(name: str, precision: str) -> None:
    """Check that a product is in full precision, the only one the C functions compute in.

    Raises:
        NotImplementedError: it is in another.
    """
    if precision != FULL:
        raise NotImplementedError(f"{name} in {precision}")


SCRATCH = 1 << 20
"""Bytes for each thread: packed blocks of A and B, and a block of C."""
LONG, TOTAL = 1 << 12, 256 * (1024 + 64)
"""From LONG summands on there may be groups of slices, and TOTAL more bytes are needed for their total."""
GEMM_MACROS = {"SCRATCH_BYTES": SCRATCH, "TOTAL_BYTES": TOTAL, "LONG_SUM": LONG}
"""Macros of `gemm.c`."""

PANEL = 128
"""Maximum bytes of a row of a panel in `kernels/cpu/tile.h`."""
MIN_ROWS = 256
"""Minimum rows. With fewer, packing a small matrix for each thread takes too much of the time."""
MIN_MATRICES = 256
"""Minimum matrices. With fewer there is too little work for many threads."""
MAX_WEIGHTS = 16 << 10
"""Maximum bytes of a small matrix. With a larger one the product takes most of the time, and `gemm.c` is faster."""
MAX_DEPTH = 2048
"""Maximum bytes of a row; `gemm.c` splits longer sums into slices."""


class Gemm(NamedTuple):
    """Products of matrices (m, k) and (k, n), which may be stored transposed."""

    batch: int
    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    first: int  # the length of A's first axis
    axes: int  # of A
    itemsize: int
    precision: str

    def numbers(self, *names: str) -> tuple[int, ...]:
        in_full("matmul", self.precision)
        return tuple(getattr(self, name) for name in names)

    @property
    def panel_row(self) -> int:
        """Bytes of n numbers in whole panels of `kernels/cpu/tile.h`."""
        return -(-self.n * self.itemsize // PANEL) * PANEL

    @property
    def multiplies_rows(self) -> bool:
        """Whether it is a product of many rows with a small matrix, which is fast row by row."""
        if self.axes != 2 or self.transpose_a or self.m < MIN_ROWS or self.k > MAX_DEPTH // self.itemsize:
            return False
        return 0 < self.k * self.n * self.itemsize <= MAX_WEIGHTS

    @property
    def sums_rows(self) -> bool:
        """Whether it is a small product that is a sum over many rows of both factors."""
        if self.axes != 2 or not self.transpose_a or self.transpose_b:
            return False
        return self.k >= MIN_ROWS and 0 < self.m * self.panel_row <= MAX_WEIGHTS

    @property
    def multiplies_matrices(self) -> bool:
        """Whether it is products of many small matrices."""
        if self.axes < 3 or self.first < MIN_MATRICES or self.k > MAX_DEPTH // self.itemsize:
            return False
        return max(self.m * self.k, self.k * self.n, self.m * self.n) * self.itemsize <= MAX_WEIGHTS


def _gemm(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> Gemm:
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    n = b.shape[-2 if transpose_b else -1]
    batch, rest = math.prod(a.shape[:-2]), (a.shape[0], len(a.shape), a.dtype.itemsize, precision)
    return Gemm(batch, m, n, k, transpose_a, transpose_b, *rest)


def _of_gemm(value: Callable[[Gemm], Any]) -> Callable[..., Any]:
    return lambda a, b, **params: value(_gemm(a, b, **params))


_whole = _of_gemm(lambda x: x.numbers("batch", "m", "n", "k", "transpose_a", "transpose_b"))
_panels = _of_gemm(lambda x: x.k * x.panel_row)
"""Bytes of B as panels."""

register(
    "matmul",
    "cpu",
    (
        CKernel(
            "gemm.c",
            "gemm",
            _whole,
            team=True,
            scratch=_of_gemm(lambda x: SCRATCH + (TOTAL if x.k > LONG else 0)),
            definitions=GEMM_MACROS,
        ),
        CKernel(
            "gemm_items.c",
            "gemm_rows",
            _of_gemm(lambda x: x.numbers("m", "n", "k", "transpose_b")),
            items=_of_gemm(lambda x: x.multiplies_rows),
            several_items=True,
            prepared=_panels,
        ),
        CKernel(
            "gemm_items.c",
            "gemm_sum",
            _of_gemm(lambda x: x.numbers("k", "m", "n")),
            items=_of_gemm(lambda x: x.sums_rows),
            several_items=True,
            sums=True,
            scratch=_panels,
            collected=_of_gemm(lambda x: x.m * x.panel_row),
        ),
        CKernel(
            "gemm_items.c",
            "gemm_matrices",
            _whole,
            items=_of_gemm(lambda x: x.multiplies_matrices),
            several_items=True,
            scratch=_panels,
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
