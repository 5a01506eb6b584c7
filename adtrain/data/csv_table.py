"""CSV and TSV tables: one line per example; one column holds the labels, or some the numbers to predict.

`csv_file` opens a file. The columns with features become numbers (`CellReader`), those to predict labels or targets
(`LabelReader`), chunk by chunk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from adtrain.data.chunks import Chunk, chunks, finite_numbers
from adtrain.data.csv_file import MAX_CATEGORIES, CsvOptions, Missing, Opened, column_title, columns_at_end, opened
from adtrain.data.errors import DataError, DataOptionError, printable, quoted, warn
from adtrain.data.notation import (
    DATE_LIKE,
    NUMBER_LIKE,
    Notation,
    Pair,
    cleaned,
    days,
    expected_number,
    is_date_format,
    pair_of,
)
from adtrain.data.part import NOTHING, Cells, Column, Columns, Format, Known, Part, Parts
from adtrain.text import first_names

LARGEST_INTEGER = 2.0**53
"""From here on float64 does not have all integers."""

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""The one way to write an integer below 10^18: texts of different labels differ."""


def read(path: Path, options: CsvOptions, known: Known = NOTHING) -> Parts:
    """The table as one part: labels or targets, and the cells of the other columns, float64 (N, columns, 1, 1).

    `CellReader` says what the cells are; `TableEncoder` makes features or images of them. Labels with equal texts are
    equal. `LabelReader.labels` says which types they have. Targets are float64 (N, targets). `opened` says whether the
    first line is a header. The columns `known` from the training part are read at whatever position the header has
    them.
    Raises DataError with line and column, and DataOptionError if a column that an option names is missing or unknown,
    or if the labels are fractions.
    """
    with opened(path, options, known.columns) as table:
        return parts_of(table, options, known)


def parts_of(table: Opened, options: CsvOptions, known: Known = NOTHING) -> Parts:
    """What `read` returns of an open table. Raises the errors of `read`."""
    learnt, path = known.columns, table.path
    labels = LabelReader(table, options, None if learnt is None else learnt.target_signs)
    columns = _chosen(table, labels, options) if learnt is None else _found(table, learnt, 0)
    cells = _cells(table, columns, labels, options, learnt is None)
    if learnt is None and options.header is None and not _has_evident_header(table, cells, labels, options):
        reason = f"expected true or false: no column of {path} has numbers, which would tell whether line 1 has names"
        raise DataOptionError("header", f"missing, {reason}")
    images = cells.values.reshape(*cells.values.shape, 1, 1)
    about = Columns(cells.columns, len(table.first), labels.target_signs)
    return Parts(Part(images, labels.labels(), str(path), about, labels.target_names))


def read_rows(path: Path, options: CsvOptions, known: Known) -> Cells:
    """The cells of the columns `known` in a table that needs no labels. Raises DataError with line and column."""
    if known.columns is None:
        expected = "expected images, or rows in .npz"
        raise DataError(f"{path}: found a table, but the run was not trained on one; {expected}")
    with opened(path, options, known.columns) as table:
        return cells_of(table, options, known.columns)


def read_columns(path: Path, names: Sequence[str]) -> np.ndarray:
    """The numbers in the columns with these names, float64 (N, names), of a table that has no other options.

    Raises DataError with the line for a column that is missing or there twice, and for a cell without a finite number.
    """
    options = CsvOptions(header=True, missing="mean", missing_values=())  # an empty cell is NaN; its error is here
    with opened(path, options, Columns.named(names)) as table:
        columns = []
        for name in names:
            found = table.positions.get(name, [])
            if len(found) != 1:
                what = f"two columns named {printable(name)}" if found else f"no column {printable(name)}"
                expected = f"expected the columns {', '.join(map(printable, names))}"
                raise DataError(f"{path}:1: found {what}, {expected}, each once: {table.listed()}")
            columns.append(Column(name, found[0]))
        reader, rows = CellReader(path, columns, False, options), [np.empty((0, len(names)))]
        for chunk in chunks(table):
            rows.append(np.stack(reader.convert(chunk), axis=1))
            if (empty := np.isnan(rows[-1])).any():
                row, column = np.argwhere(empty)[0]
                title = table.title(columns[column].position)
                expected = "expected a finite number; remove the row"
                raise DataError(f"{path}:{chunk.lines[row]}: found an empty cell in {title}, {expected}")
        reader.warn()
    return np.concatenate(rows)


