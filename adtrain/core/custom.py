"""custom_vjp: a function with a derivative that the user writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from adtrain.core import tree
from adtrain.core.array import Value, type_with_article
from adtrain.core.autodiff import ReverseTrace, ReverseTracer, fill_zeros
from adtrain.core.errors import DTypeError, ShapeError, TraceError
from adtrain.core.precision import current_precision, matmul_precision
from adtrain.core.primitive import Pull
from adtrain.core.taylor import TaylorTrace, TaylorTracer
from adtrain.core.types import ArrayType
from adtrain.core.vmap import BatchTrace, BatchTracer, vmap


def custom_vjp(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[[Any, Any], tuple[Any, ...]]
) -> Callable[..., Any]:
    """A function with ``backward`` as its derivative, at every order of differentiation.

    Matrix products of ``backward`` have the precision of the call (`ops.matmul_precision`). A second derivative
    differentiates ``backward``, and the code of ``forward`` that computes the residuals.

    Args:
        forward: ``(*args) -> (out, residuals)``, trees of arrays, written with public ops.
        backward: ``(residuals, ct) -> (ct_arg, ...)``. ``ct`` is a tree with the structure and shapes of ``out``. It
            returns one such tree for each argument, None for an argument without a derivative.

    Returns:
        A function ``(*args) -> out``.

    Raises (when called, or when its gradient is):
        TraceError: ``forward`` uses a value that is being differentiated or mapped and is not among its arguments, or a
            second derivative goes through NumPy code.
        ShapeError: ``backward`` does not return one tree for each argument, with the argument's structure and shapes.
        DTypeError: ``forward`` does not return a pair, or one of the functions returns something other than arrays.
    """

    name = getattr(forward, "__name__", "custom_vjp")

    def run(args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Call ``forward``. Refuse outputs that depend on a traced value that is not an argument."""
        found = forward(*args)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise DTypeError(f"{name}: forward must return a pair (out, residuals)")
        known = _traces(args)
        for trace in _traces(found) - known:
            if trace.live:
                kind = "mapped" if isinstance(trace, BatchTrace) else "differentiated"
                raise TraceError(f"{name}: forward uses a {kind} value that is not among its arguments; pass it in")
        for x in tree.leaves(found[0]):
            if not isinstance(x, Value):
                raise DTypeError(f"{name}: forward returned {type_with_article(x)} as output, expected arrays")
        return found

    @wraps(forward)
    def apply(*args: Any) -> Any:
        precision = current_precision()

        def backward_in_precision(residuals: Any, ct: Any) -> tuple[Any, ...]:
            with matmul_precision(precision):
                return backward(residuals, ct)

        traces = [trace for trace in _traces(args) if trace.live]
        if all(isinstance(trace, BatchTrace) for trace in traces):
            return run(args)[0]
        trace = max(traces, key=lambda t: t.level)
        if isinstance(trace, BatchTrace):
            return _apply_to_members(trace, name, run, backward_in_precision, args)
        if isinstance(trace, TaylorTrace):
            return _push(trace, name, args, apply(*tree.map(trace.lower, args)), run, backward_in_precision)
        lower_args = tree.map(trace.lower, args)
        out, residuals = run(lower_args)
        if any(isinstance(lower, (ReverseTrace, TaylorTrace)) for lower in _traces(lower_args)):
            plain, out = out, apply(*lower_args)  # so that the output has this rule at the levels below as well
            residuals = _with_outputs(residuals, plain, out, lower_args)
        return _record(trace, name, args, out, residuals, backward_in_precision)

    return apply


def _with_outputs(residuals: Any, plain: Any, out: Any, args: Any) -> Any:
    """The residuals with ``out`` in place of the outputs ``plain`` that ``forward`` computed from ``args``."""
    same = dict(zip(map(id, tree.leaves(plain)), tree.leaves(out), strict=True))
    for x in tree.leaves(args):
        same.pop(id(x), None)  # an output that is an argument stays the argument in the residuals
    return tree.map(lambda x: same.get(id(x), x), residuals)


def _traces(values: Any) -> set[Any]:
    """The traces, at all levels, of the values in a tree."""
    found = set()
    for x in tree.leaves(values):
        while isinstance(x, (ReverseTracer, BatchTracer, TaylorTracer)):
            found.add(x.trace)
            x = x.primal
    return found


