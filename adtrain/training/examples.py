"""The images and labels of a split on a device: the whole split, or a stream of chunks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from adtrain.core.array import Array, from_numpy
from adtrain.core.backend import backend
from adtrain.core.types import Shape
from adtrain.data import Images, Rows, Split
from adtrain.data.file_array import Sequences, machine_memory

CHUNK_BYTES = 64 << 20
"""The size of a chunk's images, roughly. A stream holds two chunks on the device and two on the host."""

StepInputs = tuple[Array, Array, Array]
"""The last arguments of a step: images (N, C, H, W), labels (N, ...), and int64 indices into these N examples."""

Chunk = tuple[np.ndarray, np.ndarray]
"""Images (n, C, H, W) and labels (n, ...) on the host."""


class BatchGroup(NamedTuple):
    """Consecutive batches of one size on the device: rows `position` to `position + steps` of an order (rows, size)."""

    position: int
    steps: int
    size: int
    inputs: StepInputs


class Examples(ABC):
    """A split on a device. Made by `on_device`.

    With `draws` a step draws its examples from a `Resident` split. Then only the number of the indices of a batch
    counts, so all groups share one order of zeros.
    """

    def __init__(self, split: Split, device: str, draws: bool = False) -> None:
        self.split, self.device, self.draws = split, device, draws
        self._of_groups: dict[Shape, list[Array]] = {}

    def __len__(self) -> int:
        return len(self.split)

    @abstractmethod
    def batches(self, indices: np.ndarray) -> StepInputs:
        """The arguments of a step for int64 `indices`: one batch, (batch,), or one batch per row, (rows, batch). Then
        `indices` must not be written to afterwards."""

    @abstractmethod
    def groups(
        self, batches: Iterable[np.ndarray], rows: int, part: Callable[[np.ndarray], np.ndarray] = lambda batch: batch
    ) -> Iterator[BatchGroup]:
        """Group consecutive batches of indices by size; the groups fill one order of `rows` rows after the other.

        `batches` may be endless: at most one group is prepared ahead. `part` selects the indices of each batch that are
        used here; `BatchGroup.size` is that of the whole batch. The next group may be written over a group, also by
        another call.
        """

    def _upload(self, order: np.ndarray, *chunk: np.ndarray) -> list[Array]:
        """The arrays of a group on the device, in the memory of the last group with such an order, where possible."""
        arrays = order, *chunk
        before: Sequence[Array | None] = self._of_groups.get(order.shape, (None,) * len(arrays))
        found = [from_numpy(x, self.device, old) for x, old in zip(arrays, before, strict=True)]
        self._of_groups[order.shape] = found
        return found


class Resident(Examples):
    """A whole split on the device.

    `images` can hold more than the split; then `row_numbers` maps the split's indices to rows of `images`.
    """

    def __init__(self, split: Split, device: str, draws: bool = False) -> None:
        super().__init__(split, device, draws)
        images, labels, self.row_numbers = split.images, split.labels, None
        if isinstance(images, Rows) and _usable_in_place(images.base, device):
            self.row_numbers = images.rows
            labels = np.zeros((len(images.base), *labels.shape[1:]), labels.dtype)
            labels[images.rows] = np.asarray(split.labels)
            images = images.base
        self.images, self.labels = from_numpy(np.asarray(images), device), from_numpy(np.asarray(labels), device)

    def batches(self, indices: np.ndarray) -> StepInputs:
        return self.images, self.labels, from_numpy(self._rows(indices), self.device)

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        return indices if self.row_numbers is None else self.row_numbers[indices]

    def groups(
        self, batches: Iterable[np.ndarray], rows: int, part: Callable[[np.ndarray], np.ndarray] = lambda batch: batch
    ) -> Iterator[BatchGroup]:
        for position, size, group in _group_by_size(batches, rows, rows * len(self)):
            group = [part(batch) for batch in group]
            order = np.zeros((rows, len(group[0])), np.int64)
            if self.draws:
                (given,) = self._of_groups.get(order.shape) or self._upload(order)
            else:
                order[position : position + len(group)] = group
                (given,) = self._upload(self._rows(order))
            yield BatchGroup(position, len(group), size, (self.images, self.labels, given))


