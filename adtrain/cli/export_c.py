"""`adtrain export RUN FILE.c`, `FILE.wasm` and `FILE.html`: the network as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adtrain.backends.cpu.compiler import CompilerError
from adtrain.cli.output import progress
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError, Split
from adtrain.export import evaluation, page
from adtrain.export.c import network, source
from adtrain.export.c.network import Interface
from adtrain.export.c.source import Compiled, Files, compiled
from adtrain.export.page import page_program
from adtrain.text import counted, short
from adtrain.training import Experiment, TrainedModel, prepare
from adtrain.training.evaluation import predictions
from adtrain.training.preparation import with_absolute_paths

CALIBRATION = 500
"""Training images that calibrate int8: the largest numbers of each layer are taken from them."""
MAX_LOSS = 0.2
"""Percentage points of accuracy that int8 may lose by default."""


class Written(NamedTuple):
    """The contents of files by path; what `--json` says of them, and the same as lines of text."""

    contents: Mapping[Path, bytes]
    about: Mapping[str, Any]
    lines: Sequence[str]


class Options(NamedTuple):
    """What the user asked for.

    Attributes:
        weights: a separate file for the weights.
        simd: vector extensions of gcc and clang.
        int8: weights and activations of 8 bits.
        max_loss: percentage points of accuracy that int8 may lose; None for MAX_LOSS.
        training: also a training step.
        batch_size: images of a training step; None for as many as in the run.
    """

    weights: Path | None = None
    simd: bool = False
    int8: bool = False
    max_loss: float | None = None
    training: bool = False
    batch_size: int | None = None

    def _named(self, *fields: str) -> str:
        """The options among these that are given, as the user writes them."""
        defaults = Options()
        return ", ".join(f"--{x.replace('_', '-')}" for x in fields if getattr(self, x) != getattr(defaults, x))

    def check(self, output: Path, suffix: str) -> None:
        """Raises AdtrainError for options that exclude one another, or do not fit the file."""
        if self == Options():
            return
        if suffix != ".c":
            raise AdtrainError(f"{output}: found options for a .c file: leave out {self._named(*self._fields)}")
        if self.int8 and (self.simd or self.weights):
            raise AdtrainError(
                "--int8 needs no vector extensions and keeps its weights in the C file: "
                f"leave out {self._named('simd', 'weights')}"
            )
        if self.training and (self.simd or self.int8 or self.weights):
            raise AdtrainError(
                "--training changes weights in float32, which are in the C file: "
                f"leave out {self._named('simd', 'int8', 'weights')}"
            )
        if self.max_loss is not None and not self.int8:
            raise AdtrainError("--max-loss is for --int8")
        if self.batch_size is not None and not self.training:
            raise AdtrainError("--batch-size is for --training")
        if self.weights is not None and realpath(self.weights) in map(realpath, (output, header_of(output))):
            raise AdtrainError(f"{self.weights}: is the C file or its header, expected another file for the weights")


def header_of(path: Path) -> Path:
    """The header of a C file."""
    return path.with_suffix(".h")


def write(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The contents of the C files by path, and their description for the report.

    Raises AdtrainError where the network has no C, and where its compiled code refuses its own input, and DataError
    where int8 or a training step needs data of the run that cannot be read.
    """
    note_float32(trained)
    data = trained.data() if options.int8 else None
    images = None if data is None else np.ascontiguousarray(data.train.images[:CALIBRATION])
    experiment = _experiment(trained, options.batch_size) if options.training else None
    files = source.generate(trained, path, options.simd, options.weights, images, experiment=experiment)
    about = network.interface(trained, options.int8)
    contents = {path: files.source.encode(), header_of(path): files.header.encode()}
    if options.weights is not None and files.weights is not None:
        contents[options.weights] = files.weights
    kinds = {"in int8": options.int8, "with vector extensions": options.simd, "with a training step": options.training}
    kind = " ".join(["C99", *(text for text, chosen in kinds.items() if chosen)])
    description = {"format": kind, **_signature(trained, about), "memory": files.memory, "weights": files.constants}
    try:
        with compiled(files, path, about) as program:
            description["object"] = program.object_bytes
            if data is not None:
                description["check"] = _accuracies(program, trained, data.test, options)
            else:
                description["check"] = _comparison(program, trained)
    except (CompilerError, DataError) as error:
        description["check"] = {"skipped": str(error)}
    return _written(trained, contents, description)


def _experiment(trained: TrainedModel, batch_size: int | None) -> Experiment:
    """The run's experiment, with another batch size if one is given. Raises DataError where its data cannot be read."""
    cfg = with_absolute_paths(trained.config)
    if batch_size is not None:
        cfg = cfg.changed("data", batch_size=batch_size)
    return prepare(cfg)


def _signature(trained: TrainedModel, about: Interface) -> dict[str, Any]:
    name = about.results
    return {
        "inputs": {about.example: {"type": about.c_type, "shape": about.image}},
        "outputs": {name: {"type": about.output_type, "shape": about.outputs}},
    }


