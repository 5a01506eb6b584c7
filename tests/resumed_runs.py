"""Runs that are stopped and resumed, and their comparison with one that is not."""

from __future__ import annotations

import itertools
from pathlib import Path

from adtrain import training
from adtrain.training import Experiment, Recorder, RunFolder, Start

SAME = ("config.yaml", "model.safetensors", "last.safetensors", "best.safetensors")


def train(
    experiment: Experiment,
    folder: RunFolder,
    start: Start | None = None,
    stop_call: int | None = None,
    device: str = "cpu",
) -> bool:
    """Train, and return whether the run finished. `stop` returns True at its call number `stop_call`, from 0."""
    if start is not None:
        folder.reopen(experiment, start)
    times = itertools.count()
    recorder = Recorder(folder, experiment)
    try:
        result = training.run(experiment, device, [recorder], start, lambda: next(times) == stop_call)
    except training.Interrupted:
        return False
    recorder.finished(result)
    return True


def resume_run(folder: Path, experiment: Experiment, stop_call: int | None = None, device: str = "cpu") -> bool:
    """Resume the run with the staged step of `experiment`, so that nothing is compiled again."""
    resumed = training.resume(folder)
    assert (resumed.notes, resumed.experiment.config) == ([], experiment.config)
    return train(experiment, resumed.folder, resumed.start, stop_call, device)


def check_same(one: Path, other: Path) -> None:
    for name in SAME:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert scores(one) == scores(other)


def scores(run: Path) -> list[tuple[object, ...]]:
    """The scores of the epochs and of the test, without times."""
    lines = [x for x in training.read_metrics(run) if x.kind in ("epoch", "test")]
    names = ("kind", "epoch", "step", "train", "validation", "test")
    return [tuple(getattr(x, name, None) for name in names) for x in lines]


def check_stops(experiment: Experiment, whole: Path, first: int = 0, step: int = 1) -> int:
    """Stop a run at each ``step``-th call of `stop` from the ``first``, resume it, and compare it with the one in
    ``whole``. Returns the number of calls, or up to a step more."""
    for stop_call in itertools.count(first, step):
        folder = RunFolder.create(experiment, whole.with_name(f"at-{stop_call}"))
        if train(experiment, folder, stop_call=stop_call):
            return stop_call
        assert resume_run(folder.path, experiment)
        check_same(folder.path, whole)
    raise AssertionError("unreachable")