def _apply_to_members(
    trace: BatchTrace, name: str, run: Callable[..., Any], backward: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """The function of all members, one level down, with the derivative of all members."""
    leaves, structure = tree.flatten(args)
    structures = [tree.flatten(arg)[1] for arg in args]
    axes = tuple(0 if trace.maps(x) else None for x in leaves)

    def forward_of_all(*values: Any) -> Any:
        return vmap(lambda *each: run(tree.unflatten(structure, each)), axes, axis_size=trace.size)(*values)

    def backward_of_all(residuals: Any, ct: Any) -> tuple[Any, ...]:
        cotangents = vmap(partial(_flat_cotangents, name, backward, structures), axis_size=trace.size)(residuals, ct)
        return tuple(x if x is None or axis == 0 else x.sum(0) for x, axis in zip(cotangents, axes, strict=True))

    forward_of_all.__name__ = name
    out = custom_vjp(forward_of_all, backward_of_all)(*map(trace.lower, leaves))
    return tree.map(partial(BatchTracer, trace), out)


def _flat_cotangents(
    name: str, backward: Callable[..., Any], structures: Sequence[tree.TreeDef], residuals: Any, ct: Any
) -> list[Any]:
    """The cotangent of each leaf of the arguments, which have these structures; None where there is none."""
    found = backward(residuals, ct)
    if not isinstance(found, (tuple, list)) or len(found) != len(structures):
        returned = f"{len(found)} cotangents" if isinstance(found, (tuple, list)) else type_with_article(found)
        raise ShapeError(
            f"{name}: backward returned {returned}, expected a tuple of {len(structures)}, one an argument"
        )
    flat: list[Any] = []
    for i, (x, structure) in enumerate(zip(found, structures, strict=True)):
        part = [None] * structure.leaf_count if x is None else tree.flatten_like(structure, x)
        if part is None:
            got = tree.flatten(x)[1]
            raise ShapeError(f"{name}: backward's cotangent {i} is a tree {got}, expected {structure}")
        flat += part
    return flat


def _pullback(
    name: str, backward: Callable[..., Any], args: Any, out: Any, residuals: Any, positions: Sequence[int]
) -> Pull:
    """The pullback from the leaves of ``out`` to those of ``args`` at these positions."""
    outputs, out_structure = tree.flatten(out)
    structures = [tree.flatten(arg)[1] for arg in args]
    zeros = [(x.shape, x.dtype, x.device) for x in outputs]

    def pull(cts: Sequence[Value | None]) -> list[Value | None]:
        full = [fill_zeros(ct, zero) for ct, zero in zip(cts, zeros, strict=True)]
        flat = _flat_cotangents(name, backward, structures, residuals, tree.unflatten(out_structure, full))
        for i in positions:
            if flat[i] is not None and not isinstance(flat[i], Value):
                raise DTypeError(f"{name}: backward returned {type_with_article(flat[i])}, expected arrays or None")
        return [flat[i] for i in positions]

    return pull


def _record(
    trace: ReverseTrace, name: str, args: tuple[Any, ...], out: Any, residuals: Any, backward: Callable[..., Any]
) -> Any:
    outputs, out_structure = tree.flatten(out)
    leaves = tree.leaves(args)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, ReverseTracer) and x.trace is trace]
    parents = [(leaves[i].node, leaves[i].position) for i in traced]
    pull = _pullback(name, backward, args, out, residuals, traced)
    return tree.unflatten(out_structure, list(trace.record(name, tuple(outputs), parents, pull)))


def _push(
    trace: TaylorTrace,
    name: str,
    args: tuple[Any, ...],
    out: Any,
    run: Callable[..., Any],
    backward: Callable[..., Any],
) -> Any:
    """The outputs ``out`` as series, by the transpose of ``backward``."""
    primals, out_structure = tree.flatten(out)
    leaves = tree.leaves(args)
    moving = [i for i, x in enumerate(leaves) if trace.owns(x)]

    def pullback(outputs: Sequence[Value]) -> Pull:
        plain, residuals = run(args)
        residuals = _with_outputs(residuals, plain, tree.unflatten(out_structure, list(outputs)), args)
        return _pullback(name, backward, args, out, residuals, moving)

    if not primals:
        return out
    types = [ArrayType(x.shape, x.dtype) for x in primals]
    found = trace.outputs(types, primals[0].device, lambda: primals, [leaves[i] for i in moving], pullback)
    return tree.unflatten(out_structure, list(found))
