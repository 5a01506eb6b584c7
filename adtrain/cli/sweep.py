"""`adtrain sweep`: trains the members of a sweep together, ranks them, and writes the sweep's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click

from adtrain import config
from adtrain.cli.names import ConfigName, RunPath
from adtrain.cli.options import (
    FilePath,
    autotune_option,
    device_option,
    json_option,
    plugin_option,
    quiet_option,
    set_autotune,
    set_option,
)
from adtrain.cli.output import is_quiet, message, print_json, progress, show
from adtrain.cli.stop_signals import stop_signals
from adtrain.config.differences import rounded_text
from adtrain.config.records import plain
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.distributed.environment import place
from adtrain.sweeps import member_run
from adtrain.sweeps.folder import SweepFolder, refuse_used
from adtrain.sweeps.members import with_seeds
from adtrain.sweeps.plan import GroupPlan, together_of
from adtrain.sweeps.records import MemberResult, SweepResults
from adtrain.sweeps.run import SweepInterrupted, Watch, members_text
from adtrain.sweeps.session import Session, described, prepared, reopened
from adtrain.table import Column, render, terminal_width
from adtrain.training import scores

MAX_ROWS = 10
"""Members in the printed ranking."""


@click.command(short_help="Train many variants of a config together, and rank them.")
@click.argument("config_path", metavar="[CONFIG]", required=False, type=ConfigName())
@click.option(
    "--resume", "sweep", type=RunPath(), metavar="SWEEP", help="Continue a sweep that was stopped: its folder."
)
@click.option("--halving", is_flag=True, help="Drop the worse half of the members after 1, 2, 4, ... epochs.")
@click.option(
    "--by", "rank_by", metavar="METRIC", help="Rank by this, such as validation_accuracy; overrides sweep.rank_by."
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train at most N members of a group at a time; by default as many as the device's memory holds.",
)
@click.option("--output-dir", type=FilePath(), metavar="DIR", help="The sweep's folder; by default runs/NAME-sweep.")
@device_option
@autotune_option
@set_option
@plugin_option
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; train and write nothing.")
@click.option("--all", "all_rows", is_flag=True, help=f"Print all members, not only the best {MAX_ROWS}.")
@quiet_option("sweep")
@json_option
def command(
    config_path: str | None,
    sweep: Path | None,
    halving: bool,
    rank_by: str | None,
    at_once: int | None,
    output_dir: Path | None,
    device: str,
    autotune: str,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    dry_run: bool,
    all_rows: bool,
    as_json: bool,
) -> None:
    """Train the members of the sweep that the section `sweep` of CONFIG describes.

    Members that differ in seeds, learning rates and other numbers of the optimizer, or in their schedules, are one
    Program; members with other layers or options are groups of their own. A member has the same result whichever others
    are trained beside it. Writes metrics, states and a ranking into the sweep's folder, and the best member as a run.
    """
    if (config_path is None) == (sweep is None):
        raise click.UsageError(
            "found neither CONFIG nor --resume SWEEP" if sweep is None else "--resume takes no CONFIG"
        )
    new_only = {"--halving": halving, "--by": rank_by, "--output-dir": output_dir, "--set": overrides}
    if sweep is not None and (given := [name for name, value in new_only.items() if value]):
        raise click.UsageError(f"{given[0]} is for a new sweep, and --resume SWEEP continues one")
    found = place(os.environ)
    if found is not None and found.size > 1:
        raise click.UsageError(f"{found.launcher} started {found.size} processes, but a sweep runs in one process")
    if output_dir is not None and not dry_run:
        refuse_used(output_dir)
    set_autotune(device, autotune)
    if sweep is not None:
        session, folder = reopened(sweep, device, plugins)
        if folder.results() is not None:
            raise AdtrainError(f"{sweep}: the sweep is finished")
    else:
        cfg = config.load(str(config_path), overrides, plugins)
        session, folder = prepared(cfg, device), None
    train_session(session, folder, halving, rank_by, at_once, output_dir, dry_run, all_rows, as_json)


def train_seeds(
    config_path: str,
    overrides: Sequence[str],
    plugins: Sequence[str],
    count: int,
    device: str,
    output_dir: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """`adtrain train --members`: the sweep of `count` seeds, from the config's own."""
    if output_dir is not None and not dry_run:
        refuse_used(output_dir)
    first = config.load(config_path, [*overrides, "sweep=null"], plugins).training.seed
    session = prepared(config.load(config_path, [*overrides, with_seeds(first, count)], plugins), device)
    train_session(session, None, False, None, None, output_dir, dry_run, False, as_json)


