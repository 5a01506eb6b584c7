"""A spec: a class or function that a config names, and its options. A family: the specs that may stand in one place.

Families are layers, losses, optimizers, schedules, augmentations, data sets, metrics and terms of equations:

    relu                              the name alone
    linear: 128                       the value of the first option
    linear: {out_features: 128}       options by name

Names, types, bounds and defaults of the options are those of the signatures and annotations of the classes and
functions, the package's own and the user's. `add` is the one way into a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from threading import RLock
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, Union, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    TypeAdapter,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from adtrain import docstrings
from adtrain.config import mistakes
from adtrain.config.records import Places, WarmUp, option_type
from adtrain.config.schema import OWN
from adtrain.core.errors import OptionError
from adtrain.option_types import Count, Positive, Size, Text


class Spec(BaseModel):
    """One layer, loss or other named class. `kind` is its name; the fields are its options.

    `target` is the class or function that has them as arguments.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    kind: ClassVar[str]
    target: ClassVar[Callable[..., Any]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.__doc__ = docstrings.of(cls)

    @classmethod
    def first_option(cls) -> str | None:
        """The option that `kind: value` sets; None if there are no options."""
        return next(iter(cls.model_fields), None)

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    @model_validator(mode="before")
    @classmethod
    def _options_of(cls, value: Any) -> Any:
        if value == cls.kind:
            return {}
        options = value[cls.kind] if isinstance(value, dict) and list(value) == [cls.kind] else value
        if options is None or isinstance(options, dict):
            return options or {}
        if (first := cls.first_option()) is None:
            raise PydanticCustomError("expected", mistakes.NO_OPTIONS)
        return {first: options}

    @model_serializer
    def written(self) -> str | dict[str, Any]:
        """The spec in a config's form, with every option by name: `{"linear": {"out_features": 128, "bias": True}}`."""
        options = {name: _written(value) for name, value in self.options().items() if value is not None}
        return {self.kind: options} if options else self.kind

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The allowed forms: options by name, a value if only the first option is required, the name if none is."""
        options = handler.resolve_ref_schema(handler(schema))
        forms = [dict(options)]
        required = options.get("required", [])
        first = cls.first_option()
        if first is not None and set(required) <= {first}:
            forms.append(options["properties"][first])
        if not required:
            forms.append({"type": "null"})
        named = {
            "type": "object",
            "properties": {cls.kind: {"anyOf": forms}},
            "required": [cls.kind],
            "additionalProperties": False,
        }
        options.clear()
        options |= {"anyOf": [{"const": cls.kind}, named]} if not required else named
        return options


def _written(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.written()
    return [_written(item) for item in value] if isinstance(value, (list, tuple)) else value


def _name_of(value: Any) -> str | None:
    if isinstance(value, Spec):
        return value.kind
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


Specs: TypeAlias = dict[str, type[Spec] | partial[type[Spec]]]
"""Specs by name. A `partial` returns the spec; it is called at its first use."""


class Family(MutableMapping[str, type[Spec]]):
    """The specs of a family by name.

    `own` returns the package's specs. It is called at the first use of the family, because it imports their modules.
    """

    def __init__(self, own: Callable[[], Specs]) -> None:
        self._own = own
        self._found: Specs | None = None
        self._making = RLock()

    @property
    def _specs(self) -> Specs:
        with self._making:
            if self._found is None:
                self._found = self._own()
            return self._found

    def __getitem__(self, kind: str) -> type[Spec]:
        with self._making:  # one class for all threads: values of two classes are never equal
            spec = self._specs[kind]
            if isinstance(spec, partial):
                spec = self._specs[kind] = spec()
            return spec

    def __contains__(self, kind: object) -> bool:  # the inherited method would make the spec
        return kind in self._specs

    def __setitem__(self, kind: str, spec: type[Spec]) -> None:
        self._specs[kind] = spec

    def __delitem__(self, kind: str) -> None:
        del self._specs[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class OneOf:
    """The annotation of a value that is any spec of a family. The name in a config selects the spec."""

    as_union = False
    """Whether pydantic builds the core schema as a union of all specs, which a JSON Schema needs. Validation does not:
    it builds only the spec that the config names."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def check(self, value: Any) -> Any:
        """The spec of a value in a config. Raises the errors of pydantic for a union."""
        kind, context = _name_of(value), {"discriminator": "name"}
        if kind is None:
            raise PydanticKnownError("union_tag_not_found", context)
        if kind not in self.family:
            expected = ", ".join(self.family)
            raise PydanticKnownError("union_tag_invalid", {**context, "tag": kind, "expected_tags": expected})
        return _adapter(self.family[kind]).validate_python(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self.as_union:
            return handler.generate_schema(_union(self.family.values()))
        return core_schema.no_info_plain_validator_function(self.check)


def _union(specs: Iterable[type[Spec]]) -> Any:
    """The union of specs. The locations of its errors contain the name of the spec."""
    tagged = tuple(Annotated[spec, Tag(spec.kind)] for spec in specs)
    return Annotated[Union[tagged], Discriminator(_name_of)]  # noqa: UP007


@lru_cache
def _adapter(spec: type[Spec]) -> TypeAdapter[Any]:
    return TypeAdapter(_union([spec]))


def _without_docstring(schema: dict[str, Any]) -> None:
    """Leave out the class's docstring, which Python does not keep when it optimises."""
    schema.pop("description", None)


class Term(BaseModel):
    """An expression whose mean square is a part of the loss."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, json_schema_extra=_without_docstring)
    equation: Text = Field(description='what is to be 0, such as "u_t - 0.1 * u_xx"')
    at: Places | None = Field(
        None,
        description="variables with fixed values, such as {t: 0}; points take the values of {x: [-1, 1]} in turns",
    )
    weight: Positive = Field(1.0, description="the factor of its mean square in the loss")
    points: Size | None = Field(None, description="the maximum number of points in a step; default: data.batch_size")

    @model_serializer(mode="wrap")
    def _written(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in written(self).items() if value is not None}

    @property
    def fixed(self) -> dict[str, tuple[float, ...]]:
        """The values of the variables in `at`."""
        given = self.at or {}
        return {name: x if isinstance(x, tuple) else (x,) for name, x in given.items()}


class Equations(Spec):
    """The mean squares of expressions, each times its weight; in a config `loss: [{equation: ...}, ...]`."""

    kind = mistakes.EQUATIONS
    terms: Annotated[list[Term], Field(min_length=1)] = Field(description="a list of equations")

    @model_serializer
    def written(self) -> Any:
        return [term.model_dump(mode="json") for term in self.terms]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The list of terms, or the form of other losses."""
        named = super().__get_pydantic_json_schema__(schema, handler)
        options = dict(named)
        terms = options["properties"][cls.kind]["anyOf"][0]["properties"]["terms"]
        named.clear()
        named |= {"anyOf": [terms, options]}
        return named


AsTerms = BeforeValidator(lambda value: {Equations.kind: value} if isinstance(value, list) else value)
"""If the loss is a list, it has the terms of `equations`."""


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
    spec = FAMILIES[family][kind] = _spec(family, kind, target)
    OWN[kind] = tuple(spec.model_fields)


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
