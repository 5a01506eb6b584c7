"""stage: trace a function once into a Program, and run the Program from then on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, ArrayType, Value, array
from adtrain.core.backend import backend
from adtrain.core.errors import DTypeError, TraceError
from adtrain.core.hooks import active_hooks
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import current_phase, current_scope
from adtrain.core.trace import Tracer, base_trace

Pass: TypeAlias = Callable[[Program], Program]
"""Program to a better Program that computes the same."""

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def user_line() -> str:
    """``file:number`` of the innermost frame outside adtrain."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Symbol(Tracer):
    """What a staged function computes with: a variable of the Program being written."""

    __slots__ = ("device", "dtype", "shape", "trace", "variable")

    def __init__(self, trace: StagingTrace, variable: Variable) -> None:
        self.trace = trace
        self.variable = variable
        self.shape, self.dtype = variable.type
        self.device = variable.device

    def numpy(self) -> np.ndarray:
        raise TraceError(
            f"{user_line()}: the elements of {self.dtype}{list(self.shape)} are asked for while the function is being "
            "staged, when there are none: use ops.where in place of a branch, and ops in place of NumPy and float()"
        )


class StagingTrace:
    """A base level that writes equations instead of running them."""

    level = 0

    def __init__(self) -> None:
        self.live = True
        self.inputs: list[Variable] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, tuple[Array, Variable]] = {}

    def input(self, x: Value) -> Symbol:
        self.inputs.append(Variable(ArrayType(x.shape, x.dtype), x.device))
        return Symbol(self, self.inputs[-1])

    def variable(self, x: Value) -> Variable:
        """The variable of a symbol; an array that was there already becomes a constant."""
        if isinstance(x, Symbol) and x.trace is self:
            return x.variable
        if not isinstance(x, Array):
            raise TraceError(f"{user_line()}: a staged function uses a value of another tracing; pass it in")
        if id(x) not in self.constants:
            self.constants[id(x)] = x, Variable(ArrayType(x.shape, x.dtype), x.device)
        return self.constants[id(x)][1]

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        inputs = tuple(self.variable(x) for x in args)
        device = inputs[0].device if inputs else params["device"]
        outputs = tuple(Variable(t, device) for t in primitive.output_types(args, params))
        self.equations.append(Equation(primitive, inputs, params, outputs, current_scope(), current_phase()))
        symbols = tuple(Symbol(self, v) for v in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def program(self, outputs: Sequence[Value]) -> Program:
        return Program(
            tuple(self.inputs),
            {v: x for x, v in self.constants.values()},
            tuple(self.equations),
            tuple(self.variable(x) for x in outputs),
        )


@dataclass(frozen=True)
class _Compiled:
    program: Program
    structure: tree.TreeDef  # of the result
    run: Callable[[Sequence[Any]], Sequence[Any]]


class Staged:
    """A function that runs as a Program. Made by `stage`."""

    def __init__(self, f: Callable[..., Any], passes: Sequence[Pass]) -> None:
        self.f = f
        self.passes = passes
        self.compiled: dict[Any, _Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, structure = _leaves(args)
        compiled = self._compiled(leaves, structure)
        values = [x for x in leaves if isinstance(x, Value)]
        if active_hooks() or any(isinstance(x, Tracer) for x in values):
            return tree.unflatten(compiled.structure, compiled.program.evaluate(*values))
        buffers = compiled.run([x.buffer for x in values])  # type: ignore[attr-defined]
        outputs = compiled.program.outputs
        return tree.unflatten(
            compiled.structure,
            [Array(b, *v.type, v.device) for b, v in zip(buffers, outputs, strict=True)],
        )

    def program(self, *args: Any) -> Program:
        """The Program for arguments of these types, after the passes; nothing is run."""
        return self._compiled(*_leaves(args)).program

    def _compiled(self, leaves: Sequence[Any], structure: tree.TreeDef) -> _Compiled:
        # 1, 1.0 and True are equal, and make different programs
        kinds = ((x.shape, x.dtype, x.device) if isinstance(x, Value) else (type(x), x) for x in leaves)
        key = (structure, tuple(kinds))
        try:
            found = self.compiled.get(key)
        except TypeError as error:
            raise DTypeError(f"stage: an argument is neither an array nor a static value: {error}") from None
        if found is None:
            found = self.compiled[key] = self._trace(leaves, structure)
        return found

    def _trace(self, leaves: Sequence[Any], structure: tree.TreeDef) -> _Compiled:
        trace = StagingTrace()
        symbols = [trace.input(x) if isinstance(x, Value) else x for x in leaves]
        try:
            with base_trace(trace):
                out = self.f(*tree.unflatten(structure, symbols))
        finally:
            trace.live = False
        outputs, out_structure = tree.flatten(out)
        for x in outputs:
            if not isinstance(x, Value):
                raise DTypeError(f"stage: the function returned a {type(x).__name__}, expected arrays")
        program = trace.program(outputs)
        for improve in self.passes:
            program = improve(program)
        devices = {v.device for v in (*program.inputs, *program.constants)} or {"cpu"}
        return _Compiled(program, out_structure, backend(min(devices)).compile(program))


def _leaves(args: Any) -> tuple[list[Any], tree.TreeDef]:
    """The leaves of the arguments, NumPy arrays as Arrays."""
    leaves, structure = tree.flatten(args)
    return [array(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves], structure


def stage(f: Callable[..., Any], passes: Sequence[Pass] = ()) -> Staged:
    """``f`` as a function that is traced once for each combination of argument types, and then runs as a Program.

    Args:
        f: function of trees of arrays to a tree of arrays, made of public ops, gradients and updates included. Leaves
            that are no arrays (numbers, strings) are static: another value means another Program. Arrays that ``f``
            does not get as arguments are constants of the Program.
        passes: applied to the Program in this order.

    Raises (when called):
        TraceError: the function asks for the elements of an array (the message names the line), or uses a value that
            it kept from an earlier call.
        DTypeError: it returns something other than arrays.
    """
    return Staged(f, passes)
