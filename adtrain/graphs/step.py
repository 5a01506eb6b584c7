"""The graph of a Program after each of its passes: of a training step, or of a function (`adtrain.graph`).

Forward is drawn down the left, backward up the right, the update at the far right. Each layer is a row, so what it
keeps for its gradient is a horizontal line, like a rung of a ladder.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from adtrain import training
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.config import Config
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Pass
from adtrain.graphs.details import Kernel, Statistics, kernels, value_statistics
from adtrain.graphs.ladder import (
    BACKWARD,
    FORWARD,
    NO_FOLDS,
    Flow,
    Ladder,
    Node,
    Place,
    Roles,
    flat,
    folds,
    program_text,
)
from adtrain.graphs.picture import (
    HISTOGRAM,
    LABEL,
    TITLE,
    Arrow,
    Box,
    Graph,
    Heading,
    Picture,
    Point,
    fitted,
    text_height,
    text_width,
    wrapped,
)
from adtrain.jitted import Jitted, jit
from adtrain.passes import SIMPLIFY
from adtrain.passes.fusion import declined
from adtrain.text import counted, short
from adtrain.training import Experiment

WIDTHS, GUTTERS = (256, 256, 210), (190, 150)
"""Widths of the columns, and of the room between them."""
MARGIN, TOP, GAP = 24, 92, 26
PADDING = 8
RUNG = 17
"""Distance of horizontal arrows."""
LANE = 18
"""Distance of vertical arrows that pass other boxes."""


def ladder_picture(ladder: Ladder, title: str, name: str) -> Picture:
    """The picture of a Program."""
    return _Layout(ladder).picture(title, name)


class _Layout:
    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self.room = HISTOGRAM + 6 if ladder.values else 0
        self.columns = 1 + max(node.right for node in ladder.nodes) if ladder.nodes else 1
        self.texts = {node: self._text(node) for node in ladder.nodes}
        self.y: dict[Node, float] = {}
        self.height: dict[Node, float] = {}
        self.bottom = self._place_rows()
        self.used: dict[tuple[Node, str], list[float]] = {}
        self.channels: dict[int, list[tuple[float, float, float]]] = {}
        self.lanes = self._lanes()
        counts = [len(set(lanes.values())) for lanes in self.lanes]
        self.x = [MARGIN + LANE * counts[FORWARD] + 4]
        for column in range(1, self.columns):
            room = GUTTERS[column - 1] + LANE * (counts[column - 1] if column - 1 != FORWARD else 0)
            self.x.append(self.x[-1] + WIDTHS[column - 1] + room)
        last = self.columns - 1
        self.right = self.x[-1] + WIDTHS[last] + LANE * (counts[last] if last != FORWARD else 0) + MARGIN

    def picture(self, title: str, name: str) -> Picture:
        ladder, count = self.ladder, len(self.ladder.roles.program.equations)
        note = counted(count, "equations")
        if ladder.stored:
            note += f", {short(ladder.stored, 'B')} kept for backward"
        width = max(self.right, MARGIN * 2 + text_width(title, 17, bold=True), MARGIN * 2 + text_width(note, 12))
        boxes = [self._box(node) for node in ladder.nodes]
        return Picture(
            title, note, width, self.bottom + MARGIN, boxes, list(self._arrows()), (), self._headings(), name
        )

    def _text(self, node: Node) -> tuple[list[str], list[str]]:
        width = sum(WIDTHS[node.left : node.right + 1]) - 2 * PADDING
        title = wrapped(self.ladder.title(node), " + ", width, 4, TITLE, bold=True)
        return title, wrapped(self.ladder.text(node), ", ", width, 2)

    def _place_rows(self) -> float:
        """Set y and height of all nodes, and return the y of the lowest border."""
        arriving = dict.fromkeys(self.ladder.nodes, 0)
        for flow in self.ladder.flows:
            if flow.start != flow.end:
                arriving[flow.head] += 1
        least = {
            node: max(text_height(*self.texts[node]) + 2 * PADDING, RUNG * (arriving[node] + 1))
            for node in self.ladder.nodes
        }
        cells: dict[tuple[int, int], list[Node]] = {}
        for node in self.ladder.nodes:
            cells.setdefault((node.top, node.left), []).append(node)
        heights = [0.0] * len(self.ladder.rows)
        for (row, _), nodes in cells.items():
            alone = [node for node in nodes if node.bottom == row]
            heights[row] = max(heights[row], sum(least[node] + GAP for node in alone) - GAP)
        for node in self.ladder.nodes:
            covered = sum(heights[node.top : node.bottom + 1]) + GAP * (node.bottom - node.top)
            heights[node.bottom] += max(0.0, least[node] - covered)
        tops = [TOP + sum(heights[:row]) + GAP * row for row in range(len(heights) + 1)]
        for (row, column), nodes in cells.items():
            node = nodes[0]
            if len(nodes) == 1 and node.home.scope and not self.ladder.detail:
                self.y[node], self.height[node] = tops[row], tops[node.bottom + 1] - GAP - tops[row]
                continue
            y = tops[row]
            for node in reversed(nodes) if column == BACKWARD else nodes:
                self.y[node], self.height[node] = y, least[node]
                y += least[node] + GAP
        return tops[-1] - GAP

    def _end(self, node: Node) -> float:
        return self.y[node] + self.height[node]

    def _neighbours(self, flow: Flow) -> bool:
        """Whether a flow in one column can be a straight vertical arrow."""
        down = flow.start != BACKWARD
        upper, lower = (flow.tail, flow.head) if down else (flow.head, flow.tail)
        low, high = self._end(upper), self.y[lower]
        between = (
            node.left <= flow.start <= node.right and self._end(node) > low and self.y[node] < high
            for node in self.ladder.nodes
        )
        return low < high and not any(between)

    def _lanes(self) -> list[dict[Flow, int]]:
        """For each column the flows that run beside it, with the number of their lane. Lane 0 is next to the column."""
        found: list[dict[Flow, int]] = []
        for column in range(3):
            flows = [f for f in self.ladder.flows if f.start == f.end == column and not self._neighbours(f)]
            spans = {f: sorted((self.y[f.tail], self.y[f.head])) for f in flows}
            lanes: list[list[Sequence[float]]] = []
            placed = {}
            for flow in sorted(flows, key=lambda f: spans[f][1] - spans[f][0]):
                low, high = spans[flow][0] - GAP, spans[flow][1] + max(self.height[flow.tail], self.height[flow.head])
                free = [i for i, lane in enumerate(lanes) if all(high < a or b < low for a, b in lane)]
                number = free[0] if free else len(lanes)
                lanes += [] if free else [[]]
                lanes[number].append((low, high))
                placed[flow] = number
            found.append(placed)
        return found

    def _box(self, node: Node) -> Box:
        title, text = self.texts[node]
        kind = ("forward", "backward", "update")[node.home.column]
        right = self.x[node.right] + WIDTHS[node.right]
        return Box(
            f"b{node.number}", kind, title, text, self.x[node.left], self.y[node], right - self.x[node.left],
            self.height[node], details=self.ladder.details(node), passes=self.ladder.passes(node),
            kernels=self.ladder.kernels_of(node),
        )  # fmt: skip

    def _headings(self) -> Sequence[Heading]:
        update = any(e.phase == "update" for e in self.ladder.roles.members)
        titles = ("forward ↓", "backward ↑", "update" if update else "after backward")
        kinds = ("forward", "backward", "update")
        found = [Heading(kinds[i], titles[i], x + WIDTHS[i] / 2, TOP - 16) for i, x in enumerate(self.x)]
        if any(flow.kept for flow in self.ladder.flows) and self.columns > 1:
            found.append(Heading("kept", "kept for backward", self.x[1] - GUTTERS[0] / 2, TOP - 16))
        return found

    def _arrows(self) -> Iterator[Arrow]:
        order = sorted(
            self.ladder.flows, key=lambda f: (f.start == f.end, self.y[f.head], f.head.number, f.tail.number)
        )
        for flow in order:
            if flow.start != flow.end:
                yield self._across(flow)
            elif flow in self.lanes[flow.start]:
                yield self._beside(flow)
            else:
                yield self._vertical(flow)

    def _vertical(self, flow: Flow) -> Arrow:
        x = self.x[flow.start] + WIDTHS[flow.start] / 2
        if flow.start == BACKWARD:
            start, end = self.y[flow.tail], self._end(flow.head)
        else:
            start, end = self._end(flow.tail), self.y[flow.head]
        label = fitted(self.ladder.shape(flow), WIDTHS[flow.start] / 2 + 16 - self.room, LABEL)
        at = x + 8 + text_width(label, LABEL) / 2, (start + end) / 2 + 4
        return self._arrow(flow, [(x, start), (x, end)], label, at)

    def _beside(self, flow: Flow) -> Arrow:
        """Left of the forward column, right of the others."""
        left, column = flow.start == FORWARD, flow.start
        edge = self.x[column] + (0 if left else WIDTHS[column])
        x = edge + (LANE * self.lanes[column][flow] + 20) * (-1 if left else 1)
        side = "left" if left else "right"
        start, end = self._free(flow.tail, side, last=column != BACKWARD), self._free(flow.head, side)
        room = abs(end - start) - 8
        label = self._label(flow, room) if room > 60 else ""
        return self._arrow(
            flow,
            [(edge, start), (x, start), (x, end), (edge, end)],
            label,
            (x - 4 if left else x + 11, (start + end) / 2),
            True,
        )

    def _across(self, flow: Flow) -> Arrow:
        """The arrow to a column further right; straight if the boxes, or boxes that read the same, face each other."""
        tail, head = self._facing(flow), flow.head
        start_x = self.x[min(tail.right, flow.end - 1)] + WIDTHS[min(tail.right, flow.end - 1)]
        end_x = self.x[max(head.left, tail.right + 1)] if tail.right < flow.end else self.x[flow.end]
        low, high = max(self.y[tail], self.y[head]), min(self._end(tail), self._end(head))
        label_x = max(start_x, end_x - GUTTERS[flow.end - 1])
        if high - low >= RUNG - 3:
            y = self._free(head, "left", low, high)
            points: list[Point] = [(start_x, y), (end_x, y)]
            label = self._label(flow, end_x - label_x - 16 - self.room)
            return self._arrow(flow, points, label, ((label_x + end_x - self.room) / 2, y - 4))
        start, end = self._free(tail, "right", last=self.y[head] > self.y[tail]), self._free(head, "left")
        x = self._channel(flow.end, label_x, start, end)
        label = self._label(flow, end_x - x - 14 - self.room)
        points = [(start_x, start), (x, start), (x, end), (end_x, end)]
        return self._arrow(flow, points, label, ((x + end_x - self.room) / 2, end - 4))

    def _label(self, flow: Flow, width: float) -> str:
        """The names of a flow and its bytes; its bytes alone where there is room for half of the names at most."""
        whole = self.ladder.name(flow)
        label = fitted(whole, width, LABEL)
        return label if len(label) > len(whole) / 2 + 4 else flow.size

    def _channel(self, column: int, x: float, start: float, end: float) -> float:
        """An x from `x` on at which no other vertical line to the column is between start and end."""
        low, high = sorted((start, end))
        lines = self.channels.setdefault(column, [])
        while any(abs(x + 8 - other) < 6 and low < b and a < high for other, a, b in lines):
            x += 6
        lines.append((x + 8, low, high))
        return x + 8

    def _facing(self, flow: Flow) -> Node:
        """The node at which an arrow to the right begins: one that has the values and is beside their reader."""
        others = [
            other.head
            for other in self.ladder.flows
            if other.tail is flow.tail
            and other.start == other.end == flow.start
            and set(flow.values) <= set(other.values)
        ]
        for node in (flow.tail, *others):
            if min(self._end(node), self._end(flow.head)) - max(self.y[node], self.y[flow.head]) >= RUNG:
                return node
        return flow.tail

    def _free(self, node: Node, side: str, low: float = 0, high: float = 1e9, last: bool = False) -> float:
        """A y on the side of a node, between low and high, that no other arrow uses there."""
        low, high = max(low, self.y[node]) + 15, min(high, self._end(node)) - 5
        used = self.used.setdefault((node, side), [])
        places = [low + RUNG * i for i in range(int((high - low) / RUNG) + 1)] or [(low + high) / 2]
        free = [y for y in places if all(abs(y - other) >= RUNG - 1 for other in used)] or places[-1:]
        used.append(free[-1 if last else 0])
        return used[-1]

    def _arrow(self, flow: Flow, points: Sequence[Point], label: str, at: Point, turned: bool = False) -> Arrow:
        kind = "kept" if flow.kept else "flow"
        values = self.ladder.statistics(flow)
        return Arrow(kind, f"b{flow.tail.number}", f"b{flow.head.number}", points, label, at, turned, values)


TRACE = "trace"
"""The name of the Program before the first pass."""
SIMPLIFIED = SIMPLIFY[-1].__name__
"""The last pass before those that fuse equations."""


def step_graph(
    cfg: Config,
    after: str = SIMPLIFIED,
    detail: bool = False,
    target: Target | None = None,
    values: Callable[[Experiment], Sequence[np.ndarray]] | None = None,
) -> Graph:
    """The graph of a config's training step. Without `values` no data are read, and nothing is run.

    Args:
        values: the inputs of the step, whose values the graph has; see `details.first_batch_inputs`.
        target: the GPU that runs the step; None for the CPU. This machine needs no GPU.
        after: the pass after which the Program is shown; of one that runs twice, the first time.
        detail: draw a box for each equation instead of one for each layer and phase.

    Raises:
        AdtrainError: there is no such pass. The message lists the names.
        ConfigError: the layers do not fit together.
    """
    experiment = training.outline(cfg) if values is None else training.prepare(cfg)
    program = experiment.step_program(passes=())
    title = f"{cfg.name}: a training step on {counted(experiment.full_batch, cfg.data.examples)}"
    labels = {"optimizer": cfg.optimizer.kind, "loss": f"{cfg.loss.kind} loss"}
    arguments = None if values is None else partial(values, experiment)
    return program_graph(program, experiment.step_inputs, title, labels, after, detail, target, arguments)


def program_graph(
    program: Program,
    inputs: Sequence[str],
    title: str,
    labels: Mapping[str, str],
    after: str,
    detail: bool,
    target: Target | None = None,
    arguments: Callable[[], Sequence[np.ndarray]] | None = None,
) -> Graph:
    """The graph of a traced Program.

    Args:
        inputs: the names of its inputs.
        arguments: the inputs, for statistics of the values; None for a graph without them.
        labels: names of scopes that are not layers.
        after, detail, target: see `step_graph`.
    """
    passes = (*SIMPLIFY, *(cpu_fusions() if target is None else gpu_fusions(target)))
    names = list(dict.fromkeys([TRACE, *map(_pass_name, passes)]))
    if after not in names:
        raise AdtrainError(f"unknown pass {after!r}; {known(after, names, 'passes')}")
    folded = NO_FOLDS if detail else folds(program)
    labels = {**labels, **folded.labels}
    order = Roles(program, inputs, folded.scopes).rows
    programs = list(_after_passes(program, passes))
    ladders = [(name, Ladder(Roles(x, inputs, folded.scopes), labels, order, detail)) for name, x in programs]
    chosen = next(ladder for name, ladder in ladders if name == after)
    values = {} if arguments is None else _values(chosen, arguments())
    last = ladders[-1][1]
    numbered, numbers = _numbered(last)
    counts = [(name, Counter(map(ladder.roles.place, ladder.roles.program.equations))) for name, ladder in ladders]
    pictures: list[Picture] = []
    shown = 0
    for name, ladder in ladders:
        ladder.values, ladder.equation_counts, ladder.kernels = values, counts, numbers
        picture = ladder_picture(ladder, title, name)
        if not pictures or replace(picture, name="") != replace(pictures[-1], name=""):
            pictures.append(picture)
        if ladder is chosen:
            shown = len(pictures) - 1

    def make_kernels() -> list[Kernel]:
        found = kernels(last.roles.program, target)
        return [Kernel("\n".join(x.title for x in found.get(e, ())), "\n".join(x.text for x in found.get(e, ())))
                for e in numbered]  # fmt: skip

    notes = declined(passes, [x for _, x in programs])
    return Graph(pictures, shown, program_text(chosen.roles), make_kernels, notes)


def _values(ladder: Ladder, arguments: Sequence[np.ndarray]) -> dict[Variable, Statistics]:
    """The statistics of the values of a ladder's flows."""
    return value_statistics(ladder.roles.program, arguments, {v for flow in ladder.flows for v in flow.values})


