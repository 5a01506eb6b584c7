"""Build model, loss, optimizer and the other objects of a config; shapes are checked, nothing is allocated."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast, get_type_hints

from adtrain import augment, nn, ops, optim
from adtrain.config import equations as of_equations
from adtrain.config import sweep_section
from adtrain.config.document import Config
from adtrain.config.problems import ConfigError, PathParts, Problem, dotted
from adtrain.config.specs import Add, Concat, Equations, Layer, Multiply, Residual, Spec
from adtrain.config.sweep_section import Sweep
from adtrain.core.array import Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.data.catalogue import Entry
from adtrain.data.datasets import DataSource
from adtrain.equations import Expression
from adtrain.metrics import Metric
from adtrain.option_types import StepList, Steps

CLASSIFICATION = ("cross_entropy", "nll")
REGRESSION = ("mse", "l1", "huber")

CONTAINED = {
    "cross_entropy": ("softmax", "log_softmax", "sigmoid"),
    "binary_cross_entropy_with_logits": ("sigmoid", "softmax", "log_softmax"),
}
"""From a loss to layers that must not come before it; it applies the first one itself."""


def takes_labels(loss: Spec) -> bool:
    """Whether the loss takes labels, as losses of plug-ins do; others take a number for each output."""
    return loss.kind in CLASSIFICATION or is_own(loss)


def is_own(loss: Spec) -> bool:
    """Whether the loss is that of a plug-in."""
    return not isinstance(loss, Equations) and isinstance(type(loss).target, type)


def check(cfg: Config) -> list[Problem]:
    """The problems that prevent the objects of the config from being built."""
    problems: list[Problem] = []
    one_step = functools.partial(schedule, steps_per_epoch=1, total_steps=1)
    builders: list[Callable[[Config], object]] = [model, loss, optimizer, one_step, average, augmentations, metrics]
    if cfg.data.dataset is not None:
        builders.append(data_source)
    if cfg.sweep is not None:
        builders.append(sweep)
    if cfg.data.points is not None or isinstance(cfg.loss, Equations):
        builders.append(equations)
    for builder in builders:
        try:
            builder(cfg)
        except ConfigError as error:
            problems += error.problems
    return problems


def warnings(cfg: Config) -> list[Problem]:
    """What is allowed, and is most likely a mistake: a last layer that the loss contains already."""
    last = len(cfg.model.layers) - 1
    layer, path = cfg.model.layers[last].kind, ("model", "layers", last)
    if layer not in CONTAINED.get(cfg.loss.kind, ()):
        return []
    reason = f"the loss {cfg.loss.kind} takes logits, and applies {CONTAINED[cfg.loss.kind][0]} itself"
    return [Problem(cfg.where(path), dotted(path), f"found {layer}, but {reason}: remove this layer")]


def model(cfg: Config) -> nn.Sequential:
    """The network. The shape of every layer is checked, from the input, if the config has one, to the loss.

    Raises ConfigError that names the layer, its position in the file, and the found and expected sizes.
    """
    path: PathParts = ("model", "layers")
    built = _sequential(cfg, cfg.model.layers, path)
    if cfg.lora is not None:
        paths = (cfg.lora.paths,) if isinstance(cfg.lora.paths, str) else tuple(cfg.lora.paths)
        built = nn.LowRankSequential(*built.layers, rank=cfg.lora.rank, paths=paths)
    if cfg.model.coefficients:
        if cfg.lora is not None:
            raise cfg.error_at(("lora",), "expected none together with model.coefficients")
        built = nn.WithCoefficients(*built.layers, coefficients=tuple(cfg.model.coefficients.items()))
    if not cfg.model.input_shape:  # known when the data are read
        return built
    try:
        output = built.output_shape(cfg.model.input_shape)
    except nn.LayerError as error:
        raise _error(cfg, *_layer_at(cfg.model.layers, path, error.path), error.reason) from None
    if isinstance(built, nn.LowRankSequential):
        try:
            weights = built.adapted(cfg.model.input_shape)
        except OptionError as error:
            raise cfg.error_at(("lora", "paths"), str(error)) from None
        widest = max(weights, key=lambda name: min(weights[name]))
        largest = min(weights[widest])
        if built.rank > largest:
            reason = f"expected at most {largest}, the largest rank of a weight that it adapts ({widest})"
            raise cfg.error_at(("lora", "rank"), f"found {built.rank}, {reason}")
    if takes_labels(cfg.loss) and len(output) != (2 if cfg.data.is_text else 1):
        last = len(cfg.model.layers) - 1
        expected = f"(classes,) for the loss {cfg.loss.kind}: add flatten and linear"
        if cfg.data.is_text:
            expected = "(length, classes) for a text: end with linear, without flatten before it"
        reason = f"found output {output}, expected {expected}"
        raise _error(cfg, (*path, last), cfg.model.layers[last].kind, reason)
    for option, value in cfg.loss.options().items():
        per_class = isinstance(value, tuple) and cfg.loss.kind in nn.LOSSES
        if per_class and len(value) != output[-1]:
            reason = f"{option} has {len(value)} numbers, expected {output[-1]}: one for each class"
            raise _error(cfg, ("loss",), cfg.loss.kind, reason)
    return built


def loss(cfg: Config) -> Callable[[Value, Value], Value]:
    """The loss as a function of (outputs, targets), a mean over the batch, with the config's options."""
    if isinstance(cfg.loss, Equations):  # of outputs alone; `training.equations` has that of points
        return ops.mse_loss
    target, options = type(cfg.loss).target, cfg.loss.options()
    if is_own(cfg.loss):
        return cast(Callable[[Value, Value], Value], _construct(cfg, ("loss",), cfg.loss, options))
    return functools.partial(target, **options)


