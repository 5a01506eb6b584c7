"""The folder of a run: its files, a training that writes them, and the resumption of a run.

The files are the config, metrics, model and checkpoints, and the summary when the run is over.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from adtrain import config, plugins
from adtrain.config import Config, plugged, records
from adtrain.config.plugged import NONE, Trust
from adtrain.config.problems import dotted, found
from adtrain.config.records import leaves, plain
from adtrain.core import communicator
from adtrain.core.errors import AdtrainError
from adtrain.core.timeline import during
from adtrain.data import DataError
from adtrain.files import (
    Content,
    Unwritable,
    make_folder,
    read_file,
    read_regular,
    remove_temporaries,
    unwritable,
    write_atomic,
)
from adtrain.training import checkpoint, model_file
from adtrain.training.checkpoint import Checkpoint, CheckpointFile, encode, fetch, of_model
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.preparation import prepare
from adtrain.training.progress import (
    LOST,
    METRICS,
    Best,
    Epoch,
    Interval,
    MetricsFolder,
    Progress,
    ResumedAt,
    Stopped,
    StopReason,
    Tested,
    Validated,
    read_metrics,
)
from adtrain.training.scores import single_numbers
from adtrain.training.step import TrainState, averaged
from adtrain.training.summary import SUMMARY, Summary
from adtrain.training.tensor_file import MODEL
from adtrain.training.trainer import NotFinite, Observer, Result, Start, ended, run

CONFIG = "config.yaml"
LAST, BEST = "last.safetensors", "best.safetensors"
ARRAYS, ROWS = "arrays.npz", "rows.csv"
ALL = (CONFIG, METRICS, MODEL, LAST, BEST, SUMMARY, ARRAYS, ROWS)
NO_DATA: Mapping[str, bytes] = {}
DEFAULT_PARENT = Path("runs")


class RunFolder(MetricsFolder):
    """The files of one run. Each is replaced as a whole; metrics grow by whole lines."""

    @classmethod
    def create(cls, experiment: Experiment, path: Path | None = None, data: Mapping[str, bytes] = NO_DATA) -> RunFolder:
        """Create a folder with the resolved config and empty metrics: `path`, or else runs/NAME, runs/NAME-2, ...

        NAME is the config's name. `data` is the content of ARRAYS or ROWS by this name, for data in no other file.
        Raises AdtrainError where the folder cannot be written, `path` already holds a run, or `training.init_from` has
        no weights for the experiment.
        """
        _check_initial_weights(experiment)
        _ = experiment.digests  # read before the training, because a run that is stopped has to end soon
        if path is not None:
            _refuse_existing(path)
            make_folder(path)
        folder = cls(create_numbered(experiment.config.name) if path is None else path)
        metrics = folder.path / METRICS
        try:
            metrics.open("x").close()  # if two runs start in the same folder, only one succeeds
        except OSError as error:
            raise unwritable(metrics, error) from error
        try:
            for name, content in data.items():
                write_atomic(folder.path / name, content)
            write_atomic(folder.path / CONFIG, experiment.config_text.encode())
            write_plugins(experiment.config, folder.path, replace=False)
        except AdtrainError:
            folder._discard()
            raise
        return folder

    @staticmethod
    def planned(experiment: Experiment, path: Path | None = None) -> Path:
        """The folder that `create` would make; nothing is written.

        Raises AdtrainError as `create` does, as far as this can be known before.
        """
        _check_initial_weights(experiment)
        if path is None:
            path = next(path for path in _numbered(experiment.config.name) if not os.path.lexists(path))
        else:
            _refuse_existing(path)
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise AdtrainError(f"{path}: {parent} is not a writable folder")
        return path

    def reopen(self, experiment: Experiment, start: Start) -> None:
        """Prepare the folder for a run that continues from `start`; metrics of later steps become void.

        Raises AdtrainError where the folder cannot be written.
        """
        for name in ALL:
            remove_temporaries(self.path / name)
        metrics, progress = self.path / METRICS, start.checkpoint.progress
        if metrics.exists():
            self.drop_unfinished_line()
        try:
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.path / SUMMARY, error) from error
        self.append_metrics(ResumedAt(progress.epoch, progress.step))
        # The process may have been killed between writing the two files.
        self.write_checkpoint(encode(experiment, start.checkpoint), best=start.best is start.checkpoint)
        write_plugins(experiment.config, self.path)
        write_atomic(self.path / CONFIG, experiment.config_text.encode())

    @contextmanager
    def in_training(self, config: Config) -> Iterator[None]:
        """Lock the folder as `locked` does. If a file cannot be written within the block, the error says what to do."""
        with self.locked():
            try:
                yield
            except Unwritable as error:
                has_checkpoint, again = (self.path / LAST).exists(), "the run has no checkpoint: train again"
                raise AdtrainError(f"{error}; {self.advice(config) if has_checkpoint else again}") from error

    def advice(self, config: Config) -> str:
        """How to continue the run after it stopped."""
        return f"continue with: adtrain train --resume {shlex.quote(str(self.path))}{plugin_options(config)}"

    def write_model(self, experiment: Experiment, state: TrainState) -> None:
        """Write the model of a state on the host."""
        write_atomic(self.path / MODEL, model_file.encode(experiment, state))

    def write_checkpoint(self, content: Content, best: bool) -> None:
        """Write last.safetensors, and best.safetensors if it is `best`, after the metrics so far have reached the disk.

        Where possible the two are hard links to one file until the next checkpoint, so that it is written once.
        """
        metrics = self.path / METRICS
        try:
            with metrics.open("ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(metrics, error) from error
        write_atomic(self.path / LAST, content)
        if best:
            write_atomic(self.path / BEST, content, same_as=self.path / LAST)

    def write_summary(self, summary: Summary) -> None:
        records.write(self.path / SUMMARY, summary)

    def files(self) -> list[str]:
        """The names of the run's files that exist."""
        return [name for name in ALL if (self.path / name).exists()]

    def _discard(self) -> None:
        """Remove the files of a run that has not begun, and the folder if it is then empty."""
        with suppress(OSError):
            for name in self.files():
                (self.path / name).unlink()
            with suppress(FileNotFoundError):
                (self.path / plugged.FOLDER).rmdir()
            self.path.rmdir()


