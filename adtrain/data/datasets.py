"""Load a data set of the catalogue by name, or files by path, with warnings about data that are probably a mistake.

Such are classes without a training example, a column that gives away what is to be predicted, and lost digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from adtrain.data import catalogue, csv_table, formats, idx, npz
from adtrain.data.catalogue import Entry
from adtrain.data.errors import DataError, DataOptionError, printable, warn
from adtrain.data.file_array import Conversion, FileArray
from adtrain.data.formats import Options
from adtrain.data.part import Columns, Known, Part, Parts, arrays_as_parts
from adtrain.data.split import Images, Rows, Split, Stored, split_test
from adtrain.data.statistics import (
    PIXEL_MAX,
    as_float32,
    cell_statistics,
    channel_statistics,
    converted,
    lossy_channels,
    offsets,
    target_statistics,
)
from adtrain.data.table_encoder import TableEncoder, is_rows, labels_in_memory, learn, table_in_memory
from adtrain.data.tokenizer import Tokenizer
from adtrain.text import counted, first_names

FEW, MANY = 256, 4096
"""Rows that are looked at first. They rule out most columns."""


REPEATED = 4
"""If a column has at least this number of rows for each of its values, it is not by chance that each has one label."""


ROUNDING = 1e-6
"""The part of the largest deviation of a target that is rounding error."""

ClassType: TypeAlias = Literal["str", "int", "bool", "float"]
CLASS_TYPES: dict[str, ClassType] = {"U": "str", "i": "int", "b": "bool", "f": "float"}
"""The type of labels by the kind of their dtype."""


@dataclass(frozen=True)
class DataSet:
    """The training and the test part of a data set; their images have the same shape and dtype, uint8 or float32.

    `mean` and `std` are those of the training images divided by `scale`, per channel; `offset` has been subtracted from
    the numbers of each channel, see `statistics.offsets`, but not from its mean. `encoder` has made the images of the
    rows of a table. `targets` are the names of the numbers to predict; then there are no classes, and the labels are
    float64 (N, targets), and `target_mean` and `target_std` those of the training part, or with `robust_targets` those
    of its targets that are not extreme. `skipped` has one line for each unreadable image that was left out.
    `class_type` is the type of the labels whose texts `classes` has. The last `validation_rows` examples of the
    training part, as `load` returns it, are those that the files have for validation. `tokenizer` is that of a text of
    tokens.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    offset: tuple[float, ...] = ()
    encoder: TableEncoder | None = None
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    class_type: ClassType = "str"
    validation_rows: int = 0
    tokenizer: Tokenizer | None = None
    robust_targets: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the channels, if the data set is a table."""
        tabular = self.encoder is not None and self.train.images.shape[2:] == (1, 1)
        return self.encoder.features if self.encoder is not None and tabular else ()

    @property
    def scale(self) -> float:
        """The divisor of the images' numbers: 255 for uint8, 1 for float32."""
        return float(PIXEL_MAX) if self.train.images.dtype == np.uint8 else 1.0

    def with_train(self, train: Split) -> DataSet:
        """This data set with another training part; mean and standard deviation of targets are that part's."""
        mean, std = target_statistics(train.labels, self.robust_targets) if self.targets else ((), ())
        return replace(self, train=train, target_mean=mean, target_std=std)


def class_values(classes: Sequence[str], kind: ClassType, count: int) -> np.ndarray:
    """The labels of the training data, in their type, for `count` numbers of classes.

    A number without a class is its own label. Raises ValueError where a class is not the text of such a label.
    """
    convert: dict[ClassType, Callable[[str], Any]] = {
        "str": str,
        "int": int,
        "float": float,
        "bool": ("False", "True").index,
    }
    further = range(len(classes), count)
    values = [*map(convert[kind], classes), *(map(str, further) if kind == "str" else further)]
    return np.array(values, None if kind != "bool" or further else bool)


