"""The picture of a network: a node for each layer, a frame for each container, and arrows labelled with shapes."""

from __future__ import annotations

from math import prod

from adtrain import config, nn
from adtrain.config import Config
from adtrain.graph.dot import Dot
from adtrain.nn.fields import size_text

# A colour of Okabe and Ito's palette for colour-blind readers, and a thick border with the same meaning.
WITH_PARAMETERS = {"fillcolor": "#56B4E9", "penwidth": "2"}
JOIN = {"shape": "circle", "margin": "0.02"}
END = {"shape": "ellipse"}


def network_dot(cfg: Config) -> str:
    """The config's layers in DOT, from the input to the loss. Shapes are those of one image.

    No array is allocated and no data are read. Raises ConfigError where the layers do not fit together.
    """
    model, shape = config.build.model(cfg), cfg.model.input
    picture = _Picture(f"{cfg.name}: {parameters_text(model, shape)}, {cfg.training.precision}")
    last = picture.add(model, shape, "", picture.node("input", shape, **END))
    loss = picture.node(f"loss\n{cfg.loss.kind}", (), **END)
    picture.connect(last, loss)
    return picture.dot.text()


class _Picture:
    def __init__(self, title: str) -> None:
        self.dot = Dot(title)
        self.shapes: dict[str, nn.Shape] = {}

    def node(self, label: str, output: nn.Shape, *path: str, **attributes: str) -> str:
        name = self.dot.node(label, *path, **attributes)
        self.shapes[name] = output
        return name

    def connect(self, tail: str, head: str) -> None:
        self.dot.edge(tail, head, size_text(self.shapes[tail]))

    def add(self, module: nn.Module, shape: nn.Shape, name: str, source: str, *path: str) -> str:
        """Draw the module `name`, whose input is the node `source`, and return the node of its output."""
        if isinstance(module, nn.Sequential):
            for child_name, child, inner in module.children(shape):
                source = self.add(child, inner, f"{name}.{child_name}".strip("."), source, *path)
            return source
        if isinstance(module, (nn.Residual, nn.Add, nn.Concat)):
            path = (*path, f"{name} {module.kind()}: {parameters_text(module, shape)}")
            children = list(module.children(shape))
            ends = [self.add(child, inner, f"{name}.{part}", source, *path) for part, child, inner in children]
            if isinstance(module, nn.Residual) and module.shortcut is None:
                ends.append(source)
            join = "concat" if isinstance(module, nn.Concat) else "+"
            node = self.node(join, module.output_shape(shape), *path, **JOIN)
        else:
            output, size = module.output_shape(shape), parameters(module, shape)
            lines = [f"{name} {module.kind()}", size_text(output), *([parameters_text(module, shape)] if size else [])]
            ends, node = [source], self.node("\n".join(lines), output, *path, **(WITH_PARAMETERS if size else {}))
        for end in ends:
            self.connect(end, node)
        return node


def parameters(module: nn.Module, shape: nn.Shape) -> int:
    """The number of a module's parameters, for input samples of `shape`."""
    return sum(map(prod, module.parameter_shapes(shape).values()))


def parameters_text(module: nn.Module, shape: nn.Shape) -> str:
    return f"{parameters(module, shape):,} parameters"
