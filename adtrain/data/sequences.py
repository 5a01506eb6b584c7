"""Sequences of a stream of tokens, in memory or in files: they are read when they are indexed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.file_array import DataFile

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
class Sequences:
    """`count` sequences of a stream, an array (count, *row_shape): sequence i begins at `first` + i * `stride`.

    The index is an integer, a slice or an integer array for the first axis; `np.asarray` reads all sequences. Of
    sequences `by_offset` the index is an offset in the stream, and can be larger than `count`.
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
    def ndim(self) -> int:
        return 1 + len(self.row_shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def digest(self) -> str:
        """Which sequences of which tokens these are."""
        return f"{self.stream.digest} {self.first} {self.stride} {self.shape} {self.dtype}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: Any) -> np.ndarray:
        rows = np.arange(*key.indices(self.count)) if isinstance(key, slice) else np.asarray(key, np.int64)
        found = self.stream.read(self.first + rows.ravel() * self.stride, math.prod(self.row_shape))
        return found.astype(self.dtype).reshape(*rows.shape, *self.row_shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("sequences are read into a new array")
        return self[:] if dtype is None else self[:].astype(dtype)

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