class DataSource(Protocol):
    """A data set of a plug-in. `registered_at` is its place and name for messages."""

    registered_at: ClassVar[str]

    @classmethod
    def kind(cls) -> str: ...

    def load(self) -> tuple[Any, Any]:
        """The training part and the test part, pairs of images and labels as `arrays_as_parts` takes them."""


def load(
    dataset: str | Entry | DataSource | None = None,
    path: str | Path | None = None,
    options: Options | None = None,
    need_test: bool = True,
    encoder: TableEncoder | None = None,
    numbers: bool = False,
    classes: tuple[str, ...] = (),
    offset: tuple[float, ...] | None = None,
    tokenizer: Tokenizer | None = None,
) -> DataSet:
    """Load a data set, or the files at `path`; exactly one of the two must be given.

    `dataset` is a name of the catalogue, an entry of it, or the data set of a plug-in.

    `formats` lists the file formats. The classes are the labels that occur, numbers or names, in sorted order. With
    `need_test=False` the test part may be empty. `encoder` makes the images of a table's rows; by default it is learnt
    from the training part. With `numbers`, integer labels of files are numbers to predict. `classes` are those of a
    text, and `tokenizer` makes its tokens; by default both are those of the text at `path`. `offset` is that of a
    trained network, () for none; by default it is learnt from the training part.

    Raises:
        DataError: files are missing, damaged or do not fit together; one line that names the file.
        DataOptionError: an option does not fit the files.
    """
    options = options or Options()
    if (dataset is None) == (path is None):
        raise DataError("expected either the name of a data set or a path, and not both")
    if dataset is not None:
        found = catalogue.find(dataset) if isinstance(dataset, str) else dataset
        if isinstance(found, Entry):
            return _of_catalogue(found, options)
        return _of_source(found, options, numbers, offset)
    source = Path(os.path.expanduser(str(path)))
    name = os.path.basename(os.path.realpath(source)) if source.is_dir() else source.stem
    parts = formats.read(source, options, Known(None if encoder is None else encoder.columns, classes, tokenizer))
    return of_parts(parts, options, name, str(source), need_test, encoder, numbers, offset)


def of_arrays(
    data: Any,
    test_data: Any,
    options: Options,
    numbers: bool = False,
    offset: tuple[float, ...] | None = None,
    need_test: bool = True,
    encoder: TableEncoder | None = None,
) -> DataSet:
    """The data set of arrays in memory; see `arrays_as_parts` for the arguments, and `load` for the others.

    `data` can also be a table in one of the forms of `table_encoder.rows_in_memory`, without `test_data`. Its classes
    are those of the same table as a file, and have the type of its labels.
    Raises DataError and DataOptionError as `load` does.
    """
    if is_rows(data):
        formats.check_options(options, csv_table.FORMAT.own_options, "a table")
        options = replace(options, header=True)
        known = Known(None if encoder is None else encoder.columns)
        parts = csv_table.parts_of(table_in_memory(data, options), options, known)
        found = of_parts(parts, options, "data", "data", need_test, encoder, numbers, offset)
        if not found.classes:
            return found
        # The texts of the labels may be those of another type.
        of_types = {type(label): label for label in labels_in_memory(data, options.label)}
        kinds = {np.asarray(label).dtype.kind for label in of_types.values()}
        kind = CLASS_TYPES.get(kinds.pop()) if len(kinds) == 1 else None
        return replace(found, class_type=kind or found.class_type)
    formats.check_options(options, npz.FORMAT.own_options, "arrays")
    parts = arrays_as_parts(data, test_data, options)
    return of_parts(parts, options, "data", "data", need_test, None, numbers, offset)