def read_dropped(path: Path, options: CsvOptions, known: Columns) -> dict[str, list[str]]:
    """The texts of the columns that `options.drop` lists and the table has, such as identifiers of its rows.

    A number in `options.drop` is a position in the training table. It names a column of this table only if the features
    have the same positions in both tables. Behind the last feature both tables must also have equally many columns.
    """
    with opened(path, options, known) as table:
        positions = [column.position for column in _found(table, known, columns_at_end(options, known))]
        end = 0  # of the positions that both tables share
        if positions == [column.position for column in known.features]:
            end = known.width if len(table.first) == known.width else max(positions)

        def places(given: str | int) -> list[int]:
            if isinstance(given, str):
                return table.positions.get(cleaned(given), [])
            return [place] if (place := given % known.width) < end else []

        chosen = dict.fromkeys(at[0] for given in options.drop if len(at := places(given)) == 1)
        counts = Counter(map(table.name, chosen))
        names = [name if (name := table.name(i)) and counts[name] == 1 else f"column {i}" for i in chosen]
        rows = [table.row(line, row) for line, row in table.lines]
        return {name: [cleaned(row[i]) for row in rows] for name, i in zip(names, chosen, strict=True)}


def cells_of(table: Opened, options: CsvOptions, known: Columns) -> Cells:
    """The cells of the columns `known` in an open table; see `read_rows`."""
    return _cells(table, _found(table, known, columns_at_end(options, known)), None, options, False)


def _chosen(table: Opened, labels: LabelReader, options: CsvOptions) -> list[Column]:
    """The columns with features according to the options; those listed in `categories` have no categories yet."""
    dropped = {table.column("drop", column) for column in options.drop}
    listed = {table.column("categories", column) for column in options.categories}
    dates = {table.column("dates", column) for column in options.dates}
    for option, indices in (("drop", dropped), ("categories", listed), ("dates", dates)):
        if both := indices & set(labels.columns):
            what = "a column of the targets" if labels.are_targets else "the column of the labels"
            raise DataOptionError(option, f"found {what}, {table.title(min(both))}")
    pairs = (("drop", dropped, "categories", listed), ("drop", dropped, "dates", dates))
    for option, indices, other, others in (*pairs, ("categories", listed, "dates", dates)):
        if both := indices & others:
            raise DataOptionError(option, f"found {table.title(min(both))}, which data.{other} lists too")
    for option, indices in (("categories", listed), ("dates", dates)):
        if indices and options.shape:
            raise DataOptionError(option, "found together with data.shape, whose columns are the pixels of an image")
    _check_date_format(options)
    predicted = set(labels.columns)
    columns = []
    for i in range(len(table.first)):
        if i not in predicted and i not in dropped:
            columns.append(Column(table.name(i), i, () if i in listed else None, i in dates))
    if not columns:
        what = "targets" if labels.are_targets else "labels"
        raise DataOptionError("drop", f"found all columns but the {what}, expected one that stays: {table.listed()}")
    for name, positions in table.positions.items():
        if len(kept := [i for i in positions if i not in dropped]) > 1 and not predicted.issuperset(kept):
            found = f"found two columns named {printable(name)}, {kept[0]} and {kept[1]}"
            raise DataError(f"{table.path}:1: {found}, expected different names; data.drop takes the number of one")
    return columns


def _check_date_format(options: CsvOptions) -> None:
    form = options.date_format
    if form is not None and not options.dates:
        raise DataOptionError("date_format", f"found {quoted(form)}, but data.dates names no column")
    if form is not None and not is_date_format(form):
        expected = "expected directives for year, month and day, such as %d/%m/%Y"
        raise DataOptionError("date_format", f"found {quoted(form)}, {expected}")


