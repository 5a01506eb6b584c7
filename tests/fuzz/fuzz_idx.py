"""Fuzz the reader of IDX files; see runner.py."""

from __future__ import annotations

import gzip
import struct

import atheris

with atheris.instrument_imports(include=["adtrain.data", "gzip"]):
    from adtrain.data import idx

from runner import fuzz

PLAIN = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 4) + bytes(range(24))
FLOATS = bytes([0, 0, 0x0D, 1]) + struct.pack(">I2f", 2, 1.5, -2.0)

fuzz("", [PLAIN, FLOATS, gzip.compress(PLAIN, mtime=0)], idx.read)
