"""Forms: the kinds of GPU kernels that compute several equations. Each is one record in the table FORMS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adtrain.backends.cuda.codegen.part import Kernel
from adtrain.core.fused import OVERWRITES, Overwrites
from adtrain.core.program import Equation

if TYPE_CHECKING:
    from adtrain.backends.cuda.lower import Lowering


@dataclass(frozen=True)
class Form:
    """A kind of kernel.

    Attributes:
        name: the parameter ``form`` of its equations; or the name of a primitive whose kernel is generated.
        kernels: the kernels of an equation, to launch in order.
        overwrites: whether a result of an equation may overwrite an argument, where this does not follow from the
            equation of the body that reads the argument.
    """

    name: str
    kernels: Callable[[Equation, Lowering], list[Kernel]]
    overwrites: Overwrites | None = None


FORMS: dict[str, Form] = {}
"""All forms, by name."""


def define(form: Form) -> None:
    """Add a form to the table.

    Raises:
        ValueError: there is one of this name.
    """
    if form.name in FORMS:
        raise ValueError(f"form {form.name!r} is defined twice")
    FORMS[form.name] = form
    if form.overwrites is not None:
        OVERWRITES[form.name] = form.overwrites


def kernel_form(equation: Equation) -> Form | None:
    """The form of a fused equation, or of a primitive with a generated kernel; None for another equation."""
    return FORMS.get(equation.name)
