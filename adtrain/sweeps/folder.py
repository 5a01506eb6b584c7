"""The folder of a sweep: its config, options, metrics, states of waves, and results."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import config
from adtrain.config import Config, records
from adtrain.config.names import SWEEP_CONFIG
from adtrain.config.plugged import NONE, Trust
from adtrain.config.records import Total
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.files import make_folder, remove_temporaries, unwritable, write_atomic
from adtrain.sweeps.members import Group
from adtrain.sweeps.records import FORMAT, EpochLine, SweepData, SweepOptions, SweepResults
from adtrain.sweeps.step import empty_tally
from adtrain.sweeps.wave import WaveState
from adtrain.training import tensor_file
from adtrain.training.checkpoint import named_state
from adtrain.training.preparation import with_absolute_paths
from adtrain.training.progress import METRICS, MetricsFolder, read_lines
from adtrain.training.run_folder import changed_data, create_numbered, plugin_options, write_plugins
from adtrain.training.step import TrainState

TALLY, LAST, BEST = "tally.", "last.", "best."
"""The prefixes of the names of a tally's arrays, and of the states after the last and after the best epoch."""


@dataclass(frozen=True)
class _Metadata:
    """The metadata of a file; see `WaveState`."""

    members: tuple[Total, ...]
    epochs: Total
    batches: Total
    frozen: tuple[Total, ...]


@dataclass(frozen=True)
class StateFiles:
    """The files in a folder: one for each wave of a group in a rung. Each is replaced as a whole."""

    folder: Path

    def path(self, rung: int, group: int, wave: int) -> Path:
        """The file of a wave's state."""
        return self.folder / f"rung{rung}-group{group}-wave{wave}.safetensors"

    def write(self, rung: int, group: int, wave: int, state: WaveState) -> None:
        """Replace the file of a wave's state. Raises AdtrainError where it cannot be written."""
        path = self.path(rung, group, wave)
        make_folder(path.parent)
        remove_temporaries(path)
        arrays = named_state(state.state)
        if state.tally is not None and state.last is not None:
            arrays |= tensor_file.named(state.tally, prefix=TALLY)
            arrays |= named_state(state.last, LAST)
        if state.best is not None:
            arrays |= named_state(state.best, BEST)
        about = _Metadata(state.members, state.epochs, state.batches, state.frozen)
        write_atomic(path, tensor_file.parts(arrays, about))

    def read(self, rung: int, group: Group, wave: int) -> WaveState | None:
        """The state of a wave; None if there is none yet. Raises AdtrainError where it does not fit the group."""
        path = self.path(rung, group.number, wave)
        if not path.exists():
            return None
        file = tensor_file.TensorFile(path)
        about = file.metadata(_Metadata)
        size, experiment = len(about.members), group.experiment
        known = {member.number for member in group.members}
        if not (
            set(about.frozen) <= set(about.members) <= known
            and 0 < size == len(set(about.members))
            and about.epochs <= experiment.epochs
            and about.batches <= experiment.steps_per_epoch * (about.epochs < experiment.epochs)
        ):
            raise AdtrainError(f"{path}: found metadata that do not fit the members of the sweep: the file is damaged")
        state: TrainState = tree.map(
            lambda x: np.broadcast_to(np.zeros((), x.dtype), (size, *x.shape)), experiment.state_types
        )
        tally = tree.map(lambda x: x.numpy(), empty_tally(experiment.network.task, size, "cpu"))
        parts = {"": named_state(state)}
        if about.batches:
            parts |= {TALLY: tensor_file.named(tally, prefix=TALLY), LAST: named_state(state, LAST)}
        if experiment.restores_best and about.epochs < experiment.epochs:
            parts[BEST] = named_state(state, BEST)
        expected = {name: x for names in parts.values() for name, x in names.items()}
        arrays = file.read(expected, "the sweep's members", finite=False)

        def of_part(like: Any, part: str) -> Any:
            return tree.unflatten(tree.flatten(like)[1], [arrays[name] for name in parts[part]])

        best = of_part(state, BEST) if BEST in parts else None
        found = WaveState(about.members, about.epochs, about.batches, of_part(state, ""), about.frozen, best)
        if not about.batches:
            return found
        return replace(found, tally=of_part(tally, TALLY), last=of_part(state, LAST))

    def of_waves(self, rung: int, group: Group) -> Iterator[WaveState]:
        """The states of all waves of a group, one in memory at a time."""
        for wave in count():
            if (state := self.read(rung, group, wave)) is None:
                return
            yield state

    def latest_rung(self, rungs: int) -> int:
        """The number of the last one of `rungs` rungs that has a stored state; 0 if there is none."""
        return next((x for x in range(rungs - 1, 0, -1) if any(self.folder.glob(f"rung{x}-*.safetensors"))), 0)

    def remove(self, rung: int) -> None:
        """Remove the states of a rung that the next one has replaced."""
        for path in self.folder.glob(f"rung{rung}-*.safetensors"):
            path.unlink(missing_ok=True)


OPTIONS, RESULTS, DATA = "options.json", "results.json", "data.json"
STATES, RUNS = "states", "members"
DAMAGED = "the file is damaged, or of another sweep"


