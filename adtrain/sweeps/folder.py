"""The folder of a sweep: its config, options, metrics, the states of waves, and the results."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import config
from adtrain.config import Config, records
from adtrain.config.records import plain
from adtrain.config.values import Duration, Total
from adtrain.core import tree
from adtrain.core.errors import AdtrainError
from adtrain.files import locked_by, read_regular, remove_temporaries, unwritable, write_atomic
from adtrain.plugins import loaded
from adtrain.sweeps.members import Group
from adtrain.sweeps.step import empty_tally
from adtrain.sweeps.wave import WaveState
from adtrain.training import tensor_file
from adtrain.training.preparation import with_absolute_paths
from adtrain.training.run_folder import DEFAULT_PARENT
from adtrain.training.scores import Score
from adtrain.training.step import TrainState

SWEEP, OPTIONS, METRICS, RESULTS = "sweep.yaml", "options.json", "metrics.jsonl", "results.json"
STATES, RUNS = "states", "members"
FORMAT = 1


@dataclass(frozen=True)
class SweepOptions:
    """Options of the command that decide about the result.

    Attributes:
        halving: the epochs after which the worse half of the members is dropped.
        rank_by: the metric that ranks members.
    """

    halving: tuple[Total, ...]
    rank_by: str
    format: Total = FORMAT


@dataclass(frozen=True)
class MemberEpoch:
    """A member's scores after an epoch. `failed_at` is the first step with a loss that is not finite."""

    member: Total
    epoch: Total
    train: Score | None
    validation: Score | None
    failed_at: Total | None


@dataclass(frozen=True)
class EpochLine:
    """The line of an epoch of a wave in metrics.jsonl."""

    rung: Total
    group: Total
    epoch: Total
    seconds: Duration
    members: tuple[MemberEpoch, ...]


@dataclass(frozen=True)
class MemberResult:
    """The result of a member.

    Attributes:
        rank: from 1, the best member. Dropped members follow finished ones, and failed members come last.
        status: "finished", "dropped" by halving, or "failed".
        value: by `SweepOptions.rank_by`, of the last epoch; None if it failed.
        train, validation: of the last epoch. test: None if it was dropped or failed.
    """

    rank: Total
    member: Total
    group: Total
    values: dict[str, Any]
    status: str
    epochs: Total
    failed_at: Total | None
    value: float | None
    train: Score | None
    validation: Score | None
    test: Score | None


@dataclass(frozen=True)
class SweepResults:
    """The content of results.json: the members in the order of their ranks."""

    rank_by: str
    device: str
    device_name: str
    seconds: Duration
    train_seconds: Duration
    members: tuple[MemberResult, ...]


@dataclass(frozen=True)
class _StateMetadata:
    """The metadata of a file of a wave's state."""

    members: tuple[Total, ...]
    epochs: Total
    batches: Total