def _found(table: Opened, known: Columns, fewer: int) -> list[Column]:
    """The known columns with their positions in this table; without a header, the last `fewer` may be missing."""
    if not table.header:
        if len(table.first) not in (known.width, known.width - fewer):
            reason = f"found {len(table.first)} columns, expected {known.width} as in training, without a header"
            raise DataError(f"{table.path}: {reason}")
        return list(known.features)
    columns = []
    for column in known.features:
        found = table.positions.get(str(column.name), [])
        if len(found) > 1 and column.position in found:  # `drop` has the numbers of the others
            found = [column.position]
        if len(found) != 1:
            name = printable(str(column.name))
            if found:
                raise DataError(f"{table.path}:1: found two columns named {name}, expected one")
            raise DataError(f"{table.path}:1: found no column {name}, expected it as in training: {table.listed()}")
        columns.append(replace(column, position=found[0]))
    return columns


def _cells(
    table: Opened, columns: Sequence[Column], labels: LabelReader | None, options: CsvOptions, learning: bool
) -> Cells:
    """The cells of these columns, and of the same rows the labels, into `labels`.

    With `missing: drop` without the rows that have empty cells, with `mean` and `zero` without those that lack a label.
    """
    reader = CellReader(table.path, columns, learning and not options.shape, options)
    found: list[list[np.ndarray]] = []
    kept: list[np.ndarray] = []
    count, first_dropped = 0, -1
    for chunk in chunks(table):
        values = reader.convert(chunk)
        keep = np.arange(len(chunk.lines))
        if options.missing == "drop" and (empty := np.logical_or.reduce(list(map(np.isnan, values)))).any():
            keep = np.flatnonzero(~empty)
        if labels is not None:
            keep = labels.add(chunk, keep)
        if len(keep) < len(chunk.lines):
            first = np.setdiff1d(np.arange(len(chunk.lines)), keep)[0]
            first_dropped = chunk.lines[first] if first_dropped < 0 else first_dropped
            values = [column[keep] for column in values]
        found.append(values)
        kept.append(count + keep)
        count += len(chunk.lines)
    reader.warn()
    rows = np.concatenate([np.zeros(0, np.int64), *kept])
    if first_dropped >= 0:
        place = "row" if table.before is None else "line"
        lacking = "with an empty cell" if options.missing == "drop" or labels is None else f"without a {labels.kind}"
        lacking += f" (also {first_names(list(map(quoted, labels.emptied)))})" if labels and labels.emptied else ""
        what = f"{count - len(rows):,} of {count:,} rows {lacking}, the first in {place} {first_dropped}"
        warn(table.path, f"left out {what}")
    if not len(rows):
        nothing = f"an empty cell in each of {count:,} rows" if count else "no rows"
        raise DataError(f"{table.path}: found {nothing}, expected one per example")
    cells, done = np.empty((len(rows), len(columns))), 0
    for values in found:
        for i, column in enumerate(values):
            cells[done : done + len(column), i] = column
        done += len(values[0])
    return Cells(cells, reader.columns, rows)


def _has_evident_header(table: Opened, cells: Cells, labels: LabelReader, options: CsvOptions) -> bool:
    """Whether a header was detected by more than the absence of numbers in the first of many lines of texts."""
    named = [options.label, *options.drop, *options.categories, *options.dates]
    has_numbers = any(x.categories is None and not x.is_date for x in cells.columns) or labels.have_numbers
    return not table.header or has_numbers or options.label is None or any(isinstance(x, str) for x in named)


