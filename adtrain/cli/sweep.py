"""`adtrain sweep`: trains the members of a sweep together, ranks them, and writes the sweep's folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click

from adtrain import config
from adtrain.cli.options import (
    ConfigName,
    FilePath,
    Refusals,
    RunPath,
    Whole,
    autotune_option,
    device_option,
    json_option,
    plugin_option,
    quiet_option,
    refusing,
    set_autotune,
    set_option,
    trust_option,
)
from adtrain.cli.output import is_quiet, is_silent, message, print_json, progress, show
from adtrain.config.records import plain, rounded_text
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.distributed.environment import place
from adtrain.signals import stop_signals
from adtrain.sweeps import finished
from adtrain.sweeps.folder import SweepFolder, refuse_used
from adtrain.sweeps.members import with_seeds
from adtrain.sweeps.records import MemberResult, SweepResults
from adtrain.sweeps.session import (
    GroupPlan,
    Session,
    SweepInterrupted,
    SweepRun,
    described,
    prepared,
    reopened,
    together_of,
)
from adtrain.table import TEXT, CellFormat, Column, render, terminal_width
from adtrain.text import counted, mebibytes
from adtrain.training import Trust, scores


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
        f"sweep   {counted(count, 'members')} in {counted(groups, 'groups')}, ranked by {rank_by}",
        f"device  {session.device}, {backend(session.device).device_name()}",
    ]
    if halving:
        lines.append(f"halving after epoch {', '.join(map(str, halving))}")
    for group_plan, values in zip(plans, described(session.groups), strict=True):
        members, waves = counted(len(group_plan.group.members), "members"), group_plan.waves
        named = ", ".join(f"{key} {rounded_text(value)}" for key, value in values.items())
        in_waves = f" in {len(waves)} waves of {waves[0]:,}, one after the other" if len(waves) > 1 else ""
        lines.append(
            f"group {group_plan.group.number} {members}{in_waves} of {group_plan.parameters:,} parameters"
            f"{f' ({named})' if named else ''}, {counted(group_plan.steps, 'steps')}, "
            f"memory {mebibytes(group_plan.bytes)}"
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


def ranking_lines(results: SweepResults, folder: SweepFolder, most: int) -> list[str]:
    """The ranking of the best `most` members as a table, with the columns that differ between members."""
    keys = list(results.members[0].values)
    chosen = results.rank_by
    others = [name for name in _score_names(results) if name != chosen]
    columns: list[Column[MemberResult]] = [
        Column("rank", lambda row: row.rank),
        Column("member", lambda row: row.member, rank=1),
        _score_column(chosen, lambda row: row.value),
        *(Column(key, partial(_value, key=key), rank=2) for key in keys),
        *(_score_column(name, partial(_number, name=name), rank) for rank, name in enumerate(others, 3)),
        Column("", lambda row: row.ending, TEXT),
    ]
    shown = results.members[:most]
    lines = render(columns, shown, terminal_width())
    if len(shown) < len(results.members):
        command = f"adtrain report {shlex.quote(str(folder.path))}"
        lines.append(f"{len(results.members) - len(shown):,} more members; {command} shows them")
    return lines


def _score_names(results: SweepResults) -> list[str]:
    """The scores that members have, such as "test_accuracy"."""
    found: list[str] = []
    for part in ("test", "validation", "train"):
        numbers = next((each for x in results.members if (each := _numbers(x, part))), {})
        found += [f"{part}_{name}" for name in scores.metrics_first(list(numbers)) if name in numbers]
    return found


def _numbers(found: MemberResult, part: str) -> dict[str, float]:
    """The score of a member on a part, with its other metrics that are single numbers."""
    score = getattr(found, part)
    return {**(score._asdict() if score else {}), **(scores.single_numbers(found.metrics) if part == "test" else {})}


def _value(found: MemberResult, key: str) -> str:
    return rounded_text(found.values[key])


def _number(found: MemberResult, name: str) -> float | None:
    """A score of a member by its name, such as "test_accuracy"."""
    part, _, metric = name.partition("_")
    return _numbers(found, part).get(metric)


def _score_column(name: str, of: Callable[[MemberResult], float | None], rank: int = 0) -> Column[MemberResult]:
    return Column(name.replace("_", " "), of, CellFormat(partial(scores.value_text, name.partition("_")[2])), rank)


def summary_lines(results: SweepResults, folder: SweepFolder, resumed: bool) -> list[str]:
    """How many members finished, the time, and where the files are. The training may be of several processes."""
    since = "since the resumption" if resumed else "in all"
    counts = {status: sum(x.status == status for x in results.members) for status in ("finished", "dropped", "failed")}
    told = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    lines = [
        *_seed_lines(results),
        f"members {told}",
        f"time    {results.seconds:,.1f} s {since}, {results.train_seconds:,.1f} s training{' in all' * resumed}",
        f"sweep   {folder.path}",
    ]
    if results.members[0].status == "finished":
        lines.append(f"best    {finished.run_path(folder, results.members[0].member)}")
    return lines


def over_seeds(results: SweepResults) -> dict[str, dict[str, float]]:
    """Mean and sample standard deviation of the test scores, if the members differ in their seeds only."""
    found = [numbers for x in results.members if (numbers := _numbers(x, "test"))]
    if len(found) < 2 or set(results.members[0].values) != {"training.seed"}:
        return {}
    columns = {name: [x[name] for x in found] for name in found[0] if all(name in x for x in found)}
    return {
        "mean": {name: mean(values) for name, values in columns.items()},
        "deviation": {name: stdev(values) for name, values in columns.items()},
    }


def _seed_lines(results: SweepResults) -> list[str]:
    found = over_seeds(results)
    texts = {
        title: ", ".join(f"{name} {scores.value_text(name, x)}" for name, x in values.items())
        for title, values in found.items()
    }
    return [f"mean    test {texts['mean']}", f"sd      test {texts['deviation']}"] if found else []


MAX_ROWS = 10
"""Members in the printed ranking."""


def _without_effect(sweep: Path | None, **_: Any) -> Refusals:
    """The parameters that have no effect in this use of the command."""
    if sweep is not None:
        of_new = {"config_path", "halving", "rank_by", "output_dir", "overrides"}
        yield of_new, "--resume SWEEP continues a sweep, and takes no {}"
    else:
        yield {"copies", "override"}, "{} is for --resume SWEEP only"


@click.command()
@click.argument("config_path", metavar="[CONFIG]", required=False, type=ConfigName())
@refusing(_without_effect)
@click.option(
    "--resume", "sweep", type=RunPath(), metavar="SWEEP", help="Continue a sweep that was stopped: its folder."
)
@click.option("--halving", is_flag=True, help="Stop the worse half of the members after 1, 2, 4, ... epochs.")
@click.option(
    "--by",
    "rank_by",
    metavar="METRIC",
    help="Rank by this metric, such as validation_accuracy; overrides sweep.rank_by.",
)
@click.option(
    "--at-once",
    type=Whole(min=1),
    help="Train at most N members of a group at the same time; by default as many as fit into the device's memory.",
)
@click.option(
    "-o", "--output-dir", type=FilePath(), metavar="DIR", help="The sweep's folder; by default runs/NAME-sweep."
)
@device_option
@autotune_option
@set_option
@plugin_option
@trust_option
@click.option(
    "--override",
    is_flag=True,
    help="With --resume: continue although the data, or a plug-in, have changed since the training.",
)
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; train and write nothing.")
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
    copies: bool,
    override: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train many variants of CONFIG together. The section `sweep` of CONFIG says which.

    A variant is a member of the sweep. Members that differ only in seeds, schedules, learning rates and other numbers
    of the optimizer are one group, and are trained as one compiled program. Other differences, such as layers, make
    groups of their own. The result of a member does not depend on the other members.

    The sweep's folder gets metrics, states and a ranking, and the best member as a run.
    """
    if config_path is None and sweep is None:
        raise click.UsageError("found neither CONFIG nor --resume SWEEP")
    _check_place(output_dir, dry_run)
    set_autotune(device, autotune)
    if sweep is not None:
        session, folder = reopened(sweep, device, Trust(plugins, copies, override))
        if (results := folder.results()) is not None:
            if results.members[0].status == "finished":
                finished.write_run(session, folder, None)  # unless it is there: a full disk may have prevented it
            raise AdtrainError(f"{sweep}: the sweep is finished")
        changed = folder.changed_data(session.digests)
        if changed and not override:
            advice = "undo the changes, or accept them with --override"
            raise AdtrainError(f"{sweep}: the sweep was trained on other data: {'; '.join(changed)}; {advice}")
        for note in changed:
            progress(note)
    else:
        cfg = config.load(str(config_path), overrides, plugins)
        session, folder = prepared(cfg, device), None
    train_session(session, folder, halving, rank_by, at_once, output_dir, dry_run, as_json)


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
    """`adtrain train --seeds`: the sweep of `count` seeds, from the config's own.

    Raises ConfigError where the config has a section `sweep`.
    """
    _check_place(output_dir, dry_run)
    cfg = config.load(config_path, overrides, plugins)
    if cfg.sweep is not None:
        advice = "adtrain sweep trains its members, and --set sweep=null leaves it out"
        raise cfg.error_at(("sweep",), f"found a sweep, expected none beside --seeds: {advice}")
    first = cfg.training.seed
    session = prepared(config.load(config_path, [*overrides, with_seeds(first, count)], plugins), device)
    train_session(session, None, False, None, None, output_dir, dry_run, as_json)