class Recorder(Observer):
    """Writes a run's files: a line of metrics per interval and epoch, checkpoints, and the model.

    The model is that of the last complete epoch; before the end of the first one that of the last checkpoint.
    """

    def __init__(self, folder: RunFolder, experiment: Experiment) -> None:
        self.folder = folder
        self.experiment = experiment
        self.model_step = -1
        """The step of the weights that model.safetensors holds, where this recorder has written it."""

    @during("write")
    def interval_done(self, interval: Interval) -> None:
        self.folder.append_metrics(interval)

    @during("write")
    def validated(self, validated: Validated) -> None:
        self.folder.append_metrics(validated)

    @during("write")
    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        self.folder.append_metrics(epoch)

    @during("write")
    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        self.folder.write_checkpoint(encode(self.experiment, checkpoint), best)
        if checkpoint.progress.evaluated or checkpoint.progress.epoch == 1:
            self.folder.write_model(self.experiment, averaged(checkpoint.state))
            self.model_step = checkpoint.progress.step

    @during("write")
    def stopped(self, reason: StopReason, progress: Progress) -> None:
        self.folder.append_metrics(Stopped(reason, progress.epoch, progress.step))

    @during("write")
    def finished(self, result: Result) -> None:
        if result.restored or self.model_step != result.steps:
            self.folder.write_model(self.experiment, fetch(result.state)())
        self.folder.append_metrics(Tested(result.epochs, result.steps, result.test, single_numbers(result.metrics)))


