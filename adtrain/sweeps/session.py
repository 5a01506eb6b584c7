"""A sweep that is ready to run: its members, groups, Programs and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adtrain import config
from adtrain.config import Config
from adtrain.config.problems import found
from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.sweeps.folder import OPTIONS, SweepFolder
from adtrain.sweeps.members import Group, Member, groups_of, members_of
from adtrain.sweeps.plan import GroupPlan, measured, plan, together_of
from adtrain.sweeps.records import SweepOptions
from adtrain.sweeps.run import SweepRun, Watch, halving_epochs
from adtrain.sweeps.wave import Programs
from adtrain.training.checks import check_precision, other_metrics
from adtrain.training.trust import Trust


@dataclass(frozen=True)
class Session:
    """A sweep that is ready to run. Made by `prepared`; `programs` has those of each group by its number."""

    config: Config
    members: Sequence[Member]
    groups: Sequence[Group]
    programs: dict[int, Programs]
    device: str

    def plans(self, most: int | None = None) -> list[GroupPlan]:
        """The plan of each group, with at most `most` members in a wave. Raises OutOfMemory."""
        return [plan(group, self.device, self.programs[group.number], most) for group in self.groups]

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the data of all groups; data that several groups have are named after the first one."""
        found: dict[str, str] = {}
        seen: list[Split] = []
        for group in self.groups:
            if not any(group.whole is split for split in seen):
                seen.append(group.whole)
                parts = {"training": group.whole, "test": group.experiment.test}
                for part, split in parts.items():
                    found |= {f"{part} {name} of group {group.number}": x for name, x in split.digests.items()}
        return found

    def measured(self, plans: Sequence[GroupPlan]) -> list[GroupPlan]:
        """The plans with measured times. Compiles the Programs."""
        return [measured(x, self.device, self.programs[x.group.number]) for x in plans]

    def run(self, folder: SweepFolder, plans: Sequence[GroupPlan], watch: Watch) -> SweepRun:
        """The run of the sweep into a folder, with the waves of the plans. Raises AdtrainError as `SweepRun` does."""
        if (wrong := self._lacks(folder.options.rank_by)) is not None:
            raise AdtrainError(f"{folder.path / OPTIONS}: rank_by: {wrong}")
        waves = {x.group.number: x.waves[0] for x in plans}
        together = [[x.group for x in same_time] for same_time in together_of(plans, self.device)]
        return SweepRun(folder, self.members, self.groups, self.programs, waves, together, self.device, watch)

    def _lacks(self, rank_by: str) -> str | None:
        """What is wrong with a metric that some members do not have; None where all have it."""
        part, _, metric = rank_by.partition("_")
        for group in self.groups:
            task = group.experiment.network.task
            fields, others = task.score_kind._fields, other_metrics(group.experiment.config, task)
            in_part = (*fields, *others) if part in ("validation", "test") else fields if part == "train" else ()
            if metric not in in_part:
                expected = f"expected train_, validation_ or test_ with one of {', '.join(fields)}"
                expected += f", or validation_ or test_ with one of {', '.join(others)}" if others else ""
                return f"found {found(rank_by)}, {expected}"
            if part == "validation" and group.experiment.validation is None:
                return f"found {rank_by}, expected data.validation above 0 for it"
        return None

    def options(self, halving: bool, rank_by: str | None) -> SweepOptions:
        """The options of a new sweep. Raises ConfigError where the members do not have the metric."""
        chosen = rank_by or config.build.sweep(self.config).rank_by or self.groups[0].experiment.best_by
        if (wrong := self._lacks(chosen)) is not None:
            raise self.config.error_at(("sweep", "rank_by"), wrong)
        criterion = self.groups[0].criterion(chosen)
        if halving and (wrong := self._lacks(str(self.groups[0].of_survival(criterion)))) is not None:
            raise self.config.error_at(("sweep", "rank_by"), f"{wrong}, by which members are dropped")
        epochs = max(group.experiment.epochs for group in self.groups)
        return SweepOptions(halving_epochs(epochs, len(self.members)) if halving else (), chosen)


def prepared(cfg: Config, device: str) -> Session:
    """The sweep of a config: members are checked, data are read, nothing is compiled.

    Raises ConfigError and DataError.
    """
    members = members_of(cfg)
    for member in members:
        check_precision(member.config, device)
    groups = groups_of(cfg, members)
    return Session(cfg, members, groups, {group.number: Programs(group) for group in groups}, device)


def reopened(path: Path, device: str, trust: Trust) -> tuple[Session, SweepFolder]:
    """The sweep in a folder. Raises AdtrainError where it is none, and as `SweepFolder.config` and `prepared` do."""
    folder = SweepFolder.open(path)
    return prepared(folder.config(trust), device), folder


def described(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What sets each group apart: keys with one value in all of its members, but not the same in all groups."""
    values = [
        {key: [member.values[key] for member in group.members] for key in group.members[0].values} for group in groups
    ]
    constant = [{key: xs[0] for key, xs in of_group.items() if all(x == xs[0] for x in xs)} for of_group in values]
    return [
        {key: x for key, x in of_group.items() if not all(key in other and other[key] == x for other in constant)}
        for of_group in constant
    ]