def _numbered(ladder: Ladder) -> tuple[list[Equation], dict[Place, list[int]]]:
    """The equations that have kernels, and the numbers of those of each place."""
    roles = ladder.roles
    numbered = [e for e in roles.program.equations if not e.is_view]
    found: dict[Place, list[int]] = {}
    for number, e in enumerate(numbered):
        for place in {roles.places[member] for member in flat([e])}:
            found.setdefault(place, []).append(number)
    return numbered, found


def _after_passes(program: Program, passes: Sequence[Pass]) -> Iterator[tuple[str, Program]]:
    """The traced Program, and the Program after each pass, with the name of the pass."""
    yield TRACE, program
    for apply in passes:
        program = apply(program)
        yield _pass_name(apply), program


def _pass_name(apply: Pass) -> str:
    name: str = getattr(apply, "func", apply).__name__
    return name


def graph(f: Callable[..., Any], *args: Any, after: str = SIMPLIFIED, detail: bool = False, **options: Any) -> Graph:
    """The graph of a function for arguments of these types. The function is traced as by `jit`; nothing is run.

    Forward equations run down the left, gradients up the right, and equations that depend on gradients follow at the
    far right. What is stored for the gradients is drawn between them, with its bytes. Equations in layers are drawn as
    one box for each layer, others one by one.

    Args:
        f: function of trees of arrays to a tree of arrays, or the result of `jit`.
        args, options: its arguments.
        after: the pass of the compiler after which equations are shown, or "trace"; by default the last one before
            fusion.
        detail: draw a box for each equation in layers as well.

    Returns:
        The graph: `svg`, `html` and `dot` as text, `save(path)` for files. A notebook shows it.

    Raises:
        OptionError: `f` is not a function. AdtrainError: there is no pass of that name.
        TraceError, DTypeError: see `jit`.
    """
    jitted = f if isinstance(f, Jitted) else jit(f)
    program, places = jitted.trace(*args, **options)
    try:
        parameters = list(inspect.signature(jitted).parameters)
    except (TypeError, ValueError):  # a function written in C
        parameters = []
    names: dict[int | str, str] = dict(enumerate(parameters[: len(args)]))
    inputs = [".".join(filter(None, (str(names.get(place, place)), path))) for place, path in places]
    name = getattr(jitted, "__name__", "function")
    title = f"{name}({', '.join(dict.fromkeys(path.partition('.')[0] for path in inputs))})"
    return program_graph(program, inputs, title, {}, after, detail)
