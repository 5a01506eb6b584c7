"""The C text of types, literals and elements, and the parts that a program's source is collected from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.backends.cpu.compiler import Source, c_type
from adtrain.core.kernel import CKernel
from adtrain.core.program import Equation, Variable


class Writer:
    """What has been written so far of a program's source: functions, prototypes of kernels, and what they need.

    Attributes:
        sources: the kernels' files, each for certain element types.
        scratch: bytes that each thread needs for its own use.
        checked: the equations that can meet an index out of range, in the order of their numbers from 1.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.prototypes: dict[str, None] = {}
        self.sources: set[Source] = set()
        self.scratch = 0
        self.checked: list[Equation] = []

    def function(self, kind: str, parameters: str, body: Sequence[str]) -> str:
        """The name of a function of this text, which is written once however often it is asked for."""
        text = "\n".join([f"({parameters}) {{", *(f"    {line}" for line in body), "}"])
        return self.functions.setdefault(text, f"{kind}_{len(self.functions)}")

    def text(self) -> str:
        # Inlined into one another and then into the entry, a thousand functions would take minutes to compile.
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
            memory: addresses of scratch and of what was prepared, as far as the kernel takes them.
        """
        params, name = equation.params, self.name(kernel, equation, types)
        returns = "int" if kernel.checked else "void"
        declared = [pointer(v, const=True) for v in equation.inputs] + [pointer(v) for v in equation.outputs]
        team = [("const Team *", "team")] if kernel.team else []
        variables = [*zip(declared, pointers, strict=True)]
        if kernel.each:
            *inputs, out = variables
            calls = []
            for i, x in enumerate(inputs):
                numbers = _numbers(kernel.numbers(i, *types, **params))
                calls.append(self._declared(returns, name, [*team, x, out, *numbers]))
            return [f"{call};" for call in calls]
        numbers = _numbers(kernel.numbers(*types, **params))
        call = self._declared(returns, name, [*team, *variables, *numbers, *(("char *", m) for m in memory)])
        if not kernel.checked:
            return [f"{call};"]
        self.checked.append(equation)
        return [f"if ({call}) fail(m, {len(self.checked)});"]

    def prepare(
        self,
        kernel: CKernel,
        equation: Equation,
        types: Sequence[Any],
        shared: Sequence[tuple[str, str]],
        memory: str,
    ) -> str:
        """The call that prepares `kernel` in `memory`; `shared` has types and addresses of the inputs not by item."""
        numbers = _numbers(kernel.numbers(*types, **equation.params))
        name = self.name(replace(kernel, name=f"{kernel.name}_prepare"), equation, types)
        return f"{self._declared('void', name, [*shared, *numbers, ('char *', memory)])};"

    def name(self, kernel: CKernel, equation: Equation, types: Sequence[Any]) -> str:
        """The function's full name; its file becomes part of the program."""
        source = Source(kernel.file, kernel.dtypes(*types, **equation.params))
        self.sources.add(source)
        return kernel.name + source.suffix

    def _declared(self, returns: str, name: str, arguments: Sequence[tuple[str, str]]) -> str:
        self.prototypes[f"{returns} {name}({', '.join(c for c, _ in arguments)});"] = None
        return f"{name}({', '.join(value for _, value in arguments)})"


def _numbers(numbers: Sequence[float]) -> list[tuple[str, str]]:
    return [("double" if isinstance(x, (float, np.floating)) else "int64_t", literal(x)) for x in numbers]


def literal(x: float) -> str:
    """A Python number in C."""
    if isinstance(x, (bool, int, np.integer)):
        return str(int(x))
    if math.isnan(x):
        return "NAN"
    return repr(float(x)) if math.isfinite(x) else "INFINITY" if x > 0 else "-INFINITY"


def element(equation: Equation, arguments: Sequence[str]) -> str:
    """One element of an elementwise equation's result, as a C expression of the elements of its arguments."""
    text = equation.primitive.expression
    if callable(text):
        text = text(**equation.params)
    assert text is not None
    t = equation.inputs[-1].type.dtype if equation.inputs else equation.outputs[0].type.dtype
    names = dict(zip("abc", arguments, strict=False))
    names |= {"T": c_type(t), "U": c_type(equation.outputs[0].type.dtype)}

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return f"({literal(equation.params[match[1]])})"
        return names.get(match[0], match[0])

    return re.sub(r"\{(\w+)\}|\b\w+\b", replaced, text)


def pointer(v: Variable, const: bool = False) -> str:
    """The C type of a pointer to the elements of `v`."""
    return f"{'const ' if const else ''}{c_type(v.type.dtype)} *"
