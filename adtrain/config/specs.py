"""Layers, losses, optimizers, schedules and augmentations as a config writes them: a name, with options.

    relu                              the name alone
    linear: 128                       a value: the first option
    linear: {out_features: 128}       options by name

Names, options and defaults are read off the classes and functions that do the work, so a layer added to `nn.LAYERS` is
in the language at once; `values.OPTIONS` bounds what each option takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from adtrain import augment, nn, optim
from adtrain.config.values import OPTIONS, Count, WarmUp


class Spec(BaseModel):
    """One layer, loss, optimizer, schedule or augmentation: its name is `kind`, its options are the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    kind: ClassVar[str]

    @classmethod
    def first_option(cls) -> str | None:
        """The option that a value in place of the options stands for; None where there are no options."""
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
        """The spec as a config writes it, every option by name: `{"linear": {"out_features": 128, "bias": True}}`."""
        options = {name: _written(value) for name, value in self.options().items() if value is not None}
        return {self.kind: options} if options else self.kind

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The written forms: the name alone where no option is required, a value, or options by name."""
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


def derive(kind: str, worker: Callable[..., Any], leave_out: Collection[str] = (), **more: Any) -> type[Spec]:
    """The spec of the options that `worker`, a class or function, takes, less `leave_out`, and of the fields `more`."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(worker).parameters.items():
        if name not in leave_out:
            values = OPTIONS.get(f"{kind}.{name}", OPTIONS[name])
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (values | None if default is None else values, default)
    made = create_model(kind, __base__=Spec, __module__=__name__, **fields, **more)
    made.kind = kind
    made.__doc__ = (inspect.getdoc(worker) or kind).splitlines()[0]
    return made


class Residual(Spec):
    """The body's output added to the input, or to the shortcut's output; `residual: [...]` is a body alone."""

    kind = "residual"
    body: Layers
    shortcut: Layers | None = None


class Concat(Spec):
    """The outputs of branches side by side along the channels: `concat: [[...], [...]]`."""

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
    """The type of a value written by name, which selects its spec."""
    tagged = tuple(Annotated[spec, Tag(kind)] for kind, spec in specs.items())
    return Annotated[Union[tagged], Discriminator(_name_of)]  # noqa: UP007


WARM_UP: dict[str, Any] = {"warmup_epochs": (WarmUp, 0.0), "warmup_steps": (Count, 0)}
"""Before any schedule: the rate rises linearly for so many epochs or steps, and the schedule starts after."""

CONTAINERS: tuple[type[Spec], ...] = (Residual, Concat, Add)
LAYERS: dict[str, type[Spec]] = {
    **{kind: derive(kind, layer) for kind, layer in nn.LAYERS.items()},
    **{container.kind: container for container in CONTAINERS},
}
LOSSES: dict[str, type[Spec]] = {
    kind: derive(kind, loss, leave_out=list(inspect.signature(loss).parameters)[:2]) for kind, loss in nn.LOSSES.items()
}
OPTIMIZERS: dict[str, type[Spec]] = {kind: derive(kind, optimizer) for kind, optimizer in optim.OPTIMIZERS.items()}
SCHEDULES: dict[str, type[Spec]] = {
    kind: derive(kind, schedule, leave_out=("total_steps",), **WARM_UP) for kind, schedule in optim.SCHEDULES.items()
}
"""Schedules count in epochs here: step_size and milestones are epochs, gamma is per epoch for exponential."""
AUGMENTATIONS: dict[str, type[Spec]] = {kind: derive(kind, change) for kind, change in augment.AUGMENTATIONS.items()}

FAMILIES = {
    "layer": LAYERS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "augmentation": AUGMENTATIONS,
}
BY_KIND: dict[str, type[Spec]] = {kind: spec for family in FAMILIES.values() for kind, spec in family.items()}

if TYPE_CHECKING:
    Layer: TypeAlias = Spec
    Loss: TypeAlias = Spec
    Optimizer: TypeAlias = Spec
    Schedule: TypeAlias = Spec
    Augmentation: TypeAlias = Spec
else:
    Layer = _one_of(LAYERS)
    Loss = _one_of(LOSSES)
    Optimizer = _one_of(OPTIMIZERS)
    Schedule = _one_of(SCHEDULES)
    Augmentation = _one_of(AUGMENTATIONS)
Layers = Annotated[list[Layer], Field(min_length=1)]
Branches = Annotated[list[Layers], Field(min_length=1)]
