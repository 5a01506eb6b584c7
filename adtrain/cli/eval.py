"""`adtrain eval`: loss and metrics of a trained run on the test images."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from adtrain import training
from adtrain.cli.options import (
    FilePath,
    RunPath,
    Whole,
    autotune_option,
    device_option,
    json_option,
    set_autotune,
    set_option,
    trust_options,
)
from adtrain.cli.output import note_epoch, note_precision, print_json, progress, show
from adtrain.config import is_sweep
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.sweeps import finished
from adtrain.sweeps.session import reopened
from adtrain.table import COUNT, TEXT, CellFormat, Column, render, terminal_width
from adtrain.text import counted
from adtrain.training import model_file, scores
from adtrain.training.evaluation import Influenced, influence, metrics_of, named_metrics

SHOWN = 3
"""How many helpful and harmful training examples are listed for a test example."""
LOSS, PRODUCT = CellFormat("{:.4f}".format), CellFormat("{:.3g}".format)


@click.command()
@click.argument("run", type=RunPath())
@click.option(
    "--data",
    "path",
    type=FilePath(),
    metavar="PATH",
    help="A file or folder to evaluate on: its test part, or all of it if it has none. Options of the run's section "
    "data that fit its format apply.",
)
@click.option(
    "--text",
    "text_path",
    type=FilePath(),
    metavar="FILE",
    help="The same for a text file of any name, all of it, and a run on text.",
)
@click.option(
    "--influence",
    "highest_losses",
    type=Whole(min=1),
    help="For the N test examples with the highest loss, list the training examples that helped and harmed most.",
)
@click.option("--top", type=Whole(min=1), help="With a sweep: take its N best members; by default all.")
@set_option
@device_option
@autotune_option
@trust_options
@json_option
def command(
    run: Path,
    path: Path | None,
    text_path: Path | None,
    highest_losses: int | None,
    top: int | None,
    overrides: tuple[str, ...],
    device: str,
    autotune: str,
    trust: training.Trust,
    as_json: bool,
) -> None:
    """Measure loss and metrics of the run in the folder RUN on the test examples of its config, or on those at PATH, or
    on the text in FILE.

    If RUN is the folder of a sweep, its members are an ensemble: its prediction is the mean of their probabilities, or
    of the numbers that they predict.
    """
    set_autotune(device, autotune)
    if path is not None and text_path is not None:
        raise click.UsageError("found --data and --text, expected one of them")
    if is_sweep(run):
        if path is not None or text_path is not None or overrides or highest_losses is not None:
            expected = "no --data, --text, --influence or --set"
            raise click.UsageError(f"an ensemble is measured on the sweep's own test part: {expected}")
        _ensemble(run, top, device, trust, as_json)
        return
    if top is not None:
        raise click.UsageError(f"--top is for a sweep, and {run} is none")
    trained = model_file.load(run, device, trust, overrides)
    note_precision(trained.config, device)
    if text_path is not None and not trained.config.data.is_text:
        raise click.UsageError(f"--text is for runs on text, and {run} was trained on {trained.config.data.examples}")
    if text_path is not None and not text_path.is_file():
        raise AdtrainError(
            f"{text_path}: found {'a folder' if text_path.is_dir() else 'no file'}, expected a text file"
        )
    test = trained.test_split(path or text_path, None if text_path is None else "text")
    started = perf_counter()
    examples = training.on_device(test, device)
    step, task = trained.evaluation_step, trained.network.task
    score = training.Evaluation(step, task, examples).score(trained.params, trained.statistics)
    seconds = perf_counter() - started
    epoch = note_epoch(run)
    model = trained.network, trained.params, trained.statistics
    metrics = named_metrics(model, metrics_of(trained.config, task), trained.classes, test, device)
    influenced, train = list[Influenced](), None
    if highest_losses is not None:
        train = training.prepare(trained.config).train
        progress(f"influence: compiling, then gradients of {len(train):,} training {trained.config.data.examples}")
        influenced = influence(model, train, test, highest_losses, SHOWN, device)
    if as_json:
        found = {
            "run": str(run),
            "model_epoch": epoch,
            "device": device,
            "images": len(test),
            "test": score._asdict(),
            "metrics": plain(metrics),
            "seconds": seconds,
            "images_per_second": len(test) / seconds,
        }
        print_json(found if highest_losses is None else {**found, "influence": plain(influenced)})
        return
    consists_of = trained.config.data.examples
    if confusion := scores.confusion_lines(metrics, trained.classes, terminal_width()):
        show(*confusion, "")
    if train is not None:
        show(*influence_lines(influenced, test, train, trained.classes, terminal_width()), "")
    show(
        f"test    {scores.text(score)} of {counted(len(test), consists_of)}",
        *scores.metric_lines(metrics),
        f"time    {seconds:.2f} s ({len(test) / seconds:,.0f} {consists_of}/s)",
    )


def influence_lines(
    influenced: Sequence[Influenced], test: Split, train: Split, classes: Sequence[str], width: int
) -> list[str]:
    """A heading and a table: a row for each training example that helped or harmed a test example."""

    def label(split: Split, i: int) -> str | None:
        found = np.asarray(split.labels[i])
        return classes[int(found)] if classes and not found.ndim else None

    columns: list[Column[tuple[Any, ...]]] = [
        Column("test", itemgetter(0), COUNT),
        Column("label", itemgetter(1), TEXT, rank=1),
        Column("loss", itemgetter(2), LOSS),
        Column("effect", itemgetter(3), TEXT),
        Column("training", itemgetter(4), COUNT),
        Column("label", itemgetter(5), TEXT, rank=2),
        Column("influence", itemgetter(6), PRODUCT),
    ]
    rows = [
        (x.example, label(test, x.example), x.loss, effect, i, label(train, i), value)
        for x in influenced
        for effect, found in (("helps", x.helpful), ("harms", x.harmful))
        for i, value in found
    ]
    if not any(row[1] or row[5] for row in rows):
        columns = [column for column in columns if column.title != "label"]
    return ["examples by index, from 0: the highest test losses, and training examples", *render(columns, rows, width)]


def _ensemble(path: Path, top: int | None, device: str, trust: training.Trust, as_json: bool) -> None:
    """Print the score of the ensemble of a sweep's members."""
    session, folder = reopened(path, device, trust)
    members = finished.members_of(folder, top)
    score = finished.evaluate(session, folder, members)
    if as_json:
        print_json({"sweep": str(path), "device": device, "members": members, "test": score._asdict()})
        return
    show(f"test    {scores.text(score)}", f"members {len(members)}, the mean of their predictions")
