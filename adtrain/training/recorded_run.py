"""A training whose files are written into a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adtrain.core import communicator
from adtrain.data import DataError
from adtrain.training.endings import NotFinite, Result
from adtrain.training.experiment import Experiment
from adtrain.training.observer import Observer
from adtrain.training.run_folder import LAST, Recorder, RunFolder
from adtrain.training.trainer import Start, run


def run_in_folder(
    folder: RunFolder,
    experiment: Experiment,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    start: Start | None = None,
    stop: Callable[[], bool] = lambda: False,
    every_step_checked: bool = False,
) -> Result:
    """Train as `run` does, and write all files of the run but the summary, before `observers` are called.

    With several ranks only rank 0 writes files and has observers. Raises the errors of `run`. DataError says how to
    continue the run, NotFinite where its last good state is.
    """
    if communicator.current().rank:
        return run(experiment, device, (), start, stop, every_step_checked)
    recorder = Recorder(folder, experiment)
    try:
        result = run(experiment, device, [recorder, *observers], start, stop, every_step_checked)
    except DataError as error:
        raise DataError(f"{error}; {folder.advice(experiment.config)}") from None
    except NotFinite as error:
        raise NotFinite(f"{error}; the state before that step is in {folder.path / LAST}") from None
    recorder.finished(result)
    return result