def train_session(
    session: Session,
    folder: SweepFolder | None,
    halving: bool,
    rank_by: str | None,
    at_once: int | None,
    output_dir: Path | None,
    dry_run: bool,
    all_rows: bool,
    as_json: bool,
) -> None:
    """Print the plan, train a new sweep or the one in `folder`, and print the ranking."""
    options = session.options(halving, rank_by) if folder is None else folder.options
    plans = session.plans(at_once)
    lines = plan_lines(session, plans, options.rank_by, options.halving)
    if dry_run:
        if as_json:
            print_json(plan_values(session, plans, options.rank_by, options.halving))
        else:
            show(*lines)
        return
    for line in lines:
        progress(line)
    progress(time_line(session.measured(plans), session.device, options.halving))
    if folder is None:
        folder = SweepFolder.create(session.config, options, output_dir)
    with folder.locked(), ExitStack() as stack:
        folder.truncate_metrics()
        signals = stack.enter_context(stop_signals())
        run = session.run(folder, plans, Watch(stop=signals.stop_requested, line=progress))
        try:
            results = run.run()
        except SweepInterrupted:
            message(f"stopped; {folder.advice}")
            raise SystemExit(signals.exit_code) from None
    if results.members[0].status == "finished":
        member_run.write_run(session, folder, None)
    if as_json:
        print_json({"sweep": str(folder.path), **plain(results)})
    elif is_quiet():
        show(folder.path)
    else:
        show(*ranking_lines(results, None if all_rows else MAX_ROWS), "", *summary_lines(results, folder))


def plan_values(session: Session, plans: Sequence[GroupPlan], rank_by: str, halving: Sequence[int]) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "name": session.config.name,
        "device": session.device,
        "device_name": backend(session.device).device_name(),
        "members": len(session.members),
        "rank_by": rank_by,
        "halving": list(halving),
        "groups": [
            {
                "members": [member.number for member in x.group.members],
                "values": values,
                "waves": list(x.waves),
                "parameters": x.parameters,
                "planned_bytes": x.bytes,
                "steps": x.steps,
            }
            for x, values in zip(plans, described(session.groups), strict=True)
        ],
    }


def plan_lines(session: Session, plans: Sequence[GroupPlan], rank_by: str, halving: Sequence[int]) -> list[str]:
    """The plan as lines of text."""
    count, groups = len(session.members), len(plans)
    lines = [
        f"sweep   {members_text(count)} in {groups} group{'s' * (groups > 1)}, ranked by {rank_by}",
        f"device  {session.device}, {backend(session.device).device_name()}",
    ]
    if halving:
        lines.append(f"halving after epoch {', '.join(map(str, halving))}")
    for group_plan, values in zip(plans, described(session.groups), strict=True):
        members, waves = members_text(len(group_plan.group.members)), group_plan.waves
        named = ", ".join(f"{key} {rounded_text(value)}" for key, value in values.items())
        in_waves = f" in {len(waves)} waves of {waves[0]:,}, one after the other" if len(waves) > 1 else ""
        lines.append(
            f"group {group_plan.group.number} {members}{in_waves} of {group_plan.parameters:,} parameters"
            f"{f' ({named})' if named else ''}, {group_plan.steps:,} steps, memory {group_plan.bytes / 2**20:,.1f} MiB"
        )
    for together in together_of(plans, session.device):
        if len(together) > 1:
            lines.append(f"groups {', '.join(str(x.group.number) for x in together)} side by side")
    return lines


