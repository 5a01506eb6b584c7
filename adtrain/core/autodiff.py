"""grad, vjp, jvp, hvp, jacobian, hessian: they take and return functions of trees of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import ShapeError
from adtrain.core.options import require_function
from adtrain.core.recording import Recording, check_tuples, checked_positions, differentiable, matching_tangents
from adtrain.core.scope import phase
from adtrain.core.vmap import vmap


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of ``f`` and its pullback: the function that multiplies a cotangent by the transposed Jacobian.

    Args:
        f: function of trees of floating-point arrays that returns a tree of arrays; with ``has_aux`` a pair of such a
            tree and one that is not differentiated.
        primals: the arguments of ``f``, one tree each.

    Returns:
        ``(out, pullback)``, with ``has_aux`` ``(out, pullback, aux)``. ``pullback(ct)`` takes a tree with the structure
        and shapes of ``out``. It returns a tuple of trees with those of ``primals``. It may be called more than once,
        and holds the residuals in memory.

    Raises:
        DTypeError: an argument is not of floating point, or ``f`` returns something other than arrays.
        ShapeError (by ``pullback``): ``ct`` does not have the structure, shapes and dtypes of ``out``.
    """
    require_function("vjp", f)
    recording = Recording("vjp", f, primals, range(len(primals)), has_aux)
    return (recording.value, recording.pullback, recording.aux) if has_aux else (recording.value, recording.pullback)


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the value of ``f`` and its gradient.

    Args:
        f: returns a floating-point array of shape (); with ``has_aux`` a pair of that and a tree that is not
            differentiated.
        argnums: position of the argument to differentiate by, or several positions. Each argument is a tree of
            floating-point arrays.

    Returns:
        A function with the arguments of ``f`` that returns ``(value, gradient)``, with ``has_aux``
        ``((value, aux), gradient)``. The gradient is a tree with the structure and shapes of the argument, or a tuple
        of such trees. Keyword arguments are passed to ``f`` and not differentiated.

    Raises (when called):
        ShapeError: the value is not of shape (), or ``argnums`` names no argument or one twice.
        DTypeError: an argument or the value is not of floating point.
    """
    require_function("grad", f)
    several = not isinstance(argnums, (int, np.integer))

    @wraps(f)
    def value_and_gradient(*args: Any, **options: Any) -> tuple[Any, Any]:
        positions = checked_positions("grad", argnums, len(args))
        recording = Recording("grad", partial(f, **options), args, positions, has_aux)
        if len(recording.primals_out) != 1 or recording.primals_out[0].shape != ():
            shapes = ", ".join(str(x.shape) for x in recording.primals_out)
            found = f"shape {shapes}" if shapes else "no array"
            raise ShapeError(f"grad: the function returned {found}, expected one scalar of shape ()")
        out = recording.primals_out[0]
        differentiable("grad", "the function's value", out)
        with phase("backward"):
            seed = Value._ops.ones_like(out)
        grads = recording.pull_back([seed], retain=False)
        value = (recording.value, recording.aux) if has_aux else recording.value
        return value, grads if several else grads[0]

    return value_and_gradient


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradient of ``f``; with ``has_aux`` ``(gradient, aux)``.

    Arguments and errors are those of `value_and_grad`.
    """
    both = value_and_grad(f, argnums, has_aux)

    @wraps(f)
    def gradient(*args: Any, **options: Any) -> Any:
        value, found = both(*args, **options)
        return (found, value[1]) if has_aux else found

    return gradient


def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of ``f`` and the product of its Jacobian with a vector (forward mode).

    The pullback is linear in the cotangent. Its transpose is this product, so `vjp` is applied twice (J. Townsend: "A
    new trick for calculating Jacobian vector products", 2017).

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
    require_function("jvp", f)
    recording = Recording("jvp", f, primals, range(len(primals)), has_aux=False)
    zeros = tree.map(lambda x: Value._ops.zeros_like(differentiable("jvp", "the function's value", x)), recording.value)
    _, transpose = vjp(recording.pullback, zeros)
    _, structure = tree.flatten(tuple(primals))
    return recording.value, transpose(tree.unflatten(structure, matching_tangents("jvp", primals, tangents)))[0]


def hvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The product of the Hessian of a scalar function with a vector, without computing the Hessian.

    It is the gradient of ``<grad f, tangents>`` (B. Pearlmutter: "Fast exact multiplication by the Hessian", Neural
    Computation 6, 1994).

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
    positions = tuple(range(len(primals)))
    if not tree.leaves(primals):
        raise ShapeError("hvp: found no arrays to differentiate by")
    direction = matching_tangents("hvp", primals, tangents)

    def slope(*args: Any) -> Value:
        gradient = tree.leaves(grad(f, positions)(*args))
        products = [(g * t).sum() for g, t in zip(gradient, direction, strict=True)]
        return sum(products[1:], start=products[0])

    found = grad(slope, positions)(*primals)
    return found[0] if len(primals) == 1 else found


def jacobian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns the Jacobian of ``f``: all first derivatives by argument ``argnums``.

    It runs one backward pass for each array of the output, for all its elements at once, by `vmap`. So its memory is
    that of a backward pass times the number of elements.

    Returns:
        A function with the arguments of ``f``. It returns the tree of outputs, with the tree of the argument in place
        of each output; its arrays have shape ``output.shape + argument.shape``.

    Raises (when called):
        ShapeError: there is no argument ``argnums``.
        DTypeError: the argument or an output is not of floating point.
    """

    require_function("jacobian", f)

    @wraps(f)
    def derivatives(*args: Any) -> Any:
        (position,) = checked_positions("jacobian", argnums, len(args))
        recording = Recording("jacobian", f, args, (position,), has_aux=False)
        per_output = []
        for k, out in enumerate(recording.primals_out):
            differentiable("jacobian", "the function's value", out)
            before, after = [None] * k, [None] * (len(recording.primals_out) - k - 1)

            def row(ct: Value, before: Any = before, after: Any = after) -> Any:
                return recording.pull_back([*before, ct, *after], retain=True)[0]

            basis = np.eye(out.size, dtype=out.dtype).reshape(out.size, *out.shape)
            rows = vmap(row)(array(basis, device=out.device))
            per_output.append(tree.map(lambda r, shape=out.shape: Value._ops.reshape(r, (*shape, *r.shape[1:])), rows))
        return tree.unflatten(recording.out_structure, per_output)

    return derivatives


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns the Hessian of a scalar function: all second derivatives by argument ``argnums``.

    Returns:
        A function with the arguments of ``f``. It returns the tree of the argument, with the same tree in place of each
        leaf; its arrays have shape ``leaf.shape + other_leaf.shape``.

    Raises (when called):
        ShapeError: the value is not of shape (), or there is no argument ``argnums``.
        DTypeError: the argument or the value is not of floating point.
    """
    return jacobian(grad(f, argnums), argnums)
