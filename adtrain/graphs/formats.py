"""A graph: pictures of one thing, as files in several formats. In DOT, Graphviz chooses the positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.graphs.details import Kernel
from adtrain.graphs.picture import Picture
from adtrain.templates import environment, macro

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
