"""stage: trace a function into a Program once, and run the Program in later calls.

The leaves of the arguments are arrays, Python floats, and static values. `keeps` declares what a pass keeps of the
results.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, TracedNumber, Value, array, returned_no_array
from adtrain.core.backend import Executable, backend
from adtrain.core.errors import DTypeError, TraceError, user_line
from adtrain.core.memory import without_collection
from adtrain.core.precision import current_precision
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.side_effects import refuse_assignments, refuse_attribute_changes, refuse_leaks
from adtrain.core.static_key import Template, is_constant, static_key
from adtrain.core.timeline import during
from adtrain.core.trace import (
    Tracer,
    active_hooks,
    at,
    base_trace,
    bind,
    common_device,
    current_phase,
    current_scope,
    new_level,
)
from adtrain.core.types import ArrayType, Shape
from adtrain.core.vmap import BatchTrace, BatchTracer


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


STATIC = (bool, int, str, bytes, type, np.dtype, Enum)
"""The types of leaves that are static without being declared so."""


@dataclass(frozen=True)
class Declared:
    """Arguments of a function, by position and by name."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def __contains__(self, place: int | str) -> bool:
        return place in self.positions or place in self.names


NOTHING = Declared()


@dataclass(frozen=True)
class StaticArgument:
    """A whole argument that is declared static, as one leaf."""

    tree_leaf: ClassVar[bool] = True
    value: Any


class ArrayLeaf(NamedTuple):
    """The type of an array."""

    shape: Shape
    dtype: np.dtype
    device: str


class NumberLeaf(NamedTuple):
    """The type of a Python float: it is passed to the Program as a float64 array of shape () on ``device``."""

    device: str

    def array(self, x: float) -> Array:
        return array(np.float64(x), device=self.device)


@dataclass(frozen=True)
class StaticLeaf:
    """The type of a static value: its `static_key`. Another value has another Program."""

    key: Hashable
    same: Any = field(compare=False)
    """The value if it `is_constant`, which makes `matches` fast; otherwise an object that no value is."""

    @classmethod
    def of(cls, x: Any) -> StaticLeaf:
        key = static_key(x)
        return cls(key, x if is_constant(key) else object())

    def static_parts(self) -> tuple[Any, ...]:
        return (self.key,)

    def matches(self, x: Any) -> bool:
        """Whether ``x`` is this value."""
        if x is self.same:
            return True
        if isinstance(x, (Value, TracedNumber, np.ndarray)):
            return False
        try:
            return static_key(x) == self.key
        except TypeError:  # x is not hashable
            return False


LeafType = ArrayLeaf | NumberLeaf | StaticLeaf


def leaf(x: Any, device: str) -> Any:
    """A leaf as a Value, a TracedNumber, or a static value.

    Args:
        device: where NumPy arrays and floats go.

    Raises:
        DTypeError: it is an object of another type that is not declared static.
    """
    if isinstance(x, (Value, TracedNumber, StaticArgument)):
        return x
    if isinstance(x, float):  # also np.float64, which all operations take as a float
        return TracedNumber(array(np.float64(x), device=device))
    if isinstance(x, (np.ndarray, np.generic)):
        return array(x, device=device)
    if isinstance(x, STATIC):
        return x
    raise DTypeError(
        f"jit: found an argument of type {type(x).__name__}, expected arrays and numbers; if it is a constant of the "
        "function, declare it with jit(f, static_argnums=...)"
    )


def type_of(x: Any) -> LeafType:
    """The type of a leaf.

    Raises:
        DTypeError: an argument is declared static and holds an array, or is not hashable.
    """
    if isinstance(x, Value):
        return ArrayLeaf(x.shape, x.dtype, x.device)
    if isinstance(x, TracedNumber):
        return NumberLeaf(x.device)
    value = x.value if isinstance(x, StaticArgument) else x
    if any(isinstance(v, (Value, TracedNumber, np.ndarray)) for v in tree.leaves(value)):
        raise DTypeError("jit: a static argument holds an array, expected numbers, strings or other objects")
    try:
        return StaticLeaf.of(value)
    except TypeError as error:
        raise DTypeError(f"jit: a static argument is not hashable: {error}") from None


def traced(trace: StagingTrace, x: Any) -> Any:
    """What the function gets for a leaf while it is traced."""
    if isinstance(x, TracedNumber):
        return TracedNumber(trace.input(x.value))
    if isinstance(x, Value):
        return trace.input(x)
    return x.value if isinstance(x, StaticArgument) else x


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
        with without_collection():  # passes make many objects, and nearly no cycles
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

    ``f`` must have no side effects: they would happen only once, when it is traced. `adtrain.core.side_effects` lists
    what is refused, and what is not detected.

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
