"""The terms of a loss of equations in a config."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import CoreSchema

from adtrain.config.family import Spec
from adtrain.config.values import Places
from adtrain.option_types import Positive, Size, Text


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

    kind = "equations"
    terms: Annotated[list[Term], Field(min_length=1)]

    @model_serializer
    def written(self) -> Any:
        return [term.model_dump(mode="json") for term in self.terms]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        options = handler.resolve_ref_schema(handler(schema))
        terms = dict(options["properties"]["terms"])
        options.clear()
        options |= terms
        return options


AsTerms = BeforeValidator(lambda value: {Equations.kind: value} if isinstance(value, list) else value)
"""If the loss is a list, it has the terms of `equations`."""
