"""Checks of derivatives, of the axes that primitives state, and of a user's operations.

Gradient checks are in float64. For f at x, a cotangent u and a direction v: ``<vjp(f, x)(u), v>`` is the slope of
``<u, f(x + h v)>`` in h at 0. Order k checks the pullback of order k - 1 in the same way, as a function of its point
and its cotangent. This checks the derivatives of the rules too. (As `check_grads` in HIPS/autograd.)

Forward mode has no rules but those of reverse mode. So the two agree to rounding: the k-th derivative of ``<u, f(x + t
v)>`` in t, by Taylor mode and by k nested gradients.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import inf, isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.augment import Batch
from adtrain.cases import Case
from adtrain.config import Config, build
from adtrain.config.specs import Equations
from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import grad, vjp
from adtrain.core.axes import Axes, Labels
from adtrain.core.errors import AdtrainError, OptionError, ShapeError
from adtrain.core.forward import jet
from adtrain.core.kernel import has_kernels
from adtrain.core.memory import OutOfBounds, poisoned
from adtrain.core.primitive import Primitive
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.core.vmap import vmap
from adtrain.custom_ops import OWN_OPS, CustomOp, OwnOp
from adtrain.nn import Mode
from adtrain.ops import one_hot, reshape, rng_state
from adtrain.passes import ALL
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

MOVED = 1e-3
"""How far parameters that begin at 0 are moved from there: more than `STEP`, so the differences do not cross 0."""

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

    The loss of equations is that of a few of their points. Parameters that begin at 0 are moved by about `MOVED`: with
    biases of 0, an example whose inputs to a relu layer are 0 is at the kink of the relu after it.

    If h is large, a relu or max may switch between x - h v and x + h v. If h is small, rounding hides the slope. So the
    smallest error of three steps counts. A wrong rule is wrong at each step.
    """
    rng = np.random.default_rng(config.training.seed)
    model = build.model(config)
    shape = tuple(config.model.input_shape)
    inputs = np.random.default_rng(config.training.seed).normal(size=(_NETWORK_BATCH, *shape))
    params, state = model.init(shape, rng, np.dtype(np.float64), inputs)
    params = tree.map(lambda x: _away_from_zero(x.numpy(), np.random.default_rng(config.training.seed)), params)
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


def _away_from_zero(x: np.ndarray, rng: np.random.Generator) -> Array:
    return array(np.where(x == 0, MOVED * _direction(rng, x), x))


def _equation_loss(config: Config, mode: Mode, device: str) -> Callable[[Any], Value]:
    """The loss of equations at _NETWORK_BATCH of their points, as a function of the parameters."""
    exact = config.changed("training", precision="float64")
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
        return inf


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
    return error if isfinite(error) else inf


