"""Data sets: read from disk with every mistake named, split, and put in batches."""

from __future__ import annotations

from adtrain.data import idx, images
from adtrain.data.batches import batches, split_validation, validation_size
from adtrain.data.catalogue import CATALOGUE, Entry
from adtrain.data.datasets import DataSet, Split, load
from adtrain.data.errors import DataError

__all__ = [
    "CATALOGUE",
    "DataError",
    "DataSet",
    "Entry",
    "Split",
    "batches",
    "idx",
    "images",
    "load",
    "split_validation",
    "validation_size",
]
