"""Program: a list of equations over typed variables, each assigned once (SSA form).

Also: the axes of a Program, the costs of its equations, and fused equations.

The parameter ``body`` of a fused primitive is a small Program, which runs as one kernel. Only passes make fused
equations, after differentiation, so they have no derivative. The reference runs the body's equations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from adtrain.core.array import Array
from adtrain.core.axes import Axes, Items, aligned, items, letters, outer_items, rows, rows_along, summed_items
from adtrain.core.batching_rules import loop
from adtrain.core.primitive import VIEWS, Cost, Primitive, Trait
from adtrain.core.static_key import Identity
from adtrain.core.types import ArrayType, Shape


class Variable:
    """A value of a Program: its type, its device and its members. Compared by identity.

    A mapped value differs between the members of a Program by member. Its type and size, the number of elements, are
    those of one member, and `members` is their number. Another value has 0 members.
    """

    __slots__ = ("device", "members", "size", "type")

    def __init__(self, type_: ArrayType, device: str, members: int = 0) -> None:
        self.type = type_
        self.device = device
        self.members = members
        self.size = math.prod(type_.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.type.dtype.itemsize

    @property
    def stored(self) -> ArrayType:
        """The type of the array in memory. That of a mapped value has the members along axis 0."""
        return ArrayType((self.members, *self.type.shape), self.type.dtype) if self.members else self.type

    def like(self, type_: ArrayType | None = None) -> Variable:
        """A new variable with the device and the members of this one, and its type or another one."""
        return Variable(type_ or self.type, self.device, self.members)


@dataclass(frozen=True, eq=False)
class Equation:
    """``outputs = primitive(inputs, **params)``, with its scope (layer) and phase (part of the step)."""

    primitive: Primitive
    inputs: tuple[Variable, ...]
    params: Mapping[str, Any]
    outputs: tuple[Variable, ...]
    scope: str = ""
    phase: str = "forward"

    def has(self, trait: Trait) -> bool:
        return trait in self.primitive.traits

    def renamed_inputs(self, names: Mapping[Variable, Variable]) -> Equation:
        """The equation with the inputs that are keys of ``names`` replaced; itself if there are none."""
        if names.keys().isdisjoint(self.inputs):
            return self
        return replace(self, inputs=tuple(names.get(v, v) for v in self.inputs))

    @property
    def form(self) -> str:
        """The kind of kernel that computes a fused equation; "" for another one. See `fused_p`."""
        return self.params["form"] if self.primitive.name == "fused" else ""

    @property
    def name(self) -> str:
        """The form of a fused equation, the name of the primitive of another one."""
        return self.form or self.primitive.name

    @cached_property
    def kernel_params(self) -> Mapping[str, Any]:
        """The parameters for the kernels of `name`: of a fused equation those of the equations in its body.

        Those of views are left out. Where equations have different values of a parameter, the value is a tuple of all.
        """
        if not self.form:
            return self.params
        found: dict[str, list[Any]] = {}
        for e in self.params["body"].equations:
            for name, value in {} if e.is_view else e.kernel_params.items():
                found.setdefault(name, []).append(value)
        return {name: xs[0] if all(x == xs[0] for x in xs) else tuple(xs) for name, xs in found.items()}

    @cached_property
    def cost(self) -> Cost:
        """FLOPs and bytes of one run, for one member."""
        types, outputs = ([v.type for v in variables] for variables in (self.inputs, self.outputs))
        return self.primitive.cost(types, self.params, self.elements_read, outputs)

    @cached_property
    def elements_read(self) -> Sequence[int]:
        """How many elements of each input one run reads from memory, for one member."""
        return self.primitive.elements_read([v.type for v in self.inputs], self.params)

    @cached_property
    def axes(self) -> Axes:
        """How the axes of its outputs relate to those of its inputs."""
        types, outputs = ([v.type for v in variables] for variables in (self.inputs, self.outputs))
        return self.primitive.related_axes(types, self.params, outputs)

    @cached_property
    def items(self) -> Items | None:
        """How it works item by item; None if it does not. An item is an index of axis 0."""
        return items(self.axes, *self._shapes)

    @cached_property
    def outer_items(self) -> Items | None:
        """As `items`, but if axis 0 joins several axes, an item is an index of the first. See `adtrain.core.axes`."""
        return outer_items(self.axes, *self._shapes)

    @cached_property
    def summed_items(self) -> Items | None:
        """How it sums over items of its inputs; None if it does not."""
        return summed_items(self.axes, self._shapes[0])

    def rows(self, count: int) -> Items | None:
        """How it works by ``count`` rows; None if it does not. See `adtrain.core.axes.rows`."""
        return rows(self.axes, *self._shapes, count)

    @cached_property
    def rows_along(self) -> int | None:
        """By how many rows it works if it is along its input's last axes. See `adtrain.core.axes.rows_along`."""
        return rows_along(self.axes, self._shapes[0]) if self.inputs else None

    @property
    def _shapes(self) -> tuple[Sequence[Shape], Sequence[Shape]]:
        return [v.type.shape for v in self.inputs], [v.type.shape for v in self.outputs]

    @cached_property
    def members(self) -> int:
        """How many members it computes. 0 if all members share its results."""
        return max((v.members for v in self.outputs), default=0)

    @property
    def is_view(self) -> bool:
        """Whether its arguments and its output share memory, so that it needs no kernel."""
        return not VIEWS.isdisjoint(self.primitive.traits)


