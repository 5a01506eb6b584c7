"""The text of an exported C file, of its header, and the content of its file of weights."""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.export.c import int8, network
from adtrain.export.c.body import MARK, body
from adtrain.export.c.header import header
from adtrain.export.c.main_program import is_image
from adtrain.export.c.network import Interface
from adtrain.export.c.training import TrainingStep, training_step
from adtrain.export.evaluation import size_text
from adtrain.text import visible
from adtrain.training import Experiment, TrainedModel
from adtrain.version import __version__

MAX_BYTES = 2**31 - 1
"""The largest array that the indices of the C functions, which are int, can reach."""


MOST_FEATURES = 200
"""Features that the comment of a C file lists."""


class Files(NamedTuple):
    """An exported network.

    Attributes:
        source, header: the texts of NAME.c and NAME.h.
        weights: the content of the file of weights; None if the weights are in the source.
        memory: bytes of the array that holds all values.
        constants: bytes of the arrays of weights.
        translated: the statements of the network.
    """

    source: str
    header: str
    weights: bytes | None
    memory: int
    constants: int
    translated: network.Translated


def c_name(path: Path) -> str:
    """The prefix of the exported names: the file's name with characters that C allows."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return name if re.match(r"[A-Za-z]", name) else f"net_{name}"


def generate(
    trained: TrainedModel,
    path: Path,
    simd: bool = False,
    weights: Path | None = None,
    calibration: np.ndarray | None = None,
    keep_first: bool = False,
    experiment: Experiment | None = None,
) -> Files:
    """The files for the C file at `path`.

    Args:
        simd: use the functions of `layers_simd.c`.
        weights: the path of a separate file for the weights.
        calibration: images (N, C, H, W) of the training set; with them the network is in int8.
        keep_first: keep the first layer's result in memory until the end.
        experiment: the run's, of which the file also has the training step.

    Raises AdtrainError as `network.translated` and `int8.translated` do, for a name that C cannot include, and for
    arrays of 2 GiB.
    """
    if re.search(r'["\\\n\r?*]', path.name):
        raise AdtrainError(f"{path}: the name has characters that #include cannot hold, expected another name")
    about, name = network.interface(trained, int8=calibration is not None), c_name(path)
    step = None if experiment is None else training_step(experiment, name, about.c_type)
    if calibration is None:
        found = network.translated(trained, simd, training=step is not None)
    else:
        found = int8.translated(trained, calibration)
    code = found.code
    code.place([found.outputs, *([found.first] if keep_first else [])])
    constants = sum(x.nbytes for x in code.arrays.values())
    if max(constants, code.bytes) > MAX_BYTES:
        raise AdtrainError(f"the network needs arrays of {constants:,} bytes, C functions reach {MAX_BYTES:,}")
    content = None if weights is None else weights_file(code.arrays)
    notes = _notes(about, code.bytes, constants, simd, path, step, _feature_notes(trained))
    header_text = header(name, about, notes, code.bytes, weights is not None, step)
    source = "\n".join(body(name, path.with_suffix(".h").name, found, about, notes, content, step))
    return Files(source, header_text, content, code.bytes, constants, found)


def weights_file(arrays: dict[str, np.ndarray]) -> bytes:
    """MARK bytes of their digest, then all float32 arrays, little-endian, one after the other."""
    content = b"".join(x.astype("<f4").tobytes() for x in arrays.values() if x.dtype == np.float32)
    return hashlib.sha256(content).digest()[:MARK] + content


def _notes(
    about: Interface,
    memory: int,
    constants: int,
    simd: bool,
    path: Path,
    step: TrainingStep | None,
    features: list[str],
) -> list[str]:
    """What a reader of the file needs to know, as lines of a comment."""
    unit = " in units of 1 / 65536; the arithmetic is that of integers" if about.gives_integers else ""
    kind = "bytes from 0 to 255" if about.c_type == "uint8_t" else "numbers"
    options = "-O3 -march=native -ffp-contract=fast" if simd else "-O2"
    source, header_name = shlex.quote(path.name), path.with_suffix(".h").name
    libm = "" if about.gives_integers else " -lm"
    reads = "images" if is_image(about) else "numbers"
    signature = [
        f"input    {size_text(about.image)} {kind}; they are normalised here",
        f"output   {size_text(about.outputs)} {'probabilities' if about.chooses else 'numbers'}{unit}",
    ]
    if about.is_text:
        length, classes = about.outputs
        labels = f"{c_name(path)}_labels"
        signature = [
            f"input    {length} numbers: the index of each character in {labels}; 0 after a shorter text",
            f"output   {length}x{classes} probabilities: after each character those of the next one",
            "         the class that is returned is that after the last character",
        ]
    return [
        f"A network trained by adtrain {__version__}, in this file and {header_name}. It allocates nothing.",
        "",
        *signature,
        *features,
        f"memory   {memory:,} bytes for all values, static: threads that share it must take turns",
        f"weights  {constants:,} bytes",
        *(_training_notes(step) if step else []),
        f"compile  cc {options} -c {source}",
        f"program  cc {options} -D{c_name(path).upper()}_MAIN {source}{libm}; it reads {reads}",
    ]


def _feature_notes(trained: TrainedModel) -> list[str]:
    """The features of a row of a table, and what to give for an empty cell."""
    encoder = trained.encoder
    if encoder is None or trained.image_shape != (len(encoder.features), 1, 1):
        return []
    fill = [f", {x!r} for an empty cell" for x in encoder.fill] or [""] * len(encoder.features)
    # No name ends the comment, begins another one or is a trigraph.
    names = [re.sub(r"[*?\\]", "_", visible(name)) for name in encoder.features]
    lines = [f"  number {i}  {name}{empty}" for i, (name, empty) in enumerate(zip(names, fill, strict=True))]
    more = [f"  and {len(lines) - MOST_FEATURES:,} more"] if len(lines) > MOST_FEATURES else []
    return [*lines[:MOST_FEATURES], *more]


def _training_notes(step: TrainingStep) -> list[str]:
    state = sum(step.state.values())
    return [f"training one step on {step.batch} images: {step.code.bytes:,} bytes more, {state:,} of the optimizer"]
