"""Curvature of a loss: gradients of single examples, the largest eigenvalues of its Hessian, and metrics of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce, wraps
from typing import Any, NamedTuple

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.autodiff import checked_position, grad
from adtrain.core.errors import AdtrainError, OptionError, ShapeError
from adtrain.core.forward import hvp
from adtrain.core.options import is_integer, require_function, shown
from adtrain.core.precision import FULL, matmul_precision
from adtrain.core.staging import stage
from adtrain.core.trace import phase
from adtrain.core.vmap import vmap
from adtrain.curvature.passes import drop_unit_axes, factor_norms
from adtrain.jitted import jit
from adtrain.ops import concatenate, matmul, reshape, sqrt, where
from adtrain.option_types import Size
from adtrain.passes import SIMPLIFY, fuse, plan_memory
from adtrain.passes.simplify import merge_common_subexpressions

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
    def gradients(*args: Any, **options: Any) -> Any:
        shared = checked_position("per_example_grad", argnums, len(args))
        return vmap(grad(f, shared), [None if i == shared else 0 for i in range(len(args))])(*args, **options)

    return gradients


def top_eigenvalues(
    f: Callable[..., Any], count: int = 5, tolerance: float = 1e-3, seed: int = 0
) -> Callable[..., np.ndarray]:
    """A function that returns the eigenvalues of largest magnitude of the Hessian of ``f``, without the Hessian.

    Lanczos' method with full reorthogonalisation (C. Lanczos, 1950; G. Golub, C. Van Loan: "Matrix Computations", 4th
    ed., ch. 10). Each step multiplies the Hessian by a vector, by `hvp`, in a compiled Program. Memory has one vector
    like the argument for each of MOST_STEPS steps, or for each element of the argument if these are fewer.

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
        v: Value = array((start / np.linalg.norm(start)).astype(dtype), device=device)
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


EXAMPLES, CHUNK_BYTES = 512, 1 << 29
"""The most examples of a metric, and the most memory for the gradients of those that are computed at a time."""
FACTORED = (*SIMPLIFY, factor_norms, drop_unit_axes, merge_common_subexpressions)
"""The passes after which few gradients of single examples are in memory."""


