"""`adtrain compare`: tables of the results of runs and the differences of their configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from adtrain.cli.names import RunPath
from adtrain.cli.options import json_option
from adtrain.cli.output import print_json, show
from adtrain.config.problems import PathParts, dotted, known
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
        return render(columns, [[key, *map(_text, values)] for key, values in differing.items()], width)
    last = [key.rpartition(".")[2] for key in differing]
    titles = [short if last.count(short) == 1 else key for short, key in zip(last, differing, strict=True)]
    columns = [Column("run", text=True), *(Column(title, rank=i, text=True) for i, title in enumerate(titles))]
    rows = zip(runs, *differing.values(), strict=True)
    return render(columns, [[run, *map(_text, values)] for run, *values in rows], width)


def differences(values: Sequence[Any], path: PathParts = ()) -> dict[str, list[Any]]:
    """Compare one value per config; maps the dotted keys that differ to all values, None where a key is missing.

    Mappings, and lists of equal length, are compared recursively. Mappings with a single key are choices, such as an
    optimizer or a layer: different choices are one difference, not one for each option.
    """
    if all(value == values[0] for value in values):
        return {}
    parts: Iterable[str | int] = ()
    if all(isinstance(value, dict) for value in values) and not _other_choice(values):
        parts = dict.fromkeys(key for value in values for key in value)
        inner = [[value.get(part) for value in values] for part in parts]
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        parts = range(len(values[0]))
        inner = [[value[part] for value in values] for part in parts]
    else:
        return {dotted(path): list(values)}
    found: dict[str, list[Any]] = {}
    for part, below in zip(parts, inner, strict=True):
        found |= differences(below, (*path, part))
    return found


def _other_choice(values: Sequence[dict[str, Any]]) -> bool:
    return all(len(value) == 1 for value in values) and any(value.keys() != values[0].keys() for value in values)


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


def _text(value: Any, brief: bool = False) -> str:
    """A config value on one line. With `brief`, a choice such as a layer is shortened to its name."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(_text(item, brief=True) for item in value)}]"
        case dict() if brief:
            return ", ".join(value)
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)
