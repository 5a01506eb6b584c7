"""Runs a sweep: its rungs, in each rung the waves of all groups, and the ranking of the members after each rung.

Everything that decides how the sweep goes on is in its folder: states of waves, and the metrics. So a killed sweep
continues from there, and ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import numpy as np

from adtrain.config.differences import rounded_text
from adtrain.core import timeline
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.sweeps import records
from adtrain.sweeps.folder import DAMAGED, OPTIONS, SweepFolder
from adtrain.sweeps.members import Group, Member
from adtrain.sweeps.records import EpochLine, MemberEpoch, MemberResult, OnTest, SweepOptions, SweepResults
from adtrain.sweeps.session import GroupPlan, Session, together_of
from adtrain.sweeps.wave import Parts, WaveState, WaveTraining, best_of, joined, side_by_side
from adtrain.text import counted
from adtrain.training import scores
from adtrain.training.progress import METRICS

SAVE_SECONDS = 30.0
"""The least time between two checkpoints within a rung."""


class SweepInterrupted(Exception):
    """The sweep stopped on request; its folder has the states."""


@dataclass(frozen=True)
class Watch:
    """Who follows a sweep: `stop` is asked about ten times a second, `line` gets texts."""

    stop: Callable[[], bool] = lambda: False
    line: Callable[[str], object] = lambda text: None


class SweepRun:
    """A sweep that is trained into its folder, with the waves of the plans.

    Raises AdtrainError where the members do not have the metric that ranks them, or the folder has lines of others.
    """

    def __init__(
        self, session: Session, folder: SweepFolder, plans: Sequence[GroupPlan], watch: Watch = Watch()
    ) -> None:
        self.folder, self.members, self.groups = folder, session.members, session.groups
        self.device, self.watch = session.device, watch
        self.waves = {plan.group.number: plan.waves[0] for plan in plans}
        """For each group the largest number of members that are trained at the same time."""
        self.together = [[plan.group for plan in same_time] for same_time in together_of(plans, self.device)]
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
        for line in folder.lines_of(groups):
            self._note(line)

    def _note(self, line: EpochLine) -> None:
        self.train_seconds += line.added_seconds
        for found in line.members:
            self.history[found.member][found.epoch] = found

    def run(self) -> SweepResults:
        """Train the rest, and write the results. Raises SweepInterrupted where `watch.stop` returned True."""
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
                self.watch.line(f"epoch {end}: keeps {len(alive)} of {len(self.members)} members")
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
        """Train a group to the end of a rung; False if `watch.stop` returned True first."""
        last = min(end, group.experiment.epochs)
        for wave, chosen in enumerate(self._in_waves(group, members)):
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

    def _in_waves(self, group: Group, members: Sequence[Member]) -> list[Sequence[Member]]:
        if not members:
            return []
        count = -(-len(members) // self.waves[group.number])
        size = -(-len(members) // count)
        return [members[first : first + size] for first in range(0, len(members), size)]

    def _states_after(self, rung: int, group: Group, members: Sequence[int]) -> WaveState:
        """The states of these members after a rung, from the files of its waves."""
        parts = []
        for found in self.folder.states.of_waves(rung, group):
            here = [number for number in found.members if number in set(members)]
            parts += [found.only(here)] if here else []
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
            scores = yield from training.epoch_in_parts(self.watch.stop)
            if scores is None:
                save()
                return False
            now = perf_counter()
            added, self.counted_until = min(scores.seconds, now - self.counted_until), now
            line = EpochLine(rung, group.number, scores.epoch, scores.seconds, added, scores.members)
            # The line first: after a kill between the two, the epoch is repeated and its line is written again. A state
            # without its line would leave a gap in the metrics.
            self.folder.append(line)
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
            self.watch.line(
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
        self.watch.line(f"{text}, {line.seconds:.1f} s")

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
