"""A sweep: its groups and plans with their memory and predicted times, and the run through its rungs and waves.

In each rung the waves of all groups are trained, and the members are ranked after it. Everything that decides how the
sweep goes on is in its folder: states of waves, and the metrics. So a killed sweep continues from there, and ends with
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np

from adtrain import config
from adtrain.config import Config
from adtrain.config.plugged import Trust
from adtrain.config.problems import found
from adtrain.config.records import rounded_text
from adtrain.core import timeline, tree
from adtrain.core.array import Array, array, from_numpy
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError, OutOfMemory
from adtrain.core.kernel import MAX_GRID
from adtrain.data import Split
from adtrain.data.file_array import machine_memory
from adtrain.sweeps import records
from adtrain.sweeps.folder import DAMAGED, OPTIONS, SweepFolder
from adtrain.sweeps.members import Group, Member, groups_of, members_of
from adtrain.sweeps.records import (
    EpochLine,
    MemberEpoch,
    MemberResult,
    OnTest,
    SweepOptions,
    SweepResults,
)
from adtrain.sweeps.step import Settings, empty_tally, zero_member_totals
from adtrain.sweeps.wave import Parts, WaveState, WaveTraining, best_of, joined, side_by_side
from adtrain.text import counted, mebibytes
from adtrain.training import scores
from adtrain.training.checks import check_precision, other_metrics
from adtrain.training.costs import tree_bytes
from adtrain.training.evaluation import batch_size_of
from adtrain.training.examples import held_bytes
from adtrain.training.experiment import LOG_ROWS, placeholders
from adtrain.training.progress import METRICS

MEMORY_SHARE = 0.8
"""The share of the device's memory, or of the host's for the CPU, that a wave may take."""
MAX_WAVE = MAX_GRID[1]
"""Maximum of members of a wave: they are dimension y of the grid of a kernel."""
MEASURED_STEPS = 10
"""Steps of a measurement: as many as one CUDA graph has, or one launch of `resident_steps`."""
ENOUGH_SECONDS = 0.1
"""A measurement that took this long is not repeated."""
MOST_TOGETHER = 8
"""The most groups that are trained side by side: the default of CUDA_DEVICE_MAX_CONNECTIONS, 8 queues."""


@dataclass(frozen=True)
class GroupPlan:
    """What is known of a group before it is trained.

    Attributes:
        waves: the number of members in each wave.
        parameters: of one member.
        bytes: the planned peak of the largest wave on the device, with the data.
        step_seconds: the measured time of a step of the largest wave; None if it was not measured.
        steps: of each member, without halving.
    """

    group: Group
    waves: tuple[int, ...]
    parameters: int
    bytes: int
    steps: int
    step_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """The predicted time of training without evaluation and halving; None if no step was measured."""
        if self.step_seconds is None:
            return None
        return self.step_seconds * self.steps * sum(self.waves) / self.waves[0]


def plan(group: Group, device: str, most: int | None = None) -> GroupPlan:
    """The plan of a group, with as many members in a wave as fit on the device, at most `most` and MAX_WAVE.

    Raises OutOfMemory where a single member does not fit.
    """
    experiment, total = group.experiment, len(group.members)
    count = _even(total, min(total, most or total, MAX_WAVE))
    limit = _limit(device)
    needed = needed_bytes(group, device, count)
    if needed > limit:
        one = needed_bytes(group, device, 1)
        if one > limit:
            raise OutOfMemory(
                f"device {device}: out of memory: one member needs {mebibytes(one)}, "
                f"{mebibytes(limit)} can be used; reduce data.batch_size or the network"
            )
        low, high = 1, count
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if needed_bytes(group, device, middle) <= limit else (low, middle)
        count = _even(total, low)
        needed = needed_bytes(group, device, count)
    sizes = tuple(min(count, total - first) for first in range(0, total, count))
    parameters = sum(prod(x.shape) for x in tree.leaves(experiment.state_types.params))
    return GroupPlan(group, sizes, parameters, needed, experiment.total_steps)


def _even(total: int, most: int) -> int:
    """The size of the largest of as few waves as possible, of at most `most` members, whose sizes are even."""
    return -(-total // -(-total // most))


def together_of(plans: Sequence[GroupPlan], device: str) -> list[list[GroupPlan]]:
    """The plans in lists of groups that are trained side by side, because all of them fit on the device.

    On the CPU each is alone, as a Program uses all cores.
    """
    found: list[list[GroupPlan]] = []
    limit = _limit(device)
    for group_plan in plans:
        last = found[-1] if found else []
        joined = (*last, group_plan)
        alone = device == "cpu" or not last or any(len(x.waves) > 1 for x in joined)
        if alone or len(last) == MOST_TOGETHER or sum(x.bytes for x in joined) > limit:
            found.append([group_plan])
        else:
            last.append(group_plan)
    return found


def needed_bytes(group: Group, device: str, count: int) -> int:
    """The planned peak of a wave of `count` members, in a step on a full batch or in an evaluation, with the data."""
    experiment = group.experiment
    arguments = step_arguments(group, count)
    evaluated = _evaluation_arguments(group, arguments[0], count)
    steps = (group.programs.step, arguments), (group.programs.evaluation, evaluated)
    memories = [backend(device).memory(step.program(*placeholders(given, device))) for step, given in steps]
    largest = max(memory.values + memory.scratch for memory in memories)
    inputs = sum(tree_bytes(x) for x in arguments[:3]) + tree_bytes(arguments[5])
    inputs += (1 + experiment.restores_best) * tree_bytes(arguments[0])  # `WaveTraining.last` and `best`
    data = held_bytes(group.whole, device) + held_bytes(experiment.test, device)
    return inputs + data + largest


def measured(found: GroupPlan, device: str) -> GroupPlan:
    """The plan with the time of a step, measured on a few steps of the largest wave from states of zeros."""
    state, *others = step_arguments(found.group, found.waves[0])
    zeros = tree.map(lambda x: np.zeros(x.shape, x.dtype), state)  # they take no memory until they are written
    arguments = tree.map(lambda x: from_numpy(np.asarray(x), device), (zeros, *others))
    carry: tuple[Any, ...] = arguments[:2]
    seconds = []
    for times in (1, 1, MEASURED_STEPS, MEASURED_STEPS):  # the first one compiles
        carry = (carry[0], carry[1]._replace(position=array(np.int64(0), device=device)))
        started = perf_counter()
        carry = found.group.programs.step.repeat(times, *carry, *arguments[2:])
        backend(device).synchronize()
        seconds.append((perf_counter() - started) / times)
        if len(seconds) > 1 and seconds[-1] * times > ENOUGH_SECONDS:
            break
    return replace(found, step_seconds=min(seconds[1:]))


def step_arguments(group: Group, count: int) -> tuple[Any, ...]:
    """Arguments of the step for `count` members, as NumPy arrays of the right types; most are views of zeros."""
    experiment = group.experiment
    whole, size = group.whole, experiment.full_batch

    def repeated(x: Array) -> np.ndarray:
        return np.broadcast_to(x.numpy(), (count, *x.shape))

    options: dict[str, Any] = {}
    for name in group.options:
        value = experiment.optimizer.numbers()[name]
        values = value if isinstance(value, tuple) else (value,)
        arrays = [np.full(count, x, np.float64) for x in values]
        options[name] = arrays if isinstance(value, tuple) else arrays[0]
    members = () if group.shared_seed is not None else (count,)
    seeds, factors = np.zeros((count, 2), np.uint32), np.zeros((count, LOG_ROWS))
    return (
        tree.map(repeated, experiment.initial_state("cpu", random=True)),
        tree.map(lambda x: x.numpy(), empty_tally(experiment.network.task, count, "cpu")),
        Settings(seeds, factors, options, _target_statistics(group, count)),  # type: ignore[arg-type]
        np.asarray(whole.images),
        whole.labels,
        np.broadcast_to(np.int64(0), (*members, LOG_ROWS, size)),
    )


def _target_statistics(group: Group, count: int) -> list[Any]:
    """`Settings.targets` of `count` members."""
    data = group.experiment.data
    statistics = [data.target_mean, data.target_std] if group.has_own_targets else []
    return [np.tile(np.array(x), (count, 1)) for x in statistics]


def _evaluation_arguments(group: Group, state: Any, count: int) -> tuple[Any, ...]:
    """Arguments of the evaluation of full batches of the test part for `count` members in this state."""
    test = group.experiment.test
    task = group.experiment.network.task
    totals = tree.map(lambda x: x.numpy(), zero_member_totals(task, count, "cpu"))
    order = np.broadcast_to(np.int64(0), (LOG_ROWS, min(batch_size_of(task), len(test))))
    return totals, state.params, state.statistics, test.images, test.labels, order, _target_statistics(group, count)


def _limit(device: str) -> int:
    available = backend(device).available()
    return int(MEMORY_SHARE * (machine_memory() if available is None else available))


@dataclass(frozen=True)
class Session:
    """A sweep that is ready to run. Made by `prepared`."""

    config: Config
    members: Sequence[Member]
    groups: Sequence[Group]
    device: str

    def plans(self, most: int | None = None) -> list[GroupPlan]:
        """The plan of each group, with at most `most` members in a wave. Raises OutOfMemory."""
        return [plan(group, self.device, most) for group in self.groups]

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
        return [measured(x, self.device) for x in plans]

    def lacks(self, rank_by: str) -> str | None:
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
        """The options of a new sweep; `rank_by` is the option --by of the command.

        Raises ConfigError, or AdtrainError for --by, where the members do not have the metric.
        """
        chosen = rank_by or config.build.sweep(self.config).rank_by or self.groups[0].experiment.best_by

        def error(wrong: str) -> AdtrainError:
            return AdtrainError(f"--by: {wrong}") if rank_by else self.config.error_at(("sweep", "rank_by"), wrong)

        if (wrong := self.lacks(chosen)) is not None:
            raise error(wrong)
        criterion = self.groups[0].criterion(chosen)
        if halving and (wrong := self.lacks(str(self.groups[0].halving_criterion(criterion)))) is not None:
            raise error(f"{wrong}, by which members are dropped")
        epochs = max(group.experiment.epochs for group in self.groups)
        return SweepOptions(halving_epochs(epochs, len(self.members)) if halving else (), chosen)


def halving_epochs(epochs: int, members: int) -> tuple[int, ...]:
    """The epochs after which the worse half is dropped: after 1, 2, 4, ... epochs, while two members or more are left.

    Successive halving (Jamieson and Talwalkar, 2016) with a factor of 2.
    """
    found: list[int] = []
    epoch = 1
    while epoch < epochs and members > 1:
        found.append(epoch)
        members = -(-members // 2)
        epoch *= 2
    return tuple(found)


def prepared(cfg: Config, device: str) -> Session:
    """The sweep of a config: members are checked, data are read, nothing is compiled.

    Raises ConfigError and DataError.
    """
    members = members_of(cfg)
    for member in members:
        check_precision(member.config, device)
    return Session(cfg, members, groups_of(cfg, members), device)


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


SAVE_SECONDS = 30.0
"""The least time between two checkpoints within a rung."""


class SweepInterrupted(Exception):
    """The sweep stopped on request; its folder has the states."""


class SweepRun:
    """A sweep that is trained into its folder, with the waves of the plans.

    Args:
        stop: is asked about ten times a second.
        line: gets texts for the user.

    Raises AdtrainError where the members do not have the metric that ranks them, or the folder has lines of others.
    """

    def __init__(
        self,
        session: Session,
        folder: SweepFolder,
        plans: Sequence[GroupPlan],
        stop: Callable[[], bool] = lambda: False,
        line: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.folder, self.members, self.groups = folder, session.members, session.groups
        self.device, self.stop, self.line = session.device, stop, line
        self.waves = {plan.group.number: plan.waves[0] for plan in plans}
        """For each group the largest number of members that are trained at the same time."""
        self.together: Sequence[Sequence[Group]] = [
            [plan.group for plan in same_time] for same_time in together_of(plans, self.device)
        ]
        """The groups, in lists of those that are trained side by side."""
        options, groups = folder.options, session.groups
        if (wrong := session.lacks(options.rank_by)) is not None:
            raise AdtrainError(f"{folder.path / OPTIONS}: rank_by: {wrong}")
        self.metrics = {group.number: group.metrics(options.rank_by) for group in groups}
        self.criterion = groups[0].criterion(options.rank_by)
        self.halving_criterion = groups[0].halving_criterion(self.criterion)
        self.rungs = rungs_of(options, groups)
        self.history: dict[int, dict[int, MemberEpoch]] = {member.number: {} for member in self.members}
        self.survived = dict.fromkeys(self.history, 0)
        """The number of rungs after which each member was kept."""
        self.tests: dict[int, OnTest] = {}
        """The results on the test part of the members that are left in the last rung, by number."""
        self.final: Sequence[tuple[Group, WaveState]] = ()
        """The final state of the wave that was trained last, in memory."""
        self.train_seconds = 0.0
        self.counted_until = 0.0
        """The end of the last epoch of any group, by perf_counter. `train_seconds` contains the time until then."""
        for known in folder.lines_of(groups):
            self._note(known)

    def _note(self, line: EpochLine) -> None:
        self.train_seconds += line.added_seconds
        for scored in line.members:
            self.history[scored.member][scored.epoch] = scored

    def run(self) -> SweepResults:
        """Train the rest, and write the results. Raises SweepInterrupted where `stop` returned True."""
        alive = [member.number for member in self.members]
        resumed = self.folder.states.latest_rung(len(self.rungs))  # earlier rungs are complete
        for rung, end in enumerate(self.rungs):
            for groups in self.together if rung >= resumed else ():
                chosen = [[member for member in group.members if member.number in set(alive)] for group in groups]
                jobs = [self._train_group(rung, end, *each) for each in zip(groups, chosen, strict=True)]
                if not side_by_side(jobs, self.device):
                    raise SweepInterrupted
            if rung > 1:  # a resumed rung whose waves differ starts from the states of the rung before
                self.folder.states.remove(rung - 2)
            self._expect_lines(alive, end)
            if not self._is_last(rung):
                alive = records.survivors(alive, self._models(end), self.halving_criterion)
                self.survived |= dict.fromkeys(alive, rung + 1)
                self.line(f"epoch {end}: keeps {len(alive)} of {len(self.members)} members")
        results = self._results()
        self.folder.write_results(results)
        self.folder.states.remove(len(self.rungs) - 2)
        return results

    def _models(self, end: int) -> dict[int, MemberEpoch]:
        """For each member the epoch whose weights it would end with after the epochs up to `end`, or the failed one."""
        found = {}
        for group in self.groups:
            for number in (member.number for member in group.members):
                epochs = {epoch: x for epoch, x in self.history[number].items() if epoch <= end}
                last = epochs[max(epochs)]
                best = best_of(group.experiment, epochs, end) if group.experiment.restores_best else None
                found[number] = epochs[best.epoch] if best and best.epoch and last.failed_at is None else last
        return found

    def _train_group(self, rung: int, end: int, group: Group, members: Sequence[Member]) -> Parts[bool]:
        """Train a group to the end of a rung; False if `stop` returned True first."""
        last = min(end, group.experiment.epochs)
        size = _even(len(members), self.waves[group.number]) if members else 1
        for wave, first in enumerate(range(0, len(members), size)):
            chosen = members[first : first + size]
            numbers = tuple(member.number for member in chosen)
            start = self.folder.states.read(rung, group, wave)
            if start is not None and start.members != numbers:
                start = None  # of waves of another size
            if start is not None:
                self._expect_lines(numbers, start.epochs)
            if start is not None and start.epochs >= last and not self._is_last(rung):
                continue
            if start is None and rung:
                start = self._states_after(rung - 1, group, numbers)
            if not (yield from self._train_wave(rung, last, group, wave, chosen, start)):
                return False
        return True

    def _states_after(self, rung: int, group: Group, members: Sequence[int]) -> WaveState:
        """The states of these members after a rung, from the files of its waves."""
        parts = []
        for state in self.folder.states.of_waves(rung, group):
            here = [number for number in state.members if number in set(members)]
            parts += [state.only(here)] if here else []
        if missing := set(members).difference(*(part.members for part in parts)):
            raise self.folder.no_state(min(missing))
        return joined(parts).only(members)

    def _expect_lines(self, members: Sequence[int], end: int) -> None:
        """Raise AdtrainError where the metrics lack an epoch up to `end` that one of the members has trained."""
        experiments = {member.number: group.experiment for group in self.groups for member in group.members}
        for number in members:
            known, experiment = self.history[number], experiments[number]
            ended = [epoch for epoch, found in known.items() if found.failed_at is not None]
            if experiment.stops_early(best_of(experiment, known, end)):
                ended.append(max(known))
            last = min(end, experiment.epochs, *ended)
            if missing := [epoch for epoch in range(1, last + 1) if epoch not in known]:
                what = f"found no line for epoch {missing[0]} of member {number}, which was trained"
                raise AdtrainError(f"{self.folder.path / METRICS}: {what}; {DAMAGED}")

    def _train_wave(
        self, rung: int, last: int, group: Group, wave: int, members: Sequence[Member], start: WaveState | None
    ) -> Parts[bool]:
        training = WaveTraining(group, members, self.device, start, self.history, self.metrics[group.number])
        saved = perf_counter()

        def save() -> None:
            if training.epochs == group.experiment.epochs:
                training.end()
            state = training.host_state()
            self.folder.states.write(rung, group.number, wave, state)
            self.final = [(group, state)] if self._is_last(rung) and training.epochs == last else []

        if training.epochs >= last:  # the group has fewer epochs than others; the next rung starts from its state
            save()
        while training.epochs < last:
            if not training.running[: training.count].any():
                training.epochs = last
                save()
                break
            scores = yield from training.epoch_in_parts(self.stop)
            if scores is None:
                save()
                return False
            now = perf_counter()
            added, self.counted_until = min(scores.seconds, now - self.counted_until), now
            line = EpochLine(rung, group.number, scores.epoch, scores.seconds, added, scores.members)
            # The line first: after a kill between the two, the epoch is repeated and its line is written again. A state
            # without its line would leave a gap in the metrics.
            self.folder.append_metrics(line, durable=True)
            if training.epochs == last or perf_counter() - saved >= SAVE_SECONDS:
                save()
                saved = perf_counter()
            self._note(line)
            self._report(group, line)
        if self._is_last(rung):
            yield True
            self.tests.update(zip((x.number for x in members), training.test_results(), strict=True))
        return True

    def _is_last(self, rung: int) -> bool:
        return rung + 1 == len(self.rungs)

    def _report(self, group: Group, line: EpochLine) -> None:
        for failed in (x for x in line.members if x.failed_at is not None):
            settings = ", ".join(f"{key} {rounded_text(x)}" for key, x in self.members[failed.member].values.items())
            kept = f"its weights of epoch {failed.epoch - 1}" if failed.epoch > 1 else "its initial weights"
            self.line(
                f"member {failed.member} ({settings}) failed in epoch {failed.epoch}, at step {failed.failed_at}: "
                f"a loss or a weight is not finite; it keeps {kept}"
            )
        members = counted(len(line.members), "members")
        text = f"group {group.number}: epoch {line.epoch}/{group.experiment.epochs}, {members}"
        values = [x for member in line.members if (x := self.criterion.value(member)) is not None]
        if values:
            best, middle = self.criterion.best(values), float(np.median(values))
            shown = [scores.value_text(self.criterion.metric, x) for x in (best, middle)]
            text += f", best {self.criterion} {shown[0]}, median {shown[1]}"
        self.line(f"{text}, {line.seconds:.1f} s")

    def _results(self) -> SweepResults:
        """The members in the order of their ranks."""
        of_group = {member.number: group.number for group in self.groups for member in group.members}
        models = self._models(self.rungs[-1])
        ranked = records.ranked(models, self.tests, self.survived, self.criterion, self.halving_criterion)
        results = []
        for rank, (number, status, value) in enumerate(ranked, 1):
            model, test = models[number], self.tests[number] if status == "finished" else OnTest(None)
            results.append(
                MemberResult(
                    rank=rank,
                    member=number,
                    group=of_group[number],
                    values=self.members[number].values,
                    status=status,
                    epochs=max(self.history[number]),
                    failed_at=model.failed_at,
                    value=value,
                    train=model.train,
                    validation=model.validation,
                    test=test.score,
                    model_epoch=None if status == "failed" else model.epoch,
                    metrics=cast(Any, test.metrics),
                )
            )
        name, seconds = backend(self.device).device_name(), perf_counter() - timeline.current().began
        higher = self.criterion.higher_is_better
        return SweepResults(str(self.criterion), self.device, name, seconds, self.train_seconds, tuple(results), higher)


def rungs_of(options: SweepOptions, groups: Sequence[Group]) -> list[int]:
    """The epochs at which rungs end; the last one is the end of the training."""
    epochs = max(group.experiment.epochs for group in groups)
    return [*(epoch for epoch in options.halving if epoch < epochs), epochs]