def _comparison(program: Compiled, trained: TrainedModel) -> dict[str, Any]:
    """Predictions of the compiled network, compared with the run's."""
    name = program.interface.results
    found = evaluation.compare(lambda batch: [program.predict(batch)[0]], [name], trained, test_images(trained))
    return {"program": "compiled", **found._asdict()}


def _accuracies(program: Compiled, trained: TrainedModel, test: Split, options: Options) -> dict[str, Any]:
    """The accuracy of int8 on the test images beside float32's; `passed`: it loses no more than allowed."""
    expected = predictions(trained.network, trained.params, trained.statistics, test.images, "cpu")
    found, classes = program.predict(np.ascontiguousarray(test.images[: len(test)]))
    accuracy = {
        "float32": float((expected.argmax(axis=1) == test.labels).mean()),
        "int8": float((classes == test.labels).mean()),
    }
    limit = MAX_LOSS if options.max_loss is None else options.max_loss
    return {
        "program": "compiled",
        "images": len(test),
        "different": int((expected.argmax(axis=1) != classes).sum()),
        "outputs": {"probabilities": float(np.abs(found - expected).max())},
        "accuracy": accuracy,
        "max_loss": limit,
        "passed": 100 * (accuracy["float32"] - accuracy["int8"]) <= limit + 1e-9,
    }


def write_wasm(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The WebAssembly module, and its description for the report."""
    module = source.webassembly(trained)
    about = {"format": "WebAssembly", **_signature(trained, module.interface), "memory": module.memory}
    return _written(trained, {path: module.content}, {**about, "check": _check_of_c(trained, path)})


def write_page(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The page, and its description for the report."""
    program = page_program(trained)
    about = {"format": "page", **_signature(trained, network.interface(trained)), "memory": program.memory}
    examples = None
    if trained.image_shape[1:] == (1, 1):
        with suppress(DataError):
            examples = trained.test_split()  # which the sliders of a table cover
    content = page.encode(trained, program, examples)
    return _written(trained, {path: content}, {**about, "check": _check_of_c(trained, path)})


def _check_of_c(trained: TrainedModel, path: Path) -> dict[str, Any]:
    """The comparison of the same C, compiled for this machine."""
    name = Path("net.c")
    files: Files = source.generate(trained, name, simd=True)
    try:
        with compiled(files, name, network.interface(trained)) as program:
            return {**_comparison(program, trained), "program": "its C, compiled"}
    except (CompilerError, DataError) as error:
        return {"skipped": str(error)}


def _written(trained: TrainedModel, contents: Mapping[Path, bytes], result: Mapping[str, Any]) -> Written:
    """What is written, with the sizes of the program and the result of the check as lines of text."""
    lines = []
    for title in ("input", "output"):
        ((name, x),) = result[f"{title}s"].items()
        lines.append(f"{title:<7} {name} {x['type']} {list(x['shape'])}")
    weights = f", {short(result['weights'], 'B')} of weights" if "weights" in result else ""
    lines.append(f"memory  {short(result['memory'], 'B')} of values{weights}")
    if "object" in result:
        lines.append(f"object  {short(result['object'], 'B')} of code and weights")
    if "accuracy" in result["check"]:
        lines.append(_loss_line(result["check"]))
    return Written(contents, result, [*lines, *comparison_lines(result["check"], trained.config.data.examples)])


def _loss_line(check: Mapping[str, Any]) -> str:
    accuracy = check["accuracy"]
    lost = 100 * (accuracy["float32"] - accuracy["int8"])
    verdict = "" if check["passed"] else f": more than {check['max_loss']:g} points lost"
    return f"int8    accuracy {accuracy['int8']:.2%}, float32 {accuracy['float32']:.2%} ({-lost:+.2f} points){verdict}"


def note_float32(trained: TrainedModel) -> None:
    """Tell the user if the run's precision is not that of the file."""
    if (precision := trained.config.training.precision) != "float32":
        progress(f"trained in {precision}, written in float32")


def test_images(trained: TrainedModel) -> Split:
    """The run's test set, with a note that the comparison starts. Raises DataError where it cannot be read."""
    test = trained.test_split()
    progress(f"comparing on {counted(len(test), f'test {trained.config.data.examples}')}")
    return test


def comparison_lines(check: Mapping[str, Any], examples: str) -> list[str]:
    """The result of a comparison as lines of text; `examples` says what the data consist of."""
    if "skipped" in check:
        return [f"check   not checked: {check['skipped']}"]
    verdict = f"{check['different']:,} predicted otherwise" if check["different"] else "same predictions"
    return [
        f"check   {check['program']}, {counted(check['images'], f'test {examples}')}: {verdict}",
        f"        {', '.join(f'{name} within {gap:.2g}' for name, gap in check['outputs'].items())}",
    ]
