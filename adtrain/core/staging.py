"""stage: trace a function into a Program once, and run the Program in later calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.backend import Executable, backend
from adtrain.core.errors import DTypeError
from adtrain.core.hooks import active_hooks
from adtrain.core.precision import current_precision
from adtrain.core.program import Program
from adtrain.core.side_effects import refuse_assignments, refuse_attribute_changes, refuse_leaks
from adtrain.core.staging_trace import StagingTrace, Symbol, evaluate
from adtrain.core.trace import Tracer, base_trace

Pass: TypeAlias = Callable[[Program], Program]
"""From a Program to a better Program with the same results."""


@dataclass(frozen=True)
class _Compiled:
    """A function compiled for arguments of certain types."""

    arguments: tree.Template
    types: tuple[Any, ...]  # _leaf_key of each leaf of the arguments
    precision: str  # current_precision() when it was traced
    traced: Program  # before the passes
    program: Program  # after the passes
    result: tree.Template
    executable: Executable
    donated: tuple[int, ...]  # positions among the Program's inputs

    def arrays(self, args: tuple[Any, ...]) -> list[Array] | None:
        """The leaves of ``args`` if this can run them: all are arrays of its types, and the precision is its own."""
        if self.precision != current_precision():
            return None
        leaves = self.arguments.flatten(args)
        if leaves is None:
            return None
        for x, kind in zip(leaves, self.types, strict=True):
            if x.__class__ is not Array or (x.shape, x.dtype, x.device) != kind:
                return None
        return leaves


class Staged:
    """A function that runs as a Program; `stage` returns it."""

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
        """Call ``times`` times, each time with the results of the last call as the donated arguments.

        For more than one call the function must return the new values of its donated arguments, in their order.

        Raises:
            DTypeError: it returns something else. Also the errors of `stage`.
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
            for remaining in range(times - 1, -1, -1):
                results, seconds = executable.run(buffers, timed=bool(observers))
                for observer in observers:
                    observer.program(compiled.program, seconds)
                if remaining:
                    for i, result in zip(compiled.donated, results, strict=True):
                        buffers[i] = result
                    del result, results  # a buffer that is referenced elsewhere is not overwritten
        outputs = zip(results, compiled.program.outputs, strict=True)
        return compiled.result.unflatten([Array(b, *v.type, v.device) for b, v in outputs])

    def compile(self, *args: Any) -> None:
        """Trace and compile for arguments of these types; nothing is run."""
        leaves, structure = _leaves(args)
        self._compiled(args, leaves, structure)

    def program(self, *args: Any) -> Program:
        """The Program for arguments of these types, after the passes. Nothing is compiled or run."""
        leaves, structure = _leaves(args)
        return self._optimized(self._trace(args, leaves, structure)[0])

    def _compiled(self, args: Sequence[Any], leaves: Sequence[Any], structure: tree.TreeDef) -> _Compiled:
        types, precision = tuple(map(_leaf_key, leaves)), current_precision()
        try:
            found = self.compiled.get((structure, types, precision))
        except TypeError as error:
            raise DTypeError(f"stage: an argument is neither an array nor hashable: {error}") from None
        if found is None:
            traced, result = self._trace(args, leaves, structure)
            program = self._optimized(traced)
            devices = {v.device for v in (*program.inputs, *program.constants)} or {"cpu"}
            executable = backend(min(devices)).compile(program)
            donated = tuple(i for i, v in enumerate(program.inputs) if v in program.donated)
            templates = tree.Template(structure), tree.Template(result)
            found = _Compiled(templates[0], types, precision, traced, program, templates[1], executable, donated)
            self.compiled[structure, types, precision] = found
        return found

    def _optimized(self, program: Program) -> Program:
        for apply in self.passes:
            program = apply(program)
        return program

    def _trace(
        self, args: Sequence[Any], leaves: Sequence[Any], structure: tree.TreeDef
    ) -> tuple[Program, tree.TreeDef]:
        refuse_assignments(self.f)
        trace = StagingTrace()
        with refuse_attribute_changes(self.f):
            program, out_structure = self._record(trace, args, leaves, structure)
            refuse_leaks(trace.symbols)
        return program, out_structure

    def _record(
        self, trace: StagingTrace, args: Sequence[Any], leaves: Sequence[Any], structure: tree.TreeDef
    ) -> tuple[Program, tree.TreeDef]:
        """Call the function on symbols. No symbol is referenced from here after the return."""
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
    """The results of the function for arguments that are tracers."""
    for _ in range(times - 1):
        for i, x in zip(compiled.donated, evaluate(compiled.traced, values), strict=True):
            values[i] = x
    return evaluate(compiled.traced, values)


def _leaf_key(x: Any) -> Any:
    """The key of a leaf: an array's type and device, or a static value.

    Values that compare equal may have different Programs, so the key of a number has its type (1 == 1.0 == True), and
    that of a float its digits (0.0 == -0.0). The digits also make one key of all NaNs, which compare unequal.
    """
    if isinstance(x, Value):
        return x.shape, x.dtype, x.device
    return type(x), x.hex() if isinstance(x, float) else x


def _leaves(args: Any) -> tuple[list[Any], tree.TreeDef]:
    """The leaves of the arguments, with NumPy arrays as Arrays, and their structure."""
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
