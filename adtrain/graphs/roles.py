"""The part that each value and equation of a Program plays: a name that users know, the layer, the column.

Repeated blocks of a network, such as the layers of a transformer, play one part: a picture draws them once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from adtrain import nn
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable

FORWARD, BACKWARD, UPDATE = range(3)
"""The columns of a picture."""
OPTIMIZER = "optimizer"
"""The scope of the update."""
MOST_SCALARS = 4
"""The most elements of a value that is drawn like a scalar: a counter, a rate or a random state."""


class Place(NamedTuple):
    """Where an equation is drawn: the row of a scope, and a column."""

    scope: str
    column: int


def flat(equations: Iterable[Equation]) -> Iterator[Equation]:
    """The equations, with the members of fused equations in their place."""
    for e in equations:
        body = e.params.get("body")
        if isinstance(body, Program):
            yield from flat(body.equations)
        else:
            yield e


LEAST_BLOCKS = 3
"""Minimum neighbouring equal blocks that are drawn as one."""


class Folds(NamedTuple):
    """The scope that stands for each scope of a repeated block, and the labels of those that stand for several."""

    scopes: dict[str, str]
    labels: dict[str, str]


NO_FOLDS = Folds({}, {})


def folds(program: Program) -> Folds:
    """The runs of LEAST_BLOCKS or more blocks whose layers have equal names, kinds and equations, in a traced Program.

    A block is what has one number in the path of a layer: "2.norm1" and "2.linear1" are of block 2. It has at least two
    layers.
    """
    equations: dict[str, list[Hashable]] = {}
    for e in flat(program.equations):
        if e.phase == "forward":
            shapes = tuple(v.type.shape for v in e.outputs)
            equations.setdefault(e.scope.partition("+")[0], []).append((e.name, shapes))
    blocks: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for scope in equations:
        name, kind = nn.layer_of(scope)
        path = name.split(".")
        number = next((i for i, part in enumerate(path) if part.isdecimal()), None)
        if number is not None:
            at, inside = (".".join(path[:number]), int(path[number])), ".".join(path[number + 1 :])
            blocks.setdefault(at, {})[inside, kind] = scope

    def signature(at: tuple[str, int]) -> Hashable:
        layers = blocks[at]
        return at[0], frozenset((key, tuple(equations[scope])) for key, scope in layers.items())

    found = Folds({}, {})
    for _, group in groupby(blocks, signature):
        run = list(group)
        first, last = blocks[run[0]], run[-1][1]
        if len(run) < LEAST_BLOCKS or len(first) < 2:
            continue
        for at in run:
            found.scopes.update((scope, first[key]) for key, scope in blocks[at].items())
        prefix, number = run[0]
        for (inside, kind), scope in first.items():
            name = ".".join(filter(None, (prefix, f"{number}…{last}", inside)))
            found.labels[scope] = f"{name} {kind}"
    return found


class Roles:
    """The roles in a Program whose inputs have the names `inputs`.

    Attributes:
        places: the place of each equation that is not fused, also of the members of fused ones.
        names: of every variable. Constants with one element have their number as the name.
        updated: the new value of each input that the Program carries to its next run.
    """

    def __init__(self, program: Program, inputs: Sequence[str], folds: Mapping[str, str] | None = None) -> None:
        """`folds` has the scope that stands for each scope of a repeated block."""
        self.program, self.folds = program, folds or {}
        self.members = list(flat(program.equations))
        self.names = dict(zip(program.inputs, inputs, strict=True))
        donated = [v for v in program.inputs if v in program.donated]
        self.updated = dict(zip(donated, program.outputs, strict=True)) if program.carries else {}
        self._makers = {v: e for e in self.members for v in e.outputs}
        self.places = self._columns()
        self._place_updates()
        self._name()

    @property
    def rows(self) -> Sequence[str]:
        """The scopes in the order of the forward pass, then those of the gradients."""
        columns = (FORWARD, BACKWARD)
        found = [place.scope for column in columns for place in self.places.values() if place.column == column]
        return list(dict.fromkeys(found)) or [""]

    def place(self, e: Equation) -> Place:
        """The place of an equation; of a fused one, that of its costliest member."""
        return self.places[max(flat([e]), key=lambda member: member.cost.flops)]

    def maker(self, v: Variable) -> Place:
        return self.places[self._makers[v]]

    def _columns(self) -> dict[Equation, Place]:
        """The column of each equation: its phase, but not left of what it reads.

        Scalars do not count where there is an update, because the log of the metrics reads the learning rate.
        """
        found: dict[Equation, Place] = {}
        least = MOST_SCALARS + 1 if any(e.phase == "update" for e in self.members) else 0
        for e in self.members:
            column = ("forward", "backward", "update").index(e.phase)
            read = (found[self._makers[v]].column for v in e.inputs if v in self._makers and v.size >= least)
            scope = e.scope.partition("+")[0] or (OPTIMIZER if column == UPDATE else "")
            found[e] = Place(self.folds.get(scope, scope), UPDATE if any(other > column for other in read) else column)
        return found

    def _place_updates(self) -> None:
        """Move arrays of the update to the row of the first layer that needs them, and name the gradients."""
        scopes = {nn.layer_of(place.scope)[0]: place.scope for place in self.places.values() if place.scope}
        scopes |= {nn.layer_of(scope)[0]: first for scope, first in self.folds.items()}
        owners: dict[Equation, dict[str, None]] = {}
        for parameter, new in self.updated.items():
            name = self.names[parameter]
            if (scope := scopes.get(name.rpartition(".")[0])) is None:
                continue
            gradients: list[Variable] = []
            for e in self._updating(new):
                owners.setdefault(e, {})[scope] = None
                gradients += (v for v in e.inputs if self._is_gradient(v, parameter))
            if len(set(gradients)) == 1:
                self.names.setdefault(gradients[0], f"{name}.grad")
        for e, layers in owners.items():
            if len(layers) == 1 or any(v.type.shape for v in e.outputs):
                self.places[e] = Place(next(iter(layers)), UPDATE)

    def _updating(self, new: Variable) -> Iterator[Equation]:
        """The equations of the last column that a new value depends on."""
        seen, remaining = set[Equation](), [new]
        while remaining:
            e = self._makers.get(remaining.pop())
            if e is not None and e not in seen and self.places[e].column == UPDATE:
                seen.add(e)
                remaining += e.inputs
                yield e

    def _is_gradient(self, v: Variable, parameter: Variable) -> bool:
        e = self._makers.get(v)
        return e is not None and self.places[e].column == BACKWARD and v.type == parameter.type

    def _name(self) -> None:
        used = set(self.names.values())

        def unique(name: str) -> str:
            found, number = name, 1
            while found in used:
                number += 1
                found = f"{name}_{number}"
            used.add(found)
            return found

        for v, x in self.program.constants.items():
            self.names[v] = f"{x.item():.6g}" if x.size == 1 else unique("constant")
        for v, new in self.updated.items():
            self.names.setdefault(new, unique(f"{self.names[v]}.new"))
        leaving = {
            v
            for e in self.members
            for v in e.inputs
            if v in self._makers
            and self.maker(v).scope != self.places[e].scope
            and self.maker(v).column == self.places[e].column
        }
        for e in self.members:
            column = self.places[e].column
            base = ".".join(filter(None, nn.layer_of(e.scope.partition("+")[0])))
            for v in e.outputs:
                if v in self.names:
                    continue
                if e.has(Trait.GATHER) and e.inputs[0] in self.program.inputs:
                    name = f"{self.names[e.inputs[0]]}.batch"
                elif v in leaving and base and column != UPDATE:
                    name = base if column == FORWARD else f"{base}.grad_input"
                else:
                    name = ".".join(filter(None, (base, "backward" * (column == BACKWARD), e.name)))
                self.names[v] = unique(name)


def equation_lines(e: Equation, names: Mapping[Variable, str]) -> Iterator[str]:
    """An equation as text, with the members of a fused one indented below it."""
    left = ", ".join(f"{names[v]}: {v.type}" for v in e.outputs)
    body = e.params.get("body")
    params = [f"{k}={v}" for k, v in e.params.items() if k != "body"]
    yield f"{left} = {e.name}({', '.join([*(names[v] for v in e.inputs), *params])})"
    if isinstance(body, Program):
        for member in body.equations:
            yield from (f"    {line}" for line in equation_lines(member, names))


def program_text(roles: Roles) -> str:
    """The Program: a line for each input, array of constants and equation, and one for the results."""
    program, names = roles.program, roles.names
    lines = [f"input  {names[v]}: {v.type}{' donated' if v in program.donated else ''}" for v in program.inputs]
    lines += [f"const  {names[v]}: {v.type}" for v in program.constants if v.size != 1]
    for e in program.equations:
        first, *rest = equation_lines(e, names)
        lines += [f"{first}  # {' '.join(filter(None, (e.phase, e.scope)))}", *rest]
    return "\n".join([*lines, f"return {', '.join(names[v] for v in program.outputs)}", ""])