@dataclass(frozen=True, eq=False)
class Program:
    """A function that was traced for arguments of certain types.

    A Program by member has the equations of one member, and computes all `members`. Its `mapped` variables have a value
    for each of them.

    Attributes:
        inputs: the leaves of the arguments.
        constants: arrays that the function used without getting them as arguments.
        equations: each stands after those that it depends on.
        outputs: the leaves of the result. A variable may be an input or a constant, and may occur twice.
        donated: inputs whose memory may be overwritten.

    Raises:
        AssertionError: a variable is assigned twice, or used before it is assigned.
    """

    inputs: tuple[Variable, ...]
    constants: Mapping[Variable, Array]
    equations: tuple[Equation, ...]
    outputs: tuple[Variable, ...]
    donated: frozenset[Variable] = frozenset()

    def __post_init__(self) -> None:
        assigned = {*self.inputs, *self.constants}
        for equation in self.equations:
            for v in equation.inputs:
                if v not in assigned:
                    raise AssertionError(f"program: {equation.primitive.name} uses a variable before it is assigned")
            for v in equation.outputs:
                if v in assigned:
                    raise AssertionError(f"program: {self.names[v]} is assigned twice")
                assigned.add(v)
        if not assigned.issuperset(self.outputs):
            raise AssertionError("program: an output is never assigned")

    @cached_property
    def mapped(self) -> frozenset[Variable]:
        """The variables that differ between members."""
        return frozenset(v for v in self.names if v.members)

    @cached_property
    def members(self) -> int:
        """The number of members of a Program by member. 0 for any other one."""
        return max((v.members for v in self.mapped), default=0)

    @cached_property
    def names(self) -> Mapping[Variable, str]:
        """The name of each variable in the text of the Program."""
        names = {v: f"in{i}" for i, v in enumerate(self.inputs)}
        names |= {v: f"c{i}" for i, v in enumerate(self.constants)}
        results = dict.fromkeys(v for equation in self.equations for v in equation.outputs)
        return {v: f"v{i}" for i, v in enumerate(results)} | names

    @cached_property
    def readers(self) -> Mapping[Variable, Sequence[Equation]]:
        """The equations that read each variable, in their order; no entry for one that none reads."""
        found: dict[Variable, list[Equation]] = {}
        for e in self.equations:
            for v in dict.fromkeys(e.inputs):
                found.setdefault(v, []).append(e)
        return found

    @cached_property
    def positions(self) -> Mapping[Variable, int]:
        """The position of the equation that computes each variable."""
        return {v: i for i, e in enumerate(self.equations) for v in e.outputs}

    @cached_property
    def needs(self) -> Sequence[frozenset[int]]:
        """For each equation the positions of those whose results it reads."""
        found = self.positions
        return [frozenset(found[v] for v in e.inputs if v in found) for e in self.equations]

    @cached_property
    def producer(self) -> Mapping[Variable, Equation]:
        """The equation that computes each variable."""
        return {v: e for e in self.equations for v in e.outputs}

    def before_reshapes(self, v: Variable) -> Variable:
        """The variable that ``v`` is a reshape of, or a reshape of a reshape; ``v`` itself if it is none."""
        while v in self.producer and self.producer[v].has(Trait.RESHAPE):
            (v,) = self.producer[v].inputs
        return v

    def static_parts(self) -> tuple[Any, ...]:
        """What makes two Programs the same: types, equations and outputs, with numbers for variables; see `static_key`.

        Constants are compared by identity, scopes and phases not at all.
        """
        numbers = {v: i for i, v in enumerate(self.names)}
        equations = tuple(
            (e.primitive.name, tuple(numbers[v] for v in (*e.inputs, *e.outputs)), len(e.inputs), dict(e.params))
            for e in self.equations
        )
        types = tuple((*v.type, v.device, v.members) for v in numbers)
        ends = tuple(tuple(numbers[v] for v in vs) for vs in (self.inputs, self.outputs, self.donated_inputs))
        return types, equations, ends, tuple(map(Identity, self.constants.values()))

    @property
    def donated_inputs(self) -> tuple[Variable, ...]:
        """The donated inputs in the order of the inputs."""
        return tuple(v for v in self.inputs if v in self.donated)

    @property
    def carries(self) -> bool:
        """Whether the outputs are new values for the donated inputs: as many, of the same types, in the same order."""
        donated = [(v.type, v.members) for v in self.donated_inputs]
        return bool(donated) and donated == [(v.type, v.members) for v in self.outputs]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The Program as text: a line for each input, constant and equation, and one for the outputs."""
        for v in self.inputs:
            yield f"input  {self.names[v]}: {_text(v)}{' donated' if v in self.donated else ''}"
        for v, x in self.constants.items():
            value = f" = {x.item()}" if x.size == 1 else ""
            yield f"const  {self.names[v]}: {v.type}{value}"
        for e in self.equations:
            left = ", ".join(f"{self.names[v]}: {_text(v)}" for v in e.outputs)
            params = [
                f"{k}={v}" for k, v in e.params.items() if not (isinstance(v, Program) or (k == "form" and e.form))
            ]
            where = " ".join(filter(None, (e.phase, e.scope)))
            yield f"{left} = {e.name}({', '.join([self.names[v] for v in e.inputs] + params)})  # {where}"
            for body in e.params.values():
                if isinstance(body, Program):
                    yield from (f"    {line}" for line in body.lines())
        yield f"return {', '.join(self.names[v] for v in self.outputs)}"

    def last_uses(self) -> Sequence[tuple[Variable, ...]]:
        """For each equation the variables that are not used after it; constants and outputs are left out."""
        used = set(self.outputs) | set(self.constants)
        dead: list[tuple[Variable, ...]] = []
        for e in reversed(self.equations):
            dead.append(tuple({v: None for v in (*e.inputs, *e.outputs) if v not in used}))
            used.update(e.inputs, e.outputs)
        return dead[::-1]


def arguments_of(equations: Iterable[Equation]) -> tuple[Variable, ...]:
    """What equations read and none of them computes, in the order in which they read it."""
    equations = tuple(equations)
    computed = {v for e in equations for v in e.outputs}
    return tuple(dict.fromkeys(v for e in equations for v in e.inputs if v not in computed))


def program_of(equations: Sequence[Equation], outputs: Sequence[Variable]) -> Program:
    """The Program of these equations. An output that none of them computes is an input too."""
    computed = {v for e in equations for v in e.outputs}
    inputs = dict.fromkeys((*arguments_of(equations), *(v for v in outputs if v not in computed)))
    return Program(tuple(inputs), {}, tuple(equations), tuple(outputs))


def _text(v: Variable) -> str:
    return f"{v.type} of {v.members} members" if v.members else str(v.type)


Axis: TypeAlias = tuple[Variable, int]
"""A value and the number of one of its axes."""


def axes_of_body(body: Program) -> Axes:
    """Axes of inputs and outputs move together if all equations between them relate them. An axis of inputs is added if
    the outputs are sums over it of what is computed at each index."""
    outputs = {(v, i) for v in body.outputs for i in range(len(v.type.shape))}
    found = joined(related_axes(body.equations))
    together = [axes for axes in found if not outputs.isdisjoint(axes) and _move_together(body, axes)]
    added = [axes for axes in found if outputs.isdisjoint(axes) and _are_added(body, axes)]
    names = letters(len(together) + len(added))
    labels = {axis: label for label, axes in zip(names, (*together, *added), strict=True) for axis in axes}
    given, results = (
        tuple(tuple(labels.get((v, i), "") for i in range(len(v.type.shape))) for v in variables)
        for variables in (body.inputs, body.outputs)
    )
    return Axes(given, results, frozenset(names[len(together) :]))


def related_axes(equations: Iterable[Equation]) -> Iterator[tuple[Axis, Axis]]:
    """Pairs of axes that have the same label in an equation. Joined axes are left out."""
    for e in equations:
        first: dict[str, Axis] = {}
        axes = e.axes.undivided()
        for v, labels in zip((*e.inputs, *e.outputs), (*axes.arguments, *axes.results), strict=True):
            yield from ((first.setdefault(label, (v, i)), (v, i)) for i, label in enumerate(labels) if label)


def _move_together(body: Program, own: set[Axis]) -> bool:
    """Whether a body computes, at each index of these axes, the same function of its inputs at that index."""
    at = dict(own)
    if len(at) < len(own):  # two axes of one value, as of x + transpose(x)
        return False
    mixed: set[Variable] = set()  # computed from several indices
    for e in body.equations:
        axes = e.axes.undivided()
        read = {labels[at[v]] for v, labels in zip(e.inputs, axes.arguments, strict=True) if v in at}
        for y, labels in zip(e.outputs, axes.results, strict=True):
            if y not in at:
                mixed |= {y} if read or not mixed.isdisjoint(e.inputs) else set()
            elif not labels[at[y]] or read - {labels[at[y]]} or not mixed.isdisjoint(e.inputs):
                return False
    return True


def _are_added(body: Program, own: set[Axis]) -> bool:
    """Whether each output of a body is a sum over these axes of a function of the inputs at each index."""
    at = dict(own)
    if len(at) < len(own):
        return False
    for e in body.equations:
        axes = e.axes.undivided()
        read = {labels[at[v]] for v, labels in zip(e.inputs, axes.arguments, strict=True) if v in at}
        for y, labels in zip(e.outputs, axes.results, strict=True):
            if y in at:
                follows = bool(labels[at[y]]) and read <= {labels[at[y]]}
            elif read:
                follows = len(read) == 1 and read <= axes.added and y in body.outputs and y not in body.readers
            else:
                follows = y not in body.outputs
            if not follows:
                return False
    return bool(body.outputs)


def joined(pairs: Iterable[tuple[Axis, Axis]]) -> list[set[Axis]]:
    """Sets of axes that move together, from pairs that do."""
    links: dict[Axis, list[Axis]] = {}
    for a, b in pairs:
        links.setdefault(a, []).append(b)
        links.setdefault(b, []).append(a)
    found: list[set[Axis]] = []
    done: set[Axis] = set()
    for first in links:
        own, waiting = set(), [first] if first not in done else []
        while waiting:
            axis = waiting.pop()
            if axis not in own:
                own.add(axis)
                waiting += links[axis]
        done |= own
        found += [own] if own else []
    return found


def reads(equations: Sequence[Equation]) -> Iterator[Counter[Variable]]:
    """For each equation the number of elements that it reads of each variable; repeated reads count once.

    Reads of a view count as reads of the variable behind it. Of a row that is broadcast, that is one row.
    """
    viewed: dict[Variable, Variable] = {}
    for e in equations:
        found: Counter[Variable] = Counter()
        if e.primitive.view:
            viewed.update((out, viewed.get(v, v)) for v in e.inputs for out in e.outputs)
        else:
            for v, n in zip(e.inputs, e.elements_read, strict=True):
                source = viewed.get(v, v)
                found[source] = min(found[source] + n, source.size)
        yield found


def costs(equations: Sequence[Equation]) -> Iterator[Cost]:
    """The cost of each equation."""
    for e, read in zip(equations, reads(equations), strict=True):
        written = Counter({v: v.size for v in e.outputs if not e.primitive.view})
        moved = sum(n * v.type.dtype.itemsize for v, n in (read + written).items())
        yield Cost(e.cost.flops, moved)


def _fused_shape(*args: Any, form: str, body: Program) -> tuple[ArrayType, ...]:
    return tuple(v.type for v in body.outputs)


def _fused_reference(*buffers: Any, form: str, body: Program) -> Any:
    known = dict(zip(body.inputs, buffers, strict=True))
    for e in body.equations:
        found = e.primitive.reference(*(known[v] for v in e.inputs), **e.params)
        known.update(zip(e.outputs, (found,) if len(e.outputs) == 1 else found, strict=True))
    results = tuple(known[v] for v in body.outputs)
    return results[0] if len(results) == 1 else results


def _fused_flops(*args: Any, form: str, body: Program) -> int:
    first, *others = body.equations
    named = {e.name + OF_POOLED for e in others}
    if not first.has(Trait.MAX_POOL_GRAD) or form.removesuffix(WITH_SUM).removesuffix(WITH_NORMS) not in named:
        return sum(e.cost.flops for e in body.equations)
    (pooled, _), (spread,) = first.inputs, first.outputs
    return sum(e.cost.flops * pooled.size // spread.size if spread in e.inputs else e.cost.flops for e in others)


def _fused_reads(*args: Any, form: str, body: Program) -> Sequence[int]:
    found: Counter[Variable] = Counter()
    for of_equation in reads(body.equations):
        found.update(of_equation)
    return [min(found[v], v.size) for v in body.inputs]


def _fused_axes(*args: Any, form: str, body: Program) -> Axes:
    if form == LOOPS:
        return aligned(tuple(v.type.shape for v in body.inputs), tuple(v.type.shape for v in body.outputs))
    return axes_of_body(body)


fused_p: Primitive = Primitive(
    "fused", _fused_shape, _fused_reference, flops=_fused_flops, reads=_fused_reads, batch=loop, axes=_fused_axes
)
"""Equations that run as one kernel. Its parameters are ``form``, the kind of kernel, and ``body``, the equations."""

LOOPS = "loops"
"""Elementwise equations over arrays of one shape, as one loop nest."""

PRODUCT = "product"
"""A matrix product with an elementwise epilogue."""

OF_POOLED = "_pooled"
"""With the name of a convolution's gradient before it: that gradient, after `max_pool2d_put` has spread a pooled one.
The kernel reads the pooled gradient, and skips the zeros between its elements."""

WITH_SUM = "_sum"
"""With the name of a weight gradient before it: that gradient and the bias gradient, which sums what both read."""

WITH_NORMS = "_norms"
"""With the name of the weight gradients of images before it: their squared norms. The kernel stores no gradient."""

GATHER = "gather"
"""Loops that read rows of tables by index."""

MAP_REDUCE = "map_reduce"
"""Reductions of values of pairs of rows and columns. The pairs are computed where they are needed and never stored."""

HORIZONTAL = "horizontal"
"""Independent equations of any shapes that run side by side."""


Overwrites: TypeAlias = Callable[[Equation, Variable, Variable], bool]
"""Whether a result of a fused equation may overwrite an argument."""

OVERWRITES: dict[str, Overwrites] = {}
"""By form. Those of other forms follow from the equation of the body that reads the argument."""


def fuse(
    form: str, equations: Sequence[Equation], needed: Collection[Variable], inputs: tuple[Variable, ...] = ()
) -> Equation:
    """Fuse several equations into one of ``form``, with the outputs that are ``needed``.

    Its scope joins their scopes by "+". Its phase is that of the equation with the most FLOPs.

    Args:
        inputs: the arguments in the order of a kernel, by default in that of the equations that read them.
    """
    inputs = inputs or arguments_of(equations)
    outputs = tuple(v for e in equations for v in e.outputs if v in needed)
    body = Program(inputs, {}, tuple(equations), outputs)
    scopes = dict.fromkeys(scope for e in equations for scope in e.scope.split("+") if scope)
    phase = max(equations, key=lambda e: e.cost.flops).phase
    return Equation(fused_p, inputs, {"form": form, "body": body}, outputs, "+".join(scopes), phase)


def body_of(equation: Equation) -> Program:
    """The body of a fused equation; for any other equation, a Program of that equation."""
    if equation.form:
        body: Program = equation.params["body"]
        return body
    return Program(tuple(dict.fromkeys(equation.inputs)), {}, (equation,), equation.outputs)


def launched_together(equation: Equation) -> Sequence[Equation]:
    """The independent equations in a `horizontal` equation; for any other equation, itself."""
    found: Sequence[Equation] = equation.params["body"].equations if equation.form == HORIZONTAL else (equation,)
    return found


def without(equation: Equation, removed: Collection[Variable]) -> Sequence[Equation]:
    """An equation without its independent equations that compute ``removed`` values. Empty if nothing is left."""
    own = launched_together(equation)
    left = [e for e in own if not any(v in removed for v in e.outputs)]
    if len(left) in (0, 1, len(own)):
        return [equation] if len(left) == len(own) else left
    return [fuse(HORIZONTAL, left, equation.outputs)]


def single_equations(equation: Equation) -> Iterator[Equation]:
    """The equations in a fused equation that are not fused themselves; for any other equation, itself."""
    if equation.form:
        for e in equation.params["body"].equations:
            yield from single_equations(e)
    else:
        yield equation


def primitive_names(equation: Equation) -> tuple[str, ...]:
    """The names of the primitives in an equation."""
    return tuple(e.primitive.name for e in single_equations(equation))


def label(equation: Equation) -> str:
    """The distinct primitives of an equation, without views: "matmul+add+relu".

    If an optimizer's update is only a part of it, that part is "update": "matmul+update".
    """
    found = [e for e in single_equations(equation) if not e.primitive.view]
    whole = all(e.phase == "update" for e in found)
    names = ("update" if e.phase == "update" and not whole else e.primitive.name for e in found)
    return "+".join(dict.fromkeys(names)) or equation.name


def renamed(equation: Equation, names: dict[Variable, Variable]) -> Equation:
    """``equation`` with the variables that are keys of ``names`` replaced, in its body as well."""
    if not names:
        return equation
    params = dict(equation.params)
    if equation.form:
        body: Program = params["body"]
        inputs, outputs = (tuple(names.get(v, v) for v in group) for group in (body.inputs, body.outputs))
        equations = tuple(renamed(e, names) for e in body.equations)
        params["body"] = replace(body, inputs=inputs, outputs=outputs, equations=equations)
    inputs, outputs = (tuple(names.get(v, v) for v in group) for group in (equation.inputs, equation.outputs))
    return replace(equation, inputs=inputs, outputs=outputs, params=params)
