"""The graph of a config's layers, from the input to the loss. Branches run side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import prod
from typing import Any, NamedTuple, cast

from adtrain import config, nn
from adtrain.config import Config
from adtrain.graphs.picture import (
    LABEL,
    TITLE,
    Arrow,
    Box,
    Frame,
    Graph,
    Picture,
    Point,
    shape_text,
    text_height,
    text_width,
)
from adtrain.nn.module import pair, size_text
from adtrain.nn.network import LayerRow
from adtrain.table import COUNT, TEXT, Column, render

KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "convolution": (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d),
    "linear": (nn.Linear, nn.Embedding),
    "normalisation": (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm, nn.RMSNorm),
    "pooling": (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample),
    "activation": (
        nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Softmax, nn.LogSoftmax,
        nn.Softplus, nn.SquaredReLU, nn.SoftCap, nn.Tanh,
    ),
}  # fmt: skip
"""The colours of layers, as names in the style sheet."""
OPENED = (nn.Sequential, nn.Residual, nn.Branches)
"""Containers whose children are drawn. Others, and layers, are one box."""
JOINS: dict[type[nn.Module], str] = {nn.Concat: "‖", nn.Multiply: "×"}
"""The sign where branches join; others are added."""
COLUMNS: tuple[Column[LayerRow], ...] = (
    Column("layer", lambda row: row.name, TEXT),
    Column("kind", lambda row: row.kind, TEXT),
    Column("output", lambda row: size_text(row.output_shape), TEXT),
    Column("parameters", lambda row: row.parameters or None, COUNT),
)
# Wide enough for every column of the text, as it goes to a file.
WIDTH = 10_000
MARGIN, TOP, PADDING, SPACE = 24, 76, 12, 28
SKIP, JOIN = 24, 26
"""Width of a branch without layers, and of the sum of branches."""


def network_graph(cfg: Config, horizontal: bool = False) -> Graph:
    """The graph of a config's layers, from top to bottom or from left to right. Shapes are those of one image.

    No array is allocated and no data are read. Raises ConfigError where the layers do not fit together.
    """
    model, shape = config.build.model(cfg), cfg.model.input_shape
    picture = network_picture(model, shape, horizontal, cfg.name, cfg.training.precision, f"{cfg.loss.kind} loss")
    return Graph([picture], 0, _text(cfg, model, shape))


def network_picture(
    model: nn.Module, shape: nn.Shape, horizontal: bool, name: str = "network", precision: str = "float32",
    loss: str = "loss",
) -> Picture:  # fmt: skip
    """The picture of a model for input samples of `shape`."""
    title, note = f"{name}: layers", ", ".join([*parameter_texts(model, shape), precision])
    return _Layout(horizontal).picture(model, shape, title, note, loss)


def _text(cfg: Config, model: nn.Module, shape: nn.Shape) -> str:
    rows = nn.describe(model, shape)
    loss, total = LayerRow("loss", cfg.loss.kind, (), 0), LayerRow("total", "", (), sum(row.parameters for row in rows))
    return "\n".join([*render(COLUMNS, [LayerRow("input", "", shape, 0), *rows, loss, total], WIDTH), ""])


class _End(NamedTuple):
    """The end of a drawn part: its box, its position, and the border of the box, where the next arrow begins."""

    id: str
    across: float
    along: float
    border: float


class _Layout:
    """Positions are pairs (across, along) the direction of the network until they are drawn."""

    def __init__(self, horizontal: bool) -> None:
        self.horizontal = horizontal
        self.gap = 84 if horizontal else 30
        # Room for the title of a frame.
        self.title = (20, 0) if horizontal else (0, 16)
        self.boxes: list[Box] = []
        self.arrows: list[Arrow] = []
        self.frames: list[Frame] = []
        self.labels: dict[str, str] = {}

    def picture(self, model: nn.Module, shape: nn.Shape, title: str, note: str, loss: str) -> Picture:
        across = max(self.size(model, shape, "")[0], self.extent(["input"], ())[0], self.extent([loss], ())[0])
        least = max(text_width(title, 17, bold=True), text_width(note, 12))
        room = across if self.horizontal else max(across, least)
        center = (TOP if self.horizontal else MARGIN) + room / 2
        end = self.box(["input"], (), "end", center, MARGIN if self.horizontal else TOP, (), "")
        self.labels[end.id] = shape_text(shape)
        end = self.add(model, shape, "", end, center, end.along + self.gap, ())
        last = self.box([loss], (), "end", center, end.along + self.gap, (), "")
        self.connect(end, last.id, center, end.along + self.gap)
        far, along = center + room / 2 + MARGIN, last.along + MARGIN
        width, height = (max(along, least + 2 * MARGIN), far) if self.horizontal else (far, along)
        return Picture(title, note, width, height, self.boxes, self.arrows, self.frames, horizontal=self.horizontal)

    def size(self, module: nn.Module, shape: nn.Shape, name: str) -> tuple[float, float]:
        """The extent of a module across and along."""
        if not isinstance(module, OPENED):
            return self.extent(*node_text(module, shape, name))
        sizes = [self.size(child, inner, joined(name, part)) for part, child, inner in module.children(shape)]
        if isinstance(module, nn.Sequential):
            along = sum(b + self.gap for _, b in sizes) - self.gap
            return max((a for a, _ in sizes), default=SKIP), max(along, 0)
        sizes += [(SKIP, 0)] if isinstance(module, nn.Residual) and module.shortcut is None else []
        across = sum(a + SPACE for a, _ in sizes) - SPACE + 2 * PADDING + self.title[0]
        return across, self.title[1] + max(b for _, b in sizes) + self.gap + JOIN + 2 * PADDING

    def extent(self, title: Sequence[str], text: Sequence[str]) -> tuple[float, float]:
        widths = [text_width(line, TITLE, bold=True) for line in title] + [text_width(line) for line in text]
        width, height = max(96, *widths) + 2 * PADDING, text_height(title, text) + PADDING + 4
        return (height, width) if self.horizontal else (width, height)

    def add(
        self, module: nn.Module, shape: nn.Shape, name: str, source: _End, center: float, start: float,
        frames: tuple[str, ...],
    ) -> _End:  # fmt: skip
        """Draw the module `name`, which reads `source`, from `start` on."""
        if isinstance(module, nn.Sequential):
            for part, child, inner in module.children(shape):
                source = self.add(child, inner, joined(name, part), source, center, start, frames)
                start = source.along + self.gap
            return source
        if isinstance(module, OPENED):
            return self.add_branches(module, shape, name, source, center, start, frames)
        title, text = node_text(module, shape, name)
        kind = next((kind for kind, classes in KINDS.items() if isinstance(module, classes)), "other")
        sizes = [f"{key}: {shape_text(size)}" for key, size in module.parameter_shapes(shape).items()]
        output = module.output_shape(shape)
        details = "\n".join([repr(module), *sizes, f"output: {shape_text(output)}"])
        end = self.box(title, text, kind, center, start, frames, details)
        if output != shape:
            self.labels[end.id] = shape_text(output)
        self.connect(source, end.id, center, start)
        return end

    def add_branches(
        self, module: nn.Container, shape: nn.Shape, name: str, source: _End, center: float, start: float,
        frames: tuple[str, ...],
    ) -> _End:  # fmt: skip
        """Draw a container whose children read the same, and the join of their outputs."""
        across, along = self.size(module, shape, name)
        title = ", ".join([f"{name} {module.kind()}", *parameter_texts(module, shape)])
        frames = (*frames, title)
        x, y, width, height = *self.point(center - across / 2, start), *self.point(across, along)
        self.frames.append(Frame(frames, title, x, y, width, height))
        join = start + along - PADDING - JOIN
        left = center - across / 2 + PADDING + self.title[0]
        ends, outputs = [], []
        for part, child, inner in module.children(shape):
            room, length = self.size(child, inner, joined(name, part))
            middle = left + room / 2
            end, first = source, start + PADDING + self.title[1]
            if length:
                end = self.add(child, inner, joined(name, part), source, middle, first, frames)
            ends.append((middle, end))
            outputs.append(child.output_shape(inner))
            left += room + SPACE
        if isinstance(module, nn.Residual) and module.shortcut is None:
            ends.append((left + SKIP / 2, source))
        box = self.box([JOINS.get(type(module), "+")], (), "end", center, join, frames, "", JOIN)
        for middle, end in ends:
            self.connect(end, box.id, center, join, middle)
        output = module.output_shape(shape)
        if output != outputs[0]:
            self.labels[box.id] = shape_text(output)
        return _End(box.id, center, start + along, box.along)

    def box(
        self, title: Sequence[str], text: Sequence[str], kind: str, center: float, start: float,
        frames: tuple[str, ...], details: str, length: float = 0,
    ) -> _End:  # fmt: skip
        across, length = (length, length) if length else self.extent(title, text)
        id = f"b{len(self.boxes)}"
        x, y, width, height = *self.point(center - across / 2, start), *self.point(across, length)
        self.boxes.append(Box(id, kind, title, text, x, y, width, height, frames, details))
        return _End(id, center, start + length, start + length)

    def connect(self, source: _End, head: str, across: float, along: float, middle: float | None = None) -> None:
        """Draw an arrow to a box whose border is at `along`; it runs at `middle`, by default at `across`."""
        middle = across if middle is None else middle
        places = [(source.across, source.border)]
        if middle != source.across:
            places += [(source.across, source.along + self.gap / 2), (middle, source.along + self.gap / 2)]
        if middle != across:
            places += [(middle, along - self.gap / 2), (across, along - self.gap / 2)]
        points = [self.point(*place) for place in (*places, (across, along))]
        label = self.labels.pop(source.id, "")
        (x0, y0), (x, y) = points[:2]
        at = (x0 + x) / 2, y - 5
        if not self.horizontal:
            at = x0 + 8 + text_width(label, LABEL) / 2, min((y0 + y) / 2, y0 + 15) + 4
        self.arrows.append(Arrow("flow", source.id, head, points, label, at))

    def point(self, across: float, along: float) -> Point:
        return (along, across) if self.horizontal else (across, along)


def joined(name: str, part: str) -> str:
    return f"{name}.{part}".strip(".")


def node_text(module: nn.Module, shape: nn.Shape, name: str) -> tuple[list[str], list[str]]:
    """Title and text of a layer: name and kind, its options, and the number of its parameters."""
    options = ", ".join(option_texts(module, shape))
    return [f"{name} {module.kind()}"], [*([options] if options else []), *parameter_texts(module, shape)]


def option_texts(module: nn.Module, shape: nn.Shape) -> Iterator[str]:
    """The options of a layer that differ from their defaults, such as "5×5", "6 → 16", "pad 2"."""
    for field in sorted(fields(cast(Any, module)), key=lambda field: field.name != "kernel_size"):
        value = getattr(module, field.name)
        if field.name == "kernel_size":
            yield shape_text(pair(value))
        elif field.name in ("out_channels", "out_features"):
            yield f"{shape[0] if field.name == 'out_channels' else shape[-1]} → {value}"
        elif value != field.default and not field.name.startswith("in_"):
            size = shape_text(value) if isinstance(value, tuple) else value
            name = {"padding": "pad", "bias": "no bias"}.get(field.name, field.name.replace("_", " "))
            yield name if isinstance(value, bool) else f"{name} {size}"


def parameter_texts(module: nn.Module, shape: nn.Shape) -> list[str]:
    """The number of a module's parameters as text; empty if it has none."""
    count = sum(map(prod, module.parameter_shapes(shape).values()))
    return [f"{count:,} parameters"] if count else []
