"""What `adtrain sweep` prints: the plan, the predicted time, the ranking and the summary."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any

from adtrain.config.differences import rounded_text
from adtrain.core.backend import backend
from adtrain.sweeps import finished
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import MemberResult, SweepResults
from adtrain.sweeps.session import GroupPlan, Session, described, together_of
from adtrain.table import TEXT, CellFormat, Column, render, terminal_width
from adtrain.text import counted, mebibytes
from adtrain.training import scores


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
