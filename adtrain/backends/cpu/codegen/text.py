"""The writer of a program's C source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.backends.cpu.compiler import KernelError, Source
from adtrain.codegen.elementwise import literal, pointer
from adtrain.core.kernel import CKernel, value_for
from adtrain.core.program import Equation


class Writer:
    """Collects a program's source: functions, prototypes of kernels, and their requirements.

    Attributes:
        sources: the kernels' files, each for certain element types, by the full name of a function.
        of_user: the prototypes of the kernels in each file of the user, by name.
        scratch: bytes that each thread needs for its own use.
        checked: the equations that can meet an index out of range, in the order of their numbers from 1.
        called: the kernels that have been called since it was cleared, each once.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.prototypes: dict[str, None] = {}
        self.of_user: dict[Source, dict[str, str]] = {}
        self.sources: dict[str, Source] = {}
        self.scratch = 0
        self.checked: list[Equation] = []
        self.called: dict[str, None] = {}

    def function(self, kind: str, parameters: str, body: Sequence[str]) -> str:
        """The name of a function with this text. Equal texts share one function."""
        text = "\n".join([f"({parameters}) {{", *(f"    {line}" for line in body), "}"])
        return self.functions.setdefault(text, f"{kind}_{len(self.functions)}")

    def files(self) -> frozenset[Source]:
        """The files of the kernels. A file of the user comes with the prototypes that its functions must have."""
        return frozenset(x._replace(prototypes=(*self.of_user.get(x, {}).values(),)) for x in self.sources.values())

    def text(self) -> str:
        # Not inlined: a thousand functions in one would take minutes to compile.
        start = "static __attribute__((noinline)) void"
        return "\n\n".join(["\n".join(self.prototypes), *(f"{start} {n}{t}" for t, n in self.functions.items())])

    def call(
        self,
        kernel: CKernel,
        equation: Equation,
        types: Sequence[Any],
        pointers: Sequence[str],
        memory: Sequence[str] = (),
    ) -> list[str]:
        """The lines of a call of `kernel` for arguments of these types.

        Args:
            pointers: to the inputs, then to the outputs.
            memory: addresses of the kernel's memory: scratch, prepared, collected. Those of 0 bytes are left out.
        """
        params, name = equation.kernel_params, self.name(kernel, equation, types)
        self.called[name] = None
        returns = "int" if kernel.checked else "void"
        declared = [pointer(v, const=True) for v in equation.inputs] + [pointer(v) for v in equation.outputs]
        team = [("const Team *", "team")] if kernel.team else []
        variables = [*zip(declared, pointers, strict=True)]
        if kernel.each:
            *inputs, out = variables
            calls = []
            for i, x in enumerate(inputs):
                numbers = _numbers(value_for(kernel.numbers, i, *types, **params))
                calls.append(self._declared(returns, name, [*team, x, out, *numbers]))
            return self._named(name, equation, [f"{call};" for call in calls])
        numbers = _numbers(value_for(kernel.numbers, *types, **params))
        call = self._declared(returns, name, [*team, *variables, *numbers, *(("char *", m) for m in memory)])
        if kernel.checked:
            self.checked.append(equation)
            call = f"if ({call}) fail(m, {len(self.checked)})"
        return self._named(name, equation, [f"{call};"])

    def call_beside(
        self,
        kernel: CKernel,
        step: str,
        equation: Equation,
        types: Sequence[Any],
        arrays: Sequence[tuple[str, str]],
        memory: str,
    ) -> str:
        """The call of ``name_prepare`` before the items or ``name_finish`` after them.

        Args:
            step: "prepare" or "finish".
            arrays: types and addresses of the inputs not by item, or of the outputs.
        """
        numbers = _numbers(value_for(kernel.numbers, *types, **equation.kernel_params))
        name = self.name(replace(kernel, name=f"{kernel.name}_{step}"), equation, types)
        call = f"{self._declared('void', name, [*arrays, *numbers, ('char *', memory)])};"
        return " ".join(self._named(name, equation, [call]))

    def name(self, kernel: CKernel, equation: Equation, types: Sequence[Any]) -> str:
        """The function's full name. Adds its file to the program."""
        params = equation.kernel_params
        source = Source(kernel.file, kernel.element_types(*types, **params), macros=tuple(kernel.definitions.items()))
        name: str = value_for(kernel.name, *types, **params) + source.suffix
        self.sources[name] = source
        return name

    def _named(self, name: str, equation: Equation, calls: Sequence[str]) -> list[str]:
        """The lines of declared calls of a kernel. Where a signal ends one of the user's, own_call.h names it."""
        if self.sources[name] not in self.of_user:
            return [*calls]
        message = f"adtrain: error: operation {equation.name}: its kernel {name} ended the process with "
        return [f'own_begin("{message}");', *calls, "own_end();"]

    def _declared(self, returns: str, name: str, arguments: Sequence[tuple[str, str]]) -> str:
        prototype = f"{returns} {name}({', '.join(c for c, _ in arguments)});"
        self.prototypes[prototype] = None
        if os.path.isabs(self.sources[name].file):
            known = self.of_user.setdefault(self.sources[name], {})
            if known.setdefault(name, prototype) != prototype:
                different = f"found calls of {known[name]} and of {prototype}"
                raise KernelError(f"your kernel {name}: {different} expected the same types in numbers= each time")
        return f"{name}({', '.join(value for _, value in arguments)})"


def _numbers(numbers: Sequence[float]) -> list[tuple[str, str]]:
    return [("double" if isinstance(x, (float, np.floating)) else "int64_t", literal(x)) for x in numbers]