class Curvature:
    """Curvature of a loss ``loss(params, others, images, labels)``, by Programs that are compiled at the first use."""

    def __init__(self, loss: Callable[[Any, Any, Value, Value], Value]) -> None:
        self.loss = loss
        self.norms_of_chunk = stage(self._norms_of, (*FACTORED, fuse))
        self._sums = stage(self._sums_of, (*FACTORED, fuse))
        self._sizes: dict[tuple[str, int], int] = {}
        self._eigenvalues: dict[int, Callable[..., np.ndarray]] = {}

    def loss_of_one(self, params: Any, others: Any, image: Value, label: Value) -> Value:
        """The loss of one example; `image` and `label` have no axis of examples."""
        return self.loss(params, others, *(reshape(x, (1, *x.shape)) for x in (image, label)))

    def _gradients(self, params: Any, others: Any, images: Value, labels: Value) -> Any:
        """The gradient of each example."""

        def of_one(params: Any, image: Value, label: Value) -> Value:
            return self.loss_of_one(params, others, image, label)

        return per_example_grad(of_one)(params, images, labels)

    def _norms_of(self, *chunk: Any) -> Value:
        """The norm of the gradient of each example."""
        return _norms(self._gradients(*chunk))

    def _sums_of(self, *chunk: Any) -> tuple[Value, Any]:
        """The norms, and the sum of the gradients."""
        grads = self._gradients(*chunk)
        return _norms(grads), tree.map(lambda g: g.sum(0), grads)

    def norms(self, params: Any, others: Any, images: Value, labels: Value) -> np.ndarray:
        """The norm of each example's gradient."""
        chunks = self._chunks(self._norms_of, params, others, images, labels)
        found = [self.norms_of_chunk(params, others, *chunk).numpy() for chunk in chunks]
        return np.concatenate(found).astype(np.float64)

    def norms_and_mean(self, params: Any, others: Any, images: Value, labels: Value) -> tuple[np.ndarray, float]:
        """The norm of each example's gradient, and the norm of their mean."""
        norms, totals = list[np.ndarray](), list[Any]()
        for chunk in self._chunks(self._sums_of, params, others, images, labels):
            each, total = self._sums(params, others, *chunk)
            norms.append(each.numpy().astype(np.float64))
            totals = [total] if not totals else [tree.map(lambda x, y: x + y, totals[0], total)]
        mean = [leaf.numpy().astype(np.float64) / len(images) for leaf in tree.leaves(totals[0])]
        return np.concatenate(norms), math.sqrt(sum(float((x * x).sum()) for x in mean))

    def _chunks(
        self, f: Callable[..., Any], params: Any, others: Any, images: Value, labels: Value
    ) -> list[tuple[Value, Value]]:
        """The examples in parts for `f`, whose memory grows with their number."""
        count = len(images)
        if (f.__name__, count) not in self._sizes:
            program = stage(f, FACTORED).program(params, others, images, labels)
            of_one = max(1, plan_memory(program).arena_bytes // count)
            self._sizes[f.__name__, count] = max(1, min(count, CHUNK_BYTES // of_one))
        size = self._sizes[f.__name__, count]
        return [(images[i : i + size], labels[i : i + size]) for i in range(0, count, size)]

    def eigenvalues(self, count: int, params: Any, others: Any, images: Value, labels: Value) -> np.ndarray:
        """The eigenvalues of largest magnitude of the Hessian of the mean loss."""
        if count not in self._eigenvalues:
            self._eigenvalues[count] = top_eigenvalues(self.loss, count)
        return self._eigenvalues[count](params, others, images, labels)


def _norms(grads: Any) -> Value:
    """The norms of gradients of examples, which are along the first axis of each array."""
    with phase("backward"):  # that of the gradients, so that both can be one kernel
        squares = [(g * g).reshape(g.shape[0], -1).sum(1) for g in tree.leaves(grads)]
        return sqrt(reduce(lambda x, y: x + y, squares))


class LossAt(NamedTuple):
    """A loss at the parameters of an epoch: what the metrics of `METRICS` are computed from."""

    curvature: Curvature
    params: Any
    others: Any
    images: Value
    labels: Value


def gradient_noise(found: LossAt) -> float:
    """The variance of the examples' gradients, summed over the parameters, over the squared norm of their mean.

    It is a batch size: far smaller batches have noisy gradients, and far larger ones hardly better ones (S. McCandlish
    et al.: "An empirical model of large-batch training", 2018).
    """
    norms, mean = found.curvature.norms_and_mean(*found[1:])
    covariance = max(float((norms**2).sum()) - len(norms) * mean**2, 0.0) / max(len(norms) - 1, 1)
    return covariance / max(mean**2, float(np.finfo(np.float32).tiny))


def per_example_norm(found: LossAt) -> float:
    """The mean over the examples of the norm of the gradient of an example's loss."""
    return float(found.curvature.norms(*found[1:]).mean())


def leading(found: LossAt, count: Size = 5) -> list[float]:
    """The eigenvalues of largest magnitude of the Hessian of the mean loss; as a single number the first of them."""
    return [float(x) for x in found.curvature.eigenvalues(count, *found[1:])]


METRICS: dict[str, Callable[..., Any]] = {
    "gradient_noise": gradient_noise,
    "per_example_norm": per_example_norm,
    "top_eigenvalues": leading,
}
"""Metrics of `training.metrics` that need the loss; each takes a `LossAt`. Of all, lower values are better."""


def is_of_loss(metric: Any) -> bool:
    """Whether a metric, with its options or without, is one of `METRICS`."""
    return getattr(metric, "func", metric) in METRICS.values()
