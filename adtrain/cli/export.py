"""`adtrain export`: a trained run as C, as a page, as an ONNX file, or as weights for PyTorch and its packages.

Also the tokenizer of a run on tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from adtrain import nn
from adtrain.cli import export_c
from adtrain.cli.export_c import Written, comparison_lines, note_float32, test_images
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
from adtrain.cli.output import STDOUT, note_epoch, print_json, show, write_file
from adtrain.config import is_sweep
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError
from adtrain.data.errors import warn
from adtrain.data.statistics import offsets
from adtrain.export import architectures, onnx_model
from adtrain.export.onnx_model import ValueType
from adtrain.files import expect_writable, make_folder
from adtrain.sweeps import finished
from adtrain.sweeps.session import reopened
from adtrain.text import short
from adtrain.training import TrainedModel, Trust, model_file
from adtrain.training.tasks import Regression


def _onnx(trained: TrainedModel, path: Path, options: export_c.Options) -> Written:
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


def _safetensors(trained: TrainedModel, path: Path, options: export_c.Options) -> Written:
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


def _tokenizer(trained: TrainedModel, path: Path, options: export_c.Options) -> Written:
    """The tokenizer of a run on tokens."""
    if trained.tokenizer is None:
        raise AdtrainError(f"{path}: the run was trained on {trained.config.data.examples} without a tokenizer")
    about = {"format": f"tokenizer of {len(trained.classes):,} tokens"}
    return Written({path: trained.tokenizer.content.encode()}, about, [])


def _folder(program: str, trained: TrainedModel, path: Path, options: export_c.Options) -> Written:
    """A folder that another package loads."""
    files = architectures.encode(trained, program)
    contents = {path / name: b"".join(parts) for name, parts in files.items()}
    return Written(contents, {"format": program, "files": sorted(files)}, [f"files   {', '.join(sorted(files))}"])


FOLDERS = (".huggingface", ".torchvision")
"""Formats that are a folder of files."""
FORMATS: dict[str, Callable[[TrainedModel, Path, export_c.Options], Written]] = {
    ".c": export_c.write,
    ".wasm": export_c.write_wasm,
    ".html": export_c.write_page,
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
    options = export_c.Options(weights, simd, int8, max_loss, training, batch_size)
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
        expect_writable(export_c.header_of(output))
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
    parameters = nn.count_parameters(trained.params)
    if as_json:
        print_json({"run": str(run), "file": str(output), "bytes": size, "parameters": parameters, **about})
    else:
        sizes = f"{about['format']}, {short(size, 'B')}, {parameters:,} parameters"
        show(f"{'folder' if is_folder else 'file':<7} {output}", f"        {sizes}", *lines)
    check = about.get("check", {})
    if not check.get("passed", not check.get("different")):
        raise SystemExit(1)
