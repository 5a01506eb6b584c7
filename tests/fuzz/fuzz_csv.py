"""Fuzz the reader of CSV files; see runner.py."""

from __future__ import annotations

from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adtrain.data"]):
    from adtrain import data
    from adtrain.data import Options

from runner import fuzz

SEEDS = [
    b"label,city,n\n0,Rome,1\n1,,\n",
    b"width,height,label\n1,2.5,cat\n-3,1e4,dog\n",
    b'1,2,3\r\n4,5,"6"\r\n',
    b"\xef\xbb\xbflabel,a\n0,255\n1,0\n",
    b'sep=;\n2019;2020;label;\n0.5;NA; "a";\n-1;?;b;\n',
]

OPTIONS = (
    Options(),
    Options(label=-1, shape=(1, 1, 2)),
    Options(missing="mean", categories=(1,)),
    Options(missing="drop", label=0, delimiter=";"),
)


def read(path: Path) -> object:
    """Read and encode the table with options that depend on the file's size."""
    return data.load(path=path, options=OPTIONS[path.stat().st_size % len(OPTIONS)], need_test=False)


fuzz(".csv", SEEDS, read)
