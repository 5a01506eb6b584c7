"""Labelled examples, in memory or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from adtrain.data.file_array import FileArray

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of an array in a given order, without copying it: indexing gathers the requested rows only.

    The index is an integer, a slice or an integer array for the first axis; `np.asarray` gathers all rows.
    """

    base: np.ndarray | FileArray
    rows: np.ndarray  # int64 (N,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.base.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.base.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, gathered."""
        return len(self.rows) * (self.base.nbytes // len(self.base))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> np.ndarray:
        gathered: np.ndarray = self.base[self.rows[key]]
        return gathered

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows are gathered into a new array")
        return self[:] if dtype is None else self[:].astype(dtype)


Images: TypeAlias = np.ndarray | FileArray | Rows


def chunks(images: Images) -> Iterator[np.ndarray]:
    """The images in chunks (n, C, H, W) of about CHUNK_BYTES."""
    rows = max(1, CHUNK_BYTES * len(images) // max(images.nbytes, 1))
    for start in range(0, len(images), rows):
        yield images[start : start + rows]


def _digest(whole: Images, parts: Iterable[np.ndarray]) -> str:
    found = sha256(f"{whole.dtype} {whole.shape}".encode())
    for part in parts:
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


@dataclass(frozen=True)
class Split:
    """One part of a data set: `images` uint8 or float32 (N, C, H, W), and `labels`.

    Labels are class numbers, int64 (N,), or the numbers to predict, float64 (N, targets).

    Of a text the images are the classes at the positions of sequences, float32 (N, 1, 1, length), and the labels the
    classes that follow them, int32 (N, length).

    The images are an array, in memory or in a file, or `Rows` of one. Tabular data have one channel per
    feature: (N, F, 1, 1).
    """

    images: Images
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digests(self) -> dict[str, str]:
        """A SHA-256 of the images and one of the labels, by these names: of type, shape, numbers and their order.

        All images are read, also those in a file. That takes less time than their mean and standard deviation.
        """
        return {"images": _digest(self.images, chunks(self.images)), "labels": _digest(self.labels, [self.labels])}

    @property
    def is_text(self) -> bool:
        """Whether the examples are sequences, in the order of a text."""
        return self.labels.ndim == 2 and self.labels.dtype.kind == "i"

    def take(self, indices: np.ndarray) -> Split:
        """The examples at these indices, in this order; the images are not copied."""
        images = self.images
        rows = Rows(images.base, images.rows[indices]) if isinstance(images, Rows) else Rows(images, indices)
        return Split(rows, self.labels[indices])
