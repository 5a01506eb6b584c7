"""Choose which products keep rounded operands.

A rounded precision permits rounding and does not require it. Kernels of full precision take part in more fusions, and
some are as fast. So a product gets full precision if it can be part of a row-product chain (`forms/row_products.py`),
or if it is narrow and threads can compute its items (`forms/thread_items.py`). Any other product keeps its rounded
precision if it will read a bfloat16 copy (`store_bfloat16.py`), or if its kernel is estimated faster by the time of a
launch.
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.backends.cuda.forms.row_products import may_join
from adtrain.backends.cuda.forms.thread_items import is_narrow
from adtrain.backends.cuda.store_bfloat16 import products_of_copies
from adtrain.backends.cuda.write_channels_last import OF_TERMS
from adtrain.core.kernel import Target, cuda_kernels
from adtrain.core.precision import FULL
from adtrain.core.program import Equation, Program
from adtrain.core.staging import Results, keeps
from adtrain.core.types import BITS

LAUNCH_CYCLES = 3800
"""Cycles of a launch."""


@keeps(Results.ROUNDING)
def choose_precision(program: Program, target: Target) -> Program:
    """``program`` with full precision where a rounded one is not faster by LAUNCH_CYCLES, or would prevent a chain."""
    of_copies = products_of_copies(program, target)

    def chosen(e: Equation) -> Equation:
        if e.params.get("precision", FULL) == FULL or e.inputs[0].type.dtype == BITS or e.name in OF_TERMS:
            return e
        full = replace(e, params={**e.params, "precision": FULL})
        if may_join(full, target) or is_narrow(full, target):
            return full
        if e in of_copies:
            return e
        rounded_cycles, full_cycles = _cycles(e, target), _cycles(full, target)
        if rounded_cycles is None or full_cycles is None:
            return e
        return full if full_cycles < rounded_cycles + LAUNCH_CYCLES else e

    return replace(program, equations=tuple(map(chosen, program.equations)))


def _cycles(e: Equation, target: Target) -> float | None:
    """The estimated cycles of the preferred kernel; None without an estimate."""
    kernels = cuda_kernels(e.primitive.name, target, *(v.type for v in e.inputs), **e.params)
    return kernels[0].cycles if kernels else None
