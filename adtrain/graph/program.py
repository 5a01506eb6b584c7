"""The picture of a training step's Program: a node for each equation, an arrow for each variable, a frame per layer.

Frames are stacked in the order of the layers. The forward pass runs down, the backward pass up next to it. Arrows
connect nodes of one frame or of neighbouring frames only. A variable from a more distant frame is listed in a table
next to its reader, so that no arrow crosses the whole picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from adtrain.core.program import Equation, Program, Variable
from adtrain.graph.dot import Dot
from adtrain.graph.labels import COLOURS, equation_label, layer_of, variable_table, variable_text

# Colours of Okabe and Ito's palette for colour-blind readers, and shapes with the same meaning.
PHASES = {
    "forward": {"fillcolor": "#56B4E9"},
    "backward": {"fillcolor": "#E69F00", "style": "filled,rounded,dashed"},
    "update": {"fillcolor": "#009E73", "shape": "octagon"},
}
SAVED = {"penwidth": "3"}
TABLE = {"shape": "plaintext", "style": "solid", "fontsize": "9", "margin": "0"}
TABLE_EDGE = {"minlen": "0", "arrowhead": "none"}
# From this number on, the equations of one layer and phase are drawn as one node, such as those of an optimizer.
LEAST_GROUPED = 48


class _Node(NamedTuple):
    """A drawn equation, or a group of equations.

    `position` grows downwards: the number of the frame, then the phase, then the execution order, which is reversed
    for backward.
    """

    name: str
    equations: Sequence[Equation]
    position: tuple[int, int, int]


def program_dot(program: Program, title: str) -> str:
    """The Program in DOT. Inputs, constants and outputs are listed next to the equations that read or produce them."""
    picture = _Picture(program, title)
    for i, equations in enumerate(groups(program)):
        picture.add(i, equations)
    for node in picture.nodes:
        picture.connect(node)
    picture.stack()
    picture.legend()
    return picture.dot.text()


def groups(program: Program) -> Iterator[Sequence[Equation]]:
    """The equations of each node: one, or all of a layer and phase from LEAST_GROUPED on."""
    by_layer: dict[tuple[str, str], list[Equation]] = {}
    for e in program.equations:
        by_layer.setdefault((layer_of(e), e.phase), []).append(e)
    for e in program.equations:
        group = by_layer[layer_of(e), e.phase]
        if len(group) < LEAST_GROUPED:
            yield [e]
        elif group[0] is e:
            yield group


def frames(layer: str) -> tuple[str, ...]:
    """The frames around a layer, outermost first: ("3.residual", "body.0.conv2d") for "3.residual.body.0.conv2d"."""
    return tuple(re.findall(r"(?:(?:\d+|body|shortcut)\.)*[^.]+", layer)) or ("step",)


class _Picture:
    def __init__(self, program: Program, title: str) -> None:
        self.program = program
        self.outputs = set(program.outputs)
        self.dot = Dot(title)
        self.makers: dict[Variable, _Node] = {}
        self.nodes: list[_Node] = []
        # All layers in the order of the network, including those whose equations were fused into another layer's.
        layers = dict.fromkeys(frames(layer) for e in program.equations for layer in e.scope.split("+"))
        used = {frames(layer_of(e)) for e in program.equations}
        self.paths = [path for path in layers if path in used]
        self.place = {path: i for i, path in enumerate(self.paths)}

    def add(self, i: int, equations: Sequence[Equation]) -> None:
        """Draw node number `i`, for the equations."""
        path, phase = frames(layer_of(equations[0])), equations[0].phase
        position = self.place[path], list(PHASES).index(phase), -i if phase == "backward" else i
        name = self.dot.node(equation_label(self.program, equations), *path, **PHASES[phase])
        self.nodes.append(_Node(name, equations, position))
        self.makers.update((v, self.nodes[-1]) for e in equations for v in e.outputs)

    def connect(self, node: _Node) -> None:
        """Draw the inputs of a node, and those of its results that are outputs of the Program."""
        path, listed = self.paths[node.position[0]], dict[str, list[str]]()
        for v in dict.fromkeys(v for e in node.equations for v in e.inputs):
            kind, text = self.read(v, node)
            if kind:
                listed.setdefault(kind, []).append(text)
        if listed:
            self.dot.edge(self.dot.node(variable_table(listed), *path, **TABLE), node.name, **TABLE_EDGE)
        results = [v for e in node.equations for v in e.outputs if v in self.outputs]
        if results:
            label = variable_table({"output": [f"output {variable_text(self.program, v)}" for v in results]})
            self.dot.edge(node.name, self.dot.node(label, *path, **TABLE), **TABLE_EDGE)

    def read(self, v: Variable, reader: _Node) -> tuple[str, str]:
        """Draw the arrow of a variable to its reader; if it has none, return its kind and text for the table."""
        text, maker = variable_text(self.program, v), self.makers.get(v)
        if maker is None:
            kind = "constant" if v in self.program.constants else "input"
            return kind, f"{kind} {text}"
        if maker is reader:
            return "", ""
        source, target = maker.equations[0], reader.equations[0]
        saved = (source.phase, target.phase) == ("forward", "backward")
        if abs(maker.position[0] - reader.position[0]) > 1:
            layer = layer_of(source)
            return ("saved", f"{text} saved by {layer}") if saved else ("distant", f"{text} from {layer}")
        # Graphviz draws the tail of an edge above its head.
        style = SAVED if saved else {}
        if maker.position < reader.position:
            self.dot.edge(maker.name, reader.name, text, **style)
        else:
            self.dot.edge(reader.name, maker.name, text, dir="back", **style)
        return "", ""

    def stack(self) -> None:
        """Place each frame below the previous one, by a chain of invisible edges.

        Each frame has an invisible node above and one below its equations; the chain runs through them.
        """
        previous = ""
        for i, path in enumerate(self.paths):
            top, bottom = (self.dot.node("", *path, shape="point", style="invis") for _ in range(2))
            for node in self.nodes:
                if node.position[0] == i:
                    self.dot.edge(top, node.name, style="invis", weight="0")
                    self.dot.edge(node.name, bottom, style="invis", weight="0")
            for tail, head in ((previous, top), (top, bottom)):
                if tail:
                    self.dot.edge(tail, head, style="invis", weight="100")
            previous = bottom

    def legend(self) -> None:
        frame = "legend"
        samples = {phase: self.dot.node(phase, frame, **style) for phase, style in PHASES.items()}
        self.dot.edge(samples["forward"], samples["backward"], "saved for backward", **SAVED)
        self.dot.edge(samples["backward"], samples["update"], "variable: type")
        words = {"distant": "variable from another layer", "saved": "variable saved by another layer's forward"}
        self.dot.node(variable_table({kind: [words.get(kind, kind)] for kind in COLOURS}), frame, **TABLE)
