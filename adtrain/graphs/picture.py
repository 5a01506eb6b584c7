"""A picture: boxes, arrows and frames at fixed positions in pixels. Templates write it as SVG and as DOT.

A graph has pictures of one thing, as files in several formats. In DOT, Graphviz chooses the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.graphs.details import Kernel, Statistics
from adtrain.table import shorten
from adtrain.templates import environment, macro

Point = tuple[float, float]

TITLE, TEXT, LABEL = 12, 10.5, 10
"""Font sizes of a box's title, of its text, and of an arrow's label."""
HISTOGRAM, HEIGHT = 30, 10
"""Width and height of a histogram beside a label."""
TITLE_LINE, TEXT_LINE = 16, 14
"""Distances of lines."""
# Widths of characters in DejaVu Sans, in units of the font size. Other fonts of the style sheet are narrower.
NARROW, WIDE = "ijlft.,:;|!'()[]/ ", "mwMW@%→↓↑×≈"


@dataclass(frozen=True)
class Box:
    """A node: an equation, several of them, or a layer.

    Attributes:
        kind: the name of its colour in the style sheet.
        frames: titles of the frames around it, outermost first.
        details: what a page shows after a click.
        passes: how many equations it has after each pass that changes their number.
        kernels: the numbers of the graph's kernels that compute its equations.
    """

    id: str
    kind: str
    title: Sequence[str]
    text: Sequence[str]
    x: float
    y: float
    width: float
    height: float
    frames: tuple[str, ...] = ()
    details: str = ""
    passes: Sequence[str] = ()
    kernels: Sequence[int] = ()

    @property
    def lines(self) -> Sequence[tuple[str, str, float]]:
        """Class, text and baseline of each line, centred between the upper and lower border."""
        y = self.y + (self.height - text_height(self.title, self.text)) / 2
        found = []
        for name, step, lines in (("name", TITLE_LINE, self.title), ("about", TEXT_LINE, self.text)):
            for line in lines:
                y += step
                found.append((name, line, y - 4))
        return found


@dataclass(frozen=True)
class Arrow:
    """A line of horizontal and vertical segments between two boxes, with a head at its end.

    `kind` is "flow", or "kept" for values that are stored for the backward pass. `at` is the middle of the label's
    baseline. The label of a `turned` one runs upwards. `values` are names and statistics of its values for one batch,
    the largest value first.
    """

    kind: str
    tail: str
    head: str
    points: Sequence[Point]
    label: str = ""
    at: Point = (0, 0)
    turned: bool = False
    values: Sequence[tuple[str, Statistics]] = ()

    @property
    def wrong(self) -> bool:
        """Whether a value has NaN or infinite elements."""
        return any(found.nan or found.infinite for _, found in self.values)

    @property
    def histogram(self) -> Sequence[tuple[float, float, float]]:
        """The histogram of the largest value, right of a label that is not turned: left, top and height of columns."""
        if not self.values or self.turned or not self.label:
            return ()
        left, bottom = self.at[0] + text_width(self.label, LABEL) / 2 + 5, self.at[1] + 1
        bars = self.values[0][1].bars
        return [(left + i * HISTOGRAM / len(bars), bottom - HEIGHT * x, HEIGHT * x) for i, x in enumerate(bars) if x]

    @property
    def path(self) -> str:
        return "M" + "L".join(f"{x:g} {y:g}" for x, y in self.points)

    @property
    def head_path(self) -> str:
        (x0, y0), (x, y) = self.points[-2:]
        length = abs(x - x0) + abs(y - y0) or 1
        dx, dy = (x - x0) / length, (y - y0) / length
        corners = [(x - 7 * dx + side * 4 * dy, y - 7 * dy + side * 4 * dx) for side in (1, -1)]
        return "M" + "L".join(f"{a:g} {b:g}" for a, b in ((x, y), *corners)) + "z"


@dataclass(frozen=True)
class Frame:
    """A titled border around boxes. `frames` are the titles of the outer frames and its own."""

    frames: tuple[str, ...]
    title: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Heading:
    """The title of a column, centred at `x`."""

    kind: str
    text: str
    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn. `name` is the title among several pictures; `horizontal` is the direction of arrows."""

    title: str
    note: str
    width: float
    height: float
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    frames: Sequence[Frame] = ()
    headings: Sequence[Heading] = ()
    name: str = ""
    horizontal: bool = False


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def text_width(text: str, size: float = TEXT, bold: bool = False) -> float:
    """The width of a line in pixels; an upper estimate for the fonts of the style sheet."""
    ems = sum(0.38 if c in NARROW else 0.92 if c in WIDE else 0.7 if c.isupper() else 0.62 for c in text)
    return ems * size * (1.1 if bold else 1)


