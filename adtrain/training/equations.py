"""A network that is trained by equations: the loss of points, the solution as data, and the residual."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops
from adtrain.augment import Batch, Resampled
from adtrain.config import Config
from adtrain.config.equation_terms import Equations, expressions, names, reference
from adtrain.core.array import Value
from adtrain.core.recording import Recording
from adtrain.core.scope import scope
from adtrain.data import DataSet, points
from adtrain.data.points import Box, Labels
from adtrain.equations import FUNCTIONS, Derivative, Expression, Names, evaluate, parts
from adtrain.training import network
from adtrain.training.network import Network
from adtrain.training.tasks import Solution, Task

COEFFICIENTS = "coefficients"
"""The key of the coefficients in the tree of the parameters."""

FUNCTIONS_OF_VALUES: dict[str, Callable[..., Any]] = {name: getattr(ops, name) for name in FUNCTIONS} | {
    "**": ops.power
}
FUNCTIONS_OF_NUMPY: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in FUNCTIONS} | {"**": np.power}

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
    """

    task: Solution
    names: Names = NO_NAMES
    terms: tuple[Term, ...] = ()
    measured: float | None = None

    def training_loss(
        self,
        params: nn.Params,
        statistics: nn.State,
        batch: Batch,
        mode: nn.Mode,
        total_weight: Value | None = None,
    ) -> tuple[Value, tuple[Value, nn.State]]:
        """The loss of a batch, and the outputs at the first points with a known solution; see `Labels`."""
        loss = self._loss(params, statistics, batch.images, mode, whole=False)
        labels = self.labels
        with scope("measurements"):
            if self.measured is not None:
                found = self._outputs_at(labels.measured_points(batch.labels), params, statistics, mode)
                measured = ops.astype(labels.measured_outputs(batch.labels), found.dtype)
                loss = loss + self.measured * ops.mean(ops.sum(ops.square(found - measured), axis=1))
        with scope("reference"):
            few = batch.labels[: points.COMPARED]
            outputs = self._outputs_at(labels.known_points(few), params, statistics, mode) if self.task.known else few
        return loss, (outputs, statistics)

    def training_sums(self, outputs: Value, labels: Value) -> Value:
        return self.task.sums(outputs, self.labels.known_outputs(labels[: outputs.shape[0]]))

    def evaluation_sums(
        self, params: nn.Params, statistics: nn.State, images: Value, labels: Value
    ) -> tuple[Value, Value, Value]:
        mode = nn.Mode(training=False)
        loss = self._loss(params, statistics, ops.astype(images, self.dtype), mode, whole=True)
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

    def _loss(self, params: nn.Params, statistics: nn.State, images: Value, mode: nn.Mode, whole: bool) -> Value:
        """The weighted sum of the mean squares of all terms, shape ().

        With `whole` the terms have all points, also those that have fewer in a training step.
        """
        total = ops.zeros((), self.dtype, images.device)
        for _, group in groupby(sorted(self.terms, key=_by_place), key=_by_place):
            terms = list(group)
            most = None if whole else terms[0].points
            with scope("points"):
                where = placed(images if most is None else images[:most], terms[0].fixed, self.offset)
            for term, residual in zip(terms, self.residuals(params, statistics, where, mode, terms), strict=True):
                with scope("loss"):
                    total = total + term.weight * ops.mean(ops.square(residual))
        return total

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


def _by_place(term: Term) -> str:
    return repr(term.place)


def placed(images: Value, fixed: Sequence[tuple[int, tuple[float, ...]]], offset: Sequence[float]) -> Value:
    """Points (N, variables, 1, 1) with fixed values of some variables; point i has value i modulo their number."""
    if not fixed:
        return images
    columns = [images[:, i : i + 1] for i in range(images.shape[1])]
    index = ops.reshape(ops.arange(images.shape[0], device=images.device), (-1, 1, 1, 1))
    for variable, values in fixed:
        column = ops.zeros_like(columns[variable]) + values[0] - offset[variable]
        turn = ops.remainder(index, len(values))
        for k, value in enumerate(values[1:], 1):
            column = ops.where(ops.equal(turn, k), value - offset[variable], column)
        columns[variable] = column
    return ops.concatenate(columns, axis=1)


def derivatives(f: Callable[[Value], Value], where: Value, keys: Collection[Key]) -> dict[Key, Value]:
    """The outputs of a function that maps each point for itself, and their derivatives, (N,) each, all at once.

    Args:
        f: points (N, variables, 1, 1) to outputs (N, outputs).
        keys: the derivatives that are needed; those on the way to them and the outputs are returned too.
    """

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
            (gradient,) = recording.pull_back(seeds, retain=True)
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
    measured = options.measurements_weight if options.measurements is not None else None
    of_net = {field.name: getattr(net, field.name) for field in fields(net)}
    return EquationNetwork(**of_net, names=own, terms=tuple(terms), measured=measured)


def read_data(cfg: Config, offset: tuple[float, ...] | None = None) -> DataSet:
    """The points of a config, with the solution at those of the evaluation if it is known.

    Raises ConfigError for an expression of the solution without a finite value, and DataError as `points.load`.
    """
    own, options = names(cfg), cfg.data.point_options
    assert cfg.data.points is not None
    box: Box = {name: cfg.data.points[name] for name in own.variables}
    test, labels = points.grid(box, options.test_points), None
    if (file := cfg.data.reference_file) is not None:
        found = points.read_table(Path(file), (*own.variables, *own.outputs))
        test, labels = found[:, : len(box)], found[:, len(box) :]
    elif solution := reference(cfg):
        values = dict(zip(own.variables, test.T, strict=True))
        with np.errstate(all="ignore"):
            columns = [evaluate(x, values, FUNCTIONS_OF_NUMPY) for x in solution]
        labels = np.stack([np.broadcast_to(np.float64(x), (len(test),)) for x in columns], axis=1)
        if not (finite := np.isfinite(labels).all(axis=1)).all():
            at = ", ".join(f"{name} = {x:g}" for name, x in zip(own.variables, test[finite.argmin()], strict=True))
            raise cfg.error_at(("data", "reference"), f"found no finite number at {at}")
    return points.load(box, own.outputs, cfg.data.batch_size, options, cfg.data.normalize, test, labels)


def resampling(cfg: Config, net: Network) -> list[Resampled]:
    """The change of a batch that draws the points of a step; none for a config without points."""
    if cfg.data.points is None:
        return []
    options = cfg.data.point_options
    intervals = [cfg.data.points[name] for name in cfg.model.variables]
    low, high = (
        tuple(interval[i] - shift for interval, shift in zip(intervals, net.offset, strict=True)) for i in (0, 1)
    )
    return [Resampled(low, high, options.sampling == "uniform", options.resample)]
