"""A training that is killed again and again, at random moments, ends with the same files as one that is not."""

from __future__ import annotations

import multiprocessing
import os
import random
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep

import pytest
from killed_training import EAGER, train
from training_runs import load
from waiting import wait_until

from adtrain import training
from adtrain.training import Recorder, RunFolder, checkpoint

SGD = "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"
LAYERS = "[linear: 8, batch_norm1d, dropout: 0.1, linear: 3]"


def step_of(file: Path) -> int | None:
    """The step of a checkpoint. To reopen a run writes the file anew, with the same step."""
    return checkpoint.read(file).progress.step if file.exists() else None


def advanced_or_ended(file: Path, before: int | None, process: BaseProcess) -> bool:
    return step_of(file) != before or not process.is_alive()


@pytest.mark.parametrize(("kills", "epochs"), [(4, 6), pytest.param(10, 12, marks=pytest.mark.exhaustive)])
def test_a_run_killed_again_and_again_and_resumed_writes_the_same_bytes(
    kills: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill -9 comes at a random moment: every second one while the run is reopened or in the next epoch, the
    others after a new checkpoint, so that the run goes forward at any speed."""
    settings = (
        f"training.epochs={epochs}",
        "training.checkpoint_every=2",
        "data.validation=0.2",
        "optimizer={sgd: {lr: 0.1, momentum: 0.9}}",
    )
    experiment = training.prepare(load(tmp_path, *settings, layers=LAYERS), EAGER)
    uninterrupted = RunFolder.create(experiment, tmp_path / "uninterrupted")
    recorder, started = Recorder(uninterrupted, experiment), monotonic()
    recorder.finished(training.run(experiment, "cpu", [recorder]))
    epoch_seconds = (monotonic() - started) / epochs

    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # for the server below, which must have one thread to be forked
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["__main__", "adtrain.training"])
    run = RunFolder.create(experiment, tmp_path / "killed").path
    moments, steps, last = random.Random(0), [0], run / "last.safetensors"
    over = False
    for kill in range(kills):
        before = step_of(last)
        receiver, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=train, args=(str(run), sender))
        process.start()
        assert receiver.recv() == "ready"
        if kill % 2:
            wait_until(partial(advanced_or_ended, last, before, process))
        sleep(moments.uniform(0, 1.5 * epoch_seconds))
        process.kill()
        process.join()
        if over := process.exitcode == 0:  # a machine that has become faster finished it
            break
        assert process.exitcode == -9
        if last.exists():
            origin = checkpoint.read(last)
            assert origin.load(experiment).progress.step >= steps[-1]
            steps.append(origin.progress.step)
    if not over:
        assert len(set(steps)) > kills / 5
        receiver, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=train, args=(str(run), sender))
        process.start()
        process.join()
        assert process.exitcode == 0
    for name in ("model.safetensors", "last.safetensors", "best.safetensors", "config.yaml"):
        assert (run / name).read_bytes() == (uninterrupted.path / name).read_bytes(), name
    lines = [training.read_metrics(at) for at in (run, uninterrupted.path)]
    written = [[(x.epoch, x.step, x.train, x.validation) for x in of if isinstance(x, training.Epoch)] for of in lines]
    assert written[0] == written[1]
    assert sorted(os.listdir(run)) == sorted(os.listdir(uninterrupted.path))
