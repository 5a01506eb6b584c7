"""Access to operands: the C text of the place of an element, and of loads of one element or of neighbours at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from adtrain.codegen.elementwise import Axis, merged, statements, strides
from adtrain.codegen.expressions import c_type
from adtrain.core.program import Program, Variable
from adtrain.core.types import Shape


def offset(index: str, lengths: Sequence[int], steps: Sequence[int]) -> str:
    """C text: the offset of element ``index`` (row-major in ``lengths``) in an array with strides ``steps``."""
    terms, below = [], 1
    for k in range(len(lengths) - 1, -1, -1):
        if steps[k] and lengths[k] > 1:
            quotient = index if below == 1 else f"{index} / {below}"
            whole = below * lengths[k] == prod(lengths)
            place = quotient if whole else f"{quotient} % {lengths[k]}"
            terms.append(place if steps[k] == 1 else f"{place} * {steps[k]}")
        below *= lengths[k]
    return " + ".join(reversed(terms)) or "0"


def place(indices: Iterable[tuple[str, Sequence[Axis]]], operand: int = 0) -> str:
    """C text: the offset of an element of an operand. Each index is row-major in the axes beside it."""
    terms = (offset(index, [x.length for x in axes], [x.strides[operand] for x in axes]) for index, axes in indices)
    return " + ".join(term for term in terms if term != "0") or "0"


class Access(NamedTuple):
    """Where an operand is read for an element of a result.

    Attributes:
        place: C text of the offset; "0" if all elements of the result read the same one.
        step: the distance of the elements that are read for neighbours along the last axis.
        run: how many such neighbours have this distance.
    """

    place: str
    step: int
    run: int


def access(shape: Shape, within: Shape, *indices: tuple[str, int]) -> Access:
    """Where an operand of `shape` is read for elements of a result of the shape `within`, to which it broadcasts.

    Args:
        indices: for each index its C text, and the number of axes of the result over which it counts. The first index
            begins at axis 0, the next one at the axis after those of the first.
    """
    steps, axes, split = strides(shape, within), list[Axis](), list[tuple[str, Sequence[Axis]]]()
    begin = 0
    for index, count in indices:
        own = slice(begin, begin := begin + count)
        axes = merged(within[own], [steps[own]])
        split.append((index, axes))
    last = axes[-1] if axes else Axis(1, (0,))
    return Access(place(split), last.strides[0], last.length)


def read(v: Variable, name: str, pointer: str, place: str, wide: int | str = 1) -> tuple[str, str]:
    """C text of a definition of `name`, the element of `v` at a place or a vector of `wide` from there on; its value.

    The value of a vector is that of its lane k. Vectors are for CUDA.
    """
    return f"const {held(v, wide)} {name} = {loaded(v, pointer, place, wide)};", lane(name, wide)


def held(v: Variable, wide: int | str = 1) -> str:
    """The C type of an element, or of a vector of `wide` of them."""
    return c_type(v.type.dtype) if wide == 1 else f"Vector<{c_type(v.type.dtype)}, {wide}>"


def loaded(v: Variable, pointer: str, place: str, wide: int | str = 1) -> str:
    """C text of the element at a place, or of a vector of `wide` from there on."""
    return f"{pointer}[{place}]" if wide == 1 else f"load<{c_type(v.type.dtype)}, {wide}>({pointer} + {place})"


def lane(name: str, wide: int | str = 1) -> str:
    """The value of an element, or of lane k of a vector."""
    return name if wide == 1 else f"{name}.lane[k]"


def vector_results(
    program: Program, values: dict[Variable, str], wide: int | str, after: Sequence[str] = (), addends: int = 0
) -> list[str]:
    """CUDA statements that compute vectors ``r0``, ``r1``, ... of `wide` elements of the outputs.

    Args:
        values: C text of the inputs, for lane k.
        after: statements for lane k, after its results.
        addends: how many of the last outputs are elements of ``addends[0]``, ``addends[1]``, ... in place of a vector.
    """
    vectors = program.outputs[: len(program.outputs) - addends]
    results = [*(f"r{i}.lane[k]" for i in range(len(vectors))), *(f"addends[{i}][k]" for i in range(addends))]
    return [
        *(f"{held(v, wide)} r{i};" for i, v in enumerate(vectors)),
        "#pragma unroll",
        f"for (int k = 0; k < {wide}; k++) {{",
        *(f"    {line}" for line in (*statements(program, values, results), *after)),
        "}",
    ]
