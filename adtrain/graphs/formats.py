"""A graph: pictures of one thing, as files in several formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.graphs.dot import dot_text
from adtrain.graphs.picture import Picture
from adtrain.templates import environment

LETTER = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20"><text x="4" y="16">{}</text></svg>'


@dataclass(frozen=True, repr=False)
class Graph:
    """Pictures, of which one is shown; a page has all of them.

    Attributes:
        pictures: a Program after each pass, or one picture.
        shown: the index of the picture that `svg`, `dot` and `png` draw.
        text: the same as text.
    """

    pictures: Sequence[Picture]
    shown: int
    text: str

    @property
    def svg(self) -> str:
        """The picture as SVG. It follows the viewer's light or dark colour scheme."""
        return environment().get_template("graph.svg.j2").render(picture=self.pictures[self.shown], page="")

    @property
    def html(self) -> str:
        """A page without links to other files: a click on a box shows its equations, and a slider chooses the pass."""
        title = self.pictures[self.shown].title
        return environment().get_template("graph.html.j2").render(title=title, pictures=self.pictures, shown=self.shown)

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