class Streamed(Examples):
    """A split that is too large for the device: a thread gathers the next chunk while the last one is in use."""

    def batches(self, indices: np.ndarray) -> StepInputs:
        arrays = (*self._gather(indices.ravel(), indices.size), np.arange(indices.size).reshape(indices.shape))
        images, labels, order = (from_numpy(x, self.device) for x in arrays)
        return images, labels, order

    def groups(
        self, batches: Iterable[np.ndarray], rows: int, part: Callable[[np.ndarray], np.ndarray] = lambda batch: batch
    ) -> Iterator[BatchGroup]:
        most = max(1, CHUNK_BYTES // self.split.images[:1].nbytes)
        with ThreadPoolExecutor(1, "examples") as background:
            ahead = None
            for position, size, group in _group_by_size(batches, rows, most):
                group = [part(batch) for batch in group]
                length = len(group[0])
                capacity = length * _count(size, rows, most)
                chunk = background.submit(self._gather, np.concatenate(group), capacity)
                if ahead is not None:
                    yield self._group(*ahead)
                order = np.zeros((rows, length), np.int64)
                order[position : position + len(group)] = np.arange(len(group) * length).reshape(-1, length)
                ahead = position, size, len(group), order, chunk
            if ahead is not None:
                yield self._group(*ahead)

    def _group(self, position: int, size: int, count: int, order: np.ndarray, chunk: Future[Chunk]) -> BatchGroup:
        given, images, labels = self._upload(order, *chunk.result())
        return BatchGroup(position, count, size, (images, labels, given))

    def _gather(self, indices: np.ndarray, capacity: int) -> Chunk:
        """The examples at these indices, followed by unused rows up to `capacity`."""
        images = np.empty((capacity, *self.split.images.shape[1:]), self.split.images.dtype)
        images[: len(indices)] = self.split.images[indices]
        labels = np.zeros((capacity, *self.split.labels.shape[1:]), self.split.labels.dtype)
        labels[: len(indices)] = self.split.labels[indices]
        return images, labels


def on_device(split: Split, device: str, draws: bool = False) -> Examples:
    """The split on `device`: `Resident` where it fits, or where a step `draws` its examples, otherwise `Streamed`.

    On the CPU, contiguous images in memory are used without a copy and must not be written to. Images that must be
    copied, to a GPU or into another layout, fit if they take at most half of its memory and half of the host's.
    Sequences at offsets are streamed, because they overlap.
    """
    return Streamed(split, device) if is_streamed(split, device) and not draws else Resident(split, device, draws)


def is_streamed(split: Split, device: str) -> bool:
    """Whether `on_device` streams the split."""
    if isinstance(split.images, Sequences):
        nbytes = split.images.nbytes + split.labels.nbytes
        return split.images.by_offset or nbytes > _copy_limit(device)
    array = split.images.base if isinstance(split.images, Rows) else split.images
    return not _usable_in_place(array, device) and split.images.nbytes > _copy_limit(device)


def held_bytes(split: Split, device: str) -> int:
    """The bytes on `device` that `on_device` takes for the split."""
    of_images, both = split.images.nbytes, split.images.nbytes + split.labels.nbytes
    return 2 * CHUNK_BYTES * both // of_images if is_streamed(split, device) else both


def _usable_in_place(images: Images, device: str) -> bool:
    """Whether a Program on the device can use this array without a copy."""
    return device == "cpu" and isinstance(images, np.ndarray) and images.flags.c_contiguous and images.flags.aligned


def _copy_limit(device: str) -> int:
    available = backend(device).available()
    return min(machine_memory(), sys.maxsize if available is None else available) // 2


def _group_by_size(
    batches: Iterable[np.ndarray], rows: int, examples: int
) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """(position, size, batches): consecutive batches of one size.

    A group ends where the order of `rows` rows ends, or with `examples` examples.
    """
    position = 0
    for size, of_size in groupby(batches, key=len):
        while group := list(islice(of_size, min(rows - position, _count(size, rows, examples)))):
            yield position, size, group
            position = (position + len(group)) % rows


def _count(size: int, rows: int, examples: int) -> int:
    """The largest number of batches of `size` in a group."""
    return min(rows, max(1, examples // size))
