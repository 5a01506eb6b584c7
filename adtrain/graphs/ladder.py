"""The boxes of a Program: which equations each has, and which values go from one to another.

Each value and equation plays a part: a name that users know, the layer, the column. Repeated blocks of a network, such
as the layers of a transformer, play one part: a picture draws them once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from adtrain import nn
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, costs
from adtrain.graphs.details import Statistics
from adtrain.graphs.picture import shape_text
from adtrain.text import counted, short

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


@dataclass(eq=False)
class Node:
    """A box before it has a position.

    Attributes:
        home: the place of its costliest equation.
        number: its position in the order in which the nodes are finished.
        places: of all its equations, in their order.
        top, bottom, left, right: the rows and columns that it covers.
    """

    home: Place
    number: int = 0
    equations: list[Equation] = field(default_factory=list)
    places: dict[Place, None] = field(default_factory=dict)
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0


@dataclass(frozen=True, eq=False)
class Flow:
    """Values that go from a box to another one: their columns, and whether they are kept from forward to backward."""

    tail: Node
    head: Node
    start: int
    end: int
    kept: bool
    values: Sequence[Variable]

    @property
    def size(self) -> str:
        """The bytes of the values."""
        return short(sum(v.nbytes for v in self.values), "B")


class Ladder:
    """The nodes and flows of a Program.

    Attributes:
        rows: the scopes in the order of the forward pass.
        viewed: the value behind each view.
        states: the kind of state of the optimizer, such as "adam.exp_avg", for "adam.exp_avg.0.weight".
        values: the statistics of values for one batch.
        equation_counts: names of passes, and the number of equations of each place after them.
        kernels: the numbers of the kernels that compute the equations of a place.
        stored: bytes that are stored from forward to backward. A view counts as the value behind it.
    """

    def __init__(self, roles: Roles, labels: Mapping[str, str], order: Sequence[str], detail: bool) -> None:
        """`labels` names scopes that are not layers, `order` has the scopes of the rows, from the first to the last."""
        self.roles, self.labels, self.order, self.detail = roles, labels, order, detail
        self.viewed = _viewed(roles.program)
        self.nodes = list(self._nodes())
        self.rows = list(order)
        self._cover()
        self.flows = list(self._flows())
        prefix = f"{labels.get(OPTIMIZER)}."
        names = [roles.names[v] for v in roles.updated]
        self.states = {name: ".".join(name.split(".")[:2]) for name in names if name.startswith(prefix)}
        self.values: Mapping[Variable, Statistics] = {}
        self.equation_counts: Sequence[tuple[str, Counter[Place]]] = ()
        self.kernels: Mapping[Place, Sequence[int]] = {}
        self._costs = dict(zip(roles.program.equations, costs(roles.program.equations), strict=True))
        stored = {self.viewed.get(v, v) for flow in self.flows if flow.kept for v in flow.values}
        self.stored = sum(v.nbytes for v in stored)

    def _nodes(self) -> Iterator[Node]:
        """One for each place; without a scope, and with `detail` before the update, one for each equation.

        Where a place has only arithmetic on scalars, this joins the optimizer's box; views join that of their reader.
        """
        found: dict[object, Node] = {}
        equations = self.roles.program.equations
        homes = {e: self.roles.place(e) for e in equations}
        busy = {home for e, home in homes.items() if not self._scalar(e) and not e.primitive.view}
        update = Place(OPTIMIZER, UPDATE)
        optimizer = update if update in homes.values() else None
        for e, home in homes.items():
            scalar, first = self._scalar(e), e
            if not home.scope or (e.primitive.view and (self.detail or home not in busy)):
                first = self._first_reader(e)
                home = homes[first]
            elif scalar and optimizer and home not in busy:
                home = optimizer
            alone = not home.scope or (self.detail and not scalar and home.column != UPDATE)
            node = found.setdefault((home, first if alone else None), Node(home))
            node.equations.append(e)
            node.places.update((self.roles.places[member], None) for member in flat([e]))
        position = {e: i for i, e in enumerate(equations)}
        for number, node in enumerate(sorted(found.values(), key=lambda node: position[node.equations[-1]])):
            node.number = number
            yield node

    def _first_reader(self, e: Equation) -> Equation:
        """The first reader of a view that is not a view itself; e itself if it is not a view, or is not read."""
        while e.primitive.view and (readers := self.roles.program.readers.get(e.outputs[0])):
            e = readers[0]
        return e

    def _scalar(self, e: Equation) -> bool:
        return all(v.size <= MOST_SCALARS for v in (*e.inputs, *e.outputs))

    def _cover(self) -> None:
        """Give each node its home, and the places next to it whose equations it has taken from other nodes."""
        row_of = {scope: i for i, scope in enumerate(self.rows)}
        taken = set()
        for node in self.nodes:
            node.top = node.bottom = row_of.get(node.home.scope, 0)
            node.left = node.right = node.home.column
            taken.add((node.top, node.left))
        if self.detail:
            return
        for node in self.nodes:
            covered = {(row_of.get(scope, 0), column) for scope, column in node.places}
            for side, step in (("right", 1), ("left", -1), ("top", -1), ("bottom", 1)):
                while True:
                    cells = self._cells(node, side, step)
                    if not cells & covered or cells & taken:
                        break
                    taken |= cells
                    setattr(node, side, getattr(node, side) + step)
        used = [i for i in range(len(self.rows)) if any(node.top <= i <= node.bottom for node in self.nodes)]
        for node in self.nodes:
            node.top, node.bottom = used.index(node.top), used.index(node.bottom)
        self.rows = [self.rows[i] for i in used]

    def _cells(self, node: Node, side: str, step: int) -> set[tuple[int, int]]:
        """The cells that a node would cover in addition if its `side` moved by `step`."""
        place = getattr(node, side) + step
        if side in ("left", "right"):
            return {(row, place) for row in range(node.top, node.bottom + 1)}
        return {(place, column) for column in range(node.left, node.right + 1)}

    def _flows(self) -> Iterator[Flow]:
        """The values between nodes. Between layers no scalars, and no values of the update."""
        makers = {v: node for node in self.nodes for e in node.equations for v in e.outputs}
        found: dict[tuple[Node, Node, int, int, bool], dict[Variable, None]] = {}
        for node in self.nodes:
            for e in node.equations:
                for v in e.inputs:
                    tail = makers.get(v)
                    if tail is None or tail is node or self.viewed.get(v, v) not in makers:
                        continue
                    start = self.roles.maker(v).column
                    end = min(self.roles.places[member].column for member in flat([e]) if v in member.inputs)
                    if tail.home.scope and node.home.scope and (v.size <= MOST_SCALARS or start == end == UPDATE):
                        continue
                    kept = start == FORWARD < end
                    start, end = (min(max(x, at.left), at.right) for x, at in ((start, tail), (end, node)))
                    found.setdefault((tail, node, start, end, kept), {})[self._stored(v) if kept else v] = None
        for key, values in found.items():
            yield Flow(*key, sorted(values, key=lambda v: v.nbytes, reverse=True))

    def _stored(self, v: Variable) -> Variable:
        """The value that has to be stored to read v: of a broadcast its argument."""
        source = self.viewed.get(v, v)
        return v if source.size == v.size else source

    def title(self, node: Node) -> list[str]:
        """The layers of a node, or the primitives of equations that are drawn one by one."""
        if all(map(self._scalar, node.equations)) and node.home.scope == OPTIMIZER:
            return [f"{self.labels.get(OPTIMIZER, OPTIMIZER)}: learning rate"]
        if not node.home.scope or (self.detail and node.home.column != UPDATE):
            names = dict.fromkeys(e.name for e in flat(node.equations) if not e.primitive.view)
            return list(names) or [node.equations[0].name]
        scopes = {place.scope: None for place in sorted(node.places, key=self._row) if place.scope}
        if node.home.column == UPDATE:
            scopes = {OPTIMIZER: None}
        elif any(place.column == UPDATE for place in node.places):
            scopes[OPTIMIZER] = None
        return [self.labels.get(scope) or " ".join(filter(None, nn.layer_of(scope))) for scope in scopes]

    def _row(self, place: Place) -> int:
        return self.order.index(place.scope) if place.scope in self.order else len(self.order)

    def text(self, node: Node) -> Sequence[str]:
        """What a node reads of the Program's inputs, and its FLOPs; of one that reads none, what it updates."""
        program, names = self.roles.program, self.roles.names
        least = MOST_SCALARS + 1 if node.home.scope else 0
        made = {v for e in node.equations for v in e.outputs}
        updated = [old for old, new in self.roles.updated.items() if new in made and old.size >= least]
        read = dict.fromkeys(self.viewed.get(v, v) for e in node.equations for v in e.inputs)
        about = [
            f"{names[v]} {shape_text(v.type.shape)}".strip()
            for v in read
            if v in program.inputs and v.size >= least and v not in updated and names[v] not in self.states
        ]
        new = [names[v] for v in updated if names[v] not in self.states]
        if new and not about:
            about = [f"updates {new[0]}", *new[1:]]
        states = [state for state in dict.fromkeys(self.states.values()) if not state.endswith(".step")]
        if node.home.scope == OPTIMIZER and states:
            about += [f"keeps {states[0]}", *states[1:]]
        if not made.isdisjoint(set(program.outputs) - set(self.roles.updated.values())):
            about.append("returned")
        flops = sum(self._costs[e].flops for e in node.equations)
        return [*about, *([short(flops, "FLOPs")] if flops else [])]

    def details(self, node: Node) -> str:
        """The equations of a node as text."""
        return "\n".join(line for e in node.equations for line in equation_lines(e, self.roles.names))

    def passes(self, node: Node) -> list[str]:
        """How many equations the layers of a node have after each pass that changes their number."""
        counts = [(name, sum(found[place] for place in node.places)) for name, found in self.equation_counts]
        return [
            f"{name}: {counted(count, 'equations')}"
            for i, (name, count) in enumerate(counts)
            if i == 0 or count != counts[i - 1][1]
        ]

    def kernels_of(self, node: Node) -> list[int]:
        return list(dict.fromkeys(number for place in node.places for number in self.kernels.get(place, ())))

    def statistics(self, flow: Flow) -> list[tuple[str, Statistics]]:
        """Names and statistics of the values of a flow."""
        return [(self.roles.names[v], self.values[v]) for v in flow.values if v in self.values]

    def name(self, flow: Flow) -> str:
        """The names of the values of a flow, and their bytes."""
        layer = ".".join(filter(None, nn.layer_of(flow.tail.home.scope)))
        names = [self.roles.names[v].removeprefix(f"{layer}.") for v in flow.values]
        if len(names) > 1:
            gradients = all(name.endswith(".grad") for name in names)
            names = ["gradients"] if gradients else [f"{names[0]} + {len(names) - 1} more"]
        return f"{names[0]}, {flow.size}"

    def shape(self, flow: Flow) -> str:
        """The shape of the value of a flow, or how many there are, and their bytes."""
        count = len(flow.values)
        shape = shape_text(flow.values[0].type.shape) if count == 1 else f"{count} values"
        return ", ".join(filter(None, (shape, flow.size)))


def _viewed(program: Program) -> dict[Variable, Variable]:
    """The value behind each view."""
    found: dict[Variable, Variable] = {}
    for e in program.equations:
        if e.primitive.view and e.inputs:
            found.update((v, found.get(e.inputs[0], e.inputs[0])) for v in e.outputs)
    return found
