"""Sums of matrix products become one product of longer factors: a b + c d = [a c] [b; d].

Such sums are the gradients of a matrix that a Program uses several times. Each product would write the whole result,
and each sum would read it. Where products have few terms, the copies of their factors are much smaller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.dead_code import remove_dead_code


@keeps(Results.ROUNDING)
def merge_added_products(program: Program) -> Program:
    """``program`` with one product for products of matrices that are only added, where that moves fewer bytes."""
    producer = {v: e for e in program.equations for v in e.outputs}
    equations: list[Equation] = []
    for e in program.equations:
        terms = list(_terms(program, producer, e)) if _is_sum(e) and not _is_term(program, e) else []
        groups = defaultdict[Hashable, list[Equation]](list)
        for v in terms:
            if (product := producer.get(v)) is not None and _is_only_added(program, product):
                groups[_kind(product)].append(product)
        merged = [products for products in groups.values() if _saves(products)]
        if merged:
            equations += _sum(e, terms, merged)
        else:
            equations.append(e)
    return remove_dead_code(replace(program, equations=tuple(equations)))


def _is_sum(e: Equation) -> bool:
    return e.primitive.name == "add" and all(v.type == e.outputs[0].type for v in e.inputs)


def _is_term(program: Program, e: Equation) -> bool:
    """Whether the only reader of an equation's result adds it."""
    (out,) = e.outputs
    readers = program.readers.get(out, ())
    return out not in program.outputs and len(readers) == 1 and _is_sum(readers[0])


def _terms(program: Program, producer: dict[Variable, Equation], root: Equation) -> Iterator[Variable]:
    """What a sum adds. Sums that are only terms of it are divided into their own terms."""
    pending = list(root.inputs[::-1])
    while pending:
        v = pending.pop()
        e = producer.get(v)
        if e is not None and _is_sum(e) and _is_term(program, e):
            pending += e.inputs[::-1]
        else:
            yield v


def _is_only_added(program: Program, e: Equation) -> bool:
    return e.primitive.name == "matmul" and len(e.outputs[0].type.shape) == 2 and _is_term(program, e)


def _kind(product: Equation) -> Hashable:
    """Equal for products whose factors can be concatenated."""
    return *product.params.items(), *(v.type.dtype for v in product.inputs)


def _saves(products: Sequence[Equation]) -> bool:
    """Whether the copies of the factors have fewer bytes than the results that are no longer written and read."""
    copied = 3 * sum(v.nbytes for e in products for v in e.inputs)  # read, written, and read again
    return copied < 2 * sum(e.outputs[0].nbytes for e in products[1:])


def _sum(root: Equation, terms: Sequence[Variable], merged: Sequence[Sequence[Equation]]) -> Iterator[Equation]:
    """The equations for the sum of ``terms`` with one product for each of the lists of products."""
    (out,) = root.outputs
    replaced = {e.outputs[0] for products in merged for e in products}
    kept = [v for v in terms if v not in replaced]
    totals = [out] if len(merged) == 1 and not kept else [out.like() for _ in merged]
    for products, total in zip(merged, totals, strict=True):
        yield from _product(products, total, root)
    total, *rest = (*totals, *kept)
    for v, result in zip(rest, [out.like() for _ in rest[1:]] + [out], strict=False):
        yield replace(root, inputs=(total, v), outputs=(result,))
        total = result


def _product(products: Sequence[Equation], total: Variable, root: Equation) -> Iterator[Equation]:
    """The equations for a product of the concatenated factors, which is the sum of the products."""
    params = dict(products[0].params)
    factors = []
    for i, flag in enumerate(("transpose_a", "transpose_b")):
        parts = tuple(e.inputs[i] for e in products)
        axis = int(bool(params[flag]) == bool(i))
        if axis == 1 and all(v.type.shape[1] == 1 for v in parts):  # columns: as rows they are copied as they lie
            rows = tuple(Variable(v.type._replace(shape=v.type.shape[::-1]), v.device) for v in parts)
            for v, row in zip(parts, rows, strict=True):
                yield _equation("reshape", (v,), {"shape": row.type.shape}, row, root)
            parts, axis, params[flag] = rows, 0, not params[flag]
        (type_,) = PRIMITIVES["concatenate"].output_types([v.type for v in parts], {"axis": axis})
        factors.append(Variable(type_, total.device))
        yield _equation("concatenate", parts, {"axis": axis}, factors[-1], root)
    yield _equation("matmul", tuple(factors), params, total, root)


def _equation(
    name: str, inputs: tuple[Variable, ...], params: dict[str, Any], out: Variable, root: Equation
) -> Equation:
    return replace(root, primitive=PRIMITIVES[name], inputs=inputs, params=params, outputs=(out,))
