"""A network that is trained by equations: the loss of points, the solution as data, and the residual.

Signed distances from a mesh are computed by a Program that goes through all pairs of points and triangles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import factorial, pi
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops
from adtrain.augment import Batch, Drawn, Resampled
from adtrain.config import Config
from adtrain.config.equations import expressions, names, reference
from adtrain.config.specs import Equations
from adtrain.core.array import Value, array
from adtrain.core.autodiff import Recording
from adtrain.core.errors import AdtrainError
from adtrain.core.forward import taylor_coefficients
from adtrain.core.staging import stage
from adtrain.core.trace import scope
from adtrain.data import DataSet, meshes, points
from adtrain.data.meshes import surface_points
from adtrain.data.points import Box, Labels
from adtrain.equations import FUNCTIONS, Derivative, Expression, Names, evaluate, parts
from adtrain.passes import ALL
from adtrain.training import network
from adtrain.training.network import Network
from adtrain.training.tasks import Solution, Task

Vector: TypeAlias = Sequence[Value]
"""The coordinates x, y, z of vectors: columns (N, 1), rows (1, F), or both (N, F)."""

PAIRS = 1 << 22
"""Maximum pairs of points and triangles of a call of the Program; a call has at least one point."""
NEAR = 0.02
"""The standard deviation of the distances of points near the surface, relative to the diagonal of the mesh."""


def signed_distances(triangles: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The distances of points (N, 3) from the surface of triangles (F, 3, 3), negative inside, float64 (N,).

    A point is inside if the surface winds around it more than half a time. The winding number is the sum of the solid
    angles of the triangles over 4 pi (A. Van Oosterom, J. Strackee, 1983; A. Jacobson et al.: "Robust inside-outside
    segmentation using generalized winding numbers", 2013). So a mesh may have holes.
    """
    corners = triangles.reshape(-1, 3)
    centre = (corners.min(0) + corners.max(0)) / 2  # float32 has more digits near 0
    a, b, c = np.moveaxis(triangles - centre, 1, 0)
    edges = np.array([b - a, c - b, a - c])
    normal = np.cross(b - a, c - a)
    unit = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    vectors = {"corners": np.array([a, b, c]), "edges": edges, "inwards": np.cross(normal, edges), "normal": unit[None]}
    of_triangles = {name: _columns(x)[:, :, np.newaxis] for name, x in vectors.items()}
    size = max(1, min(len(points), PAIRS // len(triangles)))
    found, of_points = [], stage(_of_points, ALL)
    for start in range(0, len(points), size):
        part = points[start : start + size] - centre
        padded = np.concatenate([part, np.zeros((size - len(part), 3))])  # all calls have one Program
        found.append(of_points(_columns(padded)[..., np.newaxis], of_triangles).numpy()[: len(part)].astype(np.float64))
    return np.concatenate(found)


def distance_samples(triangles: np.ndarray, low: np.ndarray, high: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Points with their signed distances, float64 (count, 4), in a random order.

    A half is near the surface, and a quarter on it. The others have a uniform distribution in the box from `low` to
    `high`, each (3,).
    """
    rng = np.random.default_rng(seed)
    diagonal = np.linalg.norm(np.ptp(triangles.reshape(-1, 3), axis=0))
    on, near = (surface_points(triangles, n, rng) for n in (count // 4, count // 2))
    near = np.clip(near + rng.normal(0, NEAR * diagonal, near.shape), low, high)
    inside = rng.uniform(low, high, (count - len(on) - len(near), 3))
    others = np.concatenate([near, inside])
    distances = np.concatenate([np.zeros(len(on)), signed_distances(triangles, others)])
    rows = np.concatenate([np.concatenate([on, others]), distances[:, np.newaxis]], axis=1)
    return rows[rng.permutation(count)]


def _columns(vectors: np.ndarray) -> np.ndarray:
    """Vectors (..., N, 3) as coordinates float32 (..., 3, N)."""
    return np.ascontiguousarray(np.swapaxes(vectors, -1, -2).astype(np.float32))


def _of_points(points: Value, triangles: dict[str, Value]) -> Value:
    """The signed distances of points (3, N, 1) from triangles, whose vectors are (vectors, 3, 1, F)."""
    here = [points[i] for i in range(3)]
    corners = [[x - y for x, y in zip(corner, here, strict=True)] for corner in _vectors(triangles["corners"])]
    edges, inwards = _vectors(triangles["edges"]), _vectors(triangles["inwards"])
    (normal,) = _vectors(triangles["normal"])
    to_edges: list[Any] = []  # squares of the distances from the edges
    above: list[Any] = []  # for each edge 1 where the projection of the point is on its inner side, else 0
    for to_corner, edge, inward in zip(corners, edges, inwards, strict=True):
        along = ops.clip(-_dot(to_corner, edge) / _dot(edge, edge), 0.0, 1.0)
        to_edge = [x + along * y for x, y in zip(to_corner, edge, strict=True)]
        to_edges.append(_dot(to_edge, to_edge))
        above.append(ops.where(_dot(to_corner, inward) <= 0, 1.0, 0.0))
    to_plane = _dot(corners[0], normal)
    squares = ops.where(above[0] + above[1] + above[2] > 2.5, to_plane * to_plane, reduce(ops.minimum, to_edges))
    a, b, c = corners
    lengths = [ops.sqrt(_dot(x, x)) for x in corners]
    # The tangent of half of the solid angle is a quotient (Van Oosterom and Strackee, 1983).
    numerator = _dot(a, _cross(b, c))
    denominator = (
        lengths[0] * lengths[1] * lengths[2]
        + _dot(a, b) * lengths[2]
        + _dot(b, c) * lengths[0]
        + _dot(c, a) * lengths[1]
    )
    winding = ops.sum(ops.arctan2(numerator, denominator), 1) / (2 * pi)
    distance = ops.sqrt(ops.min(squares, 1))
    return ops.where(ops.abs(winding) > 0.5, -distance, distance)


def _vectors(x: Value) -> list[Vector]:
    return [[x[k, i] for i in range(3)] for k in range(x.shape[0])]


def _dot(x: Vector, y: Vector) -> Any:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2]


def _cross(x: Vector, y: Vector) -> Vector:
    return [x[(i + 1) % 3] * y[(i + 2) % 3] - x[(i + 2) % 3] * y[(i + 1) % 3] for i in range(3)]


COEFFICIENTS = "coefficients"
"""The key of the coefficients in the tree of the parameters."""

FUNCTIONS_OF_VALUES: dict[str, Callable[..., Any]] = {name: getattr(ops, name) for name in FUNCTIONS} | {
    "**": ops.power
}
FUNCTIONS_OF_NUMPY: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in FUNCTIONS} | {"**": np.power}

TAYLOR_PRODUCTS = 1
"""Products of each layer that take about as long as the additional elementwise operations of Taylor mode; measured on a
CPU (docs/worklog/cpu.md)."""
NO_NAMES = Names(())
Key: TypeAlias = tuple[int, tuple[int, ...]]
"""A derivative: the number of the output, and those of the variables; none for the output itself."""


class Term(NamedTuple):
    """A part of the loss: the weighted mean square of an expression.

    Attributes:
        fixed: the numbers of variables with the values that they have in turns, point after point.
        points: the most points of a training step; None for all.
    """

    expression: Expression
    fixed: tuple[tuple[int, tuple[float, ...]], ...]
    weight: float
    points: int | None

    @property
    def place(self) -> tuple[Any, ...]:
        """Terms of one place have the same points."""
        return self.fixed, self.points


@dataclass(frozen=True)
class EquationNetwork(Network):
    """A network whose outputs are to fulfil equations at points (N, variables, 1, 1).

    Attributes:
        measured: the weight of the mean squared difference to the measurements in the labels; None without them.
        until: the number of steps after which points with large residuals stay as they are; None: they never do.
    """

    task: Solution
    names: Names = NO_NAMES
    terms: tuple[Term, ...] = ()
    measured: float | None = None
    until: int | None = None

    def training_loss(
        self,
        params: nn.Params,
        statistics: nn.State,
        batch: Batch,
        mode: nn.Mode,
        total_weight: Value | None = None,
    ) -> tuple[Value, tuple[Any, nn.State]]:
        """The loss of a batch; the outputs at the first points with a known solution, see `Labels`; and where points
        are kept, their squared residuals (N,)."""
        loss, squares = self._loss(params, statistics, batch.images, mode, batch.kept)
        labels = self.labels
        with scope("measurements"):
            if self.measured is not None:
                found = self._outputs_at(labels.measured_points(batch.labels), params, statistics, mode)
                measured = ops.astype(labels.measured_outputs(batch.labels), found.dtype)
                loss = loss + self.measured * ops.mean(ops.sum(ops.square(found - measured), axis=1))
        with scope("reference"):
            few = batch.labels[: points.COMPARED]
            outputs = self._outputs_at(labels.known_points(few), params, statistics, mode) if self.task.known else few
        return loss, ((outputs, squares), statistics)

    def training_sums(self, outputs: Any, labels: Value) -> Value:
        found, _ = outputs
        return self.task.sums(found, self.labels.known_outputs(labels[: found.shape[0]]))

    def kept_points(self, outputs: Any, batch: Batch, step: Value) -> Value:
        """The points with residuals above the mean, and new ones in place of the others (Daw et al. 2023)."""
        _, squares = outputs
        assert batch.kept is not None
        assert squares is not None
        with scope("points"):
            sizes = ops.sqrt(squares)
            keep = sizes > ops.mean(sizes)
            if self.until is not None:
                keep = keep | (step >= self.until)
            return ops.where(ops.reshape(keep, (-1, 1, 1, 1)), batch.kept, batch.images)

    def evaluation_sums(
        self, params: nn.Params, statistics: nn.State, images: Value, labels: Value
    ) -> tuple[Value, Value, Value]:
        mode = nn.Mode(training=False)
        loss, _ = self._loss(params, statistics, ops.astype(images, self.dtype), mode, whole=True)
        outputs = self.evaluated(params, statistics, images)
        count = float(images.shape[0])
        total = ops.astype(loss, np.float64) * count
        return total, ops.full((), count, np.float64, images.device), self.task.sums(outputs, labels)

    def _outputs_at(self, where: Value, params: nn.Params, statistics: nn.State, mode: nn.Mode) -> Value:
        """The outputs at points (N, variables) of float64."""
        stored = ops.astype(where - np.array(self.offset), self.dtype)
        return self.outputs(params, statistics, ops.reshape(stored, (*where.shape, 1, 1)), mode)[0]

    @property
    def labels(self) -> Labels:
        """What the labels of the training part are."""
        return Labels(len(self.names.variables), len(self.names.outputs), self.task.known)

    def _loss(
        self,
        params: nn.Params,
        statistics: nn.State,
        images: Value,
        mode: nn.Mode,
        kept: Value | None = None,
        whole: bool = False,
    ) -> tuple[Value, Value | None]:
        """The weighted sum of the mean squares of all terms, shape (); with points that are `kept`, in place of
        `images` for terms that fix no variable, also the weighted sum of the squares at each of these.

        With `whole` the terms have all points, also those that have fewer in a training step.
        """
        total, squares = ops.zeros((), self.dtype, images.device), None
        for place in dict.fromkeys(term.place for term in self.terms):
            terms = [term for term in self.terms if term.place == place]
            inside = kept is not None and not terms[0].fixed and terms[0].points is None
            with scope("points"):
                most = None if whole else terms[0].points
                where = placed(images if most is None else images[:most], terms[0].fixed, self.offset)
            where = kept if inside and kept is not None else where
            for term, residual in zip(terms, self.residuals(params, statistics, where, mode, terms), strict=True):
                with scope("loss"):
                    square = ops.square(residual)
                    total = total + term.weight * ops.mean(square)
                    if inside:
                        squares = term.weight * square if squares is None else squares + term.weight * square
        return total, squares

    def residuals(
        self, params: nn.Params, statistics: nn.State, images: Value, mode: nn.Mode, terms: Sequence[Term]
    ) -> list[Value]:
        """The values (N,) of the expressions of `terms` at points. All derivatives are computed once."""

        def outputs(where: Value) -> Value:
            return self.outputs(params, statistics, where, mode)[0]

        needed = [part for term in terms for part in parts(term.expression)]
        keys = {self._key(part): part.name for part in needed if isinstance(part, Derivative)}
        found = derivatives(outputs, images, keys)
        with scope("equation"):
            values: dict[str, Any] = {name: found[key] for key, name in keys.items()}
            values |= {name: found[i, ()] for i, name in enumerate(self.names.outputs)}
            for i, name in enumerate(self.names.variables):
                values[name] = images[:, i, 0, 0] + self.offset[i]
            values |= params.get(COEFFICIENTS, {})
            count = images.shape[0]
            computed = [evaluate(term.expression, values, FUNCTIONS_OF_VALUES) for term in terms]
            return [
                x if isinstance(x, Value) and x.ndim else x + ops.zeros((count,), self.dtype, images.device)
                for x in computed
            ]

    def _key(self, part: Derivative) -> Key:
        variables = self.names.variables
        return self.names.outputs.index(part.output), tuple(variables.index(name) for name in part.by)


def coefficients_of(params: nn.Params) -> dict[str, float]:
    """The coefficients in a tree of parameters by name; none if there are none."""
    return {name: float(x) for name, x in params.get(COEFFICIENTS, {}).items()}


def placed(images: Value, fixed: Sequence[tuple[int, tuple[float, ...]]], offset: Sequence[float]) -> Value:
    """Points (N, variables, 1, 1) with fixed values of some variables; point i has value i modulo their number."""
    if not fixed:
        return images
    columns = [images[:, i : i + 1] for i in range(images.shape[1])]
    index = np.arange(images.shape[0]).reshape(-1, 1, 1, 1)
    for variable, values in fixed:
        column = ops.zeros_like(columns[variable]) + values[0] - offset[variable]
        for k, value in enumerate(values[1:], 1):
            turn = array(index % len(values) == k, device=images.device)
            column = ops.where(turn, value - offset[variable], column)
        columns[variable] = column
    return ops.concatenate(columns, axis=1)


def derivatives(f: Callable[[Value], Value], where: Value, keys: Collection[Key]) -> dict[Key, Value]:
    """The outputs of a function that maps each point for itself, and their derivatives, (N,) each, all at once.

    Args:
        f: points (N, variables, 1, 1) to outputs (N, outputs).
        keys: the derivatives that are needed; those on the way to them and the outputs are returned too.
    """
    found: dict[Key, Value] = {}
    for variable, order in _in_taylor_mode(keys).items():
        found |= _along(f, where, variable, order)
    rest = [key for key in keys if key not in found]
    return found | _by_reverse_mode(f, where, rest) if rest or not found else found


def _in_taylor_mode(keys: Collection[Key]) -> dict[int, int]:
    """The variables for which Taylor mode is used, with the orders of their series: those with the fewest products.

    A series takes a product of each layer for each order, and gives the derivatives of all outputs by one variable. The
    outputs themselves are computed once for all modes. Variables are added in the order of what each saves alone.
    """
    orders: dict[int, int] = {}
    for _, by in keys:
        if len(by) > 1 and len(set(by)) == 1:
            orders[by[0]] = max(orders.get(by[0], 0), len(by))

    def products(chosen: tuple[int, ...]) -> int:
        rest = [(k, by) for k, by in keys if not (set(by) <= set(chosen) and len(set(by)) == 1)]
        return sum(orders[v] for v in chosen) + (TAYLOR_PRODUCTS if chosen else 0) + _reverse_products(rest)

    ranked = sorted(orders, key=lambda v: products((v,)))
    return {v: orders[v] for v in min((tuple(ranked[:count]) for count in range(len(ranked) + 1)), key=products)}


def _reverse_products(keys: Collection[Key]) -> int:
    """The products of each layer for derivatives by nested reverse mode, without those for the outputs.

    A pass for order n goes back through that for order n - 1 and all before it: 2^(n-1) products. It gives the
    derivatives of one value by all variables.
    """
    heads = {(k, by[:order]) for k, by in keys for order in range(len(by))}
    return sum(2 ** len(by) for _, by in heads)


def _along(f: Callable[[Value], Value], where: Value, variable: int, order: int) -> dict[Key, Value]:
    """The outputs and their derivatives by one variable up to an order, by Taylor mode."""
    unit = np.zeros((1, *where.shape[1:]), where.dtype)
    unit[:, variable] = 1
    direction = ops.broadcast_to(array(unit, device=where.device), where.shape)
    value, orders = taylor_coefficients("derivatives", f, (where,), [[direction], *[[None]] * (order - 1)], order)
    found: dict[Key, Value] = {(k, ()): value[:, k] for k in range(value.shape[1])}
    for n, (series,) in enumerate(orders, 1):
        if series is None:
            raise _zero(n)
        derivative = series if n == 1 else series * float(factorial(n))
        found |= {(k, (variable,) * n): derivative[:, k] for k in range(value.shape[1])}
    return found


def _zero(order: int) -> AdtrainError:
    return AdtrainError(
        f"loss: the derivatives of order {order} are 0 at all points, expected layers with such derivatives, such as "
        "tanh, silu or sine; relu has none of order 2"
    )


def _by_reverse_mode(f: Callable[[Value], Value], where: Value, keys: Collection[Key]) -> dict[Key, Value]:
    """`derivatives` by reverse mode, again for each order."""

    def up_to(order: int, x: Value) -> dict[Key, Value]:
        if not order:
            outputs = f(x)
            return {(k, ()): outputs[:, k] for k in range(outputs.shape[1])}
        heads: dict[Key, set[int]] = {}
        for output, by in sorted(keys):
            if len(by) >= order:
                heads.setdefault((output, by[: order - 1]), set()).add(by[order - 1])
        known: list[Key] = []

        def lower(y: Value) -> tuple[list[Value], list[Value]]:
            found = up_to(order - 1, y)
            known.extend(found)
            return [found[head] for head in heads], list(found.values())

        recording = Recording("derivatives", lower, (x,), (0,), has_aux=True)
        found = dict(zip(known, recording.aux, strict=True))
        for i, ((output, by), variables) in enumerate(heads.items()):
            seeds: list[Value | None] = [None] * len(heads)
            seeds[i] = ops.ones_like(recording.primals_out[i])
            (gradient,) = recording.cotangents(seeds, retain=True)
            if gradient is None:
                raise _zero(order)
            for variable in sorted(variables):
                found[output, (*by, variable)] = gradient[:, variable, 0, 0]
        return found

    return up_to(max((len(by) for _, by in keys), default=0), where)


def build(cfg: Config, mean: tuple[float, ...], std: tuple[float, ...], scale: float, task: Task) -> Network:
    """`network.build`, also for a config whose loss is equations."""
    net = network.build(cfg, mean, std, scale, task)
    if not isinstance(cfg.loss, Equations):
        return net
    own = names(cfg)
    terms = []
    for term, expression in zip(cfg.loss.terms, expressions(cfg, cfg.loss.terms), strict=True):
        fixed = tuple((own.variables.index(name), values) for name, values in term.fixed.items())
        terms.append(Term(expression, fixed, term.weight, term.points))
    options = cfg.data.point_options
    measured = options.measurements_weight if options.has_measurements else None
    of_net = {field.name: getattr(net, field.name) for field in fields(net)}
    until = options.resample_until
    return EquationNetwork(**of_net, names=own, terms=tuple(terms), measured=measured, until=until)


def read_data(cfg: Config) -> DataSet:
    """The points of a config, with the solution at those of the evaluation if it is known.

    Raises ConfigError for an expression of the solution without a finite value, and for a mesh that is not in the box;
    DataError as `points.load`, and where a file cannot be read.
    """
    own, options = names(cfg), cfg.data.point_options
    assert cfg.data.points is not None
    box: Box = {name: cfg.data.points[name] for name in own.variables}
    test, labels, measured = points.grid(box, options.test_points), None, None
    if options.measurements is not None:
        measured = _table(cfg, options.measurements, box)
    if options.sdf is not None:
        mesh = _mesh_in_box(cfg, options.sdf, box)
        low, high = np.array(list(box.values())).T
        measured = distance_samples(mesh, low, high, options.sdf_points, points.SEED)
        labels = signed_distances(mesh, test)[:, np.newaxis]
    elif (file := cfg.data.reference_file) is not None:
        found = _table(cfg, file, box)
        test, labels = found[:, : len(box)], found[:, len(box) :]
    elif solution := reference(cfg):
        values = dict(zip(own.variables, test.T, strict=True))
        with np.errstate(all="ignore"):
            columns = [evaluate(x, values, FUNCTIONS_OF_NUMPY) for x in solution]
        labels = np.stack([np.broadcast_to(np.float64(x), (len(test),)) for x in columns], axis=1)
        if not (finite := np.isfinite(labels).all(axis=1)).all():
            at = ", ".join(f"{name} = {x:g}" for name, x in zip(own.variables, test[finite.argmin()], strict=True))
            raise cfg.error_at(("data", "reference"), f"found no finite number at {at}")
    return points.load(box, own.outputs, cfg.data.batch_size, options, cfg.data.normalize, test, labels, measured)


def _table(cfg: Config, file: str, box: Box) -> np.ndarray:
    """As `points.read_table`, with a warning of points outside the box."""
    found = points.read_table(Path(file), (*box, *names(cfg).outputs))
    reason = "the equations hold inside only; check the units, or widen data.points"
    points.warn_outside(found[:, : len(box)], list(box.values()), file, reason)
    return found


def _mesh_in_box(cfg: Config, file: str, box: Box) -> np.ndarray:
    """The triangles of a mesh, float64 (F, 3, 3).

    Raises ConfigError unless there are three variables and one output and the mesh is in the box, and DataError where
    the file cannot be read.
    """
    own = names(cfg)
    if len(own.variables) != 3 or len(own.outputs) != 1:
        found = f"found {len(own.variables)} variables and {len(own.outputs)} outputs"
        raise cfg.error_at(("data", "sdf"), f"{found}, expected 3 and 1: the distance at a place in space")
    triangles = meshes.read_mesh(Path(file))
    corners = triangles.reshape(-1, 3)
    for name, low, high in zip(own.variables, corners.min(0), corners.max(0), strict=True):
        if low < box[name][0] or high > box[name][1]:
            begin, end = box[name]
            expected = f"expected an interval that contains [{low:.6g}, {high:.6g}], where {file} is"
            raise cfg.error_at(("data", "points"), f"{name}: found [{begin:.6g}, {end:.6g}], {expected}")
    return triangles


def resampling(cfg: Config, net: Network) -> list[Resampled | Drawn]:
    """The change of a batch that draws the points of a step; none for a config whose steps do not draw."""
    if cfg.data.points is None:
        return [Drawn()] if cfg.data.sets_steps_per_epoch else []
    options = cfg.data.point_options
    intervals = [cfg.data.points[name] for name in cfg.model.variables]
    low, high = (
        tuple(interval[i] - shift for interval, shift in zip(intervals, net.offset, strict=True)) for i in (0, 1)
    )
    until = options.resample_until
    if until is not None and options.resample == "epoch":
        until = -(-until // options.steps_per_epoch)
    return [Resampled(low, high, options.sampling == "uniform", options.resample, until)]
