"""A picture: boxes, arrows and frames at fixed positions in pixels. Templates write it as SVG and as DOT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adtrain.graphs.details import Statistics
from adtrain.text import shorten

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
