"""Lowering: an equation to the launches that compute it on a Target. Nothing here needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import adtrain.lowering.cuda  # noqa: F401  registers the kernels
from adtrain.backends.cuda import forms
from adtrain.backends.cuda.codegen.part import Kernel, for_members
from adtrain.backends.cuda.forms import kernel_form, no_kernel
from adtrain.backends.cuda.forms.horizontal import horizontal, is_product
from adtrain.backends.cuda.forms.row_fused import rows_alone
from adtrain.backends.cuda.launch_plan import LaunchPlan, Plan, generated_plan, kernel_plans, loops_plan, product_plans
from adtrain.backends.cuda.vendor import Library, LibraryCall, calls
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels, within_grid
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, primitive_names
from adtrain.core.static_key import lasting_text, params_key
from adtrain.passes.fusion import is_loops

for _each in iter_modules(forms.__path__):  # they define the forms
    import_module(f"{forms.__name__}.{_each.name}")

Problem: TypeAlias = "tuple[Any, ...]"
"""What candidates are measured for: the name of an equation, its epilogue, the types of arguments, and parameters."""

Candidate: TypeAlias = "CudaKernel | LibraryCall"
"""One of several ways to compute an equation."""

MARGIN = 1.03
"""The first candidate is kept while it takes at most this many times the fastest candidate's time."""


@dataclass
class Lowering:
    """Chooses kernels for a Target. What rules and code generators return is kept while the equation exists.

    Attributes:
        libraries: NVIDIA's libraries whose calls are candidates.
        measured: for each problem, the microseconds of its candidates by label. The tuner fills it. The first candidate
            is chosen for other problems.
        planned: the plans of equations of cached Programs, whose kernels were chosen by another process.
    """

    target: Target
    libraries: Sequence[Library] = ()
    measured: dict[Problem, Mapping[str, float]] = field(default_factory=dict)
    planned: WeakKeyDictionary[Equation, Plan] = field(default_factory=WeakKeyDictionary)
    _candidates: WeakKeyDictionary[Equation, list[Candidate]] = field(default_factory=WeakKeyDictionary)
    _generated_kernels: WeakKeyDictionary[Equation, list[Kernel]] = field(default_factory=WeakKeyDictionary)

    def launches(self, equation: Equation, kernel: Candidate | None = None) -> list[LaunchPlan | LibraryCall]:
        """The launches that compute an equation, in order, or the library call that does. A view and an exchange
        with other ranks have none.

        Args:
            kernel: the candidate, by default the chosen one.

        Raises:
            DeviceError: no kernel computes it.
        """
        if kernel is None and (known := self.planned.get(equation)) is not None:
            return known.launches
        if equation.is_view or equation.has(Trait.COLLECTIVE):
            return []
        if is_loops(equation) and not equation.members:
            return [loops_plan(equation)]
        if generated := self._generated(equation):
            if not all(within_grid((each.blocks, each.members)) for each in generated):
                raise no_kernel(equation)
            return [generated_plan(equation, each) for each in generated]
        kernel = kernel or self.chosen(equation)
        if isinstance(kernel, LibraryCall):
            return [kernel]
        form = kernel_form(equation)
        if form is None:
            return [*kernel_plans(equation, kernel)]
        after = [] if form.after is None else form.after(equation, kernel)
        plans = product_plans(equation, kernel, form.epilogue(equation))
        return [*plans, *(generated_plan(equation, each) for each in after)]

    def scratch(self, equation: Equation, kernel: Candidate | None = None) -> int:
        """Bytes of scratch memory that the launches of an equation need; see `launches`."""
        if kernel is None and (known := self.planned.get(equation)) is not None:
            return known.scratch
        if equation.is_view or equation.has(Trait.COLLECTIVE) or (is_loops(equation) and not equation.members):
            return 0
        if generated := self._generated(equation):
            return int(generated[0].scratch)  # the bytes of a memory layout
        return int((kernel or self.chosen(equation)).scratch or 0)

    def candidates(self, equation: Equation) -> list[Candidate]:
        """The candidates for an equation: kernels, the one to prefer first, then library calls."""
        if equation not in self._candidates:
            form, found = kernel_form(equation), list[Candidate]()
            if form is None:
                types = (v.type for v in equation.inputs)
                kernels = cuda_kernels(equation.name, self.target, *types, **equation.kernel_params)
                found = [*kernels, *calls(equation, self.libraries)]
            elif form.candidates is not None:
                found = [*form.candidates(equation, self.target)]
            self._candidates[equation] = found[:1] if self.target.by_member else found
        return self._candidates[equation]

    def chosen(self, equation: Equation) -> Candidate:
        """The candidate that the equation runs with: the fastest one if times are known, else the first.

        Raises:
            DeviceError: there is none.
        """
        found = self.candidates(equation)
        if not found:
            raise no_kernel(equation)
        times = self.measured.get(problem(equation))
        if times is None:
            return found[0]
        labels = [candidate.label for candidate in found]
        return found[labels.index(fastest(labels, times))]

    def _generated(self, equation: Equation) -> list[Kernel]:
        """The generated kernels of an equation, to launch in order; none where it has kernels of files."""
        if equation not in self._generated_kernels:
            form, made = kernel_form(equation), list[Kernel]()
            if form is not None and form.kernels is not None:
                made = form.kernels(equation, self.target)
            elif equation.members and (is_loops(equation) or is_product(equation)):
                made = [horizontal([equation], self.target)]
            elif form is None and not self.target.by_member:
                made = rows_alone(equation, self.target)
            if equation.members:  # those of one member, with the members as a dimension of the grid
                made = [for_members(each, equation.members) for each in made]
            self._generated_kernels[equation] = made
        return self._generated_kernels[equation]


def fastest(labels: Sequence[str], times: Mapping[str, float]) -> str:
    """The label of the fastest candidate; the first one if it is as fast within MARGIN, or if none was timed."""
    microseconds = [times.get(label, math.inf) for label in labels]
    best = min(microseconds)
    return labels[0 if microseconds[0] <= MARGIN * best else microseconds.index(best)]


def problem(equation: Equation) -> Problem:
    """The key of measured times. A product with an epilogue has the key of the product; see `Form.timed`."""
    form = kernel_form(equation)
    if form is not None and form.timed is not None:
        return problem(form.timed(equation))
    epilogue = () if form is None else primitive_names(equation)
    return equation.name, tuple(v.type for v in equation.inputs), params_key(equation.kernel_params), *epilogue


def problem_text(equation: Equation) -> str | None:
    """The problem as a text that is the same in all processes; None where a parameter has no such text."""
    try:
        return lasting_text(problem(equation))
    except ValueError:
        return None