class CellReader:
    """Converts the cells of a table's columns with features, chunk by chunk.

    With `learning`, a column whose `categories` are None becomes one of categories if its first cells look like texts;
    otherwise it has numbers. A date is the number of `notation.days`. An empty cell, or one of the texts
    `missing_values`, is an error unless `missing` says otherwise.
    """

    def __init__(self, path: Path, columns: Sequence[Column], learning: bool, options: CsvOptions) -> None:
        self._missing = Missing(options)
        self._readers = [_ColumnReader(path, column, learning, options, self._missing) for column in columns]

    def convert(self, chunk: Chunk) -> list[np.ndarray]:
        """The cells of each column in these rows as float64: NaN for an empty cell.

        Raises DataError with line and column.
        """
        return [reader.convert(chunk) for reader in self._readers]

    def warn(self) -> None:
        """Warn about what was read otherwise than it is written: texts as empty cells, and rounded integers."""
        for reader in self._readers:
            reader.warn()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns with all their categories; the code of a category is its index."""
        return tuple(reader.column for reader in self._readers)


class _ColumnReader:
    """Converts the cells of one column."""

    def __init__(self, path: Path, column: Column, learning: bool, options: CsvOptions, missing: Missing) -> None:
        self.path, self._column, self.learning, self.missing = path, column, learning, missing
        self.allow_empty = options.missing != "error"
        self.notation, self.date_format = Notation(options.decimal, column.sign), options.date_format
        self.has_categories = column.categories is not None
        self.has_numbers = not self.has_categories and (column.is_date or not learning)
        self.listed = self.has_categories or not learning
        self.codes = {text: i for i, text in enumerate(column.categories or ())}
        self._emptied: Counter[str] = Counter()
        self._rounded: str | None = None
        self._seen: dict[str, float] = {}

    @property
    def column(self) -> Column:
        categories = tuple(self.codes) if self.has_categories else None
        return replace(self._column, categories=categories, sign=self.notation.sign)

    def convert(self, chunk: Chunk) -> np.ndarray:
        """The cells of these rows as float64; NaN for an empty cell. Raises DataError with line and column."""
        position = self._column.position
        if self._column.is_date and (found := self._plain_dates(chunk)) is not None:
            return found
        if self.has_categories or self._column.is_date:
            return self._coded(chunk)
        has_own_numbers = self.notation.decimal is not None or self.notation.sign or self.missing.numbers
        if not has_own_numbers and (found := self._plain_numbers(chunk)) is not None:
            return found
        values = self._converted(chunk.lines, chunk.texts(position))
        self._note_emptied(chunk.texts(position, np.flatnonzero(np.isnan(values))))
        return values

    def _plain_numbers(self, chunk: Chunk) -> np.ndarray | None:
        """The numbers of a chunk; None where all texts are needed, to learn the kind or for an error or a warning."""
        position = self._column.position
        values, others = chunk.numbers(position)
        empty = np.isnan(values)
        if (len(others) and not self.has_numbers) or (np.abs(values) >= LARGEST_INTEGER).any():
            return None
        if not self.allow_empty and np.count_nonzero(empty) > len(others):
            return None
        if len(others):
            values[others] = self._converted([chunk.lines[i] for i in others], chunk.texts(position, others))
        self.has_numbers = self.has_numbers or not empty.all()
        return values

    def _plain_dates(self, chunk: Chunk) -> np.ndarray | None:
        """The dates of a chunk; None where all texts are needed, for another format or for an error."""
        if self.date_format is not None or self.missing.has_dates:
            return None
        if (found := chunk.dates(self._column.position)) is None:
            return None
        values, others = found
        if not self.allow_empty and np.count_nonzero(np.isnan(values)) > len(others):
            return None
        if len(others):
            lines = [chunk.lines[i] for i in others]
            values[others] = self._converted(lines, chunk.texts(self._column.position, others))
        return values

    def _coded(self, chunk: Chunk) -> np.ndarray:
        """The codes of categories, or the days of dates. Each text is looked at once."""
        found = chunk.distinct(self._column.position)
        new = [i for i, text in enumerate(found.texts) if text not in self._seen]
        texts = [found.texts[i] for i in new]
        codes = self._converted([chunk.lines[found.first[i]] for i in new], texts)
        self._seen |= zip(texts, codes.tolist(), strict=True)
        found_codes = np.array([self._seen[text] for text in found.texts], np.float64)
        if (empty := np.isnan(found_codes)).any():
            for i, count in zip(np.flatnonzero(empty), np.bincount(found.numbers)[empty].tolist(), strict=True):
                self._note_emptied([found.texts[i]] * count if found.texts[i] else ())
        return found_codes[found.numbers]

    def _note_emptied(self, texts: Sequence[str]) -> None:
        """Count the texts that are read as empty cells."""
        self._emptied.update(filter(None, map(cleaned, texts)))

    def _converted(self, lines: Sequence[int], cells: Sequence[str]) -> np.ndarray:
        given = list(map(cleaned, cells))
        texts = ["" if text in self.missing else text for text in given]
        filled = [text for text in texts if text]
        if len(filled) < len(texts) and not self.allow_empty:
            first = texts.index("")
            expected = "a value; data.missing: mean, zero or drop allows empty cells"
            raise _empty(f"{self.path}:{lines[first]}", given[first], self._name, expected)
        if filled and not (self.has_numbers or self.has_categories):
            self.has_numbers = any(map(NUMBER_LIKE.match, filled))
            self.has_categories = not self.has_numbers
            if self.has_numbers:
                self.notation = self.notation.of(filled[0])
        if self._column.is_date:
            return self._days(lines, texts)
        return self._codes(lines, texts) if self.has_categories else self._numbers(lines, texts)

    def _days(self, lines: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        found = [days(text, self.date_format) if text else np.nan for text in texts]
        if None in found:
            i = found.index(None)
            form = "such as 2024-12-31 or 31.12.2024" if self.date_format is None else f"written as {self.date_format}"
            raise self._wrong(lines[i], texts[i], f"expected a date {form}; data.date_format has the format")
        return np.array(found, np.float64)

    def _codes(self, lines: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        for line, text in zip(lines, texts, strict=True):
            if text and not self.listed and NUMBER_LIKE.match(text):
                expected = f"expected a category such as {quoted(next(iter(self.codes)))}"
                raise self._wrong(line, text, f"{expected}; list the column in data.categories")
            if text and self.codes.setdefault(text, len(self.codes)) == MAX_CATEGORIES and self.learning:
                expected = f"expected at most {MAX_CATEGORIES:,} categories; data.drop leaves out a column"
                raise self._wrong(line, text, expected)
        return np.array([self.codes[text] if text else np.nan for text in texts], np.float64)

    def _numbers(self, lines: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        filled = [i for i, text in enumerate(texts) if text]
        plain = list(map(self.notation.in_python, texts))
        numbers = finite_numbers([plain[i] for i in filled])
        if numbers is not None:
            found = np.full(len(texts), np.nan)
            found[filled] = numbers
            self._note_rounded(plain, found)
            return found
        for line, text in zip(lines, texts, strict=True):
            if text and not self.notation.is_finite(text):
                kind = "dates" if DATE_LIKE.fullmatch(text) else "categories"
                advice = f"; if the column has {kind}, list it in data.{kind}" if self.learning else ""
                raise self._wrong(line, text, f"{expected_number(self.notation, text, self.learning)}{advice}")
        raise AssertionError(f"{self.path}: NumPy cannot convert cells that are all finite numbers or empty")

    def _note_rounded(self, texts: Sequence[str], numbers: np.ndarray) -> None:
        for i in np.flatnonzero(np.abs(numbers) >= LARGEST_INTEGER).tolist() if self._rounded is None else ():
            if re.fullmatch(r"[+-]?\d{,400}", texts[i]) and int(texts[i]) != int(numbers[i]):
                self._rounded = texts[i]
                return

    def warn(self) -> None:
        """See `CellReader.warn`. In a column of numbers it is evident that other texts stand for empty cells."""
        if self._emptied and self.has_categories and self.learning:
            listed = first_names([f"{quoted(text)} ({count:,})" for text, count in self._emptied.items()])
            advice = "data.missing_values: [] reads such texts as categories"
            warn(self.path, f"{self._name}: read {listed} as empty cells; {advice}")
        if self._rounded is not None:
            reason = f"float64 loses the last digits of {self._rounded[:40]} and others"
            advice = "subtract a constant from them, or leave the column out by data.drop"
            warn(self.path, f"{self._name}: {reason}; {advice}")

    @property
    def _name(self) -> str:
        return column_title(self._column.position, self._column.name)

    def _wrong(self, line: int, text: str, expected: str) -> DataError:
        return DataError(f"{self.path}:{line}: found {quoted(text)} in {self._name}, {expected}")


class LabelReader:
    """Reads the labels of a table from one column, or targets from one or several, chunk by chunk.

    `columns` are the indices of these columns, from 0. `emptied` are texts of labels that stand for no label. `signs`
    are those of the targets in the training part; None if this is the training part. Raises DataOptionError where an
    option names no column.
    """

    def __init__(self, table: Opened, options: CsvOptions, signs: Sequence[str] | None) -> None:
        self._table, self._codes = table, dict[str, int]()
        self._rows: list[np.ndarray] = []  # targets, or codes of texts
        self._notation = options.notation
        self._missing = Missing(options)
        self.are_targets = options.target is not None
        self.columns = _target_columns(table, options.target) if self.are_targets else [_label_column(table, options)]
        self._learning, self._allow_empty = signs is None, options.missing != "error"
        self.emptied: dict[str, None] = {}
        known = zip(self.columns, signs or (), strict=False)
        self._readings: dict[int, Notation | Pair] = {i: Notation(options.decimal, sign) for i, sign in known if sign}

    @property
    def kind(self) -> str:
        return "target" if self.are_targets else "label"

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of the columns; without a header `column 3`."""
        return tuple(self._table.name(i) or f"column {i}" for i in self.columns)

    @property
    def target_signs(self) -> tuple[str, ...]:
        """The sign of the numbers in each column of targets; an empty text where they have none."""
        readings = [self._readings[i] for i in self.columns] if self.are_targets else []
        return tuple(reading.sign if isinstance(reading, Notation) else "" for reading in readings)

    @property
    def have_numbers(self) -> bool:
        """Whether all values so far are numbers."""
        return self.are_targets or all(map(self._notation.is_number, self._texts()[0]))

    def add(self, chunk: Chunk, keep: np.ndarray) -> np.ndarray:
        """Check the labels of all lines, keep those at the indices `keep` that are not empty, and return these indices.

        Raises DataError with the position of a wrong one; an empty one is wrong unless `missing` allows it.
        """
        if self.are_targets:
            rows = np.stack([self._targets(chunk, column) for column in self.columns], axis=1)
            keep = keep[~np.isnan(rows[keep]).any(axis=1)]
            self._rows.append(rows[keep])
            return keep
        found = chunk.distinct(self.columns[0])
        texts = list(map(cleaned, found.texts))
        codes = np.full(len(texts), -1)  # of empty labels
        for i, text in enumerate(texts):
            if text not in self._missing:
                codes[i] = self._codes.setdefault(text, len(self._codes))
            elif not self._allow_empty:
                raise self._empty(chunk.lines[found.first[i]], text, self.columns[0])
            elif text:
                self.emptied[text] = None
        rows = codes[found.numbers[keep]]
        self._rows.append(rows[rows >= 0])
        return keep[rows >= 0]

    def _empty(self, line: int, text: str, column: int) -> DataError:
        expected = f"a {self.kind}; data.missing: mean, zero or drop leaves out such rows"
        return _empty(f"{self._table.path}:{line}", text, self._table.title(column), expected)

    def _targets(self, chunk: Chunk, column: int) -> np.ndarray:
        """The targets of one column, float64; each is finite in float32, or NaN where it is empty and may be."""
        plain = self._readings.get(column) in (None, self._notation)
        if plain and not self._missing.numbers and self._notation.decimal is None:
            values, _ = chunk.numbers(column)
            if not np.isnan(values).any():
                self._readings[column] = self._notation
                return values
        targets, reading = np.full(len(chunk.lines), np.nan), self._readings.get(column)
        for i, text in enumerate(map(cleaned, chunk.texts(column))):
            if text in self._missing:
                if not self._allow_empty:
                    raise self._empty(chunk.lines[i], text, column)
                continue
            if reading is None:
                notation = self._notation.of(text) if self._learning else self._notation
                reading = self._readings[column] = pair_of(text) or notation
            if not reading.is_finite(text):
                found = f"{self._table.path}:{chunk.lines[i]}: found {quoted(text)} in {self._table.title(column)}"
                raise DataError(f"{found}, {expected_number(reading, text, self._learning)}")
            targets[i] = float(reading.in_python(text))
        return targets

    def _texts(self) -> tuple[list[str], np.ndarray]:
        """The different texts of the labels, and for each row the number of its text."""
        codes, texts = np.concatenate(self._rows), list(self._codes)
        used = np.flatnonzero(np.bincount(codes, minlength=len(texts)))
        return [texts[i] for i in used.tolist()], np.searchsorted(used, codes)

    def labels(self) -> np.ndarray:
        """The targets, float64 (N, targets), or the labels (N,), as texts or in the type that all are written in.

        These types are integers, booleans (True and False), and floats whose fractions are 0, such as 2.0.
        Raises DataOptionError where all labels are numbers and one is a fraction.
        """
        if self.are_targets:
            return np.concatenate(self._rows)
        texts, numbers = self._texts()
        if all(map(INTEGER.fullmatch, texts)):
            return np.array(list(map(int, texts)), np.int64)[numbers]
        if set(texts) <= {"False", "True"}:
            return (np.array(texts) == "True")[numbers]
        if all(map(self._notation.is_finite, texts)):
            plain = list(map(self._notation.in_python, texts))
            if not all(float(text).is_integer() for text in plain):
                raise DataOptionError("label", self._fraction(texts, plain))
            if all(str(float(text)) == text for text in plain):
                return np.array(plain, np.float64)[numbers]
        return np.array(texts)[numbers]

    def _fraction(self, texts: Sequence[str], plain: Sequence[str]) -> str:
        """What is wrong with labels that are numbers, where one is a fraction."""
        fraction = next(text for text, number in zip(texts, plain, strict=True) if not float(number).is_integer())
        column, path = self.columns[0], self._table.path
        found = f"found {fraction[:40]} in {self._table.title(column)} of {path}, expected classes"
        name = self._table.name(column)
        return (
            f"{found}; to predict numbers, set data.target: {column if name is None else name}, and a loss such as mse"
        )


