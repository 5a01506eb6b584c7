"""Program: a list of equations over typed variables, each assigned once (SSA form)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from adtrain.core.array import Array
from adtrain.core.axes import Axes, Items, items, outer_items, rows, rows_along, summed_items
from adtrain.core.primitive import VIEWS, Cost, Primitive, Trait
from adtrain.core.static_key import Identity
from adtrain.core.types import ArrayType, Shape


class Variable:
    """A value of a Program: its type, its device and its members. Compared by identity.

    A mapped value differs between the members of a Program by member. Its type and size are those of one member, and
    `members` is their number. Another value has 0 members.
    """

    __slots__ = ("device", "members", "type")

    def __init__(self, type_: ArrayType, device: str, members: int = 0) -> None:
        self.type = type_
        self.device = device
        self.members = members

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.type.shape)

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
        """The kind of kernel that computes a fused equation; "" for another one. See `adtrain.core.fused`."""
        return self.params["form"] if self.primitive.name == "fused" else ""

    @property
    def name(self) -> str:
        """The form of a fused equation, the name of the primitive of another one."""
        return self.form or self.primitive.name

    @cached_property
    def kernel_params(self) -> Mapping[str, Any]:
        """The parameters for the kernels of `name`: of a fused equation those of the equations in its body.

        Views have no part in it. Where equations have different values of a parameter, the value is a tuple of all.
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
        return self.primitive.cost([v.type for v in self.inputs], self.params, self.elements_read)

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
