"""The trace of staging, which records operations as equations of a Program, and `evaluate`, which runs them again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Array, Value
from adtrain.core.batching import BatchTrace, BatchTracer
from adtrain.core.errors import TraceError, user_line
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import at, current_phase, current_scope
from adtrain.core.trace import Tracer, bind, common_device, new_level
from adtrain.core.traced_number import TracedNumber
from adtrain.core.types import ArrayType


class Symbol(Tracer):
    """The tracer of staging: it stands for a variable of the Program."""

    __slots__ = ("device", "dtype", "shape", "trace", "variable")

    def __init__(self, trace: StagingTrace, variable: Variable) -> None:
        self.trace = trace
        self.variable = variable
        self.shape, self.dtype = variable.type
        self.device = variable.device

    def numpy(self) -> np.ndarray:
        raise TraceError(
            f"{user_line()}: the jitted function reads the elements of a traced value {self.dtype}{list(self.shape)}, "
            "which has none: use ops.where instead of a branch, and ops instead of NumPy and float(); an argument that "
            "decides about a branch can be static: jit(f, static_argnums=...)"
        )


class StagingTrace:
    """The base trace of staging: it records operations as equations and runs none."""

    level = 0

    def __init__(self) -> None:
        self.live = True
        self.inputs: list[Variable] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, tuple[Array, Variable]] = {}
        self.symbols: list[tuple[weakref.ref[Symbol], str]] = []  # with the line and origin of each

    def input(self, x: Value) -> Symbol:
        """A symbol for an argument of the type and device of ``x``."""
        self.inputs.append(Variable(ArrayType(x.shape, x.dtype), x.device))
        return self._symbol(self.inputs[-1], f"{user_line()}: an argument of this call")

    def known(self, variable: Variable) -> Symbol:
        """A symbol for a variable of another Program, as an input of this one."""
        self.inputs.append(variable)
        return self._symbol(variable, f"{user_line()}: an argument of this call")

    def _symbol(self, variable: Variable, origin: str) -> Symbol:
        symbol = Symbol(self, variable)
        self.symbols.append((weakref.ref(symbol), origin))
        return symbol

    def variable(self, x: Value) -> Variable:
        """The variable of a symbol; an array becomes a constant."""
        if isinstance(x, Symbol) and x.trace is self:
            return x.variable
        if not isinstance(x, Array):
            raise TraceError(
                f"{user_line()}: a jitted function uses a traced value of another function; pass it as an argument"
            )
        if id(x) not in self.constants:
            self.constants[id(x)] = x, Variable(ArrayType(x.shape, x.dtype), x.device)
        return self.constants[id(x)][1]

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        for name, x in params.items():
            if isinstance(x, TracedNumber):
                raise TraceError(
                    f"{user_line()}: {primitive.name} needs the value of {name}, a float argument of the jitted "
                    "function, which is traced; make it static with jit(f, static_argnums=...)"
                )
        inputs = tuple(self.variable(x) for x in args)
        device = common_device(primitive, args, params)
        members = max((v.members for v in inputs), default=0)
        if Trait.MEMBERS in primitive.traits:
            members = 0 if members else args[0].shape[0]
        outputs = tuple(Variable(t, device, members) for t in primitive.output_types(args, params))
        self.equations.append(Equation(primitive, inputs, params, outputs, current_scope(), current_phase()))
        origin = f"{user_line()}: the value computed here"
        symbols = tuple(self._symbol(v, origin) for v in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def program(self, outputs: Sequence[Value]) -> Program:
        """The Program of all equations so far."""
        results = tuple(self.variable(x) for x in outputs)  # first: an output may be a new constant
        constants = {v: x for x, v in self.constants.values()}
        return Program(tuple(self.inputs), constants, tuple(self.equations), results)


def evaluate(program: Program, args: Sequence[Value]) -> list[Value]:
    """Run the equations one by one by `bind`, so that ``args`` may be tracers. Members run as in `vmap`."""
    trace = BatchTrace(new_level(), program.members) if program.members else None

    def own(v: Variable, x: Value) -> Value:
        """The value of a variable. If that of a mapped equation is not mapped, all members have computed the same."""
        if trace is None:
            return x
        if v.members:
            return x if trace.maps(x) else BatchTracer(trace, x)
        return trace.lower(x)[0] if trace.maps(x) else x

    known: dict[Variable, Value] = dict(program.constants)
    known.update((v, own(v, x)) for v, x in zip(program.inputs, args, strict=True))
    for e, dead in zip(program.equations, program.last_uses(), strict=True):
        with at(e.scope, e.phase):
            if trace is not None and e.has(Trait.MEMBERS):
                found = trace.lower(known[e.inputs[0]])
            else:
                found = bind(e.primitive, *(known[v] for v in e.inputs), **e.params)
        results = (found,) if isinstance(found, Value) else found
        known.update((v, own(v, x)) for v, x in zip(e.outputs, results, strict=True))
        for v in dead:
            del known[v]
    return [known[v] if trace is None else trace.lower(known[v]) for v in program.outputs]
