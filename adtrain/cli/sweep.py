"""`adtrain sweep`: trains the members of a sweep together, ranks them, and writes the sweep's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
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
from adtrain.cli.sweep_report import over_seeds, plan_lines, plan_values, ranking_lines, summary_lines, time_line
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError
from adtrain.distributed.environment import place
from adtrain.signals import stop_signals
from adtrain.sweeps import finished
from adtrain.sweeps.folder import SweepFolder, refuse_used
from adtrain.sweeps.members import with_seeds
from adtrain.sweeps.session import Session, SweepInterrupted, SweepRun, Watch, prepared, reopened
from adtrain.training import Trust

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
        run = SweepRun(session, folder, plans, Watch(stop=signals.stop_requested, line=progress))
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
