"""`adtrain compare`: tables of the results of runs and the differences of their configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from adtrain.cli.options import RunPath, json_option
from adtrain.cli.output import print_json, show
from adtrain.config import is_sweep
from adtrain.config.problems import known
from adtrain.config.records import differences, rounded_text, value_text
from adtrain.sweeps.finished import finished_results
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import SweepResults
from adtrain.table import COUNT, TEXT, CellFormat, Column, render, terminal_width
from adtrain.training import ClassScore, Summary, model_file, read_metrics, scores
from adtrain.training.summary import read_summary

MOST_COLUMNS = 3
"""The most runs that have a column each in the table of differences. More have a row each."""


class _Run(NamedTuple):
    """A run's highest step, and its summary, None if it is not finished."""

    path: Path
    steps: int
    summary: Summary | None


def _of_summary(of: Callable[[Summary], Any]) -> Callable[[_Run], Any]:
    """The value of a run's summary; an unfinished run has none."""
    return lambda row: None if row.summary is None else of(row.summary)


def _metric_columns(names: Sequence[str]) -> Iterator[Column[_Run]]:
    """A column for each metric; the first one marks runs that are not finished."""

    def cell(name: str, row: _Run) -> str | None:
        if row.summary is None:
            return "unfinished" if name == names[0] else None
        value = row.summary.test._asdict().get(name)
        return None if value is None else scores.value_text(name, value)

    for name in names:
        yield Column(name, partial(cell, name), rank=1 if name == "loss" else 0)


RUN: Column[_Run] = Column("run", lambda row: row.path, TEXT)
SECONDS = CellFormat("{:.2f} s".format)
RESULTS: tuple[Column[_Run], ...] = (
    Column("training", _of_summary(lambda summary: summary.train_seconds), SECONDS, rank=2),
    Column("steps", lambda row: row.steps, COUNT, rank=3),
    Column("parameters", _of_summary(lambda summary: summary.parameters), COUNT, rank=4),
    Column("device", _of_summary(lambda summary: f"{summary.device}, {summary.device_name}"), TEXT, rank=5),
)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "--sort", metavar="METRIC", help="Sort by this, the best run first: accuracy, loss, rmse, ..., training or steps."
)
@json_option
def command(runs: tuple[Path, ...], sort: str | None, as_json: bool) -> None:
    """Tabulate the results of the runs in the folders RUN, and how their configs differ. Plug-ins are not run.

    RUN can be the folder of a sweep. Then the table has its best member and the median of its members.
    """
    if any(map(is_sweep, runs)):
        _compare_sweeps(runs, sort, as_json)
        return
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
    columns = [RUN, *_metric_columns(metrics), *RESULTS]
    show(*render(columns, records, width))
    if len(records) == 1:
        return
    if not differing:
        show("", "the configs are equal")
        return
    show("", *_matrix(differing, [str(record.path) for record in records], width))


def _compare_sweeps(paths: Sequence[Path], sort: str | None, as_json: bool) -> None:
    """Tabulate finished sweeps: their best members, the median of the finished ones, and their times."""
    if sort is not None:
        raise click.UsageError("--sort is for runs; the members of a sweep are ranked already")
    if others := [path for path in paths if not is_sweep(path)]:
        raise click.UsageError(f"{others[0]}: found a run beside sweeps, expected sweeps only")
    rows = [sweep_row(path, finished_results(SweepFolder.open(path))) for path in paths]
    if as_json:
        print_json({"sweeps": rows})
        return
    show(*render(SWEEPS, rows, terminal_width()))


def _ranked(row: Mapping[str, Any], name: str) -> str | None:
    return None if row[name] is None else scores.value_text(row["rank_by"].partition("_")[2], row[name])


def _best_values(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {rounded_text(value)}" for key, value in row["values"].items())


SWEEPS: tuple[Column[Mapping[str, Any]], ...] = (
    Column("sweep", itemgetter("sweep"), TEXT),
    Column("ranked by", itemgetter("rank_by"), TEXT),
    Column("best", partial(_ranked, name="best")),
    Column("median", partial(_ranked, name="median")),
    Column("members", itemgetter("members"), COUNT, rank=1),
    Column("failed", itemgetter("failed"), COUNT, rank=4),
    Column("training", itemgetter("train_seconds"), CellFormat("{:,.1f} s".format), rank=3),
    Column("best member", _best_values, TEXT, rank=2),
)


def sweep_row(path: Path, results: SweepResults) -> dict[str, Any]:
    """The results of a sweep as JSON values. Without a finished member there is no best one."""
    values = [x.value for x in results.members if x.status == "finished" and x.value is not None]
    return {
        "sweep": str(path),
        "rank_by": results.rank_by,
        "best": values[0] if values else None,
        "median": median(values) if values else None,
        "member": results.members[0].member if values else None,
        "values": results.members[0].values if values else {},
        "members": len(results.members),
        "failed": sum(x.status == "failed" for x in results.members),
        "train_seconds": results.train_seconds,
    }


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
        titles, ranks = ["differs", *runs], [0] * (1 + len(runs))
        rows = [[key, *map(value_text, values)] for key, values in differing.items()]
    else:
        last = [key.rpartition(".")[2] for key in differing]
        short = [name if last.count(name) == 1 else key for name, key in zip(last, differing, strict=True)]
        titles, ranks = ["run", *short], [0, *range(len(short))]
        rows = [[run, *map(value_text, values)] for run, *values in zip(runs, *differing.values(), strict=True)]
    columns = [Column(title, itemgetter(i), TEXT, ranks[i]) for i, title in enumerate(titles)]
    return render(columns, rows, width)


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
