"""`adtrain export`: a trained run as C, as a page, as an ONNX file, or as weights for PyTorch and its packages.

Also the tokenizer of a run on tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from adtrain import nn
from adtrain.backends.cpu.compiler import CompilerError
from adtrain.cli.options import (
    FilePath,
    Number,
    OutputFile,
    RunPath,
    Whole,
    format_of,
    format_option,
    json_option,
    trust_options,
)
from adtrain.cli.output import STDOUT, note_epoch, print_json, progress, show, write_file
from adtrain.config import is_sweep
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError, Split
from adtrain.data.errors import warn
from adtrain.data.statistics import offsets
from adtrain.export import architectures, evaluation, onnx_model, page
from adtrain.export.c import network, source
from adtrain.export.c.network import Interface
from adtrain.export.c.source import Compiled, Files, compiled
from adtrain.export.onnx_model import ValueType
from adtrain.export.page import page_program
from adtrain.files import expect_writable, make_folder
from adtrain.sweeps import finished
from adtrain.sweeps.session import reopened
from adtrain.text import counted, short
from adtrain.training import Experiment, TrainedModel, Trust, model_file, prepare
from adtrain.training.evaluation import predictions
from adtrain.training.preparation import with_absolute_paths
from adtrain.training.tasks import Regression

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
    description = {"format": kind, **_signature(about), "memory": files.memory, "weights": files.constants}
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


def _signature(about: Interface) -> dict[str, Any]:
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
    about = {"format": "WebAssembly", **_signature(module.interface), "memory": module.memory}
    return _written(trained, {path: module.content}, {**about, "check": _check_of_c(trained)})


def write_page(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The page, and its description for the report."""
    program = page_program(trained)
    about = {"format": "page", **_signature(network.interface(trained)), "memory": program.memory}
    examples = None
    if trained.image_shape[1:] == (1, 1):
        with suppress(DataError):
            examples = trained.test_split()  # which the sliders of a table cover
    content = page.encode(trained, program, examples)
    return _written(trained, {path: content}, {**about, "check": _check_of_c(trained)})


def _check_of_c(trained: TrainedModel) -> dict[str, Any]:
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


