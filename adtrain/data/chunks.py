"""The values of a table in chunks of rows: from its bytes, where no cell is quoted, otherwise from a reader of CSV.

The bytes are split and converted by NumPy, without an object of Python for each cell.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import cache
from io import TextIOWrapper
from itertools import islice, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from adtrain.data.csv_file import Line, Opened, csv_lines
from adtrain.data.notation import EPOCH, is_plain
from adtrain.files import open_regular

FIRST_ROWS, MORE_ROWS = 1024, 32768
"""Rows of the first chunk, which tells categories from numbers, and of each further one of bytes."""

BLOCK_BYTES = 1 << 21
"""Bytes that are read at a time, and those up to the end of the line."""

HASH_BITS, HASH_FACTOR = 14, 0x9E3779B97F4A7C15
"""Bits of the hash of a cell, and the factor, 2^64 divided by the golden ratio. The hash is the highest bits of the
product of cell and factor (D. Knuth: "The Art of Computer Programming", volume 3, section 6.4)."""

NEWLINE, POINT, PLUS, MINUS, ZERO = b"\n.+-0"

MOST_DIGITS, MOST_DECIMALS = 18, 22
"""Integers of MOST_DIGITS digits fit into int64, and powers of ten up to 10^MOST_DECIMALS are exact in float64."""

EXACT_DIGITS = 15
"""Integers of this number of digits are exact in float64, so that their quotient by a power is rounded once."""

WORD, MOST_WORDS = 8, 3
"""Bytes that are converted together, as one integer, and the most of such integers in a number."""

PADDING = WORD * MOST_WORDS
"""Bytes before the first text of a block."""

ISO_LENGTHS, ISO_NUMBERS = (10, 16, 19), (0, 2, 5, 8, 11, 14, 17)
"""Bytes of 2024-12-31, 2024-12-31 23:59 and 2024-12-31 23:59:59, and the first ones of their numbers of two digits."""

ISO_MARKS = {4: (MINUS,), 7: (MINUS,), 10: tuple(b" T"), 13: tuple(b":"), 16: tuple(b":")}
"""The possible bytes at places without digits."""

ALL_BYTES = 0x0101010101010101
NOTHING, ONE, SEVEN, EIGHT, LAST_BYTE = map(np.uint64, (0, 1, 7, 8, 56))
ZEROS, SIXES, LOW_BITS, HIGH_HALVES = (np.uint64(byte * ALL_BYTES) for byte in (ZERO, 6, 0x7F, 0xF0))
PLACES = np.uint64(0x0706050403020100)
"""The product with the lowest bit of a byte has the number of bytes above it in the highest byte."""

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

    def dates(self, column: int) -> Numbers | None:
        """The dates that `iso_dates` reads; None where there is none in the column."""
        ...


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

    def dates(self, column: int) -> None:  # their texts are split already
        return None


class ByteChunk:
    """Rows of bytes. `ends` are the positions behind the cells, int64 (rows, columns); the first begins at `begin`."""

    def __init__(self, lines: Sequence[int], block: bytes, begin: int, ends: np.ndarray) -> None:
        self.lines, self._block = lines, block
        self._ends = np.ascontiguousarray(ends.T)
        self._first = np.concatenate([[begin], self._ends[-1, :-1] + 1])

    def _begins(self, column: int) -> np.ndarray:
        return self._ends[column - 1] + 1 if column else self._first

    def texts(self, column: int, rows: np.ndarray | None = None) -> list[str]:
        chosen = slice(None) if rows is None else rows
        bounds = zip(self._begins(column)[chosen].tolist(), self._ends[column, chosen].tolist(), strict=True)
        return [self._block[begin:end].decode() for begin, end in bounds]

    def distinct(self, column: int) -> Distinct:
        begins, ends = self._begins(column), self._ends[column]
        longest = int((ends - begins).max(initial=1))
        if longest > PADDING:
            return distinct(self.texts(column))
        words = [_last_bytes(self._block, ends, ends - begins, i) for i in range(-(-longest // WORD))]
        numbers = first_equal(words)
        first = np.flatnonzero(numbers == np.arange(len(numbers)))
        number_of_first = np.empty_like(numbers)
        number_of_first[first] = np.arange(len(first))
        bounds = zip(begins[first].tolist(), ends[first].tolist(), strict=True)
        return Distinct([self._block[i:j].decode() for i, j in bounds], first, number_of_first[numbers])

    def numbers(self, column: int) -> Numbers:
        values, others = decimal_numbers(self._block, self._begins(column), self._ends[column])
        return _numbers_or_others(self, column, values, others)

    def dates(self, column: int) -> Numbers | None:
        found = iso_dates(self._block, self._begins(column), self._ends[column])
        return None if np.isnan(found.values).all() else found


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


def first_equal(words: Sequence[np.ndarray]) -> np.ndarray:
    """For each row the first row that has the same integers, uint64, in all of `words`. Rows are compared by a hash."""
    rows = left = np.arange(len(words[0]))
    found, first = np.empty_like(rows), np.empty(1 << HASH_BITS, np.int64)
    factor = HASH_FACTOR
    while len(left):
        parts = [word[left] for word in words]
        hashes = parts[0] * np.uint64(factor)
        for part in parts[1:]:
            hashes = (hashes ^ part) * np.uint64(factor)
        hashes >>= np.uint64(64 - HASH_BITS)
        first[hashes[::-1]] = left[::-1]  # of several rows with a hash the first one is written last
        candidates = first[hashes]
        equal = words[0][candidates] == parts[0]
        for word, part in zip(words[1:], parts[1:], strict=True):
            equal &= word[candidates] == part
        found[left[equal]] = candidates[equal]
        left, factor = left[~equal], factor * HASH_FACTOR % 2**64
    return found


def decimal_numbers(block: bytes, begins: np.ndarray, ends: np.ndarray) -> Numbers:
    """The texts between positions: a sign or none, digits, and a point or none. Longer numbers are `others`.

    Eight bytes of each text are one integer: the last eight, then those before. PADDING bytes come before the texts.
    """
    first = np.frombuffer(block, np.uint8).take(begins, mode="clip")
    lengths, negative = ends - begins, first == MINUS
    filled = lengths > 0
    lengths -= negative | (first == PLUS)
    longest = int(lengths.max(initial=1))
    count = min(-(-longest // WORD), MOST_WORDS)
    integers, decimals = np.zeros((2, len(ends)), np.int64)
    wrong, seen = np.zeros((2, len(ends)), np.uint64)  # bits that no number has; all bits once the point is found
    has_points, later = False, _last_bytes(block, ends, lengths, 0, ZEROS)
    for i in range(count):  # in place, because most of the time of `a | b` is that of new memory
        word = later
        point = _bytes_equal(word, POINT ^ ZERO)
        has_points = has_points or bool(point.any())
        if has_points:
            wrong |= point & ((point - ONE) | seen)
            here = (point != 0).astype(np.uint64)
            point >>= SEVEN
            places = point * PLACES
            places >>= LAST_BYTE
            if i:
                places += here * np.uint64(WORD * i)
            decimals += places.view(np.int64)
            # The bytes before the point move into its place.
            point <<= EIGHT
            point -= here
            point |= seen
            moved = word << EIGHT
            moved ^= word
            moved &= point
            word ^= moved
            seen |= NOTHING - here
        if i + 1 < count:
            later = _last_bytes(block, ends, lengths, i + 1, ZEROS)
            word |= (later >> LAST_BYTE) & seen
        above_nine = word + SIXES
        above_nine |= word
        above_nine &= HIGH_HALVES
        wrong |= above_nine
        value = _number(word)
        if i == MOST_WORDS - 1:
            wrong |= value // np.uint64(10 ** (MOST_DIGITS - WORD * i))
        integers += value.view(np.int64) * 10 ** (WORD * i) if i else value.view(np.int64)
    seen &= ONE
    are_wrong = lengths <= seen.view(np.int64)
    are_wrong |= wrong != 0
    if longest > MOST_DECIMALS:
        are_wrong |= (lengths > PADDING) | (decimals > MOST_DECIMALS)
    if not has_points:
        values = integers.astype(np.float64)
    elif longest > EXACT_DIGITS and (integers >= 10**EXACT_DIGITS).any():
        values, unsure = _quotients(integers, POWERS.take(decimals, mode="clip"))
        are_wrong |= unsure
    else:
        values = integers / POWERS.take(decimals, mode="clip")
    values *= 1.0 - 2.0 * negative  # np.negative with `where` takes five times as long
    values[are_wrong] = np.nan
    are_wrong &= filled
    return Numbers(values, np.flatnonzero(are_wrong))


def iso_dates(block: bytes, begins: np.ndarray, ends: np.ndarray) -> Numbers:
    """The texts between positions as `notation.days`: 2024-12-31, 2024-12-31 23:59 and 2024-12-31T23:59:59. Texts in
    other forms, and those that are no dates, are `others`."""
    lengths = ends - begins
    values, others = np.full(len(ends), np.nan), lengths > 0
    for length in ISO_LENGTHS:
        rows = np.flatnonzero(lengths == length)
        texts = np.ndarray((len(block) - length + 1, length), np.uint8, block, strides=(1, 1))[begins[rows]]
        texts = np.ascontiguousarray(texts.T)
        digits = texts - np.uint8(ZERO)
        fits = np.logical_and.reduce([digits[i] <= 9 for i in range(length) if i not in ISO_MARKS])
        for i, marks in ISO_MARKS.items():
            fits &= i >= length or np.logical_or.reduce([texts[i] == mark for mark in marks])
        if not fits.all():
            rows, digits = rows[fits], digits[:, fits]
        century, year, month, day, *time = (digits[i] * np.uint8(10) + digits[i + 1] for i in ISO_NUMBERS if i < length)
        hour, minute, second = [*time, *[np.zeros(len(rows), np.uint8)] * 3][:3]
        fits = (century | year > 0) & (month > 0) & (month <= 12) & (hour < 24) & (minute < 60) & (second < 60)
        months = np.where(fits, (century * np.int64(100) + year) * 12 + month, 13)
        first = month_starts()[months]
        fits &= (day > 0) & (first + day <= month_starts()[months + 1])
        seconds = (first + day - 1) * 86400 + (hour * np.int64(60) + minute) * 60 + second
        values[rows[fits]] = seconds[fits] / 86400
        others[rows[fits]] = False
    return Numbers(values, np.flatnonzero(others))


@cache
def month_starts() -> np.ndarray:
    """For each month its first day, in days since EPOCH, to that after year 9999. Month m of year y is at 12 y + m."""
    months = np.arange(12 * 10_000 + 2) - (12 * 1970 + 1)
    return months.astype("M8[M]").astype("M8[D]").astype(np.int64) - (EPOCH - datetime(1970, 1, 1)).days


def _last_bytes(block: bytes, ends: np.ndarray, lengths: np.ndarray, i: int, zeros: np.uint64 = NOTHING) -> np.ndarray:
    """The `i`-th last eight bytes of each text as an integer, the first one lowest, combined with `zeros` by XOR. Bytes
    before the text are 0."""
    words = np.ndarray(len(block) - WORD + 1, "<u8", block, strides=(1,))
    missing = np.minimum(lengths - WORD * i, WORD).view(np.uint64)
    np.subtract(EIGHT, missing, out=missing)
    missing *= EIGHT  # from 64 on a shift leaves 0
    found: np.ndarray = words[ends - WORD * (i + 1)]
    found ^= zeros
    found >>= missing
    found <<= missing
    return found


def _bytes_equal(words: np.ndarray, byte: int) -> np.ndarray:
    """The highest bit of each byte that has this value."""
    differing = words ^ np.uint64(byte * ALL_BYTES)
    found: np.ndarray = differing & LOW_BITS
    found += LOW_BITS
    found |= differing
    found |= LOW_BITS
    return np.invert(found, out=found)


def _number(digits: np.ndarray) -> np.ndarray:
    """The numbers of eight decimal digits, a byte each, the lowest byte first: pairs, fours and all are joined."""
    found = digits * np.uint64(10 * 2**8 + 1)
    found >>= EIGHT
    for pairs, factor, bits in ((0x00FF00FF00FF00FF, 100, 16), (0x0000FFFF0000FFFF, 10**4, 32)):
        found &= np.uint64(pairs)
        found *= np.uint64(factor * 2**bits + 1)
        found >>= np.uint64(bits)
    return found


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
    with open_regular(table.path) as file, ThreadPoolExecutor(1) as pool:
        for _ in range(line):
            file.readline()

        def next_block() -> tuple[int, tuple[bytes, np.ndarray] | None] | None:
            """Where the next block begins, and its split; None behind the last one."""
            begin = file.tell()
            block = file.read(BLOCK_BYTES) + file.readline()
            content = block if begin else block.removeprefix(BOM_UTF8)
            return (begin, _split(content, table.delimiter, len(table.first))) if block else None

        coming = pool.submit(next_block)
        while (found := coming.result()) is not None:
            begin, split = found
            if split is None:
                file.seek(begin)
                with TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
                    yield from _of_rows(table, csv_lines(text, table.path, table.delimiter, line))
                return
            coming = pool.submit(next_block)  # it is split while this one is converted
            content, ends = split
            start = FIRST_ROWS if line == table.before else MORE_ROWS
            bounds = [0, *range(start, len(ends), MORE_ROWS), len(ends)]
            for first, last in pairwise(bounds):
                at = int(ends[first - 1, -1]) + 1 if first else PADDING
                yield ByteChunk(range(line + first + 1, line + last + 1), content, at, ends[first:last])
            line += len(ends)


def _of_rows(table: Opened, lines: Iterator[Line]) -> Iterator[Chunk]:
    width = len(table.first)
    while rows := list(islice(lines, FIRST_ROWS)):
        yield RowChunk([(line, row if len(row) == width else table.row(line, row)) for line, row in rows])


def _split(block: bytes, delimiter: str, width: int) -> tuple[bytes, np.ndarray] | None:
    """The block after PADDING bytes, with a line at its end, and the ends of its cells, int64 (rows, width).

    None where lines differ in their number of cells, or which bytes separate cells needs a reader of CSV.
    """
    mark = delimiter.encode()
    if width < 2 or len(mark) > 1 or mark == b" " or b'"' in block or b"\0" in block:
        return None
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if b"\r" in block or not (block.isascii() or _is_text(block)):
        return None
    block = b"".join([bytes(PADDING), block, b"" if block.endswith(b"\n") else b"\n"])
    data = np.frombuffer(block, np.uint8)
    are_newlines = data == NEWLINE
    ends = np.flatnonzero(are_newlines | (data == mark[0]))
    rows = np.count_nonzero(are_newlines)
    if len(ends) != rows * width or not are_newlines[ends[width - 1 :: width]].all():
        return None
    return block, ends.reshape(rows, width)


def _is_text(block: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        block.decode()
        return True
    return False
