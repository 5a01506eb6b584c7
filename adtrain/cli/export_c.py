"""`adtrain export RUN FILE.c`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from adtrain.backends.cpu.toolchain import CompilerError
from adtrain.cli.export_check import note_float32, test_images
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError
from adtrain.export import comparison
from adtrain.export.c import network, source
from adtrain.export.c.compiled import compiled
from adtrain.text import short
from adtrain.training import TrainedModel


class Options(NamedTuple):
    """What the user asked for: a file of weights of their own, vector extensions."""

    weights: Path | None = None
    simd: bool = False


def write(trained: TrainedModel, path: Path, options: Options) -> tuple[dict[Path, bytes], dict[str, Any]]:
    """The contents of the files by path, and their description for the report.

    Raises AdtrainError where the network has no C, and where its compiled code refuses its own input.
    """
    if options.weights in (path, path.with_suffix(".h")):
        raise AdtrainError(f"{options.weights}: is the C file or its header, expected another file for the weights")
    note_float32(trained)
    files, about = source.generate(trained, path, options.simd, options.weights), network.interface(trained)
    contents = {path: files.source.encode(), path.with_suffix(".h"): files.header.encode()}
    if options.weights is not None and files.weights is not None:
        contents[options.weights] = files.weights
    name = "probabilities" if about.chooses else "values"
    description: dict[str, Any] = {
        "format": "C99" + (" with vector extensions" if options.simd else ""),
        "inputs": {"image": {"type": about.c_type, "shape": about.image}},
        "outputs": {name: {"type": "float", "shape": about.outputs}},
        "memory": files.memory,
        "weights": files.constants,
    }
    try:
        with compiled(files, path, about) as program:
            description["object"] = program.object_bytes
            test = test_images(trained)
            found = comparison.compare(lambda batch: [program.predict(batch)[0]], [name], trained, test)
            description["check"] = {"program": "compiled", **found._asdict()}
    except (CompilerError, DataError) as error:
        description["check"] = {"skipped": str(error)}
    return contents, description


def report(result: Mapping[str, Any]) -> list[str]:
    """The sizes of the program as lines of text."""
    lines = []
    for title in ("input", "output"):
        ((name, x),) = result[f"{title}s"].items()
        lines.append(f"{title:<7} {name} {x['type']} {list(x['shape'])}")
    lines.append(f"memory  {short(result['memory'], 'B')} of values, {short(result['weights'], 'B')} of weights")
    if "object" in result:
        lines.append(f"object  {short(result['object'], 'B')} of code and weights")
    return lines
