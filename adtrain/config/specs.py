"""Layers, losses, optimizers, schedules, augmentations, data sets and metrics in a config: a name and its options.

    relu                              the name alone
    linear: 128                       the value of the first option
    linear: {out_features: 128}       options by name

Names, types, bounds and defaults of the options are those of the signatures and annotations of the classes and
functions, the package's own and the user's. `add` is the one way into a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

from pydantic import BaseModel, Field, create_model

from adtrain import docstrings
from adtrain.config.equation_terms import AsTerms, Equations
from adtrain.config.family import Family, OneOf, Spec, Specs
from adtrain.config.values import WarmUp, option_type
from adtrain.core.errors import OptionError
from adtrain.option_types import Count


class Residual(Spec):
    """The body's output plus the input, or plus the shortcut's output; `residual: [...]` has a body only."""

    kind = "residual"
    body: Layers
    shortcut: Layers | None = None


class Concat(Spec):
    """The outputs of branches, concatenated along the channels: `concat: [[...], [...]]`."""

    kind = "concat"
    branches: Branches


class Add(Spec):
    """The sum of the outputs of branches: `add: [[...], [...]]`."""

    kind = "add"
    branches: Branches


class Multiply(Spec):
    """The product of the outputs of branches; an axis of length 1 is repeated: `multiply: [[...], [...]]`."""

    kind = "multiply"
    branches: Branches


@contextmanager
def specs_as_unions(*models: type[BaseModel]) -> Iterator[None]:
    """Within the block, the JSON Schemas of the models and of containers contain all specs."""

    def rebuild(as_union: bool) -> None:
        OneOf.as_union = as_union
        # Without this, a model would be rebuilt with the old schemas of the models in it.
        nested: tuple[type[BaseModel], ...] = (*CONTAINERS, Equations, *OPTIMIZERS.values(), *models)
        for model in nested:
            if "__pydantic_core_schema__" in vars(model):
                del model.__pydantic_core_schema__
        for model in nested:
            model.model_rebuild(force=True)

    rebuild(True)
    try:
        yield
    finally:
        rebuild(False)


WARM_UP: dict[str, Any] = {"warmup_epochs": (WarmUp, 0.0), "warmup_steps": (Count, 0)}
"""Options of every schedule: the rate first rises linearly over this many epochs or steps, then the schedule starts."""

FROM_DATA = ("total_steps", "steps_per_epoch")
"""Parameters of schedules that are no options: they follow from the data and `training`."""


def _family(name: str, *specs: type[Spec]) -> Family:
    """The package's own classes and functions of a family, and further specs."""

    def own() -> Specs:
        found: Specs = {}
        for kind, target in _targets(name).items():
            excluded: Sequence[str] = ["found"] if name == "metric" else ()
            if name == "loss":  # a step needs the mean over the batch, and every image has a label
                excluded = [*list(inspect.signature(target).parameters)[:2], "ignore_index", "reduction"]
            found[kind] = partial(_spec, name, kind, target, excluded)
        return found | {spec.kind: spec for spec in specs}

    return Family(own)


def _targets(family: str) -> Mapping[str, Callable[..., Any]]:
    """The package's own classes and functions of a family."""
    match family:
        case "layer" | "loss":
            from adtrain import nn

            return nn.LAYERS if family == "layer" else nn.LOSSES
        case "optimizer" | "schedule" | "average":
            from adtrain import optim

            own: dict[str, Mapping[str, Callable[..., Any]]]
            own = {"optimizer": optim.OPTIMIZERS, "schedule": optim.SCHEDULES, "average": optim.AVERAGES}
            return own[family]
        case "augmentation":
            from adtrain import augment

            return augment.AUGMENTATIONS
        case "data set":
            from adtrain.data import catalogue

            return {name: catalogue.finder(name) for name in catalogue.CATALOGUE}
        case _:
            from adtrain import curvature, metrics

            return {**metrics.METRICS, **curvature.METRICS}


CONTAINERS: tuple[type[Spec], ...] = (Residual, Concat, Add, Multiply)
LAYERS = _family("layer", *CONTAINERS)
LOSSES = _family("loss", Equations)
OPTIMIZERS = _family("optimizer")
SCHEDULES = _family("schedule")
"""In a config schedules count in epochs: step_size and milestones are epochs; gamma of exponential is per epoch."""
AVERAGES = _family("average")
AUGMENTATIONS = _family("augmentation")
DATASETS = _family("data set")
METRICS = _family("metric")
FAMILIES = {
    "layer": LAYERS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "average": AVERAGES,
    "augmentation": AUGMENTATIONS,
    "data set": DATASETS,
    "metric": METRICS,
}


def add(family: str, kind: str, target: Callable[..., Any]) -> None:
    """Add a class or function of the user to a family; it replaces one of the same name.

    Raises OptionError for a parameter whose annotation no value of a config fits.
    """
    FAMILIES[family][kind] = _spec(family, kind, target)


def _spec(family: str, kind: str, target: Callable[..., Any], excluded: Collection[str] = ()) -> type[Spec]:
    """The spec of a class or function, whose options are its parameters without `excluded`. Raises as `add`."""
    from adtrain.optim.optimizer import Optimizer as Rule

    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in excluded or (family == "schedule" and name in FROM_DATA):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        if hints[name] is Rule:
            made = default is not ... and Field(default_factory=partial(_spec_of, OPTIMIZERS, default))
            fields[name] = Optimizer, made or ...
            continue
        try:
            values = option_type(hints[name])
        except OptionError as error:
            raise OptionError(f"{family} {kind}: {name} {error}") from None
        fields[name] = (values | None if default is None else values, default)
    more = WARM_UP if family == "schedule" else {}
    spec = create_model(kind, __base__=Spec, __module__=__name__, **fields, **more)
    spec.kind = kind
    spec.target = staticmethod(target)
    spec.__doc__ = (docstrings.of(target) or kind).splitlines()[0]
    return spec


def _spec_of(family: Family, made: Any) -> Spec:
    """The spec of an object of the package: an option's default."""
    spec = family[made.kind()]
    return spec(**{name: getattr(made, name) for name in spec.model_fields})


def by_kind(kind: str) -> type[Spec] | None:
    """The spec of this name, in whatever family; None if there is none."""
    return next((family[kind] for family in FAMILIES.values() if kind in family), None)


if TYPE_CHECKING:
    Layer: TypeAlias = Spec
    Loss: TypeAlias = Spec
    Optimizer: TypeAlias = Spec
    Schedule: TypeAlias = Spec
    Average: TypeAlias = Spec
    Augmentation: TypeAlias = Spec
    DataSource: TypeAlias = Spec
    Metric: TypeAlias = Spec
else:
    Layer = Annotated[Spec, OneOf(LAYERS)]
    Loss = Annotated[Spec, OneOf(LOSSES), AsTerms]
    Optimizer = Annotated[Spec, OneOf(OPTIMIZERS)]
    Schedule = Annotated[Spec, OneOf(SCHEDULES)]
    Average = Annotated[Spec, OneOf(AVERAGES)]
    Augmentation = Annotated[Spec, OneOf(AUGMENTATIONS)]
    DataSource = Annotated[Spec, OneOf(DATASETS)]
    Metric = Annotated[Spec, OneOf(METRICS)]
Layers = Annotated[list[Layer], Field(min_length=1)]
Branches = Annotated[list[Layers], Field(min_length=1)]
