"""Forms: the kinds of GPU kernels that compute several equations, and what each may join.

Each is one record in the table FORMS, in a module here. `lower.py` imports all these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adtrain.backends.cuda.codegen.loops import Epilogue, epilogue
from adtrain.backends.cuda.codegen.part import Kernel
from adtrain.core.errors import DeviceError
from adtrain.core.kernel import CudaKernel, Target
from adtrain.core.program import OVERWRITES, Equation, Overwrites

LAUNCH_BYTES = 8 << 20
"""The bytes that the memory of a GPU moves in the time of a launch, 2 us at 4 TB/s."""


@dataclass(frozen=True)
class Form:
    """A kind of kernel.

    Its kernels are generated, or come from files and get a generated epilogue. There may be several files for one
    equation, the candidates; the tuner chooses one.

    Attributes:
        name: the parameter ``form`` of its equations; or the name of a primitive whose kernel is generated.
        kernels: the generated kernels of an equation, to launch in order.
        candidates: the kernels of files for the first equation of the body, the preferred one first. The others are
            the epilogue.
        epilogue: the epilogue of these kernels, if it is not that of a product.
        after: generated kernels that are launched after those of a candidate.
        timed: the equation whose measured times choose among the candidates, if not the whole.
        overwrites: whether a result of an equation may overwrite an argument, where this does not follow from the
            equation of the body that reads the argument.
        converts: whether the body may convert arguments of its elementwise equations, reductions and norms from
            bfloat16, and results to it. See `narrow_values`.
    """

    name: str
    kernels: Callable[[Equation, Target], list[Kernel]] | None = None
    candidates: Callable[[Equation, Target], Sequence[CudaKernel]] | None = None
    epilogue: Callable[[Equation], Epilogue] = epilogue
    after: Callable[[Equation, CudaKernel], list[Kernel]] | None = None
    timed: Callable[[Equation], Equation] | None = None
    overwrites: Overwrites | None = None
    converts: bool = False


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


def no_kernel(equation: Equation) -> DeviceError:
    """The error for an equation that no kernel computes."""
    types = ", ".join(str(v.type) for v in equation.inputs)
    return DeviceError(f"{equation.name} of {types or 'nothing'} has no kernel for the GPU; use --device cpu")
