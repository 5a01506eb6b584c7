"""`adtrain compare`: tables of the results of runs and the differences of their configs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from adtrain.cli.names import RunPath
from adtrain.cli.options import json_option
from adtrain.cli.output import print_json, show
from adtrain.config.problems import PathParts, dotted
from adtrain.table import Column, render, terminal_width
from adtrain.training import ClassScore, Summary, model_file, read_metrics, scores
from adtrain.training.summary import read_summary

RESULTS = (
    Column("training", rank=2),
    Column("steps", rank=3),
    Column("parameters", rank=4),
    Column("device", rank=5, text=True),
)
DIFFERENCES = (Column("differs", text=True), Column("run", text=True), Column("value", text=True))


class _Run(NamedTuple):
    """A run's highest step, and its summary, None if it is not finished."""

    path: Path
    steps: int
    summary: Summary | None


@click.command(short_help="Tabulate how runs and their configs differ.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@json_option
def command(runs: tuple[Path, ...], as_json: bool) -> None:
    """Tabulate the test metrics and loss, training time, steps, parameters and device of the runs in the folders RUN,
    in the given order, and the differences of their configs. Plug-ins are not run.
    """
    differing = differences([model_file.settings_of(run) for run in runs])
    records = [_Run(run, max((x.step for x in read_metrics(run)), default=0), read_summary(run)) for run in runs]
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
    rows = [
        [key if first else "", str(run), _text(value)]
        for key, values in differing.items()
        for first, run, value in zip([True, *[False] * len(runs)], runs, values, strict=False)
    ]
    show("", *render(DIFFERENCES, rows, width))


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
