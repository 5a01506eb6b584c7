"""`adtrain predict`: applies a trained run to images, to rows of tables, or to texts."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
import numpy as np

from adtrain.cli.options import FilePath, OneOf, RunPath, Whole, device_option, json_option, trust_options
from adtrain.cli.output import note_epoch, note_precision, print_json, print_text, progress, show
from adtrain.data import DataError, text_file
from adtrain.data.statistics import digits
from adtrain.data.tokenizer import shown
from adtrain.table import TEXT, CellFormat, Column, render, terminal_width
from adtrain.training import Trust, inputs, model_file, sampling
from adtrain.training.evaluation import predictions
from adtrain.training.inputs import Choice, ImageOptions
from adtrain.training.tasks import Regression

INPUT, RANK = Column("input", itemgetter(0), TEXT), Column("rank", itemgetter(1))
CLASS = Column("class", itemgetter(2), TEXT), Column("probability", itemgetter(3), CellFormat("{:.2%}".format))
"""Columns of the rows (name of the input, rank, class, probability)."""
DIGITS = 6
"""Significant digits of a predicted number, unless its differences need more."""
CHOICES = OneOf(["auto", "yes", "no"])
BROKEN_INPUT = 2
"""The exit code if an input cannot be read."""


class Predicted(NamedTuple):
    """The network's outputs for the image or row `row` of a file; `single`: the file has only that one."""

    path: Path
    row: int
    single: bool
    outputs: np.ndarray


