"""`adtrain compare`: tables of the results of runs and the differences of their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from adtrain.cli.names import RunPath
from adtrain.cli.options import json_option
from adtrain.cli.output import print_json, show
from adtrain.config.differences import differences, value_text
from adtrain.config.problems import known
from adtrain.table import Column, render, terminal_width
from adtrain.training import ClassScore, Summary, model_file, read_metrics, scores
from adtrain.training.summary import read_summary

RESULTS = (
    Column("training", rank=2),
    Column("steps", rank=3),
    Column("parameters", rank=4),
    Column("device", rank=5, text=True),
)
MOST_COLUMNS = 3
"""Of runs: more runs have a row each in the table of differences."""


class _Run(NamedTuple):
    """A run's highest step, and its summary, None if it is not finished."""

    path: Path
    steps: int
    summary: Summary | None


@click.command(short_help="Tabulate how runs and their configs differ.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option("--sort", metavar="METRIC", help="Best run first: accuracy, loss, rmse, ..., training or steps.")
@json_option
def command(runs: tuple[Path, ...], sort: str | None, as_json: bool) -> None:
    """Tabulate the results of the runs in the folders RUN, and how their configs differ. Plug-ins are not run."""
    settings = {run: model_file.settings_of(run) for run in runs}
    records = [_Run(run, max((x.step for x in read_metrics(run)), default=0), read_summary(run)) for run in runs]
    if sort is not None:
        records = _sorted(records, sort)
    differing = differences([settings[record.path] for record in records])
    if as_json:
        print_json({"runs": [_result(record) for record in records], "differences": differing})
        return
    width = terminal_width()
    found = dict.fromkeys(name for record in records if record.summary for name in record.summary.test._fields)
    metrics = scores.metrics_first(list(found or ClassScore._fields))
    columns = [Column("run", text=True), *map(Column, metrics[:-1]), Column("loss", rank=1), *RESULTS]
    show(*render(columns, [_cells(record, metrics) for record in records], width))
    if len(records) == 1:
        return
    if not differing:
        show("", "the configs are equal")
        return
    show("", *_matrix(differing, [str(record.path) for record in records], width))


def _sorted(records: Sequence[_Run], metric: str) -> list[_Run]:
    """The runs, the best first; runs without the metric come last. UsageError if no run has it."""
    values = [_measured(record) for record in records]
    if not any(metric in each for each in values):
        names = dict.fromkeys(name for each in values for name in each)
        raise click.UsageError(f"--sort {metric}: no run has it; {known(metric, names)}")
    sign = -1 if metric in scores.HIGHER_IS_BETTER else 1
    order = sorted(range(len(records)), key=lambda i: (metric not in values[i], sign * values[i].get(metric, 0)))
    return [records[i] for i in order]


def _measured(record: _Run) -> dict[str, float]:
    """The numbers that runs can be sorted by."""
    summary = record.summary
    if summary is None:
        return {"steps": record.steps}
    times = {"training": summary.train_seconds, "steps": record.steps, "parameters": summary.parameters}
    return {**summary.test._asdict(), **times}


def _matrix(differing: Mapping[str, Sequence[Any]], runs: Sequence[str], width: int) -> list[str]:
    """The keys that differ against the runs: a row for each run if there are many, otherwise for each key."""
    if len(runs) <= MOST_COLUMNS:
        columns = [Column("differs", text=True), *(Column(run, text=True) for run in runs)]
        return render(columns, [[key, *map(value_text, values)] for key, values in differing.items()], width)
    last = [key.rpartition(".")[2] for key in differing]
    titles = [short if last.count(short) == 1 else key for short, key in zip(last, differing, strict=True)]
    columns = [Column("run", text=True), *(Column(title, rank=i, text=True) for i, title in enumerate(titles))]
    rows = zip(runs, *differing.values(), strict=True)
    return render(columns, [[run, *map(value_text, values)] for run, *values in rows], width)


def _result(record: _Run) -> dict[str, Any]:
    """The run's row in the JSON output; values that an unfinished run lacks are None."""
    summary, fields = record.summary, ("train_seconds", "total_seconds", "parameters", "device", "device_name")
    return {
        "run": str(record.path),
        "finished": summary is not None,
        "test": summary and summary.test._asdict(),
        "steps": record.steps,
        **{field: summary and getattr(summary, field) for field in fields},
    }


def _cells(record: _Run, metrics: Sequence[str]) -> list[str]:
    run, steps, summary = str(record.path), f"{record.steps:,}", record.summary
    if summary is None:
        return [run, "unfinished", *[""] * len(metrics), steps, "", ""]
    test = summary.test._asdict()
    return [
        run,
        *(scores.value_text(name, test[name]) if name in test else "" for name in metrics),
        f"{summary.train_seconds:.2f} s",
        steps,
        f"{summary.parameters:,}",
        f"{summary.device}, {summary.device_name}",
    ]
