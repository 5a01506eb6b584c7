"""A data set where the step can reach it: the images and labels of a split on a device, whole or a few at a time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from adtrain.core.array import Array, array
from adtrain.core.backend import backend
from adtrain.data import Rows, Split

CHUNK_BYTES = 64 << 20
"""About the most that the images of a chunk take; a stream has two of them on the device, and two in memory."""

Given = tuple[Array, Array, Array]
"""The last arguments of a step: images (N, C, H, W), labels int64 (N,), and the order, int64, in which to take them."""

Chunk = tuple[np.ndarray, np.ndarray]
"""Images and labels of some examples, on the host."""


class Piece(NamedTuple):
    """Batches of one size, ready for steps: the rows `position` to `position + steps` of an order (rows, `size`)."""

    position: int
    steps: int
    size: int
    given: Given


class Examples(ABC):
    """A split on a device. Made by `on_device`."""

    def __init__(self, split: Split, device: str) -> None:
        self.split, self.device = split, device

    def __len__(self) -> int:
        return len(self.split)

    @abstractmethod
    def batches(self, indices: np.ndarray) -> Given:
        """What a step takes for the `indices` int64 of a batch, (batch,), or of a batch each row, (rows, batch)."""

    @abstractmethod
    def pieces(self, batches: Iterable[np.ndarray], rows: int) -> Iterator[Piece]:
        """Batches of indices, as many as there are, as pieces of one order of `rows` rows after the other.

        There may be no end of them: a piece is made when it is asked for, or one ahead of that.
        """


class Resident(Examples):
    """All of a split on the device; `places` says where each example lies in `images`, None where the split says it."""

    def __init__(self, split: Split, device: str) -> None:
        super().__init__(split, device)
        images, labels, self.places = split.images, split.labels, None
        if isinstance(images, Rows) and _in_place(images.base, device):
            self.places = images.rows
            labels = np.zeros(len(images.base), np.int64)
            labels[images.rows] = split.labels
            images = images.base
        self.images, self.labels = _array(np.asarray(images), device), _array(labels, device)

    def batches(self, indices: np.ndarray) -> Given:
        places = indices if self.places is None else self.places[indices]
        return self.images, self.labels, array(places, device=self.device)

    def pieces(self, batches: Iterable[np.ndarray], rows: int) -> Iterator[Piece]:
        for position, size, alike in _alike(batches, rows, rows * len(self)):
            order = np.zeros((rows, size), np.int64)
            order[position : position + len(alike)] = alike
            yield Piece(position, len(alike), size, self.batches(order))


class Streamed(Examples):
    """A split that the device cannot hold: the next batches are gathered in the background while the last are used."""

    def batches(self, indices: np.ndarray) -> Given:
        images, labels = self._gathered(indices.ravel(), indices.size)
        return self._uploaded(images, labels, np.arange(indices.size).reshape(indices.shape))

    def pieces(self, batches: Iterable[np.ndarray], rows: int) -> Iterator[Piece]:
        most = max(1, CHUNK_BYTES // self.split.images[:1].nbytes)
        with ThreadPoolExecutor(1, "examples") as background:
            ahead = None
            for position, size, alike in _alike(batches, rows, most):
                capacity = size * _count(size, rows, most)
                chunk = background.submit(self._gathered, np.concatenate(alike), capacity)
                if ahead is not None:
                    yield self._piece(*ahead)
                order = np.zeros((rows, size), np.int64)
                order[position : position + len(alike)] = np.arange(len(alike) * size).reshape(-1, size)
                ahead = position, size, len(alike), order, chunk
            if ahead is not None:
                yield self._piece(*ahead)

    def _piece(self, position: int, size: int, count: int, order: np.ndarray, chunk: Future[Chunk]) -> Piece:
        return Piece(position, count, size, self._uploaded(*chunk.result(), order))

    def _gathered(self, indices: np.ndarray, capacity: int) -> Chunk:
        """The examples at these indices, at the beginning of memory for `capacity` of them."""
        images = np.empty((capacity, *self.split.images.shape[1:]), self.split.images.dtype)
        images[: len(indices)] = self.split.images[indices]
        labels = np.zeros(capacity, np.int64)
        labels[: len(indices)] = self.split.labels[indices]
        return images, labels

    def _uploaded(self, images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> Given:
        return _array(images, self.device), _array(labels, self.device), array(order, device=self.device)


def on_device(split: Split, device: str) -> Examples:
    """The split on `device`: all of it where it may lie there, else `Streamed`.

    On the CPU it is the split's own memory, or the file that it is mapped from, and not to be written to any more. What
    has to be copied, to a GPU or into another layout, may take half of the memory there is.
    """
    return Resident(split, device) if _fits(split, device) else Streamed(split, device)


def held_bytes(split: Split, device: str) -> int:
    """The bytes on `device`, mapped files included, of what `on_device` makes of the split."""
    return (split.images.nbytes if _fits(split, device) else 2 * CHUNK_BYTES) + split.labels.nbytes


def _fits(split: Split, device: str) -> bool:
    memory = split.images.base if isinstance(split.images, Rows) else split.images
    return _in_place(memory, device) or split.images.nbytes <= _room(device)


def _in_place(images: np.ndarray, device: str) -> bool:
    """Whether a Program on the device can use this memory as it is."""
    return device == "cpu" and images.flags.c_contiguous and images.flags.aligned


def _room(device: str) -> int:
    available = backend(device).available()
    return (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if available is None else available) // 2


def _alike(batches: Iterable[np.ndarray], rows: int, examples: int) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """(position, size, batches): neighbours of one size, as many as fit into one order and into so many `examples`."""
    position = 0
    for size, of_size in groupby(batches, key=len):
        while alike := list(islice(of_size, min(rows - position, _count(size, rows, examples)))):
            yield position, size, alike
            position = (position + len(alike)) % rows


def _count(size: int, rows: int, examples: int) -> int:
    """How many batches of that size make a piece at most."""
    return min(rows, max(1, examples // size))


def _array(x: np.ndarray, device: str) -> Array:
    """`x` as it is where it is contiguous and aligned; `array` would copy it, because others might write to theirs."""
    elements = np.require(x, requirements=("C", "A")).view()
    elements.flags.writeable = False
    return Array(backend(device).from_numpy(elements), elements.shape, elements.dtype, device)
