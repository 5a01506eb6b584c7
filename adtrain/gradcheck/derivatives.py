"""Gradient checks in float64: reverse mode against central differences, and forward mode against reverse mode.

For f at x, a cotangent u and a direction v: ``<vjp(f, x)(u), v>`` is the slope of ``<u, f(x + h v)>`` in h at 0. Order
k checks the pullback of order k - 1 in the same way, as a function of its point and its cotangent. This checks the
derivatives of the rules too. (As `check_grads` in HIPS/autograd.)

Forward mode has no rules but those of reverse mode. So the two agree to rounding: the k-th derivative of ``<u, f(x + t
v)>`` in t, by Taylor mode and by k nested gradients.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.augment import Batch
from adtrain.cases import Case
from adtrain.config import Config, build
from adtrain.config.equation_terms import Equations
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.autodiff import grad, vjp
from adtrain.core.errors import AdtrainError
from adtrain.core.forward import jet
from adtrain.nn import Mode
from adtrain.ops import one_hot, reshape, rng_state
from adtrain.training import equations, network
from adtrain.training.preparation import with_class_weights

TOLERANCE = 1e-6
"""Largest relative error. A correct rule shows about 1e-9, the error of the differences at `STEP`."""

MODES_TOLERANCE = 1e-10
"""Largest relative difference between forward and reverse mode."""

STEP = 1e-5
"""About the cube root of the rounding error, where truncation and rounding of the difference balance."""

ROUNDING = 1e-3
"""A slope below this share of the function's value is compared relative to the value, because of its rounding."""

_NETWORK_BATCH = 4


class Row(NamedTuple):
    """The outcome of one check. ``error`` is relative, and infinite where the rule raised an error.

    ``mode`` is "reverse", against differences, or "forward", against reverse mode; empty for other checks.
    """

    op: str
    case: str
    order: int
    mode: str
    dtype: str
    device: str
    error: float
    tolerance: float
    passed: bool


def check_cases(cases: Iterable[Case], orders: Sequence[int] = (1, 2), device: str = "cpu") -> Iterator[Row]:
    """Two rows, for reverse and forward mode, for each case and each order up to `case.order`."""
    for case in cases:
        for order in orders:
            if order <= case.order:
                for mode in ("reverse", "forward"):
                    yield _row(case.op, case.name, order, mode, device, _case_error(case, order, mode, device))


def check_config(config: Config, device: str = "cpu") -> Iterator[Row]:
    """A row for each parameter of a network: the loss of one random batch with respect to it, in float64.

    The loss of equations is that of a few of their points.

    If h is large, a relu or max may switch between x - h v and x + h v. If h is small, rounding hides the slope. So the
    smallest error of three steps counts. A wrong rule is wrong at each step.
    """
    rng = np.random.default_rng(config.training.seed)
    model = build.model(config)
    shape = tuple(config.model.input_shape)
    inputs = np.random.default_rng(config.training.seed).normal(size=(_NETWORK_BATCH, *shape))
    params, state = model.init(shape, rng, np.dtype(np.float64), inputs)
    classes = model.output_shape(shape)[-1]
    batch = _NETWORK_BATCH, *shape
    if config.data.is_text:
        images, labels = (array(rng.integers(0, classes, size), device=device) for size in (batch, prod(batch)))
    else:
        images = array(rng.normal(size=batch), device=device)
        labels = array(rng.integers(0, classes, _NETWORK_BATCH), device=device)
    loss = build.loss(with_class_weights(config, labels.numpy(), classes))
    targets: Value = labels if build.takes_labels(config.loss) else one_hot(labels, classes, np.float64)
    leaves, structure = tree.flatten(tree.map(lambda x: x.to(device), params))
    state = tree.map(lambda x: x.to(device), state)
    mode = Mode(training=True, rng=rng_state(config.training.seed).to(device))

    def objective(*values: Value) -> Value:
        outputs, _ = model.forward(tree.unflatten(structure, values), state, images, mode)
        return loss(reshape(outputs, (-1, classes)), targets)

    if isinstance(config.loss, Equations):
        of_equations = _equation_loss(config, mode, device)

        def objective(*values: Value) -> Value:
            return of_equations(tree.unflatten(structure, values))

    height = abs(float(objective(*leaves)))
    gradients = grad(objective, tuple(range(len(leaves))))(*leaves)
    for i, path in enumerate(tree.paths(params)):

        def along(x: Any, i: int = i) -> float:
            return float(objective(*leaves[:i], array(x, device=device), *leaves[i + 1 :]))

        point, gradient = leaves[i].numpy(), gradients[i].numpy()
        direction = _direction(rng, point)
        slope, scale = float(np.vdot(gradient, direction)), float(np.abs(gradient * direction).sum())
        differences = [
            (along(point + h * direction) - along(point - h * direction)) / (2 * h)
            for h in (STEP, STEP / 10, STEP / 100)
        ]
        error = min(_relative_error(slope, difference, scale, height) for difference in differences)
        yield _row(path, config.name, 1, "reverse", device, error)


