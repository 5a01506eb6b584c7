"""Recurrent networks and their gradients: `recurrent.c`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.shapes import RECURRENT, reads_all_cotangents, recurrent_lengths

BLOCK_ROWS = 48
"""Rows of a block, a macro of `recurrent.c`."""
PANEL_BYTES = 128
"""Bytes of a row of the widest panel of a packed weight."""
MACROS = {"BLOCK_ROWS": BLOCK_ROWS, "PANEL_BYTES": PANEL_BYTES}
"""Macros of `recurrent.c`."""
MAX_SCRATCH = 1 << 28
"""Bytes for each thread. A larger network runs on NumPy."""


def _scratch(x: Any, weight: Any, *others: Any, **params: Any) -> int:
    """Bytes of a packed weight_hh, and of its products with a block of rows."""
    (sums, hidden), size = weight.shape, x.dtype.itemsize
    return max(_packed(sums, hidden * size), _packed(hidden, sums * size) + BLOCK_ROWS * sums * size)


def _packed(depth: int, row: int) -> int:
    return depth * -(-row // PANEL_BYTES) * PANEL_BYTES


def _numbers(*types: Any, reverse: bool, **params: Any) -> tuple[int, ...]:
    """LENGTHS of `recurrent.c`.

    Raises:
        NotImplementedError: the weight is too large for a copy in each thread.
    """
    lengths = recurrent_lengths(*types)
    if _scratch(*types) > MAX_SCRATCH:
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
    for _name, _c_name in ((_cell, _cell), (f"{_cell}_grad", _grad_name(_cell))):
        _places = IN_PLACE.get(_name, ())
        _kernel = CKernel(
            "recurrent.c", _c_name, _numbers, team=True, scratch=_scratch, in_place=_places, definitions=MACROS
        )
        register(_name, "cpu", _kernel)
