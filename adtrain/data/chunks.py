"""The values of a table in chunks of rows: from its bytes, where no cell is quoted, otherwise from a reader of CSV.

The bytes are split and converted by NumPy, without an object of Python for each cell.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import TextIOWrapper
from itertools import islice, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from adtrain.data.csv_file import Line, Opened, csv_lines
from adtrain.data.notation import is_plain
from adtrain.files import open_regular

FIRST_ROWS, MORE_ROWS = 1024, 16384
"""Rows of the first chunk, which tells categories from numbers, and of each further one of bytes."""

BLOCK_BYTES = 1 << 23

MOST_BYTES = 32
"""Of cells that are compared as numbers or bytes, without texts of Python."""

NEWLINE, POINT, PLUS, MINUS, ZERO = b"\n.+-0"

MOST_DIGITS, MOST_DECIMALS = 18, 22
"""Integers of so many digits fit into int64, and powers of ten up to this one are exact in float64."""

EXACT_DIGITS = 15
"""Integers of so many digits are exact in float64, so that their quotient by a power is rounded once."""

POWERS = 10.0 ** np.arange(MOST_DECIMALS + 1)

SPLITTER = 2.0**27 + 1
"""Splits a float64 into two halves, whose products are exact (Dekker)."""

SAFE = 2.0**-40
"""A quotient that is nearer to the middle of two float64, in units of their distance, could be rounded wrongly."""


class Chunk(Protocol):
    """Rows of a table."""

    @property
    def lines(self) -> Sequence[int]:
        """Their positions in the file, for messages."""
        ...

    def texts(self, column: int, rows: np.ndarray | None = None) -> list[str]:
        """The cells of a column as they are written; of all rows, or of these."""
        ...

    def distinct(self, column: int) -> Distinct: ...

    def numbers(self, column: int) -> Numbers: ...


class Distinct(NamedTuple):
    """The different texts of cells, the first row of each, ascending, and for each row the number of its text."""

    texts: list[str]
    first: np.ndarray
    numbers: np.ndarray


class Numbers(NamedTuple):
    """Cells as float64 where they are numbers, NaN where they are empty; `others` are the rows with other texts."""

    values: np.ndarray
    others: np.ndarray


class RowChunk:
    """Rows that a reader of CSV has split."""

    def __init__(self, rows: Sequence[Line]) -> None:
        self.lines = [line for line, _ in rows]
        self._rows = [row for _, row in rows]

    def texts(self, column: int, rows: np.ndarray | None = None) -> list[str]:
        return [row[column] for row in self._rows] if rows is None else [self._rows[i][column] for i in rows.tolist()]

    def distinct(self, column: int) -> Distinct:
        return distinct(self.texts(column))

    def numbers(self, column: int) -> Numbers:
        return _numbers_or_others(self, column, np.full(len(self._rows), np.nan), np.arange(len(self._rows)))


class ByteChunk:
    """Rows between positions in bytes. `begins` and `ends` are int64 (rows, columns)."""

    def __init__(self, lines: Sequence[int], block: bytes, begins: np.ndarray, ends: np.ndarray) -> None:
        self.lines, self._block, self._begins, self._ends = lines, block, begins, ends

    def texts(self, column: int, rows: np.ndarray | None = None) -> list[str]:
        chosen = slice(None) if rows is None else rows
        bounds = zip(self._begins[chosen, column].tolist(), self._ends[chosen, column].tolist(), strict=True)
        return [self._block[begin:end].decode() for begin, end in bounds]

    def distinct(self, column: int) -> Distinct:
        begins, ends = self._begins[:, column], self._ends[:, column]
        longest = int((ends - begins).max(initial=1))
        if longest > MOST_BYTES:
            return distinct(self.texts(column))
        width = 8 if longest <= 8 else longest
        rows = np.ascontiguousarray(_bytes(self._block, begins, ends, width).T)
        cells = rows.view("u8" if width == 8 else f"S{width}")
        _, first, numbers = np.unique(cells, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        first = first[order]
        bounds = zip(begins[first].tolist(), ends[first].tolist(), strict=True)
        return Distinct([self._block[i:j].decode() for i, j in bounds], first, place[numbers.reshape(-1)])

    def numbers(self, column: int) -> Numbers:
        values, others = decimal_numbers(self._block, self._begins[:, column], self._ends[:, column])
        return _numbers_or_others(self, column, values, others)


def _numbers_or_others(chunk: Chunk, column: int, values: np.ndarray, others: np.ndarray) -> Numbers:
    """The values of a column with those of the `others`, if all of these are numbers."""
    if len(others) and (found := finite_numbers(chunk.texts(column, others))) is not None:
        values[others], others = found, others[:0]
    return Numbers(values, others)


def distinct(texts: Sequence[str]) -> Distinct:
    """The different ones of these texts."""
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        first.setdefault(text, i)
    number = {text: i for i, text in enumerate(first)}
    numbers = np.fromiter(map(number.__getitem__, texts), np.int64, len(texts))
    return Distinct(list(first), np.array(list(first.values()), np.int64), numbers)


def finite_numbers(texts: Sequence[str]) -> np.ndarray | None:
    """The texts as float64; None unless all are numbers that are finite in float32."""
    if is_plain("".join(texts)):
        with suppress(ValueError), np.errstate(over="ignore"):
            numbers = np.array(texts, np.float64)
            if np.isfinite(numbers.astype(np.float32)).all():
                return numbers
    return None


def _bytes(block: bytes, begins: np.ndarray, ends: np.ndarray, width: int) -> np.ndarray:
    """The bytes between positions, uint8 (width, rows); 0 behind the end."""
    steps = np.arange(width)[:, np.newaxis]
    found: np.ndarray = np.frombuffer(block, np.uint8).take(begins + steps, mode="clip")
    found *= steps < ends - begins
    return found


def decimal_numbers(block: bytes, begins: np.ndarray, ends: np.ndarray) -> Numbers:
    """The texts between positions: a sign or none, digits, and a point or none. Longer numbers are `others`."""
    lengths = ends - begins
    longest = min(int(lengths.max(initial=1)), MOST_DECIMALS + 2)
    texts = _bytes(block, begins, ends, longest)
    digits = texts - np.uint8(ZERO)
    are_digits, are_points = digits <= 9, texts == POINT
    digits *= are_digits
    negative = texts[0] == MINUS
    signs = negative | (texts[0] == PLUS)
    count, points = are_digits.sum(axis=0, dtype=np.int8), are_points.sum(axis=0, dtype=np.int8)
    wrong = (count + points + signs != lengths) | (points > 1) | (count == 0)
    is_long = count.max(initial=0) > EXACT_DIGITS
    integers, decimals, zeros = np.zeros(len(lengths), np.int64), *np.zeros((2, len(lengths)), np.int8)
    behind_point, leading = np.zeros(len(lengths), bool), np.ones(len(lengths), bool)
    for digit, is_digit, is_point, factor in zip(
        digits, are_digits, are_points, 1 + 9 * are_digits.view(np.uint8), strict=True
    ):
        integers *= factor
        integers += digit
        decimals += is_digit & behind_point
        behind_point |= is_point
        if is_long:
            leading &= digit == 0
            zeros += is_digit & leading
    divisors = POWERS[np.minimum(decimals, MOST_DECIMALS)]
    if is_long:
        values, unsure = _quotients(integers, divisors)
        wrong |= unsure | (count - zeros > MOST_DIGITS)
    else:
        values = integers / divisors
    np.negative(values, where=negative, out=values)
    values[wrong] = np.nan
    return Numbers(values, np.flatnonzero(wrong & (lengths > 0)))


def _quotients(integers: np.ndarray, divisors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 by float64, rounded to the nearest float64, and where this is not sure.

    The remainder of the first quotient is exact, because products of halves are. Its quotient corrects the first one.
    """
    rounded = integers.astype(np.float64)
    first = rounded / divisors
    product = first * divisors
    (a, b), (c, d) = _halves(first), _halves(divisors)
    error = ((a * c - product) + a * d + b * c) + b * d
    correction = ((rounded - product) - error + (integers - rounded.astype(np.int64))) / divisors
    values = first + correction
    left = np.abs(correction - (values - first)) / np.spacing(np.abs(values))
    return values, (np.abs(left - 0.5) < SAFE) | (np.abs(left - 0.25) < SAFE)


