"""Data sets: read and checked, split, and divided into batches."""

from __future__ import annotations

from adtrain.data import idx, images
from adtrain.data.catalogue import CATALOGUE, Entry
from adtrain.data.datasets import DataSet, load, of_arrays
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.formats import Options
from adtrain.data.split import Images, Rows, Split, batches, split_validation, validation_size
