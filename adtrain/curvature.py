"""Curvature of a loss: gradients of single examples, and the largest eigenvalues of its Hessian."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.autodiff import grad
from adtrain.core.errors import AdtrainError, OptionError, ShapeError
from adtrain.core.forward import hvp
from adtrain.core.options import is_integer, require_function, shown
from adtrain.core.precision import FULL, matmul_precision
from adtrain.core.vmap import vmap
from adtrain.jitted import jit
from adtrain.ops import concatenate, matmul, reshape, sqrt, where

STEPS_FOR_ONE, MOST_STEPS = 10, 300
"""Lanczos steps for each eigenvalue before the first test of convergence, and the most steps."""


def per_example_grad(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """A function that returns the gradient of ``f`` for each example, by reverse mode under `vmap`.

    Args:
        f: loss of one example: ``f(params, *example)`` of shape ().
        argnums: position of the argument to differentiate by, which all examples share.

    Returns:
        A function with the arguments of ``f``, in which all others have the examples along axis 0. It returns the tree
        of the argument; its arrays have shape ``(examples, *leaf.shape)``.

    Raises (when called):
        ShapeError: the value is not of shape (), or arguments have different numbers of examples.
        DTypeError: the argument or the value is not of floating point.
    """
    require_function("per_example_grad", f)

    @wraps(f)
    def gradients(*args: Any) -> Any:
        shared = argnums % len(args) if args else argnums
        return vmap(grad(f, argnums), [None if i == shared else 0 for i in range(len(args))])(*args)

    return gradients


def top_eigenvalues(
    f: Callable[..., Any], count: int = 5, tolerance: float = 1e-3, seed: int = 0
) -> Callable[..., np.ndarray]:
    """A function that returns the eigenvalues of largest magnitude of the Hessian of ``f``, without the Hessian.

    Lanczos' method with full reorthogonalisation (C. Lanczos, 1950; G. Golub, C. Van Loan: "Matrix Computations", 4th
    ed., ch. 10). Each step multiplies the Hessian by a vector, by `hvp`, in a compiled Program. Memory has one vector
    like the argument for each step.

    Args:
        f: ``f(x, *args)`` of shape (). The Hessian is by ``x``, a tree of arrays of one dtype.
        count: how many eigenvalues.
        tolerance: the largest error of each, relative to the largest eigenvalue.
        seed: of the random first vector.

    Returns:
        A function ``(x, *args)``. It returns ``count`` eigenvalues, float64, by decreasing magnitude.

    Raises (when called):
        OptionError: ``x`` has fewer elements than ``count``.
        AdtrainError: the eigenvalues have not converged after 300 steps, or a product is not finite.
    """
    require_function("top_eigenvalues", f)
    if not is_integer(count, 1):
        raise OptionError(f"top_eigenvalues: count is {shown(count)}, expected an integer, at least 1")

    def step(basis: Value, v: Value, row: Value, x: Any, args: tuple[Any, ...]) -> tuple[Value, Value, Value, Value]:
        """The basis with another row, the next vector and its length, and the diagonal element."""
        basis = where(row, v, basis)
        direction = _unflatten(x, v)
        w = _flatten(hvp(lambda x: f(x, *args), (x,), (direction,)))
        diagonal = (w * v).sum()
        with matmul_precision(FULL):
            for _ in range(2):  # once leaves rounding errors
                w = w - matmul(matmul(basis, w), basis)
        length = sqrt((w * w).sum())
        return basis, w / where(length > 0, length, 1.0), diagonal, length

    compiled = jit(step, donate_argnums=0)

    @wraps(f)
    def eigenvalues(x: Any, *args: Any) -> np.ndarray:
        leaves = [leaf if isinstance(leaf, Value) else array(leaf) for leaf in tree.leaves(x)]
        x = tree.unflatten(tree.flatten(x)[1], leaves)
        size = sum(leaf.size for leaf in leaves)
        if size < count:
            raise OptionError(f"top_eigenvalues: found {size} elements, expected at least {count}")
        if len({leaf.dtype for leaf in leaves}) > 1:
            raise ShapeError("top_eigenvalues: found arrays of several dtypes, expected one")
        dtype, device, rng = leaves[0].dtype, leaves[0].device, np.random.default_rng(seed)
        most = min(size, MOST_STEPS)
        basis = array(np.zeros((most, size), dtype), device=device)
        start = rng.normal(size=size)
        v = array((start / np.linalg.norm(start)).astype(dtype), device=device)
        diagonal, lengths = list[float](), list[float]()
        for i in range(most):
            row = array((np.arange(most) == i)[:, None], device=device)
            basis, v, alpha, beta = compiled(basis, v, row, x, args)
            diagonal.append(alpha.item())
            lengths.append(beta.item())
            if not math.isfinite(diagonal[-1] + lengths[-1]):
                raise AdtrainError("top_eigenvalues: a product with the Hessian is not finite")
            scale = max(map(abs, (*diagonal, *lengths)))
            if (
                i + 1 < size and lengths[-1] <= float(np.finfo(dtype).eps) * scale
            ):  # the vectors span all that the Hessian maps to
                lengths[-1] = 0.0
                v = _orthogonal(rng, basis, i + 1, dtype, device)
            if i + 1 == size or (i + 1 >= STEPS_FOR_ONE * count and (i + 1) % 10 == 0):
                found, errors = _ritz(diagonal, lengths, count)
                if i + 1 == size or max(errors) <= tolerance * abs(found[0]):
                    return found
        raise AdtrainError(f"top_eigenvalues: not converged after {most} steps; raise tolerance, or ask for fewer")

    return eigenvalues


def _ritz(diagonal: list[float], lengths: list[float], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of the tridiagonal matrix, by decreasing magnitude, and bounds of their errors."""
    matrix = np.diag(diagonal) + np.diag(lengths[:-1], 1) + np.diag(lengths[:-1], -1)
    values, vectors = np.linalg.eigh(matrix)
    order = np.argsort(-np.abs(values))[:count]
    return values[order], np.abs(lengths[-1] * vectors[-1, order])


def _orthogonal(rng: np.random.Generator, basis: Value, rows: int, dtype: np.dtype, device: str) -> Value:
    """A random unit vector orthogonal to the first rows."""
    known, v = basis.numpy()[:rows].astype(np.float64), rng.normal(size=basis.shape[1])
    for _ in range(2):
        v -= known.T @ (known @ v)
    return array((v / float(np.linalg.norm(v))).astype(dtype), device=device)


def _flatten(x: Any) -> Value:
    """All elements of a tree as one vector."""
    return concatenate([reshape(leaf, (-1,)) for leaf in tree.leaves(x)])


def _unflatten(like: Any, v: Value) -> Any:
    """The elements of a vector as a tree like another one."""
    leaves, structure = tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        found.append(reshape(v[start : start + leaf.size], leaf.shape))
        start += leaf.size
    return tree.unflatten(structure, found)
