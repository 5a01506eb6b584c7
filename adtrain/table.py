"""Text tables that fit the terminal; the least important columns are dropped if there is no room for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import NamedTuple

from adtrain.text import counted, visible

GAP = "  "
MIN_TEXT = 12


class Column(NamedTuple):
    """A column. Columns are dropped in the order of decreasing `rank`; rank 0 is never dropped."""

    title: str
    rank: int = 0
    text: bool = False


def terminal_width() -> int:
    """The width of the terminal, or the environment variable COLUMNS; 100 if both are unknown."""
    return shutil.get_terminal_size((100, 24)).columns


def render(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A heading and a line for each row, at most `width` wide if possible; text is left-aligned, numbers right-aligned.

    Text is shortened to MIN_TEXT characters if necessary; if that is not enough, columns are dropped, and a last line
    tells their number.
    """
    rows = [[visible(cell) for cell in cells] for cells in rows]
    kept = list(range(len(columns)))
    widths = [max(map(len, cells)) for cells in zip([column.title for column in columns], *rows, strict=True)]
    shortest = [min(size, MIN_TEXT) if column.text else size for size, column in zip(widths, columns, strict=True)]

    def total(sizes: Sequence[int]) -> int:
        return sum(sizes[i] for i in kept) + len(GAP) * (len(kept) - 1)

    needed = total(shortest)

    while total(shortest) > width and (droppable := [i for i in kept if columns[i].rank]):
        kept.remove(max(droppable, key=lambda i: columns[i].rank))
    while total(widths) > width and (long := [i for i in kept if widths[i] > shortest[i]]):
        widths[max(long, key=lambda i: widths[i])] -= 1

    def fit(i: int, cell: str) -> str:
        return shorten(cell, widths[i]).ljust(widths[i]) if columns[i].text else cell.rjust(widths[i])

    def line(cells: Sequence[str]) -> str:
        return GAP.join(fit(i, cells[i]) for i in kept).rstrip()

    hidden = len(columns) - len(kept)
    note = f"{counted(hidden, 'columns')} hidden; COLUMNS={needed} shows all"
    return [line([column.title for column in columns]), *map(line, rows), *[note] * bool(hidden)]


def shorten(text: str, width: int) -> str:
    """The text, with its middle replaced by an ellipsis if it is longer than `width`."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
