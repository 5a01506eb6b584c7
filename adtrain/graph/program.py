"""The picture of a training step's Program: a node an equation, an arrow a variable, a frame a layer.

Layers stand one below the other. Forward runs down, and backward runs up beside it. Arrows lead to the same frame and
to the next one; what comes from further away is named beside its reader, so that no arrow crosses the whole picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from adtrain.core.program import Equation, Program, Variable
from adtrain.graph.dot import Dot
from adtrain.graph.labels import COLOURS, equation_label, layer_of, side_label, variable_text

# Of Okabe and Ito's palette, which colour-blind readers can tell apart; the shapes say the same.
PHASES = {
    "forward": {"fillcolor": "#56B4E9"},
    "backward": {"fillcolor": "#E69F00", "style": "filled,rounded,dashed"},
    "update": {"fillcolor": "#009E73", "shape": "octagon"},
}
KEPT = {"penwidth": "3"}
TABLE = {"shape": "plaintext", "style": "solid", "fontsize": "9", "margin": "0"}
BESIDE = {"minlen": "0", "arrowhead": "none"}
# So many equations of one layer and phase are drawn as one node: an optimizer has some for each parameter.
CROWD = 48


class _Node(NamedTuple):
    """A drawn equation, or a crowd of them.

    `place` grows downwards: the frame's number from above, then forward, backward, update, then the order in which
    they run, which is upwards for backward.
    """

    name: str
    equations: Sequence[Equation]
    place: tuple[int, int, int]


def program_dot(program: Program, title: str) -> str:
    """The Program in DOT; inputs, constants and outputs stand beside the equations that read or make them."""
    picture = _Picture(program, title)
    for i, equations in enumerate(groups(program)):
        picture.add(i, equations)
    for node in picture.nodes:
        picture.connect(node)
    picture.stack()
    picture.legend()
    return picture.dot.text()


def groups(program: Program) -> Iterator[Sequence[Equation]]:
    """The equations that a node stands for, for each node: one, or a crowd."""
    together: dict[tuple[str, str], list[Equation]] = {}
    for e in program.equations:
        together.setdefault((layer_of(e), e.phase), []).append(e)
    for e in program.equations:
        others = together[layer_of(e), e.phase]
        if len(others) < CROWD:
            yield [e]
        elif others[0] is e:
            yield others


def frames(layer: str) -> tuple[str, ...]:
    """The frames around a layer's equations: "3.residual.body.0.conv2d" stands in "body.0.conv2d" in "3.residual"."""
    return tuple(re.findall(r"(?:(?:\d+|body|shortcut)\.)*[^.]+", layer)) or ("step",)


class _Picture:
    def __init__(self, program: Program, title: str) -> None:
        self.program = program
        self.outputs = set(program.outputs)
        self.dot = Dot(title)
        self.makers: dict[Variable, _Node] = {}
        self.nodes: list[_Node] = []
        # In the order of the network, also where a layer's forward has been fused into another one's.
        layers = dict.fromkeys(frames(layer) for e in program.equations for layer in e.scope.split("+"))
        used = {frames(layer_of(e)) for e in program.equations}
        self.paths = [path for path in layers if path in used]

    def add(self, i: int, equations: Sequence[Equation]) -> None:
        """Draw a node, the i-th, for the equations."""
        path, phase = frames(layer_of(equations[0])), equations[0].phase
        place = self.paths.index(path), list(PHASES).index(phase), -i if phase == "backward" else i
        name = self.dot.node(equation_label(self.program, equations), *path, **PHASES[phase])
        self.nodes.append(_Node(name, equations, place))
        self.makers.update((v, self.nodes[-1]) for e in equations for v in e.outputs)

    def connect(self, node: _Node) -> None:
        """Draw what a node reads, and its part in the Program's outputs."""
        path, beside = self.paths[node.place[0]], dict[str, list[str]]()
        for v in dict.fromkeys(v for e in node.equations for v in e.inputs):
            kind, text = self.read(v, node)
            if kind:
                beside.setdefault(kind, []).append(text)
        if beside:
            self.dot.edge(self.dot.node(side_label(beside), *path, **TABLE), node.name, **BESIDE)
        results = [v for e in node.equations for v in e.outputs if v in self.outputs]
        if results:
            label = side_label({"output": [f"output {variable_text(self.program, v)}" for v in results]})
            self.dot.edge(node.name, self.dot.node(label, *path, **TABLE), **BESIDE)

    def read(self, v: Variable, reader: _Node) -> tuple[str, str]:
        """Draw the arrow of a variable; where it gets none, its kind and what to write beside its reader."""
        text, maker = variable_text(self.program, v), self.makers.get(v)
        if maker is None:
            kind = "constant" if v in self.program.constants else "input"
            return kind, f"{kind} {text}"
        if maker is reader:
            return "", ""
        source, target = maker.equations[0], reader.equations[0]
        kept = (source.phase, target.phase) == ("forward", "backward")
        if abs(maker.place[0] - reader.place[0]) > 1:
            layer = layer_of(source)
            return ("kept", f"{text} kept from {layer}") if kept else ("elsewhere", f"{text} from {layer}")
        # Graphviz puts the end that it is told of first above the other one.
        style = KEPT if kept else {}
        if maker.place < reader.place:
            self.dot.edge(maker.name, reader.name, text, **style)
        else:
            self.dot.edge(reader.name, maker.name, text, dir="back", **style)
        return "", ""

    def stack(self) -> None:
        """Keep each frame below the one before: an invisible line runs down through all of them, in and out at points
        that stand above and below a frame's equations."""
        previous = ""
        for i, path in enumerate(self.paths):
            top, bottom = (self.dot.node("", *path, shape="point", style="invis") for _ in range(2))
            for node in self.nodes:
                if node.place[0] == i:
                    self.dot.edge(top, node.name, style="invis", weight="0")
                    self.dot.edge(node.name, bottom, style="invis", weight="0")
            for tail, head in ((previous, top), (top, bottom)):
                if tail:
                    self.dot.edge(tail, head, style="invis", weight="100")
            previous = bottom

    def legend(self) -> None:
        frame = "legend"
        samples = {phase: self.dot.node(phase, frame, **style) for phase, style in PHASES.items()}
        self.dot.edge(samples["forward"], samples["backward"], "kept for backward", **KEPT)
        self.dot.edge(samples["backward"], samples["update"], "variable: type")
        words = {"elsewhere": "variable from another layer", "kept": "variable kept from another layer's forward"}
        self.dot.node(side_label({kind: [words.get(kind, kind)] for kind in COLOURS}), frame, **TABLE)