def time_line(plans: Sequence[GroupPlan], device: str, halving: Sequence[int]) -> str:
    """The predicted time, from measured steps."""
    seconds = sum(x.seconds or 0.0 for x in plans)
    of_a_step = ", ".join(f"{1e6 * (x.step_seconds or 0.0) / x.waves[0]:,.2f}" for x in plans)
    reasons = ["by halving"] * bool(halving) + ["by groups side by side"] * (
        len(together_of(plans, device)) < len(plans)
    )
    less = f" at most, less {' and '.join(reasons)}" if reasons else ""
    return f"time    {seconds:,.1f} s of training predicted{less}; a step takes {of_a_step} µs for each member"


def ranking_lines(results: SweepResults, most: int | None) -> list[str]:
    """The ranking as a table, with the columns that differ between members."""
    keys = list(results.members[0].values)
    chosen = results.rank_by
    columns = [Column("rank"), Column("member", rank=1), Column(chosen.replace("_", " "))]
    columns += [Column(key, rank=2) for key in keys]
    others = [name for name in _score_names(results) if name != chosen]
    columns += [Column(name.replace("_", " "), rank=3 + i) for i, name in enumerate(others)]
    columns.append(Column("", text=True))
    shown = results.members[:most]
    lines = render(columns, [_row(x, keys, [chosen, *others]) for x in shown], terminal_width())
    if len(shown) < len(results.members):
        lines.append(f"{len(results.members) - len(shown):,} more members; --all shows them")
    return lines


def _score_names(results: SweepResults) -> list[str]:
    """The scores that members have, such as "test_accuracy"."""
    found: dict[str, None] = {}
    for part in ("test", "validation", "train"):
        score = next((each for x in results.members if (each := getattr(x, part)) is not None), None)
        found |= dict.fromkeys(
            f"{part}_{name}" for name in (scores.metrics_first(list(score._fields)) if score else ())
        )
    return list(found)


def _row(found: MemberResult, keys: Sequence[str], names: Sequence[str]) -> list[str]:
    values = []
    for name in names:
        part, _, metric = name.partition("_")
        score = getattr(found, part)
        values.append("" if score is None else scores.value_text(metric, getattr(score, metric)))
    status = {"finished": "", "dropped": f"dropped after epoch {found.epochs}"}
    told = status.get(found.status, f"failed in epoch {found.epochs}, at step {found.failed_at}")
    return [
        str(found.rank),
        str(found.member),
        values[0],
        *(rounded_text(found.values[key]) for key in keys),
        *values[1:],
        told,
    ]


def summary_lines(results: SweepResults, folder: SweepFolder) -> list[str]:
    """How many members finished, the time, and where the files are."""
    counts = {status: sum(x.status == status for x in results.members) for status in ("finished", "dropped", "failed")}
    told = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    lines = [
        *_over_seeds(results),
        f"members {told}",
        f"time    {results.seconds:,.1f} s in all, {results.train_seconds:,.1f} s training",
        f"sweep   {folder.path}",
    ]
    if results.members[0].status == "finished":
        lines.append(f"best    {member_run.run_path(folder, results.members[0].member)}")
    return lines


def _over_seeds(results: SweepResults) -> list[str]:
    """Mean and sample standard deviation of the test scores, if the members differ in their seeds only."""
    found = [x.test for x in results.members if x.test is not None]
    if len(found) < 2 or set(results.members[0].values) != {"training.seed"}:
        return []
    lines = []
    for title, of_values in (("mean", mean), ("sd", stdev)):
        values = {name: of_values(getattr(score, name) for score in found) for name in found[0]._fields}
        text = ", ".join(f"{name} {scores.value_text(name, x)}" for name, x in values.items())
        lines.append(f"{title:<7} test {text}")
    return lines
