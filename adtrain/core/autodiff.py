"""grad and its relatives: transformations of functions over trees of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import islice
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError, DTypeError, ShapeError
from adtrain.core.reverse import ReverseTrace, ReverseTracer, walk_back
from adtrain.core.scope import phase
from adtrain.core.trace import new_level


class _Recording:
    """A function's value, and what is needed to walk back from it to some of its arguments."""

    def __init__(self, name: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], has_aux: bool):
        self.name = name
        trace = ReverseTrace(new_level())
        try:
            traced = list(args)
            self.inputs: list[ReverseTracer] = []
            self.arguments: list[tuple[tree.TreeDef, int]] = []  # structure and number of leaves of each
            for i in argnums:
                leaves, structure = tree.flatten(args[i])
                tracers = [trace.input(_differentiable(name, f"argument {i}", x)) for x in leaves]
                self.inputs += tracers
                self.arguments.append((structure, len(leaves)))
                traced[i] = tree.unflatten(structure, tracers)
            out = f(*traced)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise DTypeError(f"{name}: has_aux is set and the function returned no pair (value, aux)")
            out, aux = out if has_aux else (out, None)
        finally:
            trace.live = False
        self.outputs, self.out_structure = tree.flatten(out)
        for x in self.outputs:
            if not isinstance(x, Value):
                raise DTypeError(f"{name}: the function returned a {type(x).__name__}, expected arrays")
        self.primals_out: list[Value] = [trace.lower(x) for x in self.outputs]
        self.value = tree.unflatten(self.out_structure, self.primals_out)
        self.aux = tree.map(trace.lower, aux)
        self.trace = trace

    def pull(self, cts: Sequence[Any], keep: bool) -> tuple[Any, ...]:
        """Cotangents of the outputs to cotangent trees of the arguments."""
        seeds = [
            (x, ct)
            for x, ct in zip(self.outputs, cts, strict=True)
            if ct is not None and isinstance(x, ReverseTracer) and x.trace is self.trace
        ]
        if not keep:
            self.outputs = []
        found = walk_back(seeds, self.inputs, keep)
        zeros_like = Value._ops.zeros_like
        leaves = [zeros_like(x.primal) if ct is None else ct for x, ct in zip(self.inputs, found, strict=True)]
        remaining = iter(leaves)
        return tuple(tree.unflatten(structure, list(islice(remaining, count))) for structure, count in self.arguments)


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of ``f`` and its pullback, the transposed Jacobian as a function.

    Args:
        f: function of trees of floating-point arrays, to a tree of arrays (with ``has_aux``: a pair of that and a
            tree that is not differentiated).
        primals: the point, one tree an argument of ``f``.

    Returns:
        ``(out, pullback)``, with ``has_aux`` ``(out, pullback, aux)``. ``pullback(ct)`` takes a tree like ``out`` and
        returns a tuple with one tree an argument; it may be called more than once, and keeps the residuals alive.

    Raises:
        DTypeError: an argument holds no floating-point numbers.
    """
    recording = _Recording("vjp", f, primals, range(len(primals)), has_aux)

    def pullback(ct: Any) -> tuple[Any, ...]:
        return recording.pull(_cotangents(recording, ct), keep=True)

    return (recording.value, pullback, recording.aux) if has_aux else (recording.value, pullback)


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the value of ``f`` and its gradient, freeing each residual as it is used.

    Args:
        f: returns a floating-point array of shape () (with ``has_aux``: a pair of that and a tree passed through).
        argnums: the argument to differentiate, or several; each a tree of floating-point arrays.

    Returns:
        A function to ``(value, gradient)``, or ``((value, aux), gradient)``; the gradient is a tree like the
        argument, a tuple of trees for several. Keyword arguments go to ``f`` as they are.

    Raises:
        ShapeError: the value is not of shape (). DTypeError: an argument holds no floating-point numbers.
    """
    several = not isinstance(argnums, int)

    @wraps(f)
    def value_and_gradient(*args: Any, **options: Any) -> tuple[Any, Any]:
        positions = _positions("grad", argnums, len(args))
        recording = _Recording("grad", partial(f, **options), args, positions, has_aux)
        if len(recording.primals_out) != 1 or recording.primals_out[0].shape != ():
            shapes = ", ".join(str(x.shape) for x in recording.primals_out) or "nothing"
            raise ShapeError(f"grad: the function returned shape {shapes}, expected one scalar of shape ()")
        out = recording.primals_out[0]
        _differentiable("grad", "the function's value", out)
        with phase("backward"):
            seed = Value._ops.ones_like(out)
        grads = recording.pull([seed], keep=False)
        value = (recording.value, recording.aux) if has_aux else recording.value
        return value, grads if several else grads[0]

    return value_and_gradient


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradient of ``f`` (with ``has_aux``: and the tree passed through).

    Arguments and errors as `value_and_grad`.
    """
    both = value_and_grad(f, argnums, has_aux)

    @wraps(f)
    def gradient(*args: Any, **options: Any) -> Any:
        value, found = both(*args, **options)
        return (found, value[1]) if has_aux else found

    return gradient


def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of ``f`` and the derivative of it along a direction.

    The pullback is linear in its cotangent, and the transpose of it is the derivative wanted, so no rule beyond vjp
    is needed (J. Townsend: "A new trick for calculating Jacobian vector products", 2017).

    Args:
        primals: a tuple with one tree an argument.
        tangents: the direction, a tuple like ``primals``.

    Returns:
        ``(out, tangent_out)``, two trees of one structure.
    """
    _check_tuples("jvp", primals, tangents)
    out, pullback = vjp(f, *primals)
    zeros = tree.map(lambda x: Value._ops.zeros_like(_differentiable("jvp", "the function's value", x)), out)
    _, transpose = vjp(pullback, zeros)
    return out, transpose(tuple(tangents))[0]


def hvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The Hessian of a scalar function times a vector, without the Hessian.

    By symmetry it is the gradient of ``<grad f, tangents>`` (B. Pearlmutter: "Fast exact multiplication by the
    Hessian", Neural Computation 6, 1994).

    Args:
        primals: a tuple with one tree an argument.
        tangents: the vector, a tuple like ``primals``.

    Returns:
        A tree like the argument; for several arguments a tuple of trees.
    """
    _check_tuples("hvp", primals, tangents)
    positions = tuple(range(len(primals)))
    if not tree.leaves(primals):
        raise ShapeError("hvp: found no arrays to differentiate by")
    direction = [_matching("hvp", x, t) for x, t in zip(tree.leaves(primals), tree.leaves(tangents), strict=True)]

    def slope(*args: Any) -> Value:
        gradient = tree.leaves(grad(f, positions)(*args))
        products = [(g * t).sum() for g, t in zip(gradient, direction, strict=True)]
        return sum(products[1:], start=products[0])

    found = grad(slope, positions)(*primals)
    return found[0] if len(primals) == 1 else found


def jacobian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns all first derivatives, one walk backward for each element of the output.

    Returns:
        A function to a tree like the output of ``f``, in it trees like the argument, in them arrays of shape
        ``output.shape + argument.shape``.
    """

    @wraps(f)
    def derivatives(*args: Any) -> Any:
        (position,) = _positions("jacobian", argnums, len(args))
        recording = _Recording("jacobian", f, args, (position,), has_aux=False)
        ops = Value._ops
        per_output = []
        for k, out in enumerate(recording.primals_out):
            _differentiable("jacobian", "the function's value", out)
            rows = []
            for i in range(out.size):
                cts: list[Value | None] = [None] * len(recording.primals_out)
                basis = np.zeros(out.shape, out.dtype)
                basis.flat[i] = 1
                cts[k] = array(basis, device=out.device)
                rows.append(recording.pull(cts, keep=True)[0])
            per_output.append(
                tree.map(lambda *r, out=out: ops.reshape(ops.stack(r), (*out.shape, *r[0].shape)), *rows)
                if rows
                else tree.map(lambda x, out=out: ops.zeros((*out.shape, *x.shape), x.dtype, x.device), args[position])
            )
        return tree.unflatten(recording.out_structure, per_output)

    return derivatives


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns all second derivatives of a scalar function.

    Returns:
        A function to a tree like the argument, in it trees like the argument, in them arrays of shape
        ``leaf.shape + other_leaf.shape``.
    """
    return jacobian(grad(f, argnums), argnums)


def _positions(name: str, argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The positions of arguments that ``argnums`` names, negative ones counted from the end."""
    named = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in named:
        if not -count <= i < count:
            raise ShapeError(f"{name}: argnums names argument {i}, found {count} arguments")
    positions = tuple(i % count for i in named)
    if len(set(positions)) != len(positions):
        raise ShapeError(f"{name}: argnums {argnums} names an argument twice")
    return positions


def _differentiable(name: str, what: str, x: Any) -> Value:
    value = x if isinstance(x, Value) else array(x)
    if value.dtype.kind != "f":
        raise DTypeError(f"{name}: {what} is {value.dtype}, expected float32 or float64")
    return value


def _cotangents(recording: _Recording, ct: Any) -> list[Any]:
    leaves, structure = tree.flatten(ct)
    if structure != recording.out_structure:
        raise ShapeError(f"vjp: found a cotangent of structure {structure}, expected {recording.out_structure}")
    return [
        _matching("vjp", out, x) if out.dtype.kind == "f" else x
        for out, x in zip(recording.primals_out, leaves, strict=True)
    ]


def _matching(name: str, like: Any, x: Any) -> Value:
    """A cotangent or tangent as a value of the same shape, dtype and device as what it belongs to."""
    like = like if isinstance(like, Value) else array(like)
    value = x if isinstance(x, Value) else array(np.asarray(x, like.dtype), device=like.device)
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ShapeError(
            f"{name}: found a cotangent or tangent {value.dtype}{list(value.shape)}, "
            f"expected {like.dtype}{list(like.shape)}"
        )
    return value


def _check_tuples(name: str, primals: Sequence[Any], tangents: Sequence[Any]) -> None:
    for what, found in (("primals", primals), ("tangents", tangents)):
        if not isinstance(found, (tuple, list)):
            raise AdtrainError(
                f"{name}: {what} must be a tuple with one entry an argument, found {type(found).__name__}"
            )
    if tree.flatten(tuple(primals))[1] != tree.flatten(tuple(tangents))[1]:
        raise ShapeError(f"{name}: primals and tangents have different structures")
