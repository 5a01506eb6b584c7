"""grad, value_and_grad and vjp, by reverse mode: they take and return functions of trees of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.options import require_function
from adtrain.core.recording import Recording, checked_positions, differentiable
from adtrain.core.scope import phase


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
