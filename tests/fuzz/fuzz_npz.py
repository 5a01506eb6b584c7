"""Fuzz the reader of NPZ files; see runner.py."""

from __future__ import annotations

import io

import atheris
import numpy as np

with atheris.instrument_imports(include=["adtrain.data", "zipfile"]):
    from adtrain.data import Options, npz

from runner import fuzz

plain, compressed = io.BytesIO(), io.BytesIO()
np.savez(plain, images=np.arange(24, dtype=np.uint8).reshape(2, 3, 4), labels=np.arange(2))
ones, names = np.ones((2, 3)), np.array(["a", "b"])
np.savez_compressed(compressed, x_train=ones, y_train=names, x_test=ones, y_test=names)

fuzz(".npz", [plain.getvalue(), compressed.getvalue()], lambda path: npz.read(path, Options()))
