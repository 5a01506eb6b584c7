"""Arrays and sequences of tokens that stay in their files, because the memory is small beside them.

Rows are read when they are indexed. They are read, not memory-mapped: a memory-mapped file that is truncated ends the
process by a signal, and one that is overwritten changes the numbers without an error.
"""

from __future__ import annotations

import math
import os
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from adtrain.data.errors import DataError, reading

SHARE = 4
"""An array of more than this part of the memory stays in its file."""

# The limit of a container, in version 2 and version 1 of Linux' control groups.
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int:
    """The bytes of memory of the machine, or of the container that the process runs in."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            memory = min(memory, int(path.read_text(encoding="ascii")))
    return memory


def stays_in_file(nbytes: int) -> bool:
    """Whether an array of this size is read as needed, and not at once."""
    return nbytes > machine_memory() // SHARE


def require_memory(place: str, nbytes: int, advice: str = "") -> None:
    """Raise DataError if `nbytes` is more than the machine's memory; call it before allocating."""
    memory = machine_memory()
    if nbytes > memory:
        found = f"{nbytes / 2**30:,.1f} GiB to hold in memory, this machine has {memory / 2**30:,.1f}"
        raise DataError(f"{place}: found {found}{advice}")


class DataFile:
    """A file that is read at any position, and must not change meanwhile."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Keep the open `file` open; `path` is its name in messages."""
        self.path, self._descriptor = path, os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._current_state()

    def read(self, positions: Sequence[int], lengths: Sequence[int], content: np.ndarray) -> None:
        """Fill `content`, uint8 (n,), with the pieces at these positions, one after the other.

        Raises DataError where the file cannot be read, or where its size or time of modification has changed.
        """
        descriptor, memory, begin = self._descriptor, content.data, 0
        with reading(self.path):
            for position, length in zip(positions, lengths, strict=True):
                end = begin + length
                while begin < end:
                    count = os.preadv(descriptor, (memory[begin:end],), position)
                    if not count:
                        raise self._changed()
                    begin, position = begin + count, position + count
            if self._current_state() != self._state:
                raise self._changed()

    def _current_state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _changed(self) -> DataError:
        return DataError(f"{self.path}: was changed while it was in use; expected the same content until the end")


class Conversion(NamedTuple):
    """Rows in another type, after subtraction of `offset` in float64, unless it is None."""

    dtype: np.dtype[Any]
    offset: np.ndarray | None = None

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # `channel_statistics` refuses infinities
            return (rows if self.offset is None else rows - self.offset).astype(self.dtype, order="C")


class Indexed(ABC):
    """An array whose rows are read when they are indexed.

    The index is an integer, a slice or an integer array for the first axis; `np.asarray` reads all rows.
    """

    dtype: np.dtype[Any]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @abstractmethod
    def rows_at(self, numbers: np.ndarray) -> np.ndarray:
        """The rows with these numbers, int64 (n,)."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        rows = np.arange(*key.indices(len(self))) if isinstance(key, slice) else np.asarray(key, np.int64)
        found = self.rows_at(rows.ravel())
        return found.reshape(*rows.shape, *found.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows are read into a new array")
        return self[:] if dtype is None else self[:].astype(dtype)


@dataclass(frozen=True, eq=False)
class FileArray(Indexed):
    """An array (N, ...) in C order from `offset` of a file. Reading rows raises DataError as `DataFile.read` does.

    `axes` is the order of the axes of a row in the file, if it is another one.
    `conversion` is applied to the rows that are read.
    """

    file: DataFile
    offset: int
    stored_dtype: np.dtype[Any]
    stored_shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    conversion: Conversion | None = None

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        return self.stored_dtype if self.conversion is None else self.conversion.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored_shape[axis] for axis in self.axes) if self.axes else self.stored_shape

    def reshape(self, *shape: int) -> FileArray:
        """The same elements with another shape of the rows."""
        assert shape[0] == len(self)
        assert math.prod(shape) == self.size
        assert not self.axes
        return replace(self, stored_shape=shape)

    def transpose(self, *axes: int) -> FileArray:
        """The same elements with the axes in another order; the first one stays."""
        assert axes[0] == 0
        assert not self.axes
        return replace(self, axes=axes)

    def converted(self, conversion: Conversion) -> FileArray:
        """The same rows, converted when they are read, in place of an earlier conversion."""
        return replace(self, conversion=conversion)

    def rows_at(self, numbers: np.ndarray) -> np.ndarray:
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"found rows {numbers.min()} to {numbers.max()}, expected 0 to {len(self) - 1}")
        found = np.empty((len(numbers), *self.stored_shape[1:]), self.stored_dtype)
        firsts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)  # of runs, which are read together
        row_bytes = math.prod(self.stored_shape[1:]) * self.stored_dtype.itemsize
        positions = self.offset + numbers[firsts] * row_bytes
        lengths = np.diff(firsts, append=len(numbers)) * row_bytes
        self.file.read(positions.tolist(), lengths.tolist(), found.reshape(-1).view(np.uint8))
        if self.axes:
            found = found.transpose(self.axes)
        return found if self.conversion is None else self.conversion(found)


FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)


class Stream(Protocol):
    """Consecutive tokens."""

    @property
    def digest(self) -> str:
        """A SHA-256 of the tokens."""

    def __len__(self) -> int: ...

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each of the positions int64 (n,) on: integers (n, length)."""


