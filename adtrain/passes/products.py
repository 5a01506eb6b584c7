"""Passes around matrix products: transposes, sums of products, reshapes of their results, and rows.

A linear layer on sequences (B, S, F) is a product of (B * S, F) between two reshapes. Its bias, activation, norms,
residual additions and their gradients work on rows of F elements. As equations on (B * S, F), which `flatten_rows`
makes of them, they can join the product.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, renamed
from adtrain.core.staging import Results, keeps
from adtrain.core.static_key import params_key
from adtrain.core.types import ArrayType, Shape
from adtrain.passes.fusion import elementwise
from adtrain.passes.simplify import merge_common_subexpressions, remove_dead_code, reshape_equation, simplify_reshapes


@keeps(Results.ROUNDING)
def fold_transposes(program: Program) -> Program:
    """``program`` without transposes of the matrices that products read or write.

    A transposed factor is read in place. If only the transposed result is needed, it is the product of the transposed
    factors in the other order: an element is the same sum.
    """
    source = {e.outputs[0]: e.inputs[0] for e in program.equations if _swaps_matrix_axes(e)}
    transposed = _results_to_transpose(program, source)
    source = {v: x for v, x in source.items() if x not in transposed}
    equations = []
    for e in program.equations:
        if _has_flags(e):
            (a, b), (out,) = e.inputs, e.outputs
            flags = [e.params["transpose_a"] ^ (a in source), e.params["transpose_b"] ^ (b in source)]
            factors = [source.get(a, a), source.get(b, b)]
            if out in transposed:
                out, factors, flags = transposed[out], factors[::-1], [not flag for flag in reversed(flags)]
            params = {**e.params, "transpose_a": flags[0], "transpose_b": flags[1]}
            e = replace(e, inputs=tuple(factors), outputs=(out,), params=params)
        elif e.outputs[0] in transposed.values():
            continue
        equations.append(e)
    return remove_dead_code(replace(program, equations=tuple(equations)))


def _results_to_transpose(program: Program, source: dict[Variable, Variable]) -> dict[Variable, Variable]:
    """The products that are read only by a transpose, and its results."""
    products = {e.outputs[0] for e in program.equations if _has_flags(e)}
    found = {}
    for out, x in source.items():
        readers = program.readers.get(x, ())
        if x in products and len(readers) == 1 and x not in program.outputs:
            found[x] = out
    return found


def _has_flags(equation: Equation) -> bool:
    return equation.has(Trait.MATMUL) and "transpose_a" in equation.params


def _swaps_matrix_axes(equation: Equation) -> bool:
    """Whether it transposes the matrices along the last two axes."""
    axes = equation.params.get("axes") if equation.primitive.name == "transpose" else None
    return axes is not None and len(axes) > 1 and (*axes[:-2], axes[-1], axes[-2]) == tuple(range(len(axes)))


@keeps(Results.ROUNDING)
def merge_added_products(program: Program) -> Program:
    """``program`` with one product for products of matrices that are only added, where that moves fewer bytes."""

    def divided(e: Equation) -> bool:
        return _is_sum(e) and _is_term(program, e)

    equations: list[Equation] = []
    for e in program.equations:
        terms = list(_terms(program, e, divided)) if _is_sum(e) and not _is_term(program, e) else []
        groups = defaultdict[Hashable, list[Equation]](list)
        for v in terms:
            if (product := program.producer.get(v)) is not None and _is_only_added(program, product):
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


def _terms(program: Program, root: Equation, divided: Callable[[Equation], bool]) -> Iterator[Variable]:
    """What a sum adds, in order. A term whose equation is ``divided`` is a sum too, and its own terms replace it."""
    pending = list(root.inputs[::-1])
    while pending:
        v = pending.pop()
        e = program.producer.get(v)
        if e is not None and divided(e):
            pending += e.inputs[::-1]
        else:
            yield v


def _is_only_added(program: Program, e: Equation) -> bool:
    return e.primitive.name == "matmul" and len(e.outputs[0].type.shape) == 2 and _is_term(program, e)


def _kind(product: Equation) -> Hashable:
    """Equal for products whose factors can be concatenated."""
    return *product.params.items(), *(v.type.dtype for v in product.inputs)


def _saves(products: Sequence[Equation]) -> bool:
    """Whether the copies of the factors have fewer bytes than the results that need not be written and read."""
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
                yield _like_root("reshape", (v,), {"shape": row.type.shape}, row, root)
            parts, axis, params[flag] = rows, 0, not params[flag]
        (type_,) = PRIMITIVES["concatenate"].output_types([v.type for v in parts], {"axis": axis})
        factors.append(Variable(type_, total.device))
        yield _like_root("concatenate", parts, {"axis": axis}, factors[-1], root)
    yield _like_root("matmul", tuple(factors), params, total, root)


def _like_root(
    name: str, inputs: tuple[Variable, ...], params: dict[str, Any], out: Variable, root: Equation
) -> Equation:
    return replace(root, primitive=PRIMITIVES[name], inputs=inputs, params=params, outputs=(out,))


@keeps(Results.ROUNDING)
def add_before_products(program: Program) -> Program:
    """One product f(a + b, c) in place of f(a, c) + f(b, c), where f is linear in its first argument."""
    while (changed := _with_one_addition(program)) is not None:
        program = merge_common_subexpressions(remove_dead_code(changed))  # equal sums a + b are one value
    return program


def _with_one_addition(program: Program) -> Program | None:
    """The Program with one such product more; None if there are no two terms for it."""
    reads = Counter([*program.outputs, *(v for e in program.equations for v in e.inputs)])
    inner = {v for e in program.equations if e.name == "add" for v in e.inputs if reads[v] == 1}
    for i, e in enumerate(program.equations):
        if e.name != "add" or e.outputs[0] in inner:
            continue
        terms = list(_terms(program, e, partial(_is_inner_sum, root=e, reads=reads)))
        found = _linear_pair(terms, program.producer, reads)
        if found is not None:
            made = _added_before(e, terms, *found)
            return replace(program, equations=(*program.equations[:i], *made, *program.equations[i + 1 :]))
    return None


def _is_inner_sum(e: Equation, root: Equation, reads: Mapping[Variable, int]) -> bool:
    """Whether an equation adds arrays of the type of `root`, for a single reader."""
    return e.name == "add" and reads[e.outputs[0]] == 1 and e.outputs[0].type == root.outputs[0].type


Linear: TypeAlias = "tuple[Equation, int]"
"""An equation that is linear in the argument with this number."""


def _linear_pair(
    terms: Sequence[Variable], producer: Mapping[Variable, Equation], reads: Mapping[Variable, int]
) -> tuple[Linear, Linear] | None:
    """Two terms that differ in one argument, in which they are linear."""
    known: dict[Hashable, Linear] = {}
    for v in terms:
        e = producer.get(v)
        if e is None or reads[v] != 1:
            continue
        for argument, key in _linear_keys(e):
            other = known.setdefault(key, (e, argument))
            if other[0] is not e:
                return other, (e, argument)
    return None


def _linear_keys(e: Equation) -> Iterator[tuple[int, Hashable]]:
    """The number of each argument in which an equation is linear, and what the equation is without it."""
    if e.has(Trait.RESHAPE) or e.has(Trait.BROADCAST):  # which are not stored
        return
    if e.has(Trait.REDUCTION) and e.outputs[0].size == 1:  # an addition of the arguments takes as long as the sum
        return
    if not (e.has(Trait.LINEAR) and len(e.inputs) == 1) and not (e.has(Trait.BILINEAR) and len(e.inputs) == 2):
        return
    for i, v in enumerate(e.inputs):
        yield i, (e.primitive.name, params_key(e.params), i, v.type, e.inputs[:i], e.inputs[i + 1 :])


def _added_before(root: Equation, terms: Sequence[Variable], first: Linear, second: Linear) -> list[Equation]:
    """The equations in place of an addition `root` of the terms."""
    (e, argument), (other, _) = first, second
    a, b = e.inputs[argument], other.inputs[argument]
    total, result = a.like(), e.outputs[0].like()
    inputs = (*e.inputs[:argument], total, *e.inputs[argument + 1 :])
    made = [_add(root, a, b, total), replace(e, inputs=inputs, outputs=(result,))]
    left = [v for v in terms if v is not e.outputs[0] and v is not other.outputs[0]] + [result]
    for v in left[1:-1]:
        made.append(_add(root, left[0], v, root.outputs[0].like()))
        left[0] = made[-1].outputs[0]
    if len(left) > 1:
        return [*made, _add(root, left[0], left[-1], root.outputs[0])]
    return [made[0], replace(made[1], outputs=root.outputs)]


def _add(root: Equation, a: Variable, b: Variable, out: Variable) -> Equation:
    return Equation(PRIMITIVES["add"], (a, b), {}, (out,), root.scope, root.phase)


@keeps(Results.EXACT)
def sink_reshapes(program: Program) -> Program:
    """Swap loops and the reshape of a matrix product, where nothing else reads the reshape or the product."""
    producer = program.producer
    readers = Counter(v for e in program.equations for v in dict.fromkeys(e.inputs))
    readers.update(program.outputs)
    equations: list[Equation] = []
    for e in program.equations:
        reshapes = [producer[v] for v in e.inputs if v in producer and _is_own_product(v, producer, readers)]
        shape = e.outputs[0].type.shape
        if e.form != LOOPS or not reshapes or any(v.type.shape not in (shape, ()) for v in e.inputs):
            equations.append(e)
            continue
        flat = reshapes[0].inputs[0].type.shape
        unshaped = {v: producer[v].inputs[0] for v in e.inputs if v in producer and producer[v].has(Trait.RESHAPE)}
        equations += _before_reshapes(e, flat, {v: x for v, x in unshaped.items() if x.type.shape == flat})
    return replace(program, equations=tuple(equations))


def _is_own_product(v: Variable, producer: Mapping[Variable, Equation], readers: Counter[Variable]) -> bool:
    """Whether it is the reshape of a matrix product, and neither has another reader."""
    reshape = producer[v]
    if not reshape.has(Trait.RESHAPE) or readers[v] > 1:
        return False
    source = producer.get(reshape.inputs[0])
    return source is not None and source.has(Trait.MATMUL) and readers[reshape.inputs[0]] == 1


def _before_reshapes(loops: Equation, flat: Shape, unshaped: dict[Variable, Variable]) -> list[Equation]:
    """The loops on arrays of shape ``flat``, with reshapes before and after them.

    Args:
        unshaped: for an argument that is a reshape, the array before the reshape.
    """
    body: Program = loops.params["body"]
    shape = loops.outputs[0].type.shape
    variables = (*body.inputs, *(v for e in body.equations for v in e.outputs))
    of = {v: v.like(ArrayType(flat, v.type.dtype)) if v.type.shape == shape else v for v in variables} | unshaped

    def renamed(variables: tuple[Variable, ...]) -> tuple[Variable, ...]:
        return tuple(of[v] for v in variables)

    equations = [
        replace(
            e,
            inputs=renamed(e.inputs),
            outputs=renamed(e.outputs),
            params={**e.params, "shape": flat} if "shape" in e.params and e.params["shape"] == shape else e.params,
        )
        for e in body.equations
    ]
    moved = Program(renamed(body.inputs), {}, tuple(equations), renamed(body.outputs))
    before = [reshape_equation(loops, v, of[v]) for v in body.inputs if of[v] is not v and v not in unshaped]
    after = [reshape_equation(loops, of[v], v) for v in body.outputs if of[v] is not v]
    return [
        *before,
        replace(loops, inputs=moved.inputs, outputs=moved.outputs, params={**loops.params, "body": moved}),
        *after,
    ]


@keeps(Results.EXACT)
def flatten_rows(program: Program) -> Program:
    """Rewrite equations over the leading axes of sequences to equations over rows, with reshapes around them.

    Leading axes are those that a reshape joins for a matrix product: (B, S) of (B, S, F). Elementwise equations, norms
    and sums of rows are rewritten, and sums over all rows. Equations that read
    only gathered rows keep their shape, so that they fuse with the gather.
    """
    leading = _leading_axes(program)
    if not leading:
        return program
    equations: list[Equation] = []
    broadcasts: dict[Variable, Equation] = {}
    gathered: set[Variable] = set()  # computed from gathered rows alone
    for e in program.equations:
        inputs = {v for v in e.inputs if v.type.shape}
        of_gather = elementwise(e) and not gathered.isdisjoint(inputs) and inputs <= gathered | broadcasts.keys()
        if e.has(Trait.BROADCAST):
            broadcasts[e.outputs[0]] = e
        elif e.has(Trait.GATHER) or of_gather:
            gathered.update(e.outputs)
        elif flat := _with_flat_broadcasts(e, leading, broadcasts):
            equations += flat
            continue
        equations.append(e)
    return remove_dead_code(simplify_reshapes(replace(program, equations=tuple(equations))))


def _with_flat_broadcasts(
    e: Equation, leading: set[Shape], broadcasts: dict[Variable, Equation]
) -> list[Equation] | None:
    """`_flattened` of an equation, preceded by flattened copies of the broadcasts that it reads.

    None if one of these does not work row by row.
    """
    flat = _flattened(e, leading)
    if flat is None:
        return None
    before = {}
    for v in e.inputs:
        if v in broadcasts and v.type.shape:
            copy = _flattened(broadcasts[v], leading)
            if copy is None:
                return None
            own = {w: w.like() for each in copy for w in each.outputs}
            before[v] = [renamed(each, own) for each in copy]
            flat = [renamed(each, {v: own[v]}) if each.outputs[0] is not v else each for each in flat]
    return [*(each for group in before.values() for each in group), *flat]


def _leading_axes(program: Program) -> set[Shape]:
    """The axes before the last one of arrays that are reshaped to or from a matrix of a product."""
    matrices = {v for e in program.equations if e.has(Trait.MATMUL) for v in (*e.inputs, *e.outputs)}
    found = set()
    for e in program.equations:
        if e.has(Trait.RESHAPE):
            (x,), (y,) = e.inputs, e.outputs
            for whole, flat in ((x, y), (y, x)):
                shape = whole.type.shape
                if flat in matrices and len(shape) > 2 and flat.type.shape == flat_shape(shape):
                    found.add(shape[:-1])
    return found


def flat_shape(shape: Shape) -> Shape:
    """The shape of the rows of sequences (B, S, F) as a matrix."""
    return (prod(shape[:-1]), *shape[-1:])


def _flattened(e: Equation, leading: set[Shape]) -> list[Equation] | None:
    """The equation over rows, and reshapes of its arguments and results; None if it does not work row by row."""
    along = "axes" in e.params and e.axes.leading and len(e.inputs) == 1
    whole = e.inputs[0].type.shape if along else e.outputs[0].type.shape
    if whole[:-1] not in leading:
        return None
    if along:
        axes = _flat_axes(e, len(whole))
        if axes is None:
            return None
        params = {**e.params, "axes": axes}
    elif elementwise(e):
        params = {**e.params, "shape": flat_shape(whole)} if "shape" in e.params else dict(e.params)
    else:
        return None
    shapes = [_row_shape(v.type.shape, whole[:-1]) for v in e.inputs]
    if None in shapes:
        return None
    inputs = [v if s is None or s == v.type.shape else _like(v, s) for v, s in zip(e.inputs, shapes, strict=True)]
    types = e.primitive.output_types([v.type for v in inputs], params)
    outputs = [v if t == v.type else v.like(t) for v, t in zip(e.outputs, types, strict=True)]
    before = [reshape_equation(e, v, w) for v, w in zip(e.inputs, inputs, strict=True) if v is not w]
    after = [reshape_equation(e, w, v) for v, w in zip(e.outputs, outputs, strict=True) if v is not w]
    return [*before, replace(e, inputs=tuple(inputs), outputs=tuple(outputs), params=params), *after]


def _flat_axes(e: Equation, ndim: int) -> tuple[int, ...] | None:
    """The axes of the same equation over rows, if it works by row, or reduces over all of them; otherwise None."""
    (labels,), axes = e.axes.arguments, e.params["axes"]
    if set(axes) <= {ndim - 1}:
        return (1,) * len(axes)
    return (0,) if labels[-1] and e.axes.results == (labels[-1:],) else None


def _row_shape(shape: Shape, leading: Shape) -> Shape | None:
    """The shape of an argument over rows; None if it is neither an array of rows nor the same for all rows."""
    if len(shape) <= 1:
        return shape
    if shape[:-1] == leading:
        return flat_shape(shape)
    return shape[-1:] if prod(shape[:-1]) == 1 else None


def _like(v: Variable, shape: Shape) -> Variable:
    return v.like(ArrayType(shape, v.type.dtype))