def equations(cfg: Config) -> list[Expression]:
    """The expressions of a loss of equations, after a check of all that it needs. Raises ConfigError."""
    if not isinstance(cfg.loss, Equations):
        raise cfg.error_at(("loss",), f"found {cfg.loss.kind}, expected a list of equations for data.points")
    found = of_equations.expressions(cfg, cfg.loss.terms)
    of_equations.reference(cfg)
    outputs, shape = cfg.model.output or (), model(cfg).output_shape(cfg.model.input_shape)
    if shape != (len(outputs),):
        last = len(cfg.model.layers) - 1
        expected = f"expected [{len(outputs)}], one for each of {', '.join(outputs)}"
        raise cfg.error_at(("model", "layers", last), f"found the output {list(shape)}, {expected}")
    return found


def class_weights(cfg: Config) -> tuple[float, ...] | None:
    """The weights of the classes by which the mean loss divides; None where every example counts alike."""
    return cfg.loss.options().get("weight") if cfg.loss.kind in CLASSIFICATION else None


def optimizer(cfg: Config) -> optim.Optimizer:
    """The optimizer with the config's options. Raises ConfigError for options that exclude one another."""
    return cast(optim.Optimizer, _construct(cfg, ("optimizer",), cfg.optimizer, cfg.optimizer.options()))


def grouped_optimizer(cfg: Config, shapes: Mapping[str, nn.Shape]) -> optim.Optimizer:
    """The optimizer with the config's parameter groups; `shapes` are those of all parameters by path.

    Raises ConfigError for an option or a group that does not fit the parameters.
    """
    found = optimizer(cfg)
    try:
        found.require_fit(shapes)
    except OptionError as error:
        raise _error(cfg, ("optimizer",), cfg.optimizer.kind, str(error)) from None
    groups = [optim.Group(**dict(group)) for group in cfg.parameter_groups or ()]
    for i, group in enumerate(groups):
        try:
            group.require_fit(found, shapes)
        except OptionError as error:
            raise cfg.error_at(("parameter_groups", i), str(error)) from None
    if cfg.lora is not None:
        added = tuple(path for path in shapes if nn.is_low_rank(path))
        groups = [optim.Group("*", trainable=False), optim.Group(added, trainable=True), *groups]
    try:
        return optim.grouped(found, groups, shapes)
    except OptionError as error:
        raise cfg.error_at(("parameter_groups",), str(error)) from None


def average(cfg: Config) -> optim.Average | None:
    """The average of the weights that `training.average` names; None without it."""
    spec = cfg.training.average
    return None if spec is None else _construct(cfg, ("training", "average"), spec, spec.options())


def schedule(cfg: Config, steps_per_epoch: int, total_steps: int) -> optim.Schedule:
    """The learning-rate schedule for `total_steps` steps; counts of epochs in the config become counts of steps."""

    def steps(epochs: float) -> int:
        return max(1, round(epochs * steps_per_epoch))

    kind, options = cfg.schedule.kind, cfg.schedule.options()
    warmup_epochs, warmup_steps = options.pop("warmup_epochs"), options.pop("warmup_steps")
    if warmup_epochs and warmup_steps:
        reason = f"found warmup_epochs {warmup_epochs} and warmup_steps {warmup_steps}, expected one of them"
        raise _error(cfg, ("schedule",), kind, reason)
    if warmup_epochs:
        warmup_steps = steps(warmup_epochs)
    for name, hint in get_type_hints(type(cfg.schedule).target, include_extras=True).items():
        if options.get(name) is not None and hint in (Steps, Steps | None):
            options[name] = steps(options[name])
        elif hint == StepList:
            options[name] = tuple(map(steps, options[name]))
    if kind == "exponential":
        options["gamma"] **= 1 / steps_per_epoch
    from_data = {"total_steps": max(1, total_steps - warmup_steps), "steps_per_epoch": steps_per_epoch}
    parameters = inspect.signature(type(cfg.schedule).target).parameters
    options.update({name: x for name, x in from_data.items() if name in parameters})
    built: optim.Schedule = _construct(cfg, ("schedule",), cfg.schedule, options)
    return optim.schedules.WarmUp(warmup_steps, built) if warmup_steps else built