class SweepFolder(MetricsFolder):
    """The files of one sweep. Each is replaced as a whole; metrics grow by whole lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.states = StateFiles(path / STATES)

    @classmethod
    def create(cls, cfg: Config, options: SweepOptions, path: Path | None, digests: Mapping[str, str]) -> SweepFolder:
        """Create the folder `path`, or the first unused of runs/NAME-sweep, runs/NAME-sweep-2, ...

        It gets the config and copies of its plug-ins.

        Raises AdtrainError where it holds files.
        """
        if path is None:
            path = create_numbered(f"{cfg.name}-sweep")
        else:
            refuse_used(path)
            make_folder(path)
        folder = cls(path)
        records.write(folder.path / OPTIONS, options)
        folder.write_data(digests)
        write_atomic(folder.path / METRICS, b"")
        absolute = with_absolute_paths(cfg)
        write_plugins(absolute, folder.path)
        write_atomic(folder.path / SWEEP_CONFIG, config.dump(absolute).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> SweepFolder:
        """The folder of a sweep. Raises AdtrainError where it is none."""
        if not config.is_sweep(path):
            kind = "a file" if path.is_file() else "a folder without sweep.yaml" if path.exists() else "nothing"
            raise AdtrainError(f"{path}: found {kind}, expected the folder of a sweep of adtrain sweep")
        return cls(path)

    def config(self, trust: Trust = NONE) -> Config:
        """The config of the sweep. Raises ConfigError where `trust` does not allow to run one of its plug-ins."""
        cfg = config.load(self.path / SWEEP_CONFIG, run_plugin=trust.run)
        trust.check(cfg.plugins)
        return cfg

    @property
    def options(self) -> SweepOptions:
        """The options. Raises AdtrainError for those of another version, and for damaged ones."""
        found = records.read(SweepOptions, self.path / OPTIONS)
        if found.format != FORMAT:
            raise AdtrainError(f"{self.path / OPTIONS}: has format {found.format}; this version reads {FORMAT}")
        if list(found.halving) != sorted(set(found.halving)):
            raise AdtrainError(f"{self.path / OPTIONS}: halving: found {list(found.halving)}, expected rising epochs")
        return found

    def lines(self) -> list[EpochLine]:
        """The epochs of all waves; lines are skipped as by `training.read_metrics`.

        If an epoch was repeated after a resumption, its last line counts.
        """
        found: dict[tuple[int, tuple[int, ...]], EpochLine] = {}
        for line in read_lines(self.path / METRICS, EpochLine):
            found[line.epoch, tuple(x.member for x in line.members)] = line
        return list(found.values())

    def lines_of(self, groups: Sequence[Group]) -> list[EpochLine]:
        """The epochs of all waves of these groups. Raises AdtrainError for a line of another sweep."""
        of_member = {member.number: group.experiment for group in groups for member in group.members}
        lines = self.lines()
        for found in (x for line in lines for x in line.members):
            experiment = of_member.get(found.member)
            if experiment is None or found.epoch > experiment.epochs:
                what = f"found epoch {found.epoch} of member {found.member}, which the sweep does not have"
                raise AdtrainError(f"{self.path / METRICS}: {what}; {DAMAGED}")
            kind = experiment.network.task.score_kind
            if any(not isinstance(score, kind) for score in (found.train, found.validation) if score is not None):
                metrics = ", ".join(kind._fields)
                what = f"found metrics of member {found.member} other than {metrics}"
                raise AdtrainError(f"{self.path / METRICS}: {what}; {DAMAGED}")
        return lines

    def write_data(self, digests: Mapping[str, str]) -> None:
        """Write the digests of the data that the members are trained on."""
        records.write(self.path / DATA, SweepData(dict(digests)))

    def changed_data(self, digests: Mapping[str, str]) -> list[str]:
        """The parts of the data that have changed since `write_data`, as notes for the user."""
        return changed_data(records.read(SweepData, self.path / DATA).digests, digests)

    def write_results(self, results: SweepResults) -> None:
        records.write(self.path / RESULTS, results)

    def results(self) -> SweepResults | None:
        """The results; None if the sweep is not finished. Raises AdtrainError for damaged ones."""
        path = self.path / RESULTS
        if not path.exists():
            return None
        found = records.read(SweepResults, path)
        if (wrong := found.disagreement()) is not None:
            raise AdtrainError(f"{path}: found {wrong}; {DAMAGED}")
        return found

    def no_state(self, number: int) -> AdtrainError:
        """The error where the file with the state of a member is missing."""
        return AdtrainError(f"{self.path}: found no state of member {number}, expected one in its folder {STATES}")

    def advice(self, cfg: Config | None = None) -> str:
        """How to continue the sweep after it stopped; with its config, also with its plug-ins."""
        named = "" if cfg is None else plugin_options(cfg)
        return f"continue with: adtrain sweep --resume {shlex.quote(str(self.path))}{named}"


def refuse_used(path: Path) -> None:
    """Raise AdtrainError where a new sweep cannot be written to `path`, because files are there."""
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise unwritable(path, error) from error
    if used:
        raise AdtrainError(f"{path}: already exists and is not an empty folder; give another --output-dir")
