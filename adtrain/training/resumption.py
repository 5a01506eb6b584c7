"""Resuming a run: loads its checkpoint and its current config, and checks that they fit together."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from adtrain import config
from adtrain.config.problems import dotted, found
from adtrain.config.records import leaves, plain
from adtrain.core.errors import AdtrainError
from adtrain.training import checkpoint
from adtrain.training.best import LOST, Best
from adtrain.training.checkpoint import Checkpoint, CheckpointFile
from adtrain.training.endings import ended
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.metadata import of_model
from adtrain.training.metrics import Epoch, read_metrics
from adtrain.training.preparation import prepare
from adtrain.training.progress import Progress
from adtrain.training.run_folder import BEST, CONFIG, LAST, RunFolder
from adtrain.training.summary import SUMMARY
from adtrain.training.trainer import Start
from adtrain.training.trust import NONE, Trust


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
    if experiment.total_steps < experiment.config.training.epochs * experiment.steps_per_epoch:
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
        if best.measured(x.train, x.validation, x.metrics) is None:
            return experiment.best_start
        best = experiment.best_after(best, x)
    return best