def _halves(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two float64 of 26 bits each, whose sum is the number."""
    scaled = SPLITTER * numbers
    high = scaled - (scaled - numbers)
    return high, numbers - high


def chunks(table: Opened) -> Iterator[Chunk]:
    """The values of an open table. Raises DataError for a row of another number of columns."""
    if table.before is None:
        yield from _of_rows(table, table.lines)
        return
    line = table.before
    with open_regular(table.path) as file:
        for _ in range(line):
            file.readline()
        begin = file.tell()
        while block := file.read(BLOCK_BYTES) + file.readline():
            split = _split(block if begin else block.removeprefix(BOM_UTF8), table.delimiter, len(table.first))
            if split is None:
                file.seek(begin)
                with TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
                    yield from _of_rows(table, csv_lines(text, table.path, table.delimiter, line))
                return
            content, begins, ends = split
            start = FIRST_ROWS if line == table.before else MORE_ROWS
            bounds = [0, *range(start, len(ends), MORE_ROWS), len(ends)]
            for first, last in pairwise(bounds):
                yield ByteChunk(range(line + first + 1, line + last + 1), content, begins[first:last], ends[first:last])
            line, begin = line + len(ends), file.tell()


def _of_rows(table: Opened, lines: Iterator[Line]) -> Iterator[Chunk]:
    width = len(table.first)
    while rows := list(islice(lines, FIRST_ROWS)):
        yield RowChunk([(line, row if len(row) == width else table.row(line, row)) for line, row in rows])


def _split(block: bytes, delimiter: str, width: int) -> tuple[bytes, np.ndarray, np.ndarray] | None:
    """The block, which ends with a line, and the begins and ends of its cells, int64 (rows, width).

    None where lines differ in their number of cells, or which bytes separate cells needs a reader of CSV.
    """
    mark = delimiter.encode()
    if width < 2 or len(mark) > 1 or mark == b" " or b'"' in block or b"\0" in block:
        return None
    block = block.replace(b"\r\n", b"\n")
    if b"\r" in block or not (block.isascii() or _is_text(block)):
        return None
    block = block if block.endswith(b"\n") else block + b"\n"
    data = np.frombuffer(block, np.uint8)
    are_newlines = data == NEWLINE
    ends = np.flatnonzero(are_newlines | (data == mark[0]))
    rows = np.count_nonzero(are_newlines)
    if len(ends) != rows * width or not are_newlines[ends[width - 1 :: width]].all():
        return None
    begins = np.concatenate([[0], ends[:-1] + 1])
    return block, begins.reshape(rows, width), ends.reshape(rows, width)


def _is_text(block: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        block.decode()
        return True
    return False
