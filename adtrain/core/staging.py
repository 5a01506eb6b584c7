"""stage: trace a function into a Program once, and run the Program in later calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from adtrain.core import tree
from adtrain.core.array import Array, Value, returned_no_array
from adtrain.core.backend import Executable, backend
from adtrain.core.errors import DTypeError
from adtrain.core.hooks import active_hooks
from adtrain.core.precision import current_precision
from adtrain.core.program import Program
from adtrain.core.side_effects import refuse_assignments, refuse_attribute_changes, refuse_leaks
from adtrain.core.staging_arguments import (
    NOTHING,
    ArrayLeaf,
    Declared,
    LeafType,
    NumberLeaf,
    StaticArgument,
    StaticLeaf,
    leaf,
    traced,
    type_of,
)
from adtrain.core.staging_trace import StagingTrace, Symbol, evaluate
from adtrain.core.static_key import static_key
from adtrain.core.template import Template
from adtrain.core.timeline import during
from adtrain.core.trace import Tracer, base_trace
from adtrain.core.traced_number import TracedNumber

F = TypeVar("F", bound=Callable[..., Program])
Pass: TypeAlias = Callable[[Program], Program]
"""From a Program to a better Program with the same results, as far as its `Results` say."""


class Results(Enum):
    """How the results of a Program after a pass compare with those before it, if NumPy computes both.

    On a device, the kernel of a fused equation may add in another order than the kernels that it replaces.
    """

    EXACT = "exact"
    """They have the same bits."""
    ROUNDING = "rounding"
    """They may differ by rounding: sums have another order, or operands another precision."""
    FINITE = "finite values only"
    """As ROUNDING, if all values in the Program are finite. Kernels may leave out 0 times infinity, which is NaN."""


def keeps(results: Results) -> Callable[[F], F]:
    """Declare how the results after a pass compare with those before it: `@keeps(Results.EXACT)`."""

    def declare(apply: F) -> F:
        apply.__dict__["results"] = results
        return apply

    return declare


def results_of(apply: Pass) -> Results:
    """What a pass declares by `keeps`; also of a partial call of one."""
    function: Any = getattr(apply, "func", apply)
    declared: Results = function.results
    return declared


MAX_PROGRAMS = 64
"""The maximum number of Programs that a function keeps. The least recently used one is dropped."""


class ProgramCache(Protocol):
    """Compiled functions of earlier processes: the Program after the passes, the structure of its result, and
    `Executable.lowered`. Keys are compared by `static_key`."""

    def find(self, key: Any) -> tuple[Program, tree.TreeDef, Any] | None:
        """What is stored under the key, or None."""
        ...

    def store(self, key: Any, program: Program, result: tree.TreeDef, lowered: Any) -> None:
        """Store a compiled function under the key."""
        ...


class _Key(NamedTuple):
    """What the Program of a function depends on.

    Attributes:
        structure: the `static_key` of the structure of the arguments.
        types: `type_of` each of their leaves.
        precision: `current_precision`.
    """

    structure: Hashable
    types: tuple[LeafType, ...]
    precision: str


@dataclass(frozen=True)
class _Compiled:
    """A function compiled for arguments of certain types."""

    arguments: Template
    key: _Key
    traced: Program | None  # before the passes; None if the Program comes from a ProgramCache
    program: Program  # after the passes
    result: Template
    executable: Executable
    donated: tuple[int, ...]  # positions among the Program's inputs

    @cached_property
    def outputs(self) -> Sequence[tuple[Any, ...]]:
        """The shape, dtype and device of each result."""
        return [(*v.stored, v.device) for v in self.program.outputs]

    def arrays(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Array] | None:
        """The arrays among the arguments if this can run them: all are of its types, and the precision is its own."""
        if self.key.precision != current_precision():
            return None
        leaves = self.arguments.flatten((args, dict(sorted(options.items())) if len(options) > 1 else options))
        if leaves is None:
            return None
        found = []
        for x, kind in zip(leaves, self.key.types, strict=True):
            if x.__class__ is Array:
                if (x.shape, x.dtype, x.device) != kind:
                    return None
                found.append(x)
            elif x.__class__ is float and kind.__class__ is NumberLeaf:
                found.append(kind.array(x))
            elif kind.__class__ is not StaticLeaf or not kind.matches(x):
                return None
        return found


class Staged:
    """A function that runs as a Program; `stage` returns it."""

    # No __dict__: caches are not side effects.
    __slots__ = ("cache", "compiled", "donate", "f", "latest", "passes", "static")

    def __init__(
        self,
        f: Callable[..., Any],
        passes: Sequence[Pass],
        donate: Declared,
        static: Declared = NOTHING,
        cache: ProgramCache | None = None,
    ) -> None:
        self.f = f
        self.cache = cache
        self.passes = passes
        self.donate = donate
        self.static = static
        self.compiled: OrderedDict[_Key, _Compiled] = OrderedDict()
        self.latest: _Compiled | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._repeat(1, args, options)

    def repeat(self, times: int, *args: Any) -> Any:
        """Call ``times`` times, each time with the results of the last call as the donated arguments.

        For more than one call the function must return the new values of its donated arguments, in their order.

        Raises:
            DTypeError: it returns something else. Also the errors of `stage`.
        """
        return self._repeat(times, args, {})

    def _repeat(self, times: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        compiled = self.latest
        arrays = None if compiled is None else compiled.arrays(args, options)
        if compiled is None or arrays is None:
            leaves, structure = self._leaves(args, options)
            compiled = self.latest = self._compiled(leaves, structure)
            values = [x.value if isinstance(x, TracedNumber) else x for x in leaves]
            values = [x for x in values if isinstance(x, Value)]
            if any(isinstance(x, Tracer) for x in values):
                traced = compiled.traced or self._trace(leaves, structure)[0]
                return compiled.result.unflatten(_evaluated(traced, compiled.donated, values, times))
            arrays = values  # type: ignore[assignment]
        if times > 1 and not compiled.program.carries:
            raise DTypeError(
                "jit: a function that is repeated returns new values for its donated arguments, in their order"
            )
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
        return compiled.result.unflatten([Array(b, *x) for b, x in zip(results, compiled.outputs, strict=True)])

    def compile(self, *args: Any, **options: Any) -> Executable:
        """Trace for arguments of these types, and begin to compile; nothing is run."""
        return self._compiled(*self._leaves(args, options)).executable

    def executable(self, *args: Any, **options: Any) -> Executable | None:
        """What runs for arguments of these types; None if nothing was compiled for them."""
        leaves, structure = self._leaves(args, options)
        found = self.compiled.get(_key(leaves, structure))
        return None if found is None else found.executable

    def program(self, *args: Any, **options: Any) -> Program:
        """The Program for arguments of these types, after the passes. Nothing is compiled or run."""
        return self._optimized(self._trace(*self._leaves(args, options))[0])

    def trace(self, *args: Any, **options: Any) -> tuple[Program, Sequence[tuple[int | str, str]]]:
        """The Program before the passes, and for each of its inputs the argument and the path in it."""
        leaves, structure = self._leaves(args, options)
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(options.items())]
        places = [(place, path) for place, x in arguments for path in ([""] if place in self.static else tree.paths(x))]
        traced = [place for place, x in zip(places, leaves, strict=True) if isinstance(x, (Value, TracedNumber))]
        return self._trace(leaves, structure)[0], traced

    def _leaves(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], tree.TreeDef]:
        """The leaves of the arguments and their structure: a pair of a tuple and a dict with sorted keys.

        NumPy arrays become Arrays, floats TracedNumbers, and arguments that are declared static one leaf each.
        """
        given = tuple(StaticArgument(x) if i in self.static else x for i, x in enumerate(args))
        named = {name: StaticArgument(x) if name in self.static else x for name, x in sorted(options.items())}
        leaves, structure = tree.flatten((given, named))
        device = next((x.device for x in leaves if isinstance(x, Value)), "cpu")
        return [leaf(x, device) for x in leaves], structure

    def _compiled(self, leaves: Sequence[Any], structure: tree.TreeDef) -> _Compiled:
        key = _key(leaves, structure)
        found = self.compiled.get(key)
        if found is None:
            found = self.compiled[key] = self._compile(leaves, structure, key)
            if len(self.compiled) > MAX_PROGRAMS:
                self.compiled.popitem(last=False)
        self.compiled.move_to_end(key)
        return found

    def _compile(self, leaves: Sequence[Any], structure: tree.TreeDef, key: _Key) -> _Compiled:
        device = min((x.device for x in key.types if isinstance(x, (ArrayLeaf, NumberLeaf))), default="cpu")
        lowering_key = None if self.cache is None else backend(device).lowering_key()
        cache = None if lowering_key is None else self.cache
        cache_key, cached, traced, lowered = (key, device, lowering_key), None, None, None
        if cache is not None:
            with during("lowering"):
                cached = cache.find(cache_key)
        if cached is not None:
            program, result, lowered = cached
        else:
            with during("trace"):
                traced, result = self._trace(leaves, structure)
            with during("passes"):
                program = self._optimized(traced)
        devices = {v.device for v in (*program.inputs, *program.constants)} or {"cpu"}
        with during("lowering"):
            executable = backend(min(devices)).compile(program, lowered)
            if cache is not None and cached is None:
                cache.store(cache_key, program, result, executable.lowered)
        donated = tuple(i for i, v in enumerate(program.inputs) if v in program.donated)
        arguments, results = Template(structure), Template(result)
        return _Compiled(arguments, key, traced, program, results, executable, donated)

    def _optimized(self, program: Program) -> Program:
        for apply in self.passes:
            program = apply(program)
        return program

    def _trace(self, leaves: Sequence[Any], structure: tree.TreeDef) -> tuple[Program, tree.TreeDef]:
        refuse_assignments(self.f)
        trace = StagingTrace()
        with refuse_attribute_changes(self.f):
            program, out_structure = self._record(trace, leaves, structure)
            refuse_leaks(trace.symbols)
        return program, out_structure

    def _record(
        self, trace: StagingTrace, leaves: Sequence[Any], structure: tree.TreeDef
    ) -> tuple[Program, tree.TreeDef]:
        """Call the function on symbols. No symbol is referenced from here after the return."""
        args, options = tree.unflatten(structure, [traced(trace, x) for x in leaves])
        places = [*enumerate(args), *options.items()]
        given = tree.leaves([x for place, x in places if place in self.donate])
        donated = frozenset(x.variable for x in given if isinstance(x, Symbol))
        try:
            with base_trace(trace):
                outputs, out_structure = tree.flatten(self.f(*args, **options))
                outputs = [x.array() if isinstance(x, TracedNumber) else x for x in outputs]
        finally:
            trace.live = False
        for x in outputs:
            if not isinstance(x, Value):
                raise returned_no_array("jit", x)
        return replace(trace.program(outputs), donated=donated), out_structure


def _key(leaves: Sequence[Any], structure: tree.TreeDef) -> _Key:
    """The key of the Program for arguments. Raises DTypeError as `type_of` does."""
    return _Key(static_key(structure), tuple(map(type_of, leaves)), current_precision())


def _evaluated(traced: Program, donated: Sequence[int], values: list[Value], times: int) -> list[Value]:
    """The results of the function for arguments that are tracers."""
    for _ in range(times - 1):
        for i, x in zip(donated, evaluate(traced, values), strict=True):
            values[i] = x
    return evaluate(traced, values)


def stage(
    f: Callable[..., Any], passes: Sequence[Pass] = (), donate: Collection[int] = (), cache: ProgramCache | None = None
) -> Staged:
    """Trace ``f`` once for each combination of argument types, and run it as a compiled Program.

    A call under another `matmul_precision` also makes another Program.

    ``f`` must have no side effects: they would happen only once, when it is traced. What is refused, and what cannot be
    seen, is listed in `adtrain.core.side_effects`.

    Args:
        f: function of trees of arrays to a tree of arrays, written with public ops; it may take gradients and update
            parameters. Floats are traced; integers, bools and strings are static: each value has a Program of its own.
            Arrays that ``f`` uses without getting them as arguments become constants of the Program.
        passes: applied to the Program in this order.
        cache: Programs of earlier processes. Its keys must cover all that ``f`` and the passes depend on.
        donate: positions of donated arguments. Results may be written to their memory, so their arrays cannot be used
            after the call, even if it fails.

    Raises (when called):
        TraceError: ``f`` reads the elements of a traced array, has a side effect that is refused, or an argument was
            donated before. Names the line where it can.
        DTypeError: ``f`` returns something other than arrays.
    """
    return Staged(f, passes, Declared(frozenset(donate)), cache=cache)