def _equation_loss(config: Config, mode: Mode, device: str) -> Callable[[Any], Value]:
    """The loss of equations at _NETWORK_BATCH of their points, as a function of the parameters."""
    exact = config.model_copy(update={"training": config.training.model_copy(update={"precision": "float64"})})
    points = equations.read_data(exact)
    task = network.task_of(exact, points.target_mean, points.target_std)
    net = equations.build(exact, points.mean, points.std, points.scale, task)
    parts = (np.asarray(x[:_NETWORK_BATCH], np.float64) for x in (points.train.images, points.train.labels))
    images, labels = (array(x, device=device) for x in parts)
    batch = Batch(images, labels, net.unit)
    return lambda params: net.training_loss(params, {}, batch, mode)[0]


def _row(op: str, case: str, order: int, mode: str, device: str, error: float) -> Row:
    tolerance = TOLERANCE if mode == "reverse" else MODES_TOLERANCE
    return Row(op, case, order, mode, "float64", device, error, tolerance, error <= tolerance)


def _case_error(case: Case, order: int, mode: str, device: str) -> float:
    drawn = case.sample()
    floats = [i for i, x in enumerate(drawn) if x.dtype.kind == "f"]
    fixed = [x.to(device) for x in drawn]

    def f(*values: Value) -> tuple[Value, ...]:
        args: list[Value] = list(fixed)
        for i, value in zip(floats, values, strict=True):
            args[i] = value
        out = case.f(*args)
        return tuple(x for x in (out if isinstance(out, tuple) else (out,)) if x.dtype.kind == "f")

    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    error = _error if mode == "reverse" else _error_of_modes
    try:
        return error(f, [drawn[i].numpy() for i in floats], order, rng, device)
    except AdtrainError:
        return math.inf


def _error(f: Callable[..., Any], point: list[np.ndarray], order: int, rng: np.random.Generator, device: str) -> float:
    def arrays(xs: Sequence[np.ndarray]) -> list[Value]:
        return [array(x, device=device) for x in xs]

    out, pullback = vjp(f, *arrays(point))
    cts = [rng.normal(size=x.shape) for x in out]
    if order > 1:

        def pulled(*args: Value) -> tuple[Any, ...]:
            return vjp(f, *args[: len(point)])[1](args[len(point) :])

        return _error(pulled, [*point, *cts], order - 1, rng, device)

    gradients = [g.numpy() for g in pullback(tuple(arrays(cts)))]
    directions = [_direction(rng, x) for x in point]

    def value(h: float) -> list[np.ndarray]:
        return [x.numpy() for x in f(*arrays([x + h * v for x, v in zip(point, directions, strict=True)]))]

    difference = sum(
        float(np.vdot(ct, high - low)) for ct, high, low in zip(cts, value(STEP), value(-STEP), strict=True)
    ) / (2 * STEP)
    products = [g * v for g, v in zip(gradients, directions, strict=True)]
    slope = sum(float(p.sum()) for p in products)
    height = sum(float(np.abs(ct * x.numpy()).sum()) for ct, x in zip(cts, out, strict=True))
    return _relative_error(slope, difference, sum(float(np.abs(p).sum()) for p in products), height)


def _error_of_modes(
    f: Callable[..., Any], point: list[np.ndarray], order: int, rng: np.random.Generator, device: str
) -> float:
    values, directions = ([array(x, device=device) for x in xs] for xs in (point, [_direction(rng, x) for x in point]))
    out, series = jet(f, tuple(values), [tuple(directions), *[None] * (order - 1)])
    cts = [array(rng.normal(size=x.shape), device=device) for x in out]

    def along(t: Value) -> Any:
        found = f(*(x + v * t for x, v in zip(values, directions, strict=True)))
        return reduce(operator.add, ((ct * y).sum() for ct, y in zip(cts, found, strict=True)))

    for _ in range(order):
        along = grad(along)
    forward = [float((ct * y).sum()) for ct, y in zip(cts, series[-1], strict=True)]
    scale, height = (sum(float(abs(ct * y).sum()) for ct, y in zip(cts, ys, strict=True)) for ys in (series[-1], out))
    return _relative_error(sum(forward), float(along(array(np.float64(0.0), device=device))), scale, height)


def _direction(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """A random direction with components of magnitude 0.5 to 1.5."""
    return rng.choice((-1.0, 1.0), x.shape) * rng.uniform(0.5, 1.5, x.shape)


def _relative_error(slope: float, difference: float, scale: float, height: float) -> float:
    """Relative to ``scale``, the sum of the magnitudes of the slope's terms; NaN counts as infinite.

    ``height`` is the magnitude of the function's value, whose rounding alone causes differences of about 1e-11 of it.
    """
    if slope == difference:
        return 0.0
    error = abs(slope - difference) / max(scale, abs(difference), ROUNDING * height)
    return error if math.isfinite(error) else math.inf
