"""Going on with a run: its checkpoint, its config as it is now, and whether the one fits the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from adtrain import config
from adtrain.config.problems import PathParts, dotted, found
from adtrain.core.errors import AdtrainError
from adtrain.training import checkpoint
from adtrain.training.best import Best
from adtrain.training.checkpoint import Checkpoint, Origin, Progress
from adtrain.training.endings import ended
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.preparation import prepare
from adtrain.training.run_folder import BEST, CONFIG, LAST, SUMMARY, RunFolder
from adtrain.training.trainer import Start


class Resumed(NamedTuple):
    """A run to go on with; `notes` are what its user should know, a line each. Nothing has been written yet."""

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
) -> Resumed:
    """The run in the folder `path`, or of the checkpoint `path`, in whose folder it goes on.

    The config is that of config.yaml in the folder, where there is none the checkpoint's, with `overrides` and
    `longer` set over it (`training.epochs=8`, `training.steps=900`: how long to train, which may always change).

    Raises:
        ConfigError, DataError: as `config.load` and `prepare` do.
        AdtrainError: there is no checkpoint, or it is damaged, of another network, or of other data; the run is over;
            or the config is another one than the run was trained with, and changes are not allowed. Lists them.
    """
    file = path / LAST if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise AdtrainError(
            f"{path}: found no {LAST} to go on from; the run ended before its first checkpoint, or is none"
        )
    origin = checkpoint.read(file)
    folder = RunFolder(file.parent)
    written = folder.path / CONFIG
    settings = [*overrides, *longer]
    cfg = config.load(written, settings) if written.exists() else origin.config(settings)
    experiment = prepare(cfg, mode)
    notes = _changes(origin, experiment)
    lengths = {setting.partition("=")[0] for setting in longer}
    refused = [change for change in notes if change.partition(":")[0] not in lengths]
    if refused and not changes_allowed:
        raise AdtrainError(
            f"{file.parent}: the run was trained with another config: {'; '.join(refused)}; "
            "undo that, or go on all the same with --override"
        )
    _check_position(origin, experiment)
    last = origin.load(experiment)
    if (reason := ended(experiment, origin.progress)) and (folder.path / SUMMARY).exists():
        raise AdtrainError(_finished(folder.path, reason, experiment, origin.progress))
    start, best_notes = _with_best(folder.path, experiment, last)
    return Resumed(experiment, folder, start, [*notes, *best_notes])


def _changes(origin: Origin, experiment: Experiment) -> list[str]:
    """What is not as it was when the checkpoint was written: `training.epochs: 5 -> 8`."""
    before, now = (
        _flat(cfg.model_dump(mode="json", exclude_none=True)) for cfg in (origin.config(), experiment.config)
    )
    before |= {f"the data's {name}": value for name, value in origin.data.items()}
    now |= {f"the data's {name}": value for name, value in checkpoint.data_numbers(experiment).items()}
    return [
        f"{key}: {_text(before, key)} -> {_text(now, key)}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]


def _flat(value: Any, path: PathParts = ()) -> dict[str, Any]:
    """The values that are no containers, by their dotted keys."""
    if isinstance(value, dict):
        parts: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        return {dotted(path): value}
    return {key: x for name, inner in parts for key, x in _flat(inner, (*path, name)).items()}


def _text(values: dict[str, Any], key: str) -> str:
    return found(values[key]) if key in values else "nothing"


def _check_position(origin: Origin, experiment: Experiment) -> None:
    """Refuse a checkpoint whose place in the order of the images is none that this experiment has."""
    progress, before = origin.progress, origin.steps_per_epoch
    if before != experiment.steps_per_epoch:
        raise AdtrainError(
            f"{origin.path}: an epoch had {found(before)} batches, and has {experiment.steps_per_epoch} now, so there "
            "is no place to go on from: set data as it was, or begin a new run with training.init_from"
        )
    batches = (progress.epoch - 1) * experiment.steps_per_epoch + progress.batches
    if batches != progress.step or progress.batches > experiment.steps_per_epoch:
        raise AdtrainError(f"{origin.path}: is damaged: its counters of steps and epochs disagree")


def _finished(run: Path, reason: str, experiment: Experiment, progress: Progress) -> str:
    if reason == "early_stopping":
        return (
            f"{run} is finished: it stopped early after epoch {progress.epochs_done}; "
            "go on with --set training.early_stopping=null --override"
        )
    if experiment.total_steps < experiment.config.training.epochs * experiment.steps_per_epoch:
        return f"{run} is finished: {progress.step} steps; ask for more with --steps N"
    return f"{run} is finished: {progress.epochs_done} epochs; ask for more with --epochs N"


def _with_best(run: Path, experiment: Experiment, last: Checkpoint) -> tuple[Start, list[str]]:
    """The start with the best checkpoint so far; where that is lost the best is looked for anew, which is said."""
    progress, best = last.progress, last.progress.best
    fresh = Checkpoint(last.state, replace(progress, best=Best(experiment.best_by)))
    if best.by != experiment.best_by or not best.epoch:
        return Start(fresh, None), []
    try:
        origin = checkpoint.read(run / BEST)
        there = origin.progress.best
        if (there.by, there.epoch, there.value) == (best.by, best.epoch, best.value):
            return Start(last, origin.load(experiment)), []
        problem = f"{run / BEST}: is that of epoch {there.epoch}, expected {best.epoch}"
    except AdtrainError as error:
        problem = str(error)
    if progress.evaluated and best.epoch == progress.epochs_done:
        return Start(last, last), []  # killed between the writing of the one and of the other
    return Start(fresh, None), [f"the best epoch so far is lost, and looked for anew: {problem}"]
