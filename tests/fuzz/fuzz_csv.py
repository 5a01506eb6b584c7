"""Fuzz the reader of CSV files; see runner.py."""

from __future__ import annotations

from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adtrain.data"]):
    from adtrain.data import Options, csv_table

from runner import fuzz

SEEDS = [b"width,height,label\n1,2.5,cat\n-3,1e4,dog\n", b'1,2,3\r\n4,5,"6"\r\n', b"\xef\xbb\xbflabel,a\n0,255\n1,0\n"]


def read(path: Path) -> object:
    """Read with the labels in the last column, or with default options if the file's size is odd."""
    options = Options() if path.stat().st_size % 2 else Options(label=-1, shape=(1, 1, 2))
    return csv_table.read(path, options)


fuzz(".csv", SEEDS, read)