def run_in_folder(
    folder: RunFolder,
    experiment: Experiment,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    start: Start | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train as `run` does, and write all files of the run but the summary, before `observers` are called.

    With several ranks only rank 0 writes files and has observers. Raises the errors of `run`. DataError says how to
    continue the run, NotFinite where its last good state is.
    """
    if communicator.current().rank:
        return run(experiment, device, (), start, stop)
    recorder = Recorder(folder, experiment)
    try:
        result = run(experiment, device, [recorder, *observers], start, stop)
    except DataError as error:
        raise DataError(f"{error}; {folder.advice(experiment.config)}") from None
    except NotFinite as error:
        raise NotFinite(f"{error}; the state before that step is in {folder.path / LAST}") from None
    recorder.finished(result)
    return result


def plugin_options(cfg: Config) -> str:
    """The options of the command line that name the plug-ins of a config, each after a space."""
    found = [(plugin.file, plugins.loaded(plugin.sha256 or "").path) for plugin in cfg.plugins or ()]
    names = [str(path) if file.endswith(".py") else file for file, path in found]
    return "".join(f" --plugin {shlex.quote(name)}" for name in names)


def write_plugins(cfg: Config, folder: Path, replace: bool = True) -> None:
    """Write copies of the plug-ins of a config with absolute paths, and of the files that their kernels read.

    Installed ones are not copied. Raises AdtrainError where a file cannot be written, a file of a kernel has changed
    since the plug-in was run, or without `replace` another file is in the place of a copy.
    """
    copies: dict[Path, bytes] = {}
    for plugin in cfg.plugins or ():
        found, path = plugins.loaded(plugin.sha256 or ""), folder / plugin.file
        if plugin.file.endswith(".py"):
            copies[path] = found.text
            for name, digest in (plugin.files or {}).items():
                given = found.path.parent / name
                copies[path.parent / name] = content = read_file(given)
                if sha256(content).hexdigest() != digest:
                    raise AdtrainError(f"{given}: has changed since its plug-in was run; train again")
    for path, content in copies.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not replace and path.exists() and read_regular(path) != content:
                raise AdtrainError(f"{path}: already exists; give another --output-dir, or move that file")
        except OSError as error:
            raise unwritable(path, error) from error
        write_atomic(path, content)


def _check_initial_weights(experiment: Experiment) -> None:
    """Raise AdtrainError where `training.init_from` has no weights for the experiment."""
    if experiment.config.training.init_from is not None:
        experiment.initial_state("cpu")


def _refuse_existing(path: Path) -> None:
    existing = RunFolder(path).files()
    if existing:
        raise AdtrainError(
            f"{path}: already holds a run ({', '.join(existing)}); give another output folder, or remove that run first"
        )
    if path.exists() and not path.is_dir():
        raise AdtrainError(f"{path}: found a file, expected a folder or nothing")


def _numbered(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, ..."""
    yield DEFAULT_PARENT / name
    yield from (DEFAULT_PARENT / f"{name}-{number}" for number in count(2))


def create_numbered(name: str) -> Path:
    """Create the first unused of runs/NAME, runs/NAME-2, ...

    `mkdir` is atomic, so two runs never get the same folder. Raises AdtrainError where `runs` cannot hold folders.
    """
    paths = _numbered(name)
    while True:
        path = next(paths)
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            if not DEFAULT_PARENT.is_dir():
                raise AdtrainError(f"{DEFAULT_PARENT}: found a file or a broken link, expected a folder") from error
        except OSError as error:
            raise unwritable(path, error) from error
        else:
            return path


class Resumed(NamedTuple):
    """A run that is ready to continue. `notes` are lines to show to the user. Nothing has been written yet."""

    experiment: Experiment
    folder: RunFolder
    start: Start
    notes: Sequence[str]


def resume(
    path: Path,
    overrides: Sequence[str] = (),
    longer: Sequence[str] = (),
    changes_allowed: bool = False,
    mode: Mode = Mode.FUSED,
    trust: Trust = NONE,
) -> Resumed:
    """Load the run in the folder `path`, or that of the checkpoint file `path`; it continues in the same folder.

    The config is the folder's config.yaml, or the checkpoint's if there is none.

    Args:
        overrides: settings to change.
        longer: settings of the training's length, `training.epochs=8` or `training.steps=900`. They may always change.
        changes_allowed: whether other settings may differ from those that the checkpoint was trained with.
        trust: which plug-ins may be run.

    Raises:
        ConfigError, DataError: as `config.load` and `prepare` do.
        AdtrainError: there is no checkpoint; it is damaged or does not fit the network or the data; the run is
            finished; or the config has changed and changes are not allowed (the message lists them).
    """
    checkpoint_path = path / LAST if path.is_dir() else path
    if path.is_dir() and not checkpoint_path.exists():
        if config.is_sweep(path):
            command = f"adtrain sweep --resume {shlex.quote(str(path))}"
            raise AdtrainError(f"{path}: found a sweep, expected a run; {command} continues it")
        raise AdtrainError(f"{path}: found no {LAST}, expected the folder of a run that has written a checkpoint")
    file = checkpoint.read(checkpoint_path)
    folder = RunFolder(checkpoint_path.parent)
    written = folder.path / CONFIG
    settings = [*overrides, *longer]
    cfg = config.load(written, settings, run_plugin=trust.run) if written.exists() else file.config(settings, trust.run)
    trust.check(cfg.plugins)
    experiment = prepare(cfg, mode)
    # The file of a table that was given in memory does not say whether its labels were texts.
    experiment = replace(experiment, data=replace(experiment.data, class_type=file.metadata.class_type))
    notes = _changes(file, experiment)
    lengths = {setting.partition("=")[0] for setting in longer}
    refused = [change for change in notes if change.partition(":")[0] not in lengths]
    if refused and not changes_allowed:
        raise AdtrainError(
            f"{folder.path}: the run was trained with another config or other data: {'; '.join(refused)}; "
            "undo the changes, or accept them with --override"
        )
    _check_position(file, experiment)
    last = file.load(experiment)
    if (reason := ended(experiment, file.progress)) and (folder.path / SUMMARY).exists():
        raise AdtrainError(_finished(folder.path, reason, experiment, file.progress))
    start, best_notes = _with_best(folder.path, experiment, last)
    return Resumed(experiment, folder, start, [*notes, *best_notes])


def _changes(file: CheckpointFile, experiment: Experiment) -> list[str]:
    """The differences to the config and data of the checkpoint, such as `training.epochs: 5 -> 8`."""
    stored, current = (
        {dotted(path): value for path, value in leaves(cfg.model_dump(mode="json", exclude_none=True))}
        for cfg in (file.config(), experiment.config)
    )
    stored |= {f"the data's {name}": value for name, value in plain(file.metadata.data()).items()}
    current |= {f"the data's {name}": value for name, value in plain(of_model(experiment).data()).items()}
    changes = [
        _change(key, _text(stored, key), _text(current, key))
        for key in dict.fromkeys([*stored, *current])
        if stored.get(key) != current.get(key)
    ]
    return [*changes, *changed_data(file.metadata.digests, experiment.digests)]


def changed_data(stored: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """The parts of the data whose digests differ, as notes for the user."""
    names = dict.fromkeys([*stored, *current])
    return [f"the {name} have changed" for name in names if stored.get(name) != current.get(name)]


def _change(key: str, before: str, after: str) -> str:
    """What has changed. A long list or text is shortened, so both may look the same."""
    return f"{key}: {before} -> {after}" if before != after else f"{key}: other values"


def _text(values: dict[str, Any], key: str) -> str:
    return found(values[key]) if key in values else "nothing"


def _check_position(file: CheckpointFile, experiment: Experiment) -> None:
    """Refuse a checkpoint at a position in the order of the batches that this experiment does not have."""
    progress, before = file.progress, file.metadata.steps_per_epoch
    if before != experiment.steps_per_epoch:
        raise AdtrainError(
            f"{file.path}: found {found(before)} batches per epoch, expected {experiment.steps_per_epoch} as in the "
            "config, so the run cannot continue: restore the data section, or begin a new run with training.init_from"
        )
    batches = (progress.epoch - 1) * experiment.steps_per_epoch + progress.batches
    if batches != progress.step or progress.batches > experiment.steps_per_epoch:
        raise AdtrainError(f"{file.path}: is damaged: its numbers of steps and epochs disagree")
    if progress.step > experiment.total_steps:
        raise AdtrainError(
            f"{file.path}: found {progress.step:,} steps, expected at most the config's {experiment.total_steps:,}; "
            "give a larger --epochs or --steps"
        )


def _finished(run: Path, reason: str, experiment: Experiment, progress: Progress) -> str:
    if reason == "early_stopping":
        return (
            f"{run} is finished: it stopped early after epoch {progress.epochs_done}; "
            "continue with --set training.early_stopping=null --override"
        )
    if reason == "line_search":
        return (
            f"{run} is finished: the line search has failed after step {progress.step}, so the weights stay as they "
            f"are; begin a new run with another optimizer and training.init_from={run / MODEL}"
        )
    epochs = experiment.config.training.epochs
    if epochs is None or experiment.total_steps < epochs * experiment.steps_per_epoch:
        return f"{run} is finished: {progress.step} steps; train longer with --steps N"
    return f"{run} is finished: {progress.epochs_done} epochs; train longer with --epochs N"


def _with_best(run: Path, experiment: Experiment, last: Checkpoint) -> tuple[Start, list[str]]:
    """The start, with the checkpoint of the best epoch so far, and notes for the user.

    If the record of the best epoch is damaged, it is computed from the metrics. If its checkpoint is lost, the search
    for the best epoch begins anew. Each of these is a note.
    """
    progress, best, notes = last.progress, last.progress.best, []
    if best == LOST:
        best = _best_of_metrics(run, experiment, progress)
        notes.append(f"{run}: the record of the best epoch is damaged; by the metrics it is epoch {best.epoch}")
    with_best = Checkpoint(last.state, replace(progress, best=best))
    without_best = Checkpoint(last.state, replace(progress, best=experiment.best_start))
    if best.by != experiment.best_by or not best.epoch:
        return Start(without_best, None), notes
    try:
        file = checkpoint.read(run / BEST)
        stored = file.progress.best
        if (stored.by, stored.epoch, stored.value) == (best.by, best.epoch, best.value):
            return Start(with_best, file.load(experiment)), notes
        problem = f"{run / BEST}: found epoch {stored.epoch}, expected {best.epoch}"
    except AdtrainError as error:
        problem = str(error)
    if progress.evaluated and best.epoch == progress.epochs_done:
        return Start(with_best, with_best), notes  # killed between writing last.safetensors and best.safetensors
    lost = f"the best epoch so far is lost; searching for the best from here on: {problem}"
    return Start(without_best, None), [*notes, lost]


def _best_of_metrics(run: Path, experiment: Experiment, progress: Progress) -> Best:
    """The record after the evaluated epochs, from the metrics; the empty record if their lines are not complete."""
    best = experiment.best_start
    evaluated = progress.epoch if progress.batches and progress.evaluated else progress.epoch - 1
    epochs = [x for x in read_metrics(run) if isinstance(x, Epoch) and x.step <= progress.step]
    if [x.epoch for x in epochs] != list(range(1, evaluated + 1)):
        return best
    for x in epochs:
        if best.measured(x) is None:
            return experiment.best_start
        best = experiment.best_after(best, x)
    return best
