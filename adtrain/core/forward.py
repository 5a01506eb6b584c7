"""jvp, jet, laplacian, jacfwd by Taylor mode; hvp, jacobian and hessian by the cheaper mode.

A pass of forward mode costs as much as a few evaluations of the function, and gives the derivatives of all results in
one direction. A pass of reverse mode gives all derivatives of one result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array, returned_no_array
from adtrain.core.autodiff import Recording, check_tuples, checked_position, differentiable, grad, matching_tangents
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.options import require_function, shown
from adtrain.core.taylor import Coefficient, TaylorTrace
from adtrain.core.trace import new_level
from adtrain.core.vmap import BatchTrace, BatchTracer, vmap


def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of ``f`` and the product of its Jacobian with a vector, by forward mode.

    It costs as much as two or three evaluations of ``f``, and keeps no residuals in memory. (R. E. Wengert: "A simple
    automatic derivative evaluation program", 1964; the rules are those of `adtrain.core.taylor`.)

    Args:
        primals: a tuple of the arguments of ``f``, one tree each.
        tangents: the vector, a tuple with the structure and shapes of ``primals``.

    Returns:
        ``(out, tangent_out)``, two trees of the same structure and shapes.

    Raises:
        ShapeError: primals and tangents differ in structure or shape.
        DTypeError: an argument or an output is not of floating point.
    """
    check_tuples("jvp", primals, tangents)
    out, (tangent_out,) = _pushed("jvp", f, primals, [matching_tangents("jvp", primals, tangents)], 1)
    return out, tangent_out