@dataclass(frozen=True, eq=False)
class MemoryStream:
    """Tokens in memory, integers (n,)."""

    tokens: np.ndarray
    digest: str

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        found: np.ndarray = np.lib.stride_tricks.sliding_window_view(self.tokens, length)[starts]
        return found


@dataclass(frozen=True, eq=False)
class FileStream:
    """Tokens in files without a header, one file after the other.

    Attributes:
        counts: the number of tokens in each file.
        dtype: of the files.
        vocabulary: all tokens are smaller.
    """

    files: Sequence[DataFile]
    counts: Sequence[int]
    dtype: np.dtype[Any]
    vocabulary: int
    digest: str
    _ends: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(self.counts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """See `Stream`. Raises DataError where a file cannot be read, has changed, or has a token that is too large."""
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found, starts.tolist(), strict=True):
            done = 0
            while done < length:
                number = bisect_right(self._ends, start + done)
                file, end = self.files[number], min(length, self._ends[number] - start)
                position = (start + done - self._ends[number] + self.counts[number]) * self.dtype.itemsize
                part = row[done:end]
                file.read([position], [part.nbytes], part.view(np.uint8))
                if part.max() >= self.vocabulary:
                    wrong = f"found token {part.max()}, expected tokens below {self.vocabulary}"
                    raise DataError(f"{file.path}: is damaged: {wrong}")
                done = end
        return found


@dataclass(frozen=True, eq=False)
class Sequences(Indexed):
    """`count` sequences of a stream, an array (count, *row_shape): sequence i begins at `first` + i * `stride`.

    Of sequences `by_offset` the index is an offset in the stream, and can be larger than `count`.
    """

    stream: Stream
    first: int
    count: int
    stride: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.row_shape)

    @property
    def digest(self) -> str:
        """Which sequences of which tokens these are."""
        return f"{self.stream.digest} {self.first} {self.stride} {self.shape} {self.dtype}"

    def rows_at(self, numbers: np.ndarray) -> np.ndarray:
        found = self.stream.read(self.first + numbers * self.stride, math.prod(self.row_shape))
        return found.astype(self.dtype).reshape(-1, *self.row_shape)

    def part(self, begin: int, end: int) -> Sequences:
        """The sequences from number `begin` to before `end`."""
        return replace(self, first=self.first + begin * self.stride, count=end - begin)

    def at_offsets(self) -> Sequences:
        """As many sequences, indexed by their offsets from the first one."""
        return replace(self, stride=1)

    @property
    def by_offset(self) -> bool:
        """Whether an index is an offset; other sequences do not overlap."""
        return self.stride == 1


def cut(stream: Stream, length: int) -> tuple[Sequences, Sequences]:
    """The inputs, float32 (N, 1, 1, length), and the labels, int32 (N, length), of a stream.

    It is cut into sequences of length + 1 tokens; a shorter rest is left out. The first `length` tokens of a sequence
    are the inputs, the last `length` the labels.
    """
    count, step = len(stream) // (length + 1), length + 1
    inputs = Sequences(stream, 0, count, step, (1, 1, length), FLOAT32)
    return inputs, Sequences(stream, 1, count, step, (length,), INT32)