def of_parts(
    found: Parts,
    options: Options,
    name: str,
    source: str,
    need_test: bool = True,
    encoder: TableEncoder | None = None,
    numbers: bool = False,
    offset: tuple[float, ...] | None = None,
) -> DataSet:
    """The data set named `name` of what was read from `source`, a name for messages; see `load`."""
    if found.test is None and not options.test and need_test:
        advice = "set the fraction to hold out, such as 0.2, or data.test_path"
        raise DataOptionError("test", f"missing, {source} has no test part: {advice}")
    if found.test is not None and options.test:
        raise DataOptionError("test", f"found {options.test}, but there is a test part; remove this option")
    classes, targets, train, test = _splits(found, numbers)
    if test is None:
        train, test = split_test(train, options.test)
    learning = encoder is None and not offset
    if learning and not train.is_text:
        warn_of_classes(classes, train, test, source)
        warn_of_leaks(found.train.columns, train, source)
    if found.train.columns is not None:
        rows = train.images.rows if isinstance(train.images, Rows) else np.arange(len(train))
        learnt_from = _cells(found.train.images), rows, found.train.columns
        encoder = encoder or learn(*learnt_from, options, source)
        train, test = _encoded(encoder, found, train, test, options, offset)
    mean, std = ((0.0,), (1.0,)) if train.is_text else channel_statistics(train.images, source)
    if encoder is not None and any(encoder.indexed):  # numbers of categories are not normalised
        mean = tuple(0.0 if indexed else x for x, indexed in zip(mean, encoder.indexed, strict=True))
        std = tuple(1.0 if indexed else x for x, indexed in zip(std, encoder.indexed, strict=True))
    if train.images.dtype != np.uint8:
        needed = offsets(mean, std)
        offset = needed if offset is None else offset
        if any(needed) and not any(offset):
            tabular = encoder is not None and train.images.shape[2:] == (1, 1)
            features = encoder.features if encoder is not None and tabular else ()
            warn_of_lost_digits(train.images, std, features, source)
        train, test = _in_float32(train, test, offset, source)
    else:
        offset = ()
    return DataSet(
        name,
        train,
        test,
        classes,
        mean,
        std,
        offset,
        encoder,
        found.skipped,
        targets,
        class_type=_class_type(found),
        validation_rows=found.validation_rows,
        tokenizer=found.tokenizer,
    ).with_train(train)


def _class_type(found: Parts) -> ClassType:
    """The type of the labels; "str" where the file names the classes, or the parts have labels of several types."""
    kind = np.result_type(*(part.labels.dtype for part in (found.train, found.test) if part is not None)).kind
    return "str" if found.classes else CLASS_TYPES.get(kind, "str")


def _of_source(source: DataSource, options: Options, numbers: bool, offset: tuple[float, ...] | None) -> DataSet:
    formats.check_options(options, npz.FORMAT.own_options, f"the data set {source.kind()}")
    place = source.registered_at
    names = f"{place}: the training part", f"{place}: the test part"
    parts = arrays_as_parts(*source.load(), options, names)
    return of_parts(parts, options, source.kind(), place, numbers=numbers, offset=offset)


def _of_catalogue(entry: Entry, options: Options) -> DataSet:
    if options.given:
        raise DataOptionError(options.given[0], f"an option of files at data.path, found the data set {entry.name}")
    try:
        entry.require()
    except DataError as error:
        raise DataOptionError("dataset", str(error)) from None
    found = idx.read_folder(entry.folder)
    if found.test is None:
        raise DataError(f"{entry.folder}: found no test part, expected t10k-images-idx3-ubyte")
    for part in (found.train, found.test):
        if (largest := part.labels.max()) >= len(entry.classes):
            raise DataError(f"{part.place}: found label {largest}, expected 0 to {len(entry.classes) - 1}")
    _check_alike(found.train, found.test)
    train, test = Split(found.train.images, found.train.labels), Split(found.test.images, found.test.labels)
    mean, std = (entry.mean, entry.std) if entry.mean else channel_statistics(train.images)
    numbered = entry.classes == tuple(map(str, range(len(entry.classes))))
    return DataSet(entry.name, train, test, entry.classes, mean, std, class_type="int" if numbered else "str")