def jet(f: Callable[..., Any], primals: Sequence[Any], series: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The value of ``f`` and its derivatives of order 1 to K along a path, by Taylor mode.

    The path x(t) is given by its derivatives at 0. ``jet(f, (x,), [(v,), None])`` has the path x + t v, and gives the
    first and second directional derivatives of ``f`` in direction v. The work grows with K squared, and that of nested
    `jvp` or `grad` with 2 to the power of K. (A. Griewank, A. Walther: "Evaluating Derivatives", 2nd ed., ch. 13; J.
    Bettencourt, M. Johnson, D. Duvenaud: "Taylor-mode automatic differentiation for higher-order derivatives in JAX",
    2019.)

    Args:
        primals: a tuple of the arguments of ``f``, one tree each: x(0).
        series: for each order k from 1 to K the k-th derivative of x(t) at 0: a tuple with the structure and shapes of
            ``primals``, or None for zero.

    Returns:
        ``(out, series_out)``. ``series_out[k - 1]`` is the k-th derivative of f(x(t)) at 0, a tree with the structure
        and shapes of ``out``.

    Raises:
        OptionError: ``series`` is no list or tuple, or is empty.
        ShapeError: the structure or a shape differs from that of ``primals``.
        DTypeError: an argument or an output is not of floating point.
    """
    if not isinstance(series, (list, tuple)) or not series:
        raise OptionError(f"jet: series is {shown(series)}, expected a list of derivatives, one for each order")
    coefficients: list[Sequence[Coefficient]] = []
    for k, tangents in enumerate(series, 1):
        if tangents is None:
            coefficients.append([None for _ in tree.leaves(tuple(primals))])
        else:
            check_tuples("jet", primals, tangents)
            found = matching_tangents("jet", primals, tangents)
            coefficients.append([_scaled(x, 1 / math.factorial(k)) for x in found])
    out, orders = _pushed("jet", f, primals, coefficients, len(series))
    scales = (float(math.factorial(k)) for k in range(1, len(series) + 1))
    return out, [tree.map(partial(_scaled, scale=scale), y) for scale, y in zip(scales, orders, strict=True)]


def _scaled(x: Value, scale: float) -> Value:
    return x if scale == 1 else x * scale


def laplacian(f: Callable[..., Any], x: Any, directions: Any = None) -> tuple[Any, Any]:
    """The value of ``f`` and its Laplacian: the sum of the second derivatives by each element of ``x``.

    Collapsed Taylor mode propagates one first derivative for each direction, and one second derivative, that of the
    sum (F. Dangel et al.: "Collapsing Taylor mode automatic differentiation", 2025). Memory does not grow with the
    depth of ``f``. For a batch of points use `vmap`: ``ad.vmap(lambda x: ad.laplacian(f, x))(points)``.

    Args:
        f: function of one array that returns a tree of arrays.
        x: the point, an array of any shape.
        directions: None for the exact Laplacian, by the basis of all elements of ``x``. An array (S, *x.shape) of S
            random vectors estimates it by the mean of v' H v (M. F. Hutchinson, 1990); their elements must have mean 0
            and variance 1, such as random signs.

    Returns:
        ``(out, laplacian)``, two trees of the same structure and shapes.

    Raises:
        ShapeError: ``directions`` has another shape.
        DTypeError: ``x`` or an output is not of floating point.
    """
    value = differentiable("laplacian", "argument 0", x)
    if directions is None:
        vectors, scale = _basis(value), 2.0  # coefficient 2 is half of the second derivative
    else:
        vectors = directions if isinstance(directions, Value) else array(directions, device=value.device)
        if vectors.ndim != value.ndim + 1 or vectors.shape[1:] != value.shape or vectors.shape[0] == 0:
            expected = ", ".join(("S", *map(str, value.shape)))
            raise ShapeError(f"laplacian: found directions of shape {vectors.shape}, expected ({expected})")
        vectors, scale = vectors.astype(value.dtype), 2.0 / vectors.shape[0]
    members = BatchTrace(new_level(), vectors.shape[0])
    try:
        coefficients: list[list[Coefficient]] = [[BatchTracer(members, vectors)], [None]]
        out, (_, second) = _pushed("laplacian", f, (value,), coefficients, 2, members)
    finally:
        members.live = False
    return out, tree.map(partial(_scaled, scale=scale), second)


def _basis(x: Value) -> Value:
    """The unit vectors of all elements: (size, *shape)."""
    return array(np.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape), device=x.device)


def _pushed(
    name: str,
    f: Callable[..., Any],
    primals: Sequence[Any],
    coefficients: Sequence[Sequence[Coefficient]],
    order: int,
    directions: BatchTrace | None = None,
) -> tuple[Any, list[Any]]:
    """`taylor_coefficients` with zeros for None."""
    out, orders = taylor_coefficients(name, f, primals, coefficients, order, directions)
    leaves, structure = tree.flatten(out)
    filled = [
        [Value._ops.zeros_like(y) if x is None else x for x, y in zip(row, leaves, strict=True)] for row in orders
    ]
    return out, [tree.unflatten(structure, row) for row in filled]


def taylor_coefficients(
    name: str,
    f: Callable[..., Any],
    primals: Sequence[Any],
    coefficients: Sequence[Sequence[Coefficient]],
    order: int,
    directions: BatchTrace | None = None,
) -> tuple[Any, list[list[Coefficient]]]:
    """The value of ``f``, and for each order the Taylor coefficients of its arrays.

    Args:
        name: of the function that is called, for errors.
        coefficients: for each order those of the arrays of all arguments. An array without any is a constant.
        directions: see `TaylorTrace`.

    Raises:
        OptionError: ``f`` is no function.
        DTypeError: an argument or an output is not of floating point.
    """
    require_function(name, f)
    trace = TaylorTrace(new_level(), order, directions)
    try:
        given: list[Any] = []
        position = 0
        for i, argument in enumerate(primals):
            leaves, structure = tree.flatten(argument)
            values = [differentiable(name, f"argument {i}", x) for x in leaves]
            series = list(zip(*(row[position : position + len(values)] for row in coefficients), strict=True))
            moved = [
                x if all(c is None for c in each) else trace.input(x, each)
                for x, each in zip(values, series, strict=True)
            ]
            position += len(values)
            given.append(tree.unflatten(structure, moved))
        outputs, structure = tree.flatten(f(*given))
        for x in outputs:
            if not isinstance(x, Value):
                raise returned_no_array(name, x)
            differentiable(name, "the function's value", x)
        found = [[trace.coefficient(x, k) for x in outputs] for k in range(1, order + 1)]
        values = [trace.lower(x) for x in outputs]
    finally:
        trace.live = False
    return tree.unflatten(structure, values), found


def jacfwd(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns the Jacobian of ``f`` by forward mode: all first derivatives by argument ``argnums``.

    It runs ``f`` once for each array of the argument, with the tangents of all its elements at once, by `vmap`. It is
    cheaper than reverse mode if the argument has fewer elements than the output; `jacobian` chooses.

    Returns:
        As `jacobian`.

    Raises (when called):
        ShapeError: there is no argument ``argnums``.
        DTypeError: the argument or an output is not of floating point.
    """
    return _jacfwd("jacfwd", f, argnums)


def _jacfwd(name: str, f: Callable[..., Any], argnums: int) -> Callable[..., Any]:
    require_function(name, f)

    @wraps(f)
    def derivatives(*args: Any, **options: Any) -> Any:
        position = checked_position(name, argnums, len(args))
        leaves, structure = tree.flatten(args[position])
        values = [differentiable(name, f"argument {position}", x) for x in leaves]
        columns = []
        for i, x in enumerate(values):

            def along(v: Value, i: int = i) -> Any:
                def moved(*leaves: Any) -> Any:
                    return f(*args[:position], tree.unflatten(structure, leaves), *args[position + 1 :], **options)

                return _pushed(name, moved, values, [[v if j == i else None for j in range(len(values))]], 1)[1][0]

            found = vmap(along, out_axes=-1)(_basis(x))
            columns.append(tree.map(lambda y, s=x.shape: Value._ops.reshape(y, (*y.shape[:-1], *s)), found))
        if not columns:
            return tree.map(lambda y: tree.unflatten(structure, []), f(*args, **options))
        by_output = zip(*map(tree.leaves, columns), strict=True)
        return tree.unflatten(tree.flatten(columns[0])[1], [tree.unflatten(structure, list(x)) for x in by_output])

    return derivatives


def hvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The product of the Hessian of a scalar function with a vector, without computing the Hessian.

    It is the derivative of the gradient in a direction: forward mode over reverse mode (B. Pearlmutter: "Fast exact
    multiplication by the Hessian", Neural Computation 6, 1994).

    Args:
        f: returns a floating-point array of shape ().
        primals: a tuple of the arguments of ``f``, one tree each.
        tangents: the vector, a tuple with the structure and shapes of ``primals``.

    Returns:
        A tree with the structure and shapes of the argument; a tuple of trees for several arguments.

    Raises:
        ShapeError: the value is not of shape (), there are no arrays, or primals and tangents differ.
        DTypeError: an argument or the value is not of floating point.
    """
    check_tuples("hvp", primals, tangents)
    if not tree.leaves(primals):
        raise ShapeError("hvp: found no arrays to differentiate by")
    direction = matching_tangents("hvp", primals, tangents)
    _, (found,) = _pushed("hvp", grad(f, tuple(range(len(primals)))), primals, [direction], 1)
    return found[0] if len(primals) == 1 else found


def jacobian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns the Jacobian of ``f``: all first derivatives by argument ``argnums``.

    If the output has no more elements than the argument, it runs one backward pass for each array of the output, for
    all its elements at once, by `vmap`. So its memory is that of a backward pass times the number of elements.
    Otherwise it is `jacfwd`.

    Returns:
        A function with the arguments of ``f``. It returns the tree of outputs, with the tree of the argument in place
        of each output; its arrays have shape ``output.shape + argument.shape``.

    Raises (when called):
        ShapeError: there is no argument ``argnums``.
        DTypeError: the argument or an output is not of floating point.
    """

    require_function("jacobian", f)

    @wraps(f)
    def derivatives(*args: Any, **options: Any) -> Any:
        position = checked_position("jacobian", argnums, len(args))
        recording = Recording("jacobian", partial(f, **options), args, (position,), has_aux=False)
        for out in recording.primals_out:
            differentiable("jacobian", "the function's value", out)
        if sum(x.size for x in recording.primals_out) > sum(x.size for x in recording.inputs):
            return _jacfwd("jacobian", f, position)(*args, **options)
        per_output = []
        for k, out in enumerate(recording.primals_out):
            before, after = [None] * k, [None] * (len(recording.primals_out) - k - 1)

            def row(ct: Value, before: Any = before, after: Any = after) -> Any:
                return recording.pull_back([*before, ct, *after], retain=True)[0]

            rows = vmap(row)(_basis(out))
            per_output.append(tree.map(lambda r, shape=out.shape: Value._ops.reshape(r, (*shape, *r.shape[1:])), rows))
        return tree.unflatten(recording.out_structure, per_output)

    return derivatives


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns the Hessian of a scalar function: all second derivatives by argument ``argnums``.

    It is the Jacobian of the gradient, by forward mode over reverse mode, for all elements at once.

    Returns:
        A function with the arguments of ``f``. It returns the tree of the argument, with the same tree in place of each
        leaf; its arrays have shape ``leaf.shape + other_leaf.shape``.

    Raises (when called):
        ShapeError: the value is not of shape (), or there is no argument ``argnums``.
        DTypeError: the argument or the value is not of floating point.
    """
    return _jacfwd("hessian", grad(f, argnums), argnums)
