"""Text tables that fit the terminal; the least important columns are dropped if there is no room for them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from adtrain.text import counted, visible

GAP = "  "
MIN_TEXT = 12


Row = TypeVar("Row")


class CellFormat(NamedTuple):
    """How the values of a column are written.

    Attributes:
        write: from a value to its text. None has an empty cell.
        left: whether the column is aligned to the left, and shortened in a narrow terminal.
        breaks: a character after which a page may break the line.
    """

    write: Callable[[Any], str] = str
    left: bool = False
    breaks: str = ""


NUMBER, TEXT = CellFormat(), CellFormat(left=True)
COUNT, PERCENT = CellFormat("{:,.0f}".format), CellFormat("{:.1%}".format)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        title: its heading; with the unit of the values, if they have one.
        of: from a row to the value of its cell.
        format: how the values are written.
        rank: a narrow terminal drops columns in the order of decreasing rank; 0 is never dropped.
    """

    title: str
    of: Callable[[Row], Any] = str
    format: CellFormat = NUMBER
    rank: int = 0

    def text(self, row: Row) -> str:
        value = self.of(row)
        return "" if value is None else self.format.write(value)


def terminal_width() -> int:
    """The width of the terminal, or the environment variable COLUMNS; 100 if both are unknown."""
    return shutil.get_terminal_size((100, 24)).columns


def broken(line: str, width: int) -> list[str]:
    """The line, broken between words where it is longer than `width`; the rest is below the line's second column."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(line)


def render(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, last: Sequence[str] = ()) -> list[str]:
    """A heading and a line for each row, at most `width` wide if possible; text is left-aligned, numbers right-aligned.

    Text is shortened to MIN_TEXT characters if necessary; if that is not enough, columns are dropped, and a last line
    tells their number. `last` has the cells of a line below the rows, such as their sums.
    """
    lines = [[column.text(row) for column in columns] for row in rows]
    cells = [[visible(cell) for cell in line] for line in (*lines, *filter(None, [last]))]
    kept = list(range(len(columns)))
    widths = [max(map(len, each)) for each in zip([column.title for column in columns], *cells, strict=True)]
    left = [column.format.left for column in columns]
    shortest = [min(size, MIN_TEXT) if is_left else size for size, is_left in zip(widths, left, strict=True)]

    def total(sizes: Sequence[int]) -> int:
        return sum(sizes[i] for i in kept) + len(GAP) * (len(kept) - 1)

    needed = total(shortest)

    while total(shortest) > width and (droppable := [i for i in kept if columns[i].rank]):
        kept.remove(max(droppable, key=lambda i: columns[i].rank))
    while total(widths) > width and (long := [i for i in kept if widths[i] > shortest[i]]):
        widths[max(long, key=lambda i: widths[i])] -= 1

    def fit(i: int, cell: str) -> str:
        return shorten(cell, widths[i]).ljust(widths[i]) if left[i] else cell.rjust(widths[i])

    def line(cells: Sequence[str]) -> str:
        return GAP.join(fit(i, cells[i]) for i in kept).rstrip()

    hidden = len(columns) - len(kept)
    note = f"{counted(hidden, 'columns')} hidden; COLUMNS={needed} shows all"
    return [line([column.title for column in columns]), *map(line, cells), *[note] * bool(hidden)]


def shorten(text: str, width: int) -> str:
    """The text, with its middle replaced by an ellipsis if it is longer than `width`."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
