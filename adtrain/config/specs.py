"""Layers, losses, optimizers, schedules, augmentations, data sets and metrics in a config: a name and its options.

    relu                              the name alone
    linear: 128                       the value of the first option
    linear: {out_features: 128}       options by name

Names, types, bounds and defaults of the options are those of the signatures and annotations of the classes and
functions, the package's own and the user's. `add` is the one way into a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, Union, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    WrapValidator,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

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


def _one_of(specs: dict[str, type[Spec]]) -> Any:
    """The union of the specs; the name in a config selects one. Specs that are added later are accepted too."""
    package = tuple(specs.items())

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        current = tuple(specs.items())
        return handler(value) if current == package else _adapter(current).validate_python(value)

    return Annotated[_union(package), SerializeAsAny(), WrapValidator(check)]


def _union(specs: tuple[tuple[str, type[Spec]], ...]) -> Any:
    tagged = tuple(Annotated[spec, Tag(kind)] for kind, spec in specs)
    return Annotated[Union[tagged], Discriminator(_name_of)]  # noqa: UP007


@lru_cache(maxsize=8)
def _adapter(specs: tuple[tuple[str, type[Spec]], ...]) -> TypeAdapter[Any]:
    return TypeAdapter(_union(specs))


WARM_UP: dict[str, Any] = {"warmup_epochs": (WarmUp, 0.0), "warmup_steps": (Count, 0)}
"""Options of every schedule: the rate first rises linearly over this many epochs or steps, then the schedule starts."""

CONTAINERS: tuple[type[Spec], ...] = (Residual, Concat, Add)
LAYERS: dict[str, type[Spec]] = {}
LOSSES: dict[str, type[Spec]] = {}
OPTIMIZERS: dict[str, type[Spec]] = {}
SCHEDULES: dict[str, type[Spec]] = {}
"""In a config schedules count in epochs: step_size and milestones are epochs; gamma of exponential is per epoch."""
AUGMENTATIONS: dict[str, type[Spec]] = {}
DATASETS: dict[str, type[Spec]] = {}
METRICS: dict[str, type[Spec]] = {}
FAMILIES = {
    "layer": LAYERS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "augmentation": AUGMENTATIONS,
    "data set": DATASETS,
    "metric": METRICS,
}


def add(family: str, kind: str, target: Callable[..., Any], given: Collection[str] = ()) -> None:
    """Add a class or function of the package or of the user to a family; it replaces one of the same name.

    Its parameters are the options, except those in `given`.
    Raises OptionError for a parameter whose annotation no value of a config fits.
    """
    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in given or (family == "schedule" and name == "total_steps"):
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
    FAMILIES[family][kind] = spec


def _add_own() -> None:
    """Add the package's own classes and functions."""
    own: dict[str, Mapping[str, Callable[..., Any]]] = {
        "layer": nn.LAYERS,
        "optimizer": optim.OPTIMIZERS,
        "schedule": optim.SCHEDULES,
        "augmentation": augment.AUGMENTATIONS,
        "data set": {name: catalogue.finder(name) for name in catalogue.CATALOGUE},
    }
    for family, classes in own.items():
        for kind, cls in classes.items():
            add(family, kind, cls)
    LAYERS.update({container.kind: container for container in CONTAINERS})
    for kind, loss in nn.LOSSES.items():
        # A step needs the mean over the batch, and every image has a label.
        add("loss", kind, loss, given=[*list(inspect.signature(loss).parameters)[:2], "ignore_index", "reduction"])
    for kind, metric in metrics.METRICS.items():
        add("metric", kind, metric, given=["found"])


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
    Layer = _one_of(LAYERS)
    Loss = _one_of(LOSSES)
    Optimizer = _one_of(OPTIMIZERS)
    Schedule = _one_of(SCHEDULES)
    Augmentation = _one_of(AUGMENTATIONS)
    DataSource = _one_of(DATASETS)
    Metric = _one_of(METRICS)
Layers = Annotated[list[Layer], Field(min_length=1)]
Branches = Annotated[list[Layers], Field(min_length=1)]