@dataclass(frozen=True)
class AxesCheck:
    """Checks, by execution, what a primitive states about the axes of these arguments and of its results.

    If the arguments are gathered along the axes of a label, the results with the label are gathered likewise: index i
    of these is the same function of index i of those. A label of arguments alone is added: the results for each index
    alone, repeated along the axis, sum to the result times the length. A label of results alone repeats them.
    """

    primitive: Primitive
    args: Sequence[np.ndarray]
    params: Mapping[str, Any]

    @cached_property
    def axes(self) -> Axes:
        return self.primitive.related_axes([ArrayType(x.shape, x.dtype) for x in self.args], self.params)

    @cached_property
    def results(self) -> Sequence[np.ndarray]:
        return self._run(self.args)

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """The length of each label.

        Raises:
            ShapeError: two axes with a label have different lengths.
        """
        labels = [*self.axes.arguments, *self.axes.results]
        shapes = [x.shape for x in (*self.args, *self.results)]
        found: dict[str, int] = {}
        for label, n in (pair for pairs in zip(labels, shapes, strict=True) for pair in zip(*pairs, strict=True)):
            if len(label) == 1 and found.setdefault(label, n) != n:
                raise ShapeError(f"{self.primitive.name}: axes {label!r} have lengths {found[label]} and {n}")
        return found

    def errors(self) -> dict[str, float]:
        """For each label the largest difference from what it says, relative to the largest element."""
        return {label: self._error(label, n) for label, n in self.lengths.items() if n}

    def _error(self, label: str, length: int) -> float:
        if label in self.axes.added:
            alone = [self._gathered(label, np.full(length, i)) for i in range(length)]
            by_result = zip(zip(*alone, strict=True), self.results, strict=True)
            sums = [(np.sum(xs, axis=0, dtype=y.dtype), y * y.dtype.type(length), xs) for xs, y in by_result]
            return max(_relative_difference(total, expected, *xs) for total, expected, xs in sums)
        indices = np.random.default_rng(0).integers(length, size=length)
        found = zip(self._gathered(label, indices), self.results, self.axes.results, strict=True)
        pairs = [(x, self._take(y, own, label, indices)) for x, y, own in found if label in "".join(own)]
        return max(_relative_difference(x, expected) for x, expected in pairs)

    def _gathered(self, label: str, indices: np.ndarray) -> Sequence[np.ndarray]:
        """The results for arguments that are gathered along a label."""
        pairs = zip(self.args, self.axes.arguments, strict=True)
        return self._run([self._take(x, labels, label, indices) for x, labels in pairs])

    def _take(self, x: np.ndarray, labels: Labels, label: str, indices: np.ndarray) -> np.ndarray:
        """``x`` gathered along the axis with a label, which may be a part of an axis."""
        axes = zip(labels, x.shape, strict=True)
        parts = [(part, self.lengths.get(part, n)) for own, n in axes for part in own or [""]]
        names, shape = [name for name, _ in parts], [n for _, n in parts]
        return np.take(x.reshape(shape), indices, names.index(label)).reshape(x.shape) if label in names else x

    def _run(self, args: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with np.errstate(all="ignore"):
            found = self.primitive.reference(*args, **self.params)
        return [np.asarray(x) for x in (found if isinstance(found, tuple) else (found,))]


def _relative_difference(found: np.ndarray, expected: np.ndarray, *summands: np.ndarray) -> float:
    """The largest difference, relative to the largest element, also of the summands."""
    same = (found == expected) | ((found != found) & (expected != expected))
    if not np.isfinite(found[~same]).all():
        return inf
    finite = (np.abs(x[np.isfinite(x)], dtype=np.float64).max(initial=0.0) for x in (expected, *summands))
    return float(np.abs(found[~same].astype(np.float64) - expected[~same]).max(initial=0.0)) / (max(finite) or 1.0)


KERNEL_TOLERANCE = {"float32": 3e-5, "float64": 1e-11}
"""Largest difference from the NumPy reference in float64, relative to its largest element."""

VMAP_TOLERANCE = 1e-11
"""The same between `vmap` and calls of the members, and between results and what `axes` says about them."""


def check_own_ops(ops: Iterable[OwnOp], orders: Sequence[int], device: str) -> Iterator[Row]:
    """Rows for the derivatives of each operation, for its ``axes`` and rule ``vmap``, and for its kernels where it has
    some for the device.

    A function of public operations has the kernels of its compiled Program. Kernels run in a compiled Program in
    poisoned memory. The rows "gradient" run those of the derivative too.

    Raises:
        OptionError: an operation has no ``samples``.
        AdtrainError: a kernel wrote outside its output, or there is no compiler for it.
    """
    for op in ops:
        case = _case(op)
        yield from check_cases([case], orders, device)
        if op.custom is not None and op.custom.primitive.axes is not None:
            off = max(AxesCheck(op.custom.primitive, _drawn(op), {}).errors().values(), default=0.0)
            yield Row(op.name, "axes", 0, "", "float64", device, off, VMAP_TOLERANCE, off <= VMAP_TOLERANCE)
        if op.custom is not None and (op.custom.primitive.batch or op.custom.primitive.axes) is not None:
            off = _vmap_error(op, device)
            yield Row(op.name, "vmap", 0, "", "float64", device, off, VMAP_TOLERANCE, off <= VMAP_TOLERANCE)
        if op.custom is None or has_kernels(op.name, "cuda" if device == "gpu" else "cpu"):
            for dtype, tolerance in KERNEL_TOLERANCE.items():
                for name, f in (("kernel", case.f), ("gradient", _gradient(case)))[: 1 + bool(case.order)]:
                    error = _kernel_error(f, case, dtype, device)
                    if error is not None:
                        passed = error <= tolerance
                        yield Row(case.op, f"{name} {dtype}", 0, "", dtype, device, error, tolerance, passed)
                    elif op.custom is not None:
                        raise AdtrainError(f"{op.place}: the kernel of {op.name} needs a C compiler to be checked")


def _drawn(op: OwnOp, seed: int = 0) -> list[np.ndarray]:
    """The samples of an operation, floats in float64."""
    if op.samples is None:
        raise OptionError(f"{op.place}: custom_op {op.name} has no samples to check it with; give samples=")
    drawn = [np.asarray(x) for x in op.samples(np.random.default_rng(seed))]
    return [x.astype(np.float64) if x.dtype.kind == "f" else x for x in drawn]


def _case(op: OwnOp) -> Case:
    """The operation as a function of the samples that have a derivative; the other samples are constants."""
    drawn = _drawn(op)
    smooth = _differentiable(op.custom, drawn)

    def f(*values: Value) -> Any:
        given = iter(values)
        device = values[0].device if values else "cpu"
        dtype = values[0].dtype if values else np.dtype(np.float64)
        return op.f(*(next(given) if i in smooth else _constant(x, dtype, device) for i, x in enumerate(drawn)))

    inputs = tuple((lambda rng, x=drawn[i]: x) for i in smooth)
    return Case(op.name, "samples", f, inputs, order=2 if smooth else 0)


def _constant(x: np.ndarray, dtype: np.dtype, device: str) -> Value:
    return array(x.astype(dtype) if x.dtype.kind == "f" else x, device=device)


def _differentiable(op: CustomOp | None, drawn: Sequence[np.ndarray]) -> list[int]:
    """The floating-point arguments; of a custom operation those for which ``vjp`` returns a cotangent."""
    if op is None:
        return [i for i, x in enumerate(drawn) if x.dtype.kind == "f"]
    rule = op.primitive.joint_vjp
    if not op.has_vjp:
        return []
    assert rule is not None
    args = [array(x) for x in drawn]
    out = op.primitive.output_types(args, {})
    values = [array(np.zeros(y.shape, y.dtype)) for y in out]
    shown = len(out) - op.residuals
    cts: list[Any] = [*values[:shown], *[None] * op.residuals]
    single = len(out) == 1
    found = rule(values[0] if single else tuple(values), *args)(cts[0] if single else tuple(cts))
    return [i for i, (x, ct) in enumerate(zip(drawn, found, strict=True)) if ct is not None and x.dtype.kind == "f"]


def _vmap_error(op: OwnOp, device: str) -> float:
    """The largest difference between `vmap` and a call for each of two members, where all arguments or one differ."""
    first = _drawn(op)
    second = [y if y.shape == x.shape else x for x, y in zip(first, _drawn(op, seed=1), strict=True)]
    every, errors = tuple(range(len(first))), [0.0]
    for differing in {every, *((i,) for i in every)} - {()}:
        members = first, [second[i] if i in differing else x for i, x in enumerate(first)]
        stacked = [np.stack([x, second[i]]) if i in differing else x for i, x in enumerate(first)]
        axes = tuple(0 if i in differing else None for i in every)
        found = _leaves(vmap(op.f, axes)(*(array(x, device=device) for x in stacked)))
        each = [_leaves(op.f(*(array(x, device=device) for x in member))) for member in members]
        errors += [_relative(x, np.stack(y)) for x, y in zip(found, zip(*each, strict=True), strict=True)]
    return max(errors) if all(map(isfinite, errors)) else inf


def _gradient(case: Case) -> Callable[..., Any]:
    def pulled(*args: Value) -> Any:
        out, pullback = vjp(case.f, *args)
        return pullback(out)

    return pulled


def _kernel_error(f: Callable[..., Any], case: Case, dtype: str, device: str) -> float | None:
    """The largest difference between kernels and references, relative to the largest element; None where NumPy ran in
    place of compiled code."""
    expected = _leaves(f(*case.sample()))
    try:
        with poisoned():
            staged, given = stage(f, ALL), [x.to(device) for x in case.sample(dtype)]
            found = _leaves(staged(*given))
    except OutOfBounds as error:
        op = OWN_OPS.get(error.primitive)
        if op is None or op.custom is None:
            raise
        on_device = [file for file in op.custom.files if (file.suffix == ".cu") == (device == "gpu")]
        file = on_device[0] if on_device else op.place.file
        raise AdtrainError(f"{op.place}: kernel {error.primitive} of {file} wrote outside its output") from None
    if any(kernel.name == "NumPy" for kernels in staged.compile(*given).kernels for kernel in kernels):
        return None
    errors = [_relative(x.astype(np.float64), y) for x, y in zip(found, expected, strict=True)]
    return max(errors) if all(map(isfinite, errors)) else inf


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference, relative to the largest element of ``y``; NaN if a difference is."""
    largest = float(np.abs(y).max(initial=0.0))
    return float(np.abs(x - y).max(initial=0.0)) / max(largest, 1e-30)


def _leaves(out: Any) -> list[np.ndarray]:
    return [x.numpy() for x in (out if isinstance(out, (tuple, list)) else (out,))]
