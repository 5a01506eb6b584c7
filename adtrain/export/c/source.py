"""The text of an exported C file and of its header, by templates, and the content of its file of weights."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from adtrain.codegen.elementwise import c_type
from adtrain.core.errors import AdtrainError
from adtrain.export.c import int8, network
from adtrain.export.c.code import Part, c_string, needed, numbers
from adtrain.export.c.network import Interface, TrainingStep, training_step
from adtrain.templates import environment
from adtrain.text import visible
from adtrain.training import Experiment, TrainedModel
from adtrain.version import __version__

MAX_BYTES = 2**31 - 1
"""The largest array that the indices of the C functions, which are int, can reach."""

MARK = 8
"""Bytes at the start of a file of weights, a digest, by which `NAME_load` refuses the file of another network."""


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
    values = _values(path, found, about, content, step)
    values |= {"constants": constants, "features": _features(trained)}
    source, header = (environment().get_template(f"network.{kind}.j2").render(values) for kind in "ch")
    return Files(source, header, content, code.bytes, constants, found)


def _values(
    path: Path, found: network.Translated, about: Interface, content: bytes | None, step: TrainingStep | None
) -> dict[str, Any]:
    """The values of the templates; `content` is that of the file of weights, if they are in one."""
    code = found.code
    kinds = {"simd": code.simd, "int8": code.integers}
    files = [*(f"layers_{kind}.c" for kind, chosen in kinds.items() if chosen), "layers.c", "layers_training.c"]
    called = {**code.library, **({"argmax": None} if about.chooses else {}), **(step.code.library if step else {})}
    functions = [*needed(called, *files), *code.functions()]
    includes = {
        "stdbool": step or any(re.search(r"\bbool\b", text) for text in functions),
        "math": step or any(re.search(r"\b\w+f\(|INFINITY|NAN|\b(exp|log|sqrt|tanh)\(", text) for text in functions),
        "stdio": content is not None,
        "string": step or content is not None or any("mem" in text for text in functions),
    }
    in_file, start = dict[str, int](), 0
    for array, x in code.arrays.items() if content is not None else ():
        if x.dtype == np.float32:
            in_file[array], start = start, start + x.size
    inside = {array: x for array, x in code.arrays.items() if array not in in_file}
    return {
        **about._asdict(),
        "version": __version__,
        "name": c_name(path),
        "upper": c_name(path).upper(),
        "source": shlex.quote(path.name),
        "header": path.with_suffix(".h").name,
        "options": "-O3 -march=native -ffp-contract=fast" if code.simd else "-O2",
        "first": 1 if content is None else 2,
        "shape": about.outputs,
        "includes": [f"{file}.h" for file, included in includes.items() if included],
        "inputs": prod(about.image),
        "outputs": prod(about.outputs),
        "labels": [c_string(label) for label in about.labels],
        "results": about.results,
        "arrays": Markup("\n".join(_arrays(inside, "" if step else "const "))),  # many: not to be searched
        "weights_file": in_file,
        "weights_in_file": start,
        "mark": list(content[:MARK]) if content is not None else [],
        "memory": code.bytes,
        "memory_arrays": [declaration for declaration, _ in code.memory.values()],
        "integers": code.integers,
        "functions": functions,
        "calls": "\n".join(code.body()).strip("\n"),
        "scores": code.text(Part(found.outputs, found.outputs.size - len(about.labels))) if about.chooses else "",
        "step": step,
        "step_arrays": Markup("\n".join(_arrays(step.code.arrays) if step else [])),
        "step_functions": step.code.functions() if step else [],
        "is_image": about.c_type == "uint8_t" and about.image[0] in (1, 3),
    }


def _arrays(arrays: Mapping[str, np.ndarray], qualifier: str = "const ") -> Iterator[str]:
    for name, x in arrays.items():
        yield f"static {qualifier}{c_type(x.dtype)} {name}[{x.size}] = {{"
        yield from numbers(x)
        yield "};\n"


def weights_file(arrays: dict[str, np.ndarray]) -> bytes:
    """MARK bytes of their digest, then all float32 arrays, little-endian, one after the other."""
    content = b"".join(x.astype("<f4").tobytes() for x in arrays.values() if x.dtype == np.float32)
    return hashlib.sha256(content).digest()[:MARK] + content


def _features(trained: TrainedModel) -> list[tuple[str, str]]:
    """The features of a row of a table, and what to give for an empty cell."""
    encoder = trained.encoder
    if encoder is None or trained.image_shape != (len(encoder.features), 1, 1):
        return []
    fill = [f", {x!r} for an empty cell" for x in encoder.fill] or [""] * len(encoder.features)
    # No name ends the comment, begins another one or is a trigraph.
    names = [re.sub(r"[*?\\]", "_", visible(name)) for name in encoder.features]
    return list(zip(names, fill, strict=True))
