"""Layers, losses, optimizers, schedules, augmentations, data sets and metrics in a config: a name and its options.

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
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from adtrain import augment, metrics, nn, optim
from adtrain.config.annotations import option_type
from adtrain.config.values import WarmUp
from adtrain.core.errors import OptionError
from adtrain.data import catalogue
from adtrain.option_types import Count


class Spec(BaseModel):
    """One layer, loss or other named class. `kind` is its name; the fields are its options.

    `target` is the class or function that has them as arguments.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    kind: ClassVar[str]
    target: ClassVar[Callable[..., Any]]

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
            raise PydanticCustomError("expected", "no options")
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


def _name_of(value: Any) -> str | None:
    if isinstance(value, Spec):
        return value.kind
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


class Family(MutableMapping[str, type[Spec]]):
    """The specs of a family by name. A spec of the package is created at its first use, because a config uses few."""

    def __init__(self) -> None:
        self._specs: dict[str, type[Spec] | partial[type[Spec]]] = {}
        self._making = RLock()

    def __getitem__(self, kind: str) -> type[Spec]:
        spec = self._specs[kind]
        if isinstance(spec, partial):
            with self._making:  # one class for all threads: values of two classes are never equal
                spec = self._specs[kind]
                if isinstance(spec, partial):
                    spec = self._specs[kind] = spec()
        return spec

    def __setitem__(self, kind: str, spec: type[Spec]) -> None:
        self._specs[kind] = spec

    def add_lazily(self, kind: str, create: partial[type[Spec]]) -> None:
        """Add a spec that `create` returns at its first use."""
        self._specs[kind] = create

    def __delitem__(self, kind: str) -> None:
        del self._specs[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class _OneOf:
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


@contextmanager
def specs_as_unions(*models: type[BaseModel]) -> Iterator[None]:
    """Within the block, the JSON Schemas of the models and of containers contain all specs."""

    def rebuild(as_union: bool) -> None:
        _OneOf.as_union = as_union
        # Without this, a model would be rebuilt with the old schemas of the models in it.
        for model in (*CONTAINERS, *models):
            if "__pydantic_core_schema__" in vars(model):
                del model.__pydantic_core_schema__
        for model in (*CONTAINERS, *models):
            model.model_rebuild(force=True)

    rebuild(True)
    try:
        yield
    finally:
        rebuild(False)


def _union(specs: Iterable[type[Spec]]) -> Any:
    """The union of specs. The locations of its errors contain the name of the spec."""
    tagged = tuple(Annotated[spec, Tag(spec.kind)] for spec in specs)
    return Annotated[Union[tagged], Discriminator(_name_of)]  # noqa: UP007


@lru_cache
def _adapter(spec: type[Spec]) -> TypeAdapter[Any]:
    return TypeAdapter(_union([spec]))


WARM_UP: dict[str, Any] = {"warmup_epochs": (WarmUp, 0.0), "warmup_steps": (Count, 0)}
"""Options of every schedule: the rate first rises linearly over this many epochs or steps, then the schedule starts."""

CONTAINERS: tuple[type[Spec], ...] = (Residual, Concat, Add)
LAYERS = Family()
LOSSES = Family()
OPTIMIZERS = Family()
SCHEDULES = Family()
"""In a config schedules count in epochs: step_size and milestones are epochs; gamma of exponential is per epoch."""
AUGMENTATIONS = Family()
DATASETS = Family()
METRICS = Family()
FAMILIES = {
    "layer": LAYERS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
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
    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in excluded or (family == "schedule" and name == "total_steps"):
            continue
        try:
            values = option_type(hints[name])
        except OptionError as error:
            raise OptionError(f"{family} {kind}: {name} {error}") from None
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (values | None if default is None else values, default)
    more = WARM_UP if family == "schedule" else {}
    spec = create_model(kind, __base__=Spec, __module__=__name__, **fields, **more)
    spec.kind = kind
    spec.target = staticmethod(target)
    spec.__doc__ = (inspect.getdoc(target) or kind).splitlines()[0]
    return spec


def _add_own() -> None:
    """Add the package's own classes and functions."""
    own: dict[str, Mapping[str, Callable[..., Any]]] = {
        "layer": nn.LAYERS,
        "optimizer": optim.OPTIMIZERS,
        "schedule": optim.SCHEDULES,
        "augmentation": augment.AUGMENTATIONS,
        "data set": {name: catalogue.finder(name) for name in catalogue.CATALOGUE},
        "loss": nn.LOSSES,
        "metric": metrics.METRICS,
    }
    for family, targets in own.items():
        for kind, target in targets.items():
            excluded: Sequence[str] = ["found"] if family == "metric" else ()
            if family == "loss":  # a step needs the mean over the batch, and every image has a label
                excluded = [*list(inspect.signature(target).parameters)[:2], "ignore_index", "reduction"]
            FAMILIES[family].add_lazily(kind, partial(_spec, family, kind, target, excluded))
    LAYERS.update({container.kind: container for container in CONTAINERS})


_add_own()


def by_kind(kind: str) -> type[Spec] | None:
    """The spec of this name, in whatever family; None if there is none."""
    return next((family[kind] for family in FAMILIES.values() if kind in family), None)


if TYPE_CHECKING:
    Layer: TypeAlias = Spec
    Loss: TypeAlias = Spec
    Optimizer: TypeAlias = Spec
    Schedule: TypeAlias = Spec
    Augmentation: TypeAlias = Spec
    DataSource: TypeAlias = Spec
    Metric: TypeAlias = Spec
else:
    Layer = Annotated[Spec, _OneOf(LAYERS)]
    Loss = Annotated[Spec, _OneOf(LOSSES)]
    Optimizer = Annotated[Spec, _OneOf(OPTIMIZERS)]
    Schedule = Annotated[Spec, _OneOf(SCHEDULES)]
    Augmentation = Annotated[Spec, _OneOf(AUGMENTATIONS)]
    DataSource = Annotated[Spec, _OneOf(DATASETS)]
    Metric = Annotated[Spec, _OneOf(METRICS)]
Layers = Annotated[list[Layer], Field(min_length=1)]
Branches = Annotated[list[Layers], Field(min_length=1)]
