"""The folder of a sweep: its config, options, metrics, states of waves, and results."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from adtrain import config
from adtrain.config import Config, records
from adtrain.config.files import SWEEP_CONFIG
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError
from adtrain.files import append_line, locked_by, read_file, unwritable, write_atomic
from adtrain.sweeps.members import Group
from adtrain.sweeps.records import FORMAT, LAST_EPOCH_FORMAT, EpochLine, SweepData, SweepOptions, SweepResults
from adtrain.sweeps.states import StateFiles
from adtrain.training.metrics import read_lines
from adtrain.training.preparation import with_absolute_paths
from adtrain.training.resumption import changed_data
from adtrain.training.run_folder import create_numbered, plugin_options, write_plugins
from adtrain.training.trust import NONE, Trust

OPTIONS, METRICS, RESULTS = "options.json", "metrics.jsonl", "results.json"
DATA = "data.json"
STATES, RUNS = "states", "members"
DAMAGED = "the file is damaged, or of another sweep"


class SweepFolder:
    """The files of one sweep. Each is replaced as a whole; metrics grow by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.states = StateFiles(path / STATES)

    @classmethod
    def create(cls, cfg: Config, options: SweepOptions, path: Path | None, digests: Mapping[str, str]) -> SweepFolder:
        """Create the folder `path`, or runs/NAME-sweep, with the config and copies of its plug-ins.

        Raises AdtrainError where it holds files.
        """
        folder = cls(_created(cfg.name, path))
        write_atomic(folder.path / OPTIONS, _json(options))
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
        overrides = ["training.final_model=last"] if self.options.format == LAST_EPOCH_FORMAT else []
        cfg = config.load(self.path / SWEEP_CONFIG, overrides, run_plugin=trust.run)
        trust.check(cfg.plugins)
        return cfg

    @property
    def options(self) -> SweepOptions:
        found: SweepOptions = records.parse(SweepOptions, read_file(self.path / OPTIONS), str(self.path / OPTIONS))
        known = (LAST_EPOCH_FORMAT, FORMAT)
        if found.format not in known:
            expected = " and ".join(map(str, known))
            raise AdtrainError(f"{self.path / OPTIONS}: has format {found.format}; this version reads {expected}")
        if list(found.halving) != sorted(set(found.halving)):
            raise AdtrainError(f"{self.path / OPTIONS}: halving: found {list(found.halving)}, expected rising epochs")
        return found

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other processes. Raises AdtrainError where another one holds the lock."""
        return locked_by(self.path / METRICS)

    def append(self, line: EpochLine) -> None:
        """Append a line to the metrics, and wait until it is on the disk."""
        append_line(self.path / METRICS, json.dumps(plain(line), allow_nan=False), durable=True)

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

    def truncate_metrics(self) -> None:
        """Drop the unfinished line of a killed process."""
        path = self.path / METRICS
        content = read_file(path)
        try:
            os.truncate(path, content.rfind(b"\n") + 1)
        except OSError as error:
            raise unwritable(path, error) from error

    def write_data(self, digests: Mapping[str, str]) -> None:
        """Write the digests of the data that the members are trained on."""
        write_atomic(self.path / DATA, _json(SweepData(dict(digests))))

    def changed_data(self, digests: Mapping[str, str]) -> list[str]:
        """The parts of the data that have changed since `write_data`, as notes for the user."""
        found: SweepData = records.parse(SweepData, read_file(self.path / DATA), str(self.path / DATA))
        return changed_data(found.digests, digests)

    def write_results(self, results: SweepResults) -> None:
        write_atomic(self.path / RESULTS, _json(results))

    def results(self) -> SweepResults | None:
        """The results; None if the sweep is not finished."""
        path = self.path / RESULTS
        if not path.exists():
            return None
        found: SweepResults = records.parse(SweepResults, read_file(path), str(path))
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


def _json(record: object) -> bytes:
    return json.dumps(plain(record), indent=2, allow_nan=False).encode() + b"\n"


def _created(name: str, path: Path | None) -> Path:
    """Create the folder `path`, or the first unused of runs/NAME-sweep, runs/NAME-sweep-2, ..."""
    if path is None:
        return create_numbered(f"{name}-sweep")
    refuse_used(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return path