def fitted(text: str, width: float, size: float = TEXT, bold: bool = False) -> str:
    """The text, shortened in its middle to at most `width` pixels."""
    length = len(text)
    while length > 4 and text_width(shorten(text, length), size, bold) > width:
        length -= 1
    return shorten(text, length)


def text_height(title: Sequence[str], text: Sequence[str]) -> float:
    return len(title) * TITLE_LINE + len(text) * TEXT_LINE


def wrapped(
    parts: Sequence[str], between: str, width: float, lines: int, size: float = TEXT, bold: bool = False
) -> list[str]:
    """The parts joined by `between`, in at most `lines` lines of at most `width` pixels."""
    found: list[str] = []
    for i, part in enumerate(parts):
        joined = f"{found[-1]}{between}{part}" if found else part
        if found and text_width(joined, size, bold) <= width:
            found[-1] = joined
        elif len(found) == lines:
            rest = f" and {len(parts) - i} more"
            found[-1] = fitted(found[-1], width - text_width(rest, size, bold), size, bold) + rest
            break
        else:
            found.append(fitted(part, width, size, bold))
    return found


LETTER = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20"><text x="4" y="16">{}</text></svg>'


@dataclass(frozen=True, repr=False)
class Graph:
    """Pictures, of which one is shown; a page has all of them.

    Attributes:
        pictures: a Program after each pass, or one picture.
        shown: the index of the picture that `svg`, `dot` and `png` draw.
        text: the same as text.
        make_kernels: makes the kernels; the numbers in `Box.kernels` are their indices.
        notes: sentences about the whole, such as why a kernel is not used.
    """

    pictures: Sequence[Picture]
    shown: int
    text: str
    make_kernels: Callable[[], Sequence[Kernel]] = tuple
    notes: Sequence[str] = ()

    @property
    def svg(self) -> str:
        """The picture as SVG. It follows the viewer's light or dark colour scheme."""
        return macro("graph.svg.j2", "svg")(self.pictures[self.shown])

    @property
    def html(self) -> str:
        """A page without links to other files: a click on a box shows its equations and kernels, on an arrow its
        values, and a slider chooses the pass."""
        return environment().get_template("graph.html.j2").render(
            title=self.pictures[self.shown].title,
            pictures=self.pictures,
            shown=self.shown,
            notes=self.notes,
            kernels=self.make_kernels(),
            with_values=any(arrow.values for picture in self.pictures for arrow in picture.arrows),
        )  # fmt: skip

    @property
    def dot(self) -> str:
        """The picture in Graphviz's DOT language."""
        return dot_text(self.pictures[self.shown])

    def png(self) -> bytes:
        """The picture as a PNG file, at twice its size, with a font of the system.

        Raises AdtrainError if the extra `report` is not installed, and if the system has no font.
        """
        try:
            from resvg_py import svg_to_bytes
        except ImportError:
            raise AdtrainError("a PNG needs resvg_py: pip install 'adtrain[report]'; an SVG needs nothing") from None

        def drawn(svg: str) -> bytes:
            return bytes(svg_to_bytes(svg_string=svg, zoom=2, font_family="DejaVu Sans"))

        if drawn(LETTER.format("")) == drawn(LETTER.format("A")):
            raise AdtrainError(
                "a PNG needs a font, and the system has none: apt install fonts-dejavu-core; an SVG needs nothing"
            )
        return drawn(self.svg)

    def save(self, path: str | Path) -> None:
        """Write the file in the format of its extension: .svg, .png, .html, .dot or .txt.

        Raises AdtrainError for another extension, and if the file cannot be written.
        """
        write_atomic(path, FORMATS[checked_format(path)](self))

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        picture = self.pictures[self.shown]
        return f"Graph({picture.title!r}, {picture.note})"


