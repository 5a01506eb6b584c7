"""A spec: a class or function that a config names, and its options. A family: the specs that may stand in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import lru_cache, partial
from threading import RLock
from typing import Annotated, Any, ClassVar, TypeAlias, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from adtrain import docstrings


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