def _label_column(table: Opened, options: CsvOptions) -> int:
    if options.label is not None:
        return table.column("label", options.label)
    if table.header and "label" in table.positions:
        return table.column("label", "label")
    expected = f"expected the name of the column of {table.path} with the classes"
    raise DataOptionError("label", f"missing, {expected}; to predict numbers, set data.target; {table.listed()}")


def _target_columns(table: Opened, target: str | int | tuple[str | int, ...] | None) -> list[int]:
    given = target if isinstance(target, tuple) else () if target is None else (target,)
    columns = [table.column("target", column) for column in given]
    if len(set(columns)) < len(columns):
        raise DataOptionError("target", f"found {list(given)}, expected each column once")
    if len(columns) == len(table.first):
        found = f"found all {len(table.first)} columns of {table.path}"
        raise DataOptionError("target", f"{found}, expected at least one other column")
    return columns


def _empty(where: str, text: str, column: str, expected: str) -> DataError:
    """The error for an empty cell, or a text that stands for one."""
    found = f"found {quoted(text) if text else 'an empty cell'} in {column}"
    stands = " which stands for an empty cell unless data.missing_values says otherwise," if text else ""
    return DataError(f"{where}: {found},{stands} expected {expected}")


FORMAT = Format(
    name="CSV",
    title="a CSV file",
    suffixes=(".csv", ".tsv"),
    options=CsvOptions,
    examples="rows",
    read=read,
    read_rows=read_rows,
)