FORMATS: dict[str, Callable[[Graph], bytes]] = {
    ".svg": lambda graph: graph.svg.encode(),
    ".png": Graph.png,
    ".html": lambda graph: graph.html.encode(),
    ".dot": lambda graph: graph.dot.encode(),
    ".txt": lambda graph: graph.text.encode(),
}


def checked_format(path: str | Path) -> str:
    """The extension of the path. Raises AdtrainError unless it is that of a format."""
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        *others, last = FORMATS
        found = f"the extension {suffix}" if suffix else "no extension"
        raise AdtrainError(f"{path}: found {found}, expected {', '.join(others)} or {last}")
    return suffix


FONT = "Helvetica,Arial,sans-serif"
FILLS = {
    "forward": "#e3eefc", "convolution": "#e3eefc", "backward": "#fdeadb", "activation": "#fdeadb",
    "update": "#dff3e7", "linear": "#dff3e7", "normalisation": "#efe6fb", "pooling": "#fbf3cf",
}  # fmt: skip
KEPT = {"color": "#8150c8", "fontcolor": "#6b3cb3", "penwidth": "2"}


def dot_text(picture: Picture) -> str:
    """The picture in DOT. Boxes at one height have one rank, so a ladder stays one."""
    attributes = {
        "label": f"{picture.title}\n{picture.note}",
        "labelloc": "t",
        "rankdir": "LR" if picture.horizontal else "TB",
    }
    lines = [
        f"graph [{_list({**attributes, 'style': 'rounded,dashed', 'fontname': FONT})}]",
        f"node [{_list({'shape': 'box', 'style': 'filled,rounded', 'fontsize': '11', 'fontname': FONT})}]",
        f"edge [{_list({'fontsize': '9', 'arrowsize': '0.7', 'fontname': FONT})}]",
        *_inside(picture, ()),
        *_ranks(picture),
        *_edges(picture),
    ]
    return "\n".join(["digraph {", *(f"  {line}" for line in lines), "}", ""])


def _inside(picture: Picture, frames: tuple[str, ...]) -> Iterator[str]:
    """The boxes and frames directly inside a frame."""
    for box in picture.boxes:
        if box.frames == frames:
            label = "\n".join([*box.title, *box.text])
            yield f"{box.id} [{_list({'label': label, 'fillcolor': FILLS.get(box.kind, '#f3f4f6')})}]"
    for i, frame in enumerate(picture.frames):
        if frame.frames[:-1] == frames:
            yield f"subgraph cluster_{i} {{"
            yield f"  graph [{_list({'label': frame.title, 'labeljust': 'l'})}]"
            yield from (f"  {line}" for line in _inside(picture, frame.frames))
            yield "}"


def _ranks(picture: Picture) -> Iterator[str]:
    if picture.frames or picture.horizontal:
        return
    ranks: dict[float, list[str]] = {}
    for box in sorted(picture.boxes, key=lambda box: box.y):
        ranks.setdefault(box.y, []).append(box.id)
    for ids in ranks.values():
        yield f"{{rank=same; {'; '.join(ids)}}}"
    firsts = [ids[0] for ids in ranks.values()]
    yield from (f"{a} -> {b} [style=invis]" for a, b in pairwise(firsts))


def _edges(picture: Picture) -> Iterator[str]:
    """Graphviz draws the tail of an edge above its head, so an arrow that runs up is written from its head."""
    boxes = {box.id: box for box in picture.boxes}
    for arrow in picture.arrows:
        up = boxes[arrow.tail].y > boxes[arrow.head].y and not picture.horizontal
        ends = (arrow.head, arrow.tail) if up else (arrow.tail, arrow.head)
        style = {"label": arrow.label, **({"dir": "back"} if up else {}), **(KEPT if arrow.kind == "kept" else {})}
        yield f"{ends[0]} -> {ends[1]} [{_list(style)}]"


def _list(attributes: dict[str, str]) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in attributes.items())


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
