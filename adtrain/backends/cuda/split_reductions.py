"""Split reductions: a reduction over rows and other axes becomes two, one along the rows and one of its results.

Example: images are scaled by channel. The loss is a sum over all their elements, and the gradient of a scale is the sum
over a channel. The first sum is split. Then one `row_fused` kernel computes both sums along rows of H x W elements, and
reads the images once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from adtrain.backends.cuda.codegen.register_rows import ROW, Rows
from adtrain.backends.cuda.forms.reduction import OPERATIONS
from adtrain.backends.cuda.forms.row_fused import rows_in_registers
from adtrain.core.axes import row_axes
from adtrain.core.program import Equation, Program
from adtrain.core.staging import Pass, Results, keeps
from adtrain.core.types import ArrayType
from adtrain.passes.fusion import by_element


@keeps(Results.ROUNDING)
def split_reductions(program: Program, fuse: Pass, launch_bytes: int) -> Program:
    """Split a reduction over rows and other axes, if other equations read its rows too and so fewer bytes are moved.

    A float32 sum stays as accurate: a thread adds up to 32 elements of a row in order, the threads of the row add their
    sums in pairs, and the sums of all rows are added as in any sum.

    Args:
        fuse: the fusion pass. What its results read and write is compared.
        launch_bytes: the bytes that memory moves in the time of a launch.
    """

    def cost(program: Program) -> int:
        return sum(e.cost.bytes + launch_bytes for e in fuse(program).equations if not e.primitive.view)

    before: int | None = None
    for e, rows in _candidates(program, launch_bytes):
        split = _split(program, e, rows)
        before, after = cost(program) if before is None else before, cost(split)
        if after < before:
            program, before = split, after
    return program


def _candidates(program: Program, launch_bytes: int) -> Iterator[tuple[Equation, Rows]]:
    """Reductions that may be split, each with its rows.

    Other equations must read or compute more bytes of these rows than memory moves in the time of a launch.
    """
    held = rows_in_registers(program)
    producer = program.producer
    for e in program.equations:
        if e.primitive.name not in OPERATIONS or e in held:
            continue
        (x,) = e.inputs
        source = producer.get(x, e)
        reader = source if by_element(source) and len(program.readers[x]) == 1 else e
        for rows in dict.fromkeys(held.values()):
            arguments = (v for v in dict.fromkeys(reader.inputs) if rows.held_for(v, reader) == ROW)
            users = {v: (*program.readers[v], producer.get(v, e)) for v in arguments}
            shared = [v for v, by in users.items() if any(o not in (e, reader) and held.get(o) == rows for o in by)]
            if sum(v.nbytes for v in shared) > launch_bytes and _reduces_rows_and_others(e, rows):
                yield e, rows
                break


def _reduces_rows_and_others(e: Equation, rows: Rows) -> bool:
    """Whether an equation reduces whole rows, and other axes too."""
    shape, axes = e.inputs[0].type.shape, e.params["axes"]
    if rows.held(shape) != ROW:
        return False
    along = range(row_axes(shape, rows.count) or 0, len(shape))
    return len(axes) > len(along) and set(along) <= set(axes)


def _split(program: Program, e: Equation, rows: Rows) -> Program:
    """The Program in which a reduction is split."""
    (x,), (y,), axes = e.inputs, e.outputs, e.params["axes"]
    first = row_axes(x.type.shape, rows.count) or 0
    of_rows = x.like(ArrayType(x.type.shape[:first], y.type.dtype))
    by_row = replace(e, params={**e.params, "axes": tuple(a for a in axes if a >= first)}, outputs=(of_rows,))
    rest = replace(e, params={**e.params, "axes": tuple(a for a in axes if a < first)}, inputs=(of_rows,))
    equations = (new for old in program.equations for new in ((by_row, rest) if old is e else (old,)))
    return replace(program, equations=tuple(equations))