def _splits(found: Parts, numbers: bool) -> tuple[tuple[str, ...], tuple[str, ...], Split, Split | None]:
    """The names of the classes or of the targets, and both parts with class numbers or targets as labels."""
    parts = [part for part in (found.train, found.test) if part is not None]
    for test in parts[1:]:
        _check_alike(found.train, test)
    splits = [Split(part.images, part.labels) for part in parts]
    if splits[0].is_text:
        return found.classes, (), splits[0], splits[1] if splits[1:] else None
    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    columns = [part.labels for part in parts]
    integers = not found.classes and all(part.labels.dtype.kind in "bi" for part in parts)
    if any(part.labels.ndim == 2 for part in parts) or (numbers and integers):
        targets, columns = found.train.targets or ("label",), [_as_columns(part, found.train) for part in parts]
    else:
        labels = np.concatenate(columns)
        values = np.array(found.classes) if found.classes else np.unique(labels)
        classes = tuple(map(str, values.tolist()))
        columns = np.split(np.searchsorted(values, labels).astype(np.int64), [len(found.train.labels)])
    images = _of_one_type([part.images for part in parts], found.train.place)
    train, *rest = map(Split, images, columns)
    return classes, targets, train, rest[0] if rest else None


def _as_columns(part: Part, train: Part) -> np.ndarray:
    """The labels as float64 (N, targets). Raises DataError where a part has other targets than the training part."""
    if part.labels.dtype.kind == "U":
        raise DataError(f"{part.place}: found texts as labels, expected numbers as in {train.place}")
    columns: np.ndarray = part.labels.reshape(len(part.labels), -1).astype(np.float64)
    if columns.shape[1] != (expected := train.labels.reshape(len(train.labels), -1).shape[1]):
        given = counted(columns.shape[1], "targets")
        raise DataError(f"{part.place}: found {given}, expected {expected} as in {train.place}")
    return columns


def _encoded(
    encoder: TableEncoder,
    found: Parts,
    train: Split,
    test: Split,
    options: Options,
    offset: tuple[float, ...] | None,
) -> tuple[Split, Split]:
    """Both parts of a table with images in place of cells: in float32, to save memory, if they need no offset."""
    needed = any(offset or offsets(*cell_statistics(_cells(found.train.images))))
    dtype = np.float64 if needed else np.float32
    images: list[Stored] = [
        encoder.images(_cells(x.images).astype(dtype, copy=False), x.columns.features, x.place, options)
        for x in (found.train, found.test)
        if x is not None and x.columns is not None
    ]
    images = _of_one_type(images, found.train.place)
    return _with_images(train, images[0]), _with_images(test, images[-1])


def _in_float32(train: Split, test: Split, offset: Sequence[float], place: str) -> tuple[Split, Split]:
    """Both parts with images minus `offset` in float32; an array that both have rows of is converted once."""
    done: dict[int, Stored] = {}
    parts = []
    for part in (train, test):
        images = part.images.base if isinstance(part.images, Rows) else part.images
        if id(images) not in done:
            done[id(images)] = as_float32(images, offset, place)
        parts.append(_with_images(part, done[id(images)]))
    return parts[0], parts[1]


def _with_images(split: Split, images: Stored) -> Split:
    """The split with `images` in place of the cells that it has, or has rows of."""
    return Split(Rows(images, split.images.rows) if isinstance(split.images, Rows) else images, split.labels)


def _cells(images: Images) -> np.ndarray:
    return np.asarray(images)[:, :, 0, 0]


def _of_one_type(images: list[Stored], place: str) -> list[Stored]:
    """The images of the parts; all are numbers of one type if their dtypes differ."""
    common = np.result_type(*(x.dtype for x in images))
    return [converted(x, Conversion(common), place) for x in images]


def _check_alike(train: Part, test: Part) -> None:
    shape, expected = test.images.shape[1:], train.images.shape[1:]
    if shape != expected:
        raise DataError(f"{test.place}: found test images of shape {shape}, expected {expected} as in training")


