"""stage: trace a function once into a Program, and run the Program from then on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.backend import Executable, backend
from adtrain.core.errors import DTypeError, TraceError
from adtrain.core.hooks import active_hooks
from adtrain.core.precision import current_precision
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import at, current_phase, current_scope
from adtrain.core.side_effects import refuse_assignments, refuse_attribute_changes, refuse_leaks
from adtrain.core.trace import Tracer, base_trace, bind
from adtrain.core.types import ArrayType

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
        self.symbols: list[tuple[weakref.ref[Symbol], str]] = []  # with the line and origin of each

    def input(self, x: Value) -> Symbol:
        self.inputs.append(Variable(ArrayType(x.shape, x.dtype), x.device))
        return self._symbol(self.inputs[-1], f"{user_line()}: an argument of this call")

    def _symbol(self, variable: Variable, origin: str) -> Symbol:
        symbol = Symbol(self, variable)
        self.symbols.append((weakref.ref(symbol), origin))
        return symbol

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
        origin = f"{user_line()}: the value computed here"
        symbols = tuple(self._symbol(v, origin) for v in outputs)
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
    arguments: tree.Template
    types: tuple[Any, ...]  # of the arguments' leaves, see _kind
    precision: str  # of the products
    traced: Program  # as the function wrote it
    program: Program  # after the passes
    result: tree.Template
    executable: Executable
    donated: tuple[int, ...]  # positions among the arrays

    def arrays(self, args: tuple[Any, ...]) -> list[Array] | None:
        """The leaves of ``args`` if all are arrays of the types that this was made for, as precise; else None."""
        if self.precision != current_precision():
            return None
        leaves = self.arguments.flatten(args)
        if leaves is None:
            return None
        for x, kind in zip(leaves, self.types, strict=True):
            if x.__class__ is not Array or (x.shape, x.dtype, x.device) != kind:
                return None
        return leaves


def evaluate(program: Program, args: Sequence[Value]) -> list[Value]:
    """Run the equations one by one through `bind`, so that they can be traced or differentiated again."""
    known: dict[Variable, Value] = dict(program.constants)
    known.update(zip(program.inputs, args, strict=True))
    for e, dead in zip(program.equations, program.last_uses(), strict=True):
        with at(e.scope, e.phase):
            found = bind(e.primitive, *(known[v] for v in e.inputs), **e.params)
        known.update(zip(e.outputs, (found,) if isinstance(found, Value) else found, strict=True))
        for v in dead:
            del known[v]
    return [known[v] for v in program.outputs]


class Staged:
    """A function that runs as a Program. Made by `stage`."""

    __slots__ = ("compiled", "donate", "f", "latest", "passes")  # no __dict__: these caches are no side effects

    def __init__(self, f: Callable[..., Any], passes: Sequence[Pass], donate: Collection[int]) -> None:
        self.f = f
        self.passes = passes
        self.donate = donate
        self.compiled: dict[Any, _Compiled] = {}
        self.latest: _Compiled | None = None

    def __call__(self, *args: Any) -> Any:
        return self.repeat(1, *args)

    def repeat(self, times: int, *args: Any) -> Any:
        """Call so many times in a row, each time with the results in place of the donated arguments.

        Where ``times`` is more than 1 the function returns its donated arguments' new values, in their order.

        Raises:
            DTypeError: it returns something else.
        """
        compiled = self.latest
        arrays = None if compiled is None else compiled.arrays(args)
        if compiled is None or arrays is None:
            leaves, structure = _leaves(args)
            compiled = self.latest = self._compiled(args, leaves, structure)
            values = [x for x in leaves if isinstance(x, Value)]
            if any(isinstance(x, Tracer) for x in values):
                return compiled.result.unflatten(_evaluated(compiled, values, times))
            arrays = values  # type: ignore[assignment]
        if times > 1 and not compiled.program.carries:
            raise DTypeError(f"stage: {_NOT_CARRIED}")
        return self._run(compiled, arrays, times)  # type: ignore[arg-type]

    def _run(self, compiled: _Compiled, arrays: list[Array], times: int) -> Any:
        buffers = [x.buffer for x in arrays]
        for x in {id(arrays[i]): arrays[i] for i in compiled.donated}.values():
            del x.buffer
        observers, executable = active_hooks(), compiled.executable
        if executable.repeats and not observers:
            results, _ = executable.run(buffers, times=times)
        else:
            for left in range(times - 1, -1, -1):
                results, seconds = executable.run(buffers, timed=bool(observers))
                for observer in observers:
                    observer.program(compiled.program, seconds)
                if left:
                    for i, result in zip(compiled.donated, results, strict=True):
                        buffers[i] = result
                    del result, results  # who holds a buffer keeps it from being written to
        outputs = zip(results, compiled.program.outputs, strict=True)
        return compiled.result.unflatten([Array(b, *v.type, v.device) for b, v in outputs])

    def compile(self, *args: Any) -> None:
        """Make ready for arguments of these types, so that their first call takes no longer than the next."""
        leaves, structure = _leaves(args)
        self._compiled(args, leaves, structure)

    def program(self, *args: Any) -> Program:
        """The Program for arguments of these types, after the passes; nothing is run."""
        leaves, structure = _leaves(args)
        return self._improved(self._trace(args, leaves, structure)[0])

    def _compiled(self, args: Sequence[Any], leaves: Sequence[Any], structure: tree.TreeDef) -> _Compiled:
        types, precision = tuple(map(_kind, leaves)), current_precision()
        try:
            found = self.compiled.get((structure, types, precision))
        except TypeError as error:
            raise DTypeError(f"stage: an argument is neither an array nor a static value: {error}") from None
        if found is None:
            traced, result = self._trace(args, leaves, structure)
            program = self._improved(traced)
            devices = {v.device for v in (*program.inputs, *program.constants)} or {"cpu"}
            executable = backend(min(devices)).compile(program)
            donated = tuple(i for i, v in enumerate(program.inputs) if v in program.donated)
            templates = tree.Template(structure), tree.Template(result)
            found = _Compiled(templates[0], types, precision, traced, program, templates[1], executable, donated)
            self.compiled[structure, types, precision] = found
        return found

    def _improved(self, program: Program) -> Program:
        for improve in self.passes:
            program = improve(program)
        return program

    def _trace(
        self, args: Sequence[Any], leaves: Sequence[Any], structure: tree.TreeDef
    ) -> tuple[Program, tree.TreeDef]:
        refuse_assignments(self.f)
        trace = StagingTrace()
        with refuse_attribute_changes(self.f):
            program, out_structure = self._write(trace, args, leaves, structure)
            refuse_leaks(trace.symbols)
        return program, out_structure

    def _write(
        self, trace: StagingTrace, args: Sequence[Any], leaves: Sequence[Any], structure: tree.TreeDef
    ) -> tuple[Program, tree.TreeDef]:
        """Run the function on symbols, none of which is left when this returns."""
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
        of_argument = iter(symbols)
        donated = [
            x.variable
            for i, arg in enumerate(args)
            for x in islice(of_argument, len(tree.leaves(arg)))
            if i in self.donate and isinstance(x, Symbol)
        ]
        return replace(trace.program(outputs), donated=frozenset(donated)), out_structure


_NOT_CARRIED = "a function that is repeated returns new values for its donated arguments, in their order"


def _evaluated(compiled: _Compiled, values: list[Value], times: int) -> list[Value]:
    """What the function makes of traced values."""
    for _ in range(times - 1):
        for i, x in zip(compiled.donated, evaluate(compiled.traced, values), strict=True):
            values[i] = x
    return evaluate(compiled.traced, values)


def _kind(x: Any) -> Any:
    """What a leaf is to a Program: an array's type and device, or a static value with its type, as 1 == 1.0 == True."""
    return (x.shape, x.dtype, x.device) if isinstance(x, Value) else (type(x), x)