def augmentations(cfg: Config) -> tuple[augment.Augmentation, ...]:
    """The augmentations in order. Raises ConfigError for a duplicate or for invalid options."""
    built: list[augment.Augmentation] = []
    for i, spec in enumerate(cfg.data.augment or ()):
        path: PathParts = ("data", "augment", i)
        change = _construct(cfg, path, spec, spec.options())
        if any(type(change) is type(other) for other in built):
            raise _error(cfg, path, spec.kind, "found twice, expected each augmentation once")
        others = [other.kind() for other in built if isinstance(other, augment.Mixing)]
        if isinstance(change, augment.Mixing) and others:
            raise _error(cfg, path, spec.kind, f"found beside {others[0]}, expected one augmentation that mixes images")
        built.append(change)
    return tuple(built)


def sweep(cfg: Config) -> Sweep:
    """The section `sweep`. Raises ConfigError where the config has none, and for each mistake in it."""
    node, _ = cfg.source.root.find(("sweep",))
    if cfg.sweep is None or node is cfg.source.root:
        raise cfg.error_at((), "found no section sweep, expected one such as sweep: {training.seed: {range: 10}}")
    return sweep_section.parse(node)


def data_source(cfg: Config) -> Entry | DataSource:
    """The data set that `data.dataset` names. Raises ConfigError for invalid options."""
    spec = cfg.data.dataset
    assert spec is not None
    return cast(Entry | DataSource, _construct(cfg, ("data", "dataset"), spec, spec.options()))


def metrics(cfg: Config) -> dict[str, Metric]:
    """The metrics of `training.metrics`, by name. Raises ConfigError for a duplicate or for invalid options."""
    built: dict[str, Metric] = {}
    for i, spec in enumerate(cfg.training.metrics or ()):
        path: PathParts = ("training", "metrics", i)
        if spec.kind in built:
            raise _error(cfg, path, spec.kind, "found twice, expected each metric once")
        target, options = type(spec).target, spec.options()
        is_class = isinstance(target, type)
        built[spec.kind] = _construct(cfg, path, spec, options) if is_class else functools.partial(target, **options)
    return built


def _sequential(cfg: Config, layers: list[Layer], path: PathParts) -> nn.Sequential:
    modules: list[nn.Module] = []
    problems: list[Problem] = []
    for i, layer in enumerate(layers):
        try:
            modules.append(_layer(cfg, layer, (*path, i)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return nn.Sequential(*modules)


def _layer(cfg: Config, spec: Layer, path: PathParts) -> nn.Module:
    inside = (*path, spec.kind)
    if isinstance(spec, Residual):
        body = _sequential(cfg, spec.body, (*inside, "body"))
        shortcut = None if spec.shortcut is None else _sequential(cfg, spec.shortcut, (*inside, "shortcut"))
        return nn.Residual(body, shortcut=shortcut)
    if isinstance(spec, (Concat, Add, Multiply)):
        branches = [_sequential(cfg, branch, (*inside, "branches", i)) for i, branch in enumerate(spec.branches)]
        joins: dict[str, Callable[..., nn.Module]] = {"concat": nn.Concat, "add": nn.Add, "multiply": nn.Multiply}
        return joins[spec.kind](*branches)
    return cast(nn.Module, _construct(cfg, path, spec, spec.options()))


def _construct(cfg: Config, path: PathParts, spec: Spec, options: dict[str, Any]) -> Any:
    """The object of the spec's class; errors become a ConfigError with the position of the spec at `path`."""
    nested = {name: value for name, value in options.items() if isinstance(value, Spec)}
    inner = {name: _construct(cfg, (*path, spec.kind, name), x, x.options()) for name, x in nested.items()}
    try:
        return type(spec).target(**{**options, **inner})
    except (OptionError, ShapeError) as error:
        raise _error(cfg, path, spec.kind, str(error)) from None


def _layer_at(layers: list[Layer], path: PathParts, names: tuple[str, ...]) -> tuple[PathParts, str]:
    """Config path and kind of the layer at `names`, the child names in a LayerError."""
    index, *rest = names
    layer = layers[int(index)]
    path = (*path, int(index))
    match layer, rest:
        case Residual(), [("body" | "shortcut") as part, *inner] if inner:
            return _layer_at(getattr(layer, part), (*path, layer.kind, part), tuple(inner))
        case Concat() | Add() | Multiply(), [branch, *inner] if inner:
            return _layer_at(layer.branches[int(branch)], (*path, layer.kind, "branches", int(branch)), tuple(inner))
    return path, layer.kind


def _error(cfg: Config, path: PathParts, kind: str, reason: str) -> ConfigError:
    return ConfigError([Problem(cfg.where(path), f"{dotted(path)} {kind}", reason.removeprefix(f"{kind}: "))])
