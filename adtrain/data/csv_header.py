"""Whether the first line of a table names its columns."""

from __future__ import annotations

from collections.abc import Sequence

from adtrain.data.columns import cleaned
from adtrain.data.csv_cells import is_number

COMPARED_ROWS = 100
"""The lines after the first one that tell whether that is a header."""

YEARS = range(1800, 2101)
"""Numbers that a header has rather than other numbers."""


def names_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool | None:
    """Whether `first` (cleaned) has names, by comparison with the lines that follow it; None if they do not tell.

    A line without a number has names. One with numbers and texts has names if a text is above numbers only, or if all
    its numbers are years, above other numbers. It has values if a text occurs again in its column.
    """
    numbers = [i for i, cell in enumerate(first) if is_number(cell)]
    texts = [i for i, cell in enumerate(first) if cell and not is_number(cell)]
    if not numbers:
        return True
    below = {i: [cell for row in rows for cell in map(cleaned, row[i : i + 1]) if cell] for i in range(len(first))}
    if any(first[i] in below[i] for i in texts):
        return False
    if any(below[i] and all(map(is_number, below[i])) for i in texts):
        return True
    different = len({first[i] for i in numbers}) == len(numbers)
    if different and all(is_year(first[i]) and below[i] and not any(map(is_year, below[i])) for i in numbers):
        return True
    repeated = any(2 * len(set(below[i])) <= len(below[i]) for i in texts)
    return None if repeated else False


def is_year(text: str) -> bool:
    return text.isdecimal() and text.isascii() and int(text[:9]) in YEARS