def _check_place(output_dir: Path | None, dry_run: bool) -> None:
    """Raise UsageError in one of several processes, and AdtrainError where the folder of a new sweep holds files."""
    found = place(os.environ)
    if found is not None and found.size > 1:
        raise click.UsageError(f"{found.launcher} started {found.size} processes, but a sweep runs in one process")
    if output_dir is not None and not dry_run:
        refuse_used(output_dir)


def train_session(
    session: Session,
    folder: SweepFolder | None,
    halving: bool,
    rank_by: str | None,
    at_once: int | None,
    output_dir: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print the plan, train a new sweep or the one in `folder`, and print the ranking."""
    resumed = folder is not None
    options = session.options(halving, rank_by) if folder is None else folder.options
    plans = session.plans(at_once)
    lines = plan_lines(session, plans, options.rank_by, options.halving)
    if dry_run:
        if as_json:
            print_json(plan_values(session, plans, options.rank_by, options.halving))
        elif not is_quiet():
            show(*lines)
        return
    for line in lines:
        progress(line)
    progress(time_line(session.measured(plans), session.device, options.halving))
    if folder is None:
        folder = SweepFolder.create(session.config, options, output_dir, session.digests)
    with folder.locked(), ExitStack() as stack:
        folder.write_data(session.digests)
        folder.drop_unfinished_line()
        signals = stack.enter_context(stop_signals(is_silent()))
        run = SweepRun(session, folder, plans, signals.stop_requested, progress)
        try:
            results = run.run()
        except SweepInterrupted:
            message(f"stopped; {folder.advice(session.config)}")
            raise SystemExit(signals.exit_code) from None
    has_best = results.members[0].status == "finished"
    if has_best:
        finished.write_run(session, folder, None, run.final)
    if as_json:
        print_json({"sweep": str(folder.path), **plain(results), **over_seeds(results)})
    elif is_quiet():
        show(folder.path)
    else:
        show(*ranking_lines(results, folder, MAX_ROWS), "", *summary_lines(results, folder, resumed))
    if not has_best:
        raise AdtrainError(f"{folder.path}: no member finished; lower the optimizer's lr, or set training.clip_norm")