def warn_of_classes(classes: tuple[str, ...], train: Split, test: Split, place: str) -> None:
    """Warn about classes of which the training part has no example."""
    counts = np.bincount(train.labels, minlength=len(classes)) if classes else np.ones(0)
    if unseen := np.flatnonzero(counts == 0).tolist():
        names = first_names([printable(classes[i]) for i in unseen])
        kinds = "class" if len(unseen) == 1 else "classes"
        what = f"{counted(int(np.isin(test.labels, unseen).sum()), 'test examples')} of {kinds} {names}"
        warn(place, f"found {what}, without a training example")


def warn_of_leaks(columns: Columns | None, train: Split, place: str) -> None:
    """Warn about columns of a table, in a file of any format, that determine the label or target."""
    images = train.images
    base = images.base if isinstance(images, Rows) else images
    if images.shape[2:] != (1, 1) or isinstance(base, FileArray):
        return
    cells = Rows(_cells(base), images.rows) if isinstance(images, Rows) else _cells(base)
    for i, what in leaks(cells, train.labels):
        name = printable(str(i) if columns is None else columns.features[i].title)
        advice = "leave it out if it is not known at the time of a prediction"
        warn(place, f"column {name} leaks what is to be predicted: {what}; {advice}")


def warn_of_lost_digits(images: Images, std: Sequence[float], features: Sequence[str], place: str) -> None:
    """Warn about channels whose numbers differ by less than float32 holds; `features` names those of a table."""
    if lossy := lossy_channels(images, std):
        names = [printable(features[i]) if features else str(i) for i in lossy]
        what = f"{'column' if features else 'channel'} {first_names(names)}"
        reason = "float32 loses the last digits of these numbers; data.normalize: true subtracts the mean first"
        warn(place, f"{what}: {reason}")


def leaks(features: np.ndarray | Rows, labels: np.ndarray) -> Iterator[tuple[int, str]]:
    """The columns of features (N, columns) that determine the label, with what was found; NaN is an empty cell.

    Labels are class numbers (N,), or numbers to predict (N, targets). Of classes a column gives the label away if each
    of its values has one label and values repeat; of numbers if it is one of them times a factor plus a constant.
    """
    few = features[:FEW]
    if labels.ndim == 2:
        for target in labels.T:
            likely = np.flatnonzero(_are_linear(few, target[:FEW]))
            for i in likely[_are_linear(features[:][:, likely], target)].tolist() if len(likely) else ():
                yield i, "it is a target times a factor plus a constant"
        return
    ordered, many = np.sort(few, axis=0), features[:MANY]
    repeated = np.flatnonzero((ordered[1:] == ordered[:-1]).any(axis=0)).tolist()
    suspects = [i for i in repeated if _values_with_one_label(many[:, i], labels[:MANY])]
    for i in suspects:
        if count := _values_with_one_label(features[:][:, i], labels):
            yield i, f"each of its {count:,} values has only one label"


def _values_with_one_label(values: np.ndarray, labels: np.ndarray) -> int:
    """The number of different values if each has one label only and they repeat; otherwise 0."""
    different, codes = np.unique(values, return_inverse=True)
    if len(different) < 2 or REPEATED * len(different) > len(values):
        return 0
    last = np.zeros(len(different), labels.dtype)
    last[codes] = labels
    return len(different) if len(np.unique(labels)) > 1 and np.array_equal(last[codes], labels) else 0


def _are_linear(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """For each column whether the target is a factor times it plus a constant, and has three different numbers."""
    filled = ~np.isnan(features)
    count = np.maximum(filled.sum(axis=0), 1)
    x = features - features.sum(axis=0, where=filled) / count
    y = target[:, np.newaxis] - (filled * target[:, np.newaxis]).sum(axis=0) / count
    squares = np.square(x).sum(axis=0, where=filled)
    factor = (x * y).sum(axis=0, where=filled) / np.where(squares > 0, squares, 1)
    largest = np.abs(y).max(axis=0, where=filled, initial=0)
    error = np.abs(y - factor * x).max(axis=0, where=filled, initial=0)
    found: np.ndarray = (error <= ROUNDING * largest) & (largest > 0) & (2 * count > len(target))
    return found & (len(np.unique(target)) > 2)