class SweepFolder:
    """The files of one sweep. Each is replaced as a whole; metrics grow by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, cfg: Config, options: SweepOptions, path: Path | None) -> SweepFolder:
        """Create the folder `path`, or runs/NAME-sweep, with the config. Raises AdtrainError where it holds files."""
        folder = cls(_created(cfg.name, path))
        write_atomic(folder.path / OPTIONS, _json(options))
        write_atomic(folder.path / METRICS, b"")
        write_atomic(folder.path / SWEEP, config.dump(_with_absolute_files(cfg)).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> SweepFolder:
        """The folder of a sweep. Raises AdtrainError where it is none."""
        if not is_sweep(path):
            kind = "a file" if path.is_file() else "a folder without sweep.yaml" if path.exists() else "nothing"
            raise AdtrainError(f"{path}: found {kind}, expected the folder of a sweep of adtrain sweep")
        return cls(path)

    def config(self, plugins: Sequence[str] = ()) -> Config:
        """The config of the sweep."""
        return config.load(self.path / SWEEP, (), plugins)

    @property
    def options(self) -> SweepOptions:
        found: SweepOptions = records.parse(SweepOptions, _read(self.path / OPTIONS), str(self.path / OPTIONS))
        if found.format != FORMAT:
            raise AdtrainError(f"{self.path / OPTIONS}: has format {found.format}; this version reads format {FORMAT}")
        return found

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other processes. Raises AdtrainError where another one holds the lock."""
        return locked_by(self.path / METRICS)

    def append(self, line: EpochLine) -> None:
        """Append a line to the metrics, and wait until it is on the disk."""
        path = self.path / METRICS
        text = json.dumps(plain(line), allow_nan=False) + "\n"
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, size)
            raise unwritable(path, error) from error

    def lines(self) -> list[EpochLine]:
        """The epochs of all waves. If an epoch was repeated after a resumption, its last line counts."""
        path = self.path / METRICS
        content = _read(path)
        whole = content[: content.rfind(b"\n") + 1]
        found: dict[tuple[int, tuple[int, ...]], EpochLine] = {}
        for number, text in enumerate(whole.splitlines(), 1):
            line: EpochLine = records.parse(EpochLine, text, f"{path}:{number}")
            found[line.epoch, tuple(x.member for x in line.members)] = line
        return list(found.values())

    def truncate_metrics(self) -> None:
        """Drop the unfinished line of a killed process."""
        path = self.path / METRICS
        content = _read(path)
        try:
            os.truncate(path, content.rfind(b"\n") + 1)
        except OSError as error:
            raise unwritable(path, error) from error

    def state_path(self, rung: int, group: int, wave: int) -> Path:
        """The file of a wave's state."""
        return self.path / STATES / f"rung{rung}-group{group}-wave{wave}.safetensors"

    def write_state(self, rung: int, group: int, wave: int, state: WaveState) -> None:
        """Replace the file of a wave's state. Raises AdtrainError where it cannot be written."""
        path = self.state_path(rung, group, wave)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
        remove_temporaries(path)
        tally = {} if state.tally is None else tensor_file.named(state.tally, prefix="tally.")
        arrays = {**_names(state.state), **tally}
        about = _StateMetadata(state.members, state.epochs, state.batches)
        write_atomic(path, tensor_file.encode(arrays, about))

    def read_state(self, rung: int, group: Group, wave: int) -> WaveState | None:
        """The state of a wave; None if there is none yet. Raises AdtrainError where it does not fit the group."""
        path = self.state_path(rung, group.number, wave)
        if not path.exists():
            return None
        file = tensor_file.TensorFile(path)
        about = file.metadata(_StateMetadata)
        count, experiment = len(about.members), group.experiment
        one = experiment.random_initial_state("cpu")
        expected = {name: np.broadcast_to(x.numpy(), (count, *x.shape)) for name, x in _names(one).items()}
        tally = tree.map(lambda x: x.numpy(), empty_tally(experiment.network.task, count, "cpu"))
        named = tensor_file.named(tally, prefix="tally.")
        arrays = file.read({**expected, **(named if about.batches else {})}, "the sweep's members", finite=False)
        state: TrainState = tree.unflatten(tree.flatten(one)[1], [arrays[name] for name in expected])
        found = tree.unflatten(tree.flatten(tally)[1], [arrays[name] for name in named]) if about.batches else None
        return WaveState(about.members, about.epochs, about.batches, state, found)

    def remove_states(self, rung: int) -> None:
        """Remove the states of a rung that the next one has replaced."""
        for path in (self.path / STATES).glob(f"rung{rung}-*.safetensors"):
            path.unlink(missing_ok=True)

    def write_results(self, results: SweepResults) -> None:
        write_atomic(self.path / RESULTS, _json(results))

    def results(self) -> SweepResults | None:
        """The results; None if the sweep is not finished."""
        path = self.path / RESULTS
        if not path.exists():
            return None
        found: SweepResults = records.parse(SweepResults, _read(path), str(path))
        return found

    @property
    def advice(self) -> str:
        """How to continue the sweep after it stopped."""
        return f"continue with: adtrain sweep --resume {shlex.quote(str(self.path))}"


def _with_absolute_files(cfg: Config) -> Config:
    """The config with absolute paths, also of its plug-ins, so that the copy in the folder works."""
    absolute = with_absolute_paths(cfg)
    if cfg.plugins is None:
        return absolute
    files = [str(loaded(plugin.sha256 or "").path) for plugin in cfg.plugins]
    named = [
        plugin.model_copy(update={"file": file if plugin.file.endswith(".py") else plugin.file})
        for plugin, file in zip(cfg.plugins, files, strict=True)
    ]
    return absolute.model_copy(update={"plugins": named})


def is_sweep(path: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (path / SWEEP).is_file()


def _names(state: TrainState) -> dict[str, Any]:
    model = tensor_file.named(state.params, state.statistics)
    return {**model, **tensor_file.named(state.optimizer, prefix=tensor_file.OPTIMIZER)}


def _json(record: object) -> bytes:
    return json.dumps(plain(record), indent=2, allow_nan=False).encode() + b"\n"


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise AdtrainError(f"{path}: cannot be read ({error.strerror or error})") from None


def _created(name: str, path: Path | None) -> Path:
    """Create the folder `path`, or the first unused of runs/NAME-sweep, runs/NAME-sweep-2, ..."""
    if path is None:
        names = (f"{name}-sweep{'' if n == 1 else f'-{n}'}" for n in count(1))
        for candidate in (DEFAULT_PARENT / name for name in names):
            try:
                candidate.mkdir(parents=True)
                return candidate
            except FileExistsError:
                continue
            except OSError as error:
                raise unwritable(candidate, error) from error
        raise AssertionError
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise AdtrainError(f"{path}: already exists and is not an empty folder; give another --output-dir")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return path