def _onnx(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The network as ONNX."""
    note_float32(trained)
    content, signature = onnx_model.encode(trained), onnx_model.signature(trained)
    about: dict[str, Any] = {
        "format": f"ONNX opset {onnx_model.OPSET}",
        "inputs": {name: x._asdict() for name, x in signature.inputs.items()},
        "outputs": {name: x._asdict() for name, x in signature.outputs.items()},
        "check": _check(content, trained),
    }
    values = (("input", signature.inputs), ("output", signature.outputs))
    lines = [f"{title:<7} {name} {x}" for title, found in values for name, x in found.items()]
    return Written({path: content}, about, [*lines, *comparison_lines(about["check"], trained.config.data.examples)])


def _check(content: bytes, trained: TrainedModel) -> dict[str, Any]:
    """The result of the comparison by onnxruntime; if there was none, the reason under "skipped"."""
    if (version := onnx_model.runtime_version()) is None:
        return {"skipped": "onnxruntime is not installed"}
    try:
        test = test_images(trained)
    except DataError as error:
        return {"skipped": str(error)}
    return {"program": f"onnxruntime {version}", **onnx_model.compare(content, trained, test)._asdict()}


def _safetensors(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The weights."""
    tensors, network = architectures.named_arrays(trained), trained.network
    dtype = "int64" if trained.config.data.is_text else str(network.dtype)
    about = {
        "format": "safetensors",
        "input": {"dtype": dtype, "shape": network.input_shape},
        "scale": network.scale,
        "mean": network.mean,
        "std": network.std,
        "targets": _targets(trained),
        "tensors": {name: {"dtype": str(x.dtype), "shape": x.shape} for name, x in tensors.items()},
    }
    return Written({path: architectures.encode_weights(trained)}, about, _preparation(about))


def _targets(trained: TrainedModel) -> list[dict[str, Any]]:
    """The names of predicted numbers, and what makes numbers in original units of the network's outputs."""
    task = trained.network.task
    if not isinstance(task, Regression):
        return []
    neutral = (0.0,) * len(task.mean), (1.0,) * len(task.std)
    mean, std = (task.mean, task.std) if task.normalized else neutral
    return [{"name": name, "mean": m, "std": s} for name, m, s in zip(trained.targets, mean, std, strict=True)]


def _preparation(result: Mapping[str, Any]) -> list[str]:
    """The input of PyTorch's network, and the normalisation that must be applied to it."""
    scale, mean, std = result["scale"], result["mean"], result["std"]
    in_float64 = scale == 1 and any(offsets(mean, std))
    normalisation = [
        f"        (data / {scale:g} - mean) / std, channel by channel{', in float64' if in_float64 else ''}",
        f"mean    {' '.join(map(str, mean))}",
        f"std     {' '.join(map(str, std))}",
    ]
    return [
        f"input   {ValueType(**result['input'])}",
        *(normalisation if scale != 1 or any(mean) or any(x != 1 for x in std) else ()),
        *(f"output  {x['name']} = output * {x['std']} + {x['mean']}" for x in result["targets"]),
    ]


def _tokenizer(trained: TrainedModel, path: Path, options: Options) -> Written:
    """The tokenizer of a run on tokens."""
    if trained.tokenizer is None:
        raise AdtrainError(f"{path}: the run was trained on {trained.config.data.examples} without a tokenizer")
    about = {"format": f"tokenizer of {len(trained.classes):,} tokens"}
    return Written({path: trained.tokenizer.content.encode()}, about, [])


def _folder(program: str, trained: TrainedModel, path: Path, options: Options) -> Written:
    """A folder that another package loads."""
    files = architectures.encode(trained, program)
    contents = {path / name: b"".join(parts) for name, parts in files.items()}
    return Written(contents, {"format": program, "files": sorted(files)}, [f"files   {', '.join(sorted(files))}"])


FOLDERS = (".huggingface", ".torchvision")
"""Formats that are a folder of files."""
FORMATS: dict[str, Callable[[TrainedModel, Path, Options], Written]] = {
    ".c": write,
    ".wasm": write_wasm,
    ".html": write_page,
    ".onnx": _onnx,
    ".safetensors": _safetensors,
    ".json": _tokenizer,
    **{suffix: partial(_folder, suffix[1:]) for suffix in FOLDERS},
}
"""By the extension: (run, path of the file, options, which are those of C) to what is written."""


class _Output(OutputFile):
    """A file, or the folder of a format that is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ctx is not None and ctx.params.get("suffix") in FOLDERS:
            return FilePath.convert(self, value, param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("run", type=RunPath())
@click.argument("output", metavar="FILE", type=_Output(), required=False)
@format_option(FORMATS)
@click.option("--member", type=Whole(min=0), help="With a sweep: write this member; by default the best.")
@click.option("--weights", metavar="FILE", type=OutputFile(binary=True), help="C: write the weights to this file.")
@click.option("--simd", is_flag=True, help="C: use the vector extensions of gcc and clang, for speed.")
@click.option("--int8", is_flag=True, help="C: weights and activations of 8 bits, by integer arithmetic alone.")
@click.option(
    "--max-loss",
    type=Number(min=0),
    metavar="POINTS",
    help="With --int8: percentage points of accuracy that it may lose before the exit code is 1. [default: 0.2]",
)
@click.option("--training", is_flag=True, help="C: also a function that makes one training step.")
@click.option(
    "--batch-size", type=Whole(min=1), help="With --training: images of a step. [default: as many as in the run]"
)
@trust_options
@json_option
def command(
    run: Path,
    output: Path | None,
    suffix: str | None,
    member: int | None,
    weights: Path | None,
    simd: bool,
    int8: bool,
    max_loss: float | None,
    training: bool,
    batch_size: int | None,
    trust: Trust,
    as_json: bool,
) -> None:
    """Write the run in the folder RUN to a file, in the format of its extension. An existing file is replaced.

    FILE.c is the whole network as C99, with a header FILE.h. It needs only the C library. The command compiles it and
    compares its predictions for the test images with the run's.

    FILE.html is a page that runs the network on a drawing, on the fields of a table, or on a text. FILE.wasm is the
    network as WebAssembly, which needs clang and lld.

    FILE.onnx is the whole network in float32, from the data set's images to probabilities, or to predicted numbers in
    original units. If onnxruntime is installed, its predictions for the test images are compared with the run's.

    FILE.safetensors has the weights and running statistics by their names in the run's model file, which are also
    PyTorch's. training.init_from of a config reads it, and so does load_state_dict of the same network.

    FILE.json is the tokenizer of a run on tokens, a tokenizer.json for data.tokenizer and data tokenize --tokenizer.

    --format huggingface writes a folder that the package transformers loads: a GPT-2, Llama, Mistral, Qwen 3 or ViT.
    --format torchvision writes that of a ResNet-18, ResNet-50 or ViT. FILE is the folder, by default RUN/huggingface or
    RUN/torchvision.

    The exit code is 1 if a compared prediction differs.

    RUN can be the folder of a sweep. Then the command writes its best member, or member N with --member N. That member
    also becomes a run in the sweep's folder.
    """
    options = Options(weights, simd, int8, max_loss, training, batch_size)
    if output is None:
        if suffix not in FOLDERS:
            raise click.UsageError("Missing argument 'FILE'.")
        output = run / suffix.removeprefix(".")
    is_folder = suffix in FOLDERS
    suffix = format_of(output, suffix, (".wasm", ".onnx", ".safetensors"))
    files = [each for each in FORMATS if each not in FOLDERS]
    if suffix not in files and not is_folder:
        found = f"the extension {suffix}" if suffix else "no extension"
        raise AdtrainError(f"{output}: found {found}, expected {', '.join(files)}")
    options.check(output, suffix)
    if is_folder and (output == STDOUT or os.path.realpath(output) == os.path.realpath(run)):
        raise AdtrainError(f"{output}: a {suffix[1:]} network is a folder of files; expected a folder of its own")
    if output == STDOUT and suffix == ".c":
        raise AdtrainError("-: C is two files, FILE.c and FILE.h; expected a file")
    if suffix == ".safetensors" and output != STDOUT and os.path.realpath(output.parent) == os.path.realpath(run):
        raise AdtrainError(
            f"{output}: the run's folder holds its own .safetensors files, expected a file in another folder"
        )
    if suffix == ".c":
        expect_writable(header_of(output))
    if is_sweep(run):
        run = finished.write_run(*reopened(run, "cpu", trust), member)
    elif member is not None:
        raise click.UsageError(f"--member is for a sweep, and {run} is none")
    trained = model_file.load(run, trust=trust).merged()
    if training and trained.config.lora is not None:
        raise AdtrainError(f"{run}: found lora, expected a run without it for --training")
    note_epoch(run)
    if trained.config.data.views and suffix != ".safetensors":
        warn(run, "the file has no data.views: its predictions are those for the image itself")
    contents, about, lines = FORMATS[suffix](trained, output, options)
    is_new = is_folder and not output.exists()
    if is_folder:
        make_folder(output)
    try:
        for path, content in contents.items():
            write_file(path, content)
    except BaseException:
        if is_new:
            shutil.rmtree(output, ignore_errors=True)
        raise
    size = len(contents[output]) if output in contents else sum(map(len, contents.values()))
    counts = {} if suffix == ".json" else {"parameters": nn.count_parameters(trained.params)}
    if as_json:
        print_json({"run": str(run), "file": str(output), "bytes": size, **counts, **about})
    else:
        sizes = about["format"], short(size, "B"), *(f"{count:,} {name}" for name, count in counts.items())
        show(f"{'folder' if is_folder else 'file':<7} {output}", f"        {', '.join(sizes)}", *lines)
    check = about.get("check", {})
    if not check.get("passed", not check.get("different")):
        raise SystemExit(1)