def _leaves(args: Any) -> tuple[list[Any], tree.TreeDef]:
    """The leaves of the arguments, NumPy arrays as Arrays."""
    leaves, structure = tree.flatten(args)
    return [array(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves], structure


def stage(f: Callable[..., Any], passes: Sequence[Pass] = (), donate: Collection[int] = ()) -> Staged:
    """Trace ``f`` once for each combination of argument types, and run it as a compiled Program.

    A call under another `matmul_precision` also makes another Program.

    ``f`` must have no side effects: they would happen only once, when it is traced. What is refused, and what cannot be
    seen, is listed in `adtrain.core.side_effects`.

    Args:
        f: function of trees of arrays to a tree of arrays, written with public ops; it may take gradients and update
            parameters. Leaves that are not arrays (numbers, strings) are static: each value has a Program of its own.
            Arrays that ``f`` uses without getting them as arguments become constants of the Program.
        passes: applied to the Program in this order.
        donate: positions of donated arguments. Results may be written to their memory, so their arrays cannot be used
            after the call, even if it fails.

    Raises (when called):
        TraceError: ``f`` reads the elements of a traced array, has a side effect that is refused, or an argument was
            donated before. Names the line where it can.
        DTypeError: ``f`` returns something other than arrays.
    """
    return Staged(f, passes, donate)