@click.command()
@click.argument("run", type=RunPath())
@click.argument("paths", metavar="INPUT...", nargs=-1, required=True, type=FilePath())
@click.option("--top-k", type=Whole(min=1), help="Print the N most probable classes. [default: 1]")
@click.option(
    "--invert",
    type=CHOICES,
    default="auto",
    help="Invert PNG and JPEG images. auto: invert grey images with a light background if the training images have a "
    "dark one, and the reverse.",
)
@click.option(
    "--center",
    type=CHOICES,
    default="auto",
    help="Scale and centre the digit in a PNG or JPEG image as in MNIST. auto: if the run was trained on MNIST and the "
    "image has another size.",
)
@device_option
@trust_options
@json_option
@click.option(
    "--csv",
    "as_csv",
    is_flag=True,
    help="Print a table as CSV: file, index in the file, the columns that data.drop lists, class, and the probability "
    "of each class; or the numbers.",
)
def command(
    run: Path,
    paths: tuple[Path, ...],
    top_k: int | None,
    invert: str,
    center: str,
    device: str,
    trust: Trust,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Classify images or rows with the run in the folder RUN. Print the most probable class of each, and its
    probability.

    A run that predicts numbers prints them in their original units. A run with several labels prints the probability
    of each label.

    An INPUT is a file in one of these formats, or a folder of PNG and JPEG files:

    \b
    PNG, JPEG  an image, made grey or RGB, and resized
    IDX        images of the size of those of the training
    CSV, TSV   a table with the columns of the training
    NPZ        rows or images, in the array X or images
    text       a run on text predicts the next character

    An input that cannot be read is reported. The others are predicted, and the exit code is 2.
    """
    if as_csv and (as_json or top_k is not None):
        raise click.UsageError(
            f"--csv prints all probabilities in one form; leave out {'--json' if as_json else '--top-k'}"
        )
    trained = model_file.load(run, device, trust)
    if top_k is not None and trained.targets:
        raise click.UsageError("--top-k is for runs that predict classes; this one predicts numbers or labels")
    takes_images = not trained.config.data.is_text and trained.image_shape[1:] != (1, 1)
    for option, choice in (("--invert", invert), ("--center", center)):
        if choice != "auto" and not takes_images:
            raise click.UsageError(f"{option} is for runs on images; this one is on a table or a text")
    note_precision(trained.config, device)
    options = ImageOptions(cast(Choice, invert), cast(Choice, center))
    broken = list[DataError]()
    if trained.config.data.is_text:
        predicted = _predict_texts(paths, trained, device, broken)
    else:
        predicted = _predict(_read(paths, trained, options, broken), trained, device)
    if predicted:
        note_epoch(run)
    if as_json:
        print_json([{"file": str(x.path), "index": x.row, **_values(trained, x, top_k)} for x in predicted])
    elif as_csv:
        print_text(_csv(trained, predicted))
    elif predicted:
        show(*_table(trained, predicted, top_k))
    if broken:
        raise SystemExit(BROKEN_INPUT)


@contextmanager
def _reported(broken: list[DataError]) -> Iterator[None]:
    """Print a DataError, and add it to `broken`."""
    try:
        yield
    except DataError as error:
        progress(f"adtrain: error: {error}")
        broken.append(error)


def _read(
    paths: tuple[Path, ...], trained: model_file.TrainedModel, options: ImageOptions, broken: list[DataError]
) -> list[tuple[Path, inputs.Inputs]]:
    """The images or rows of the files that can be read. What is done to many images is printed once."""
    found, changed = [], defaultdict[str, list[Path]](list)
    for given in paths:
        listed: Sequence[Path] = []
        with _reported(broken):
            listed = inputs.files(given)
        for path in listed:
            with _reported(broken):
                read = inputs.read(path, trained, options, lambda paths, changes: changed[changes].extend(paths))
                found.append((path, read))
    for changes, changed_paths in changed.items():
        inputs.warn_of_changes(changed_paths, changes)
    return found


def _predict_texts(
    paths: tuple[Path, ...], trained: model_file.TrainedModel, device: str, broken: list[DataError]
) -> list[Predicted]:
    """The probabilities of what follows each text that can be read."""
    predicted, log_probabilities = [], sampling.next_class_of(trained, device)
    for path in paths:
        with _reported(broken):
            text = text_file.read_classes(path, trained.config.data.options, trained.known).numbers
            predicted.append(Predicted(path, 0, True, np.exp(log_probabilities(text))))
    return predicted


def _predict(found: list[tuple[Path, inputs.Inputs]], trained: model_file.TrainedModel, device: str) -> list[Predicted]:
    if not found:
        return []
    images = np.concatenate([batch for _, (batch, _) in found])
    rows = iter(predictions(trained.network, trained.params, trained.statistics, images, device))
    return [
        Predicted(path, row, len(batch) == 1, next(rows))
        for path, (batch, indices) in found
        for row in indices.tolist()
    ]


def _values(trained: model_file.TrainedModel, predicted: Predicted, top_k: int | None) -> dict[str, Any]:
    """The prediction as JSON values."""
    if trained.targets:
        return {"predicted": dict(zip(trained.targets, predicted.outputs.tolist(), strict=True))}
    ranked = [{"class": name, "probability": p} for name, p in _ranked(trained, predicted, top_k or 1)]
    return ranked[0] if top_k is None else {"top": ranked}


def _csv(trained: model_file.TrainedModel, predicted: list[Predicted]) -> str:
    """A row for each prediction, with the columns that `data.drop` lists, such as identifiers.

    Numbers have the digits that distinguish them from others of their type.
    """
    count = max((len(x.outputs) for x in predicted), default=len(trained.classes))
    named = [*trained.classes, *map(str, range(len(trained.classes), count))]
    dropped = {path: inputs.dropped_columns(path, trained) for path in dict.fromkeys(x.path for x in predicted)}
    identifiers = dict.fromkeys(name for columns in dropped.values() for name in columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    outputs = trained.targets or ["class", *(f"probability {name}" for name in named)]
    writer.writerow(["file", "index", *identifiers, *outputs])
    for x in predicted:
        chosen = [] if trained.targets else [named[int(x.outputs.argmax())]]
        columns = dropped[x.path]
        texts = (columns[name][x.row] if name in columns else "" for name in identifiers)
        writer.writerow([x.path, x.row, *texts, *chosen, *map(str, x.outputs)])
    return text.getvalue()


def _table(trained: model_file.TrainedModel, predicted: list[Predicted], top_k: int | None) -> list[str]:
    """The lines of the table; with `top_k` one for each rank."""
    width = terminal_width()
    names = [str(x.path) if x.single else f"{x.path}[{x.row}]" for x in predicted]
    if trained.targets:
        significant = [DIGITS] * len(trained.targets)
        if isinstance(task := trained.network.task, Regression):
            significant = [digits(mean, std, DIGITS) for mean, std in zip(task.mean, task.std, strict=True)]
        numbers = [
            Column(target, itemgetter(i), CellFormat(f"{{:.{n}g}}".format))
            for i, (target, n) in enumerate(zip(trained.targets, significant, strict=True), 1)
        ]
        return render([INPUT, *numbers], [(name, *x.outputs) for name, x in zip(names, predicted, strict=True)], width)
    rows = []
    for name, x in zip(names, predicted, strict=True):
        for rank, (label, probability) in enumerate(_ranked(trained, x, top_k or 1), 1):
            if trained.config.data.is_text:
                label = shown(label, trained.tokenizer is not None)
            rows.append((name, rank, label, probability))
    return render([INPUT, *([] if top_k is None else [RANK]), *CLASS], rows, width)


def _ranked(trained: model_file.TrainedModel, predicted: Predicted, count: int) -> list[tuple[str, float]]:
    """The names and probabilities of the most probable classes, `count` or all of them."""
    best = np.argsort(-predicted.outputs, kind="stable")[:count].tolist()
    names = [trained.classes[i] if i < len(trained.classes) else str(i) for i in best]
    return list(zip(names, predicted.outputs[best].tolist(), strict=True))
