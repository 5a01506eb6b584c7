"""A training that is killed again and again, at any moment, comes to the same end."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from time import monotonic, sleep

import pytest
from killed_training import EAGER, train
from training_runs import load

from adtrain import training
from adtrain.training import Recorder, RunFolder, checkpoint

KILLS, EPOCHS = 50, 60
SGD = "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"
LAYERS = "[linear: 8, batch_norm1d, dropout: 0.1, linear: 3]"


def test_a_run_killed_fifty_times_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill -9 comes at a random moment of what reopening and the next epoch take."""
    settings = (
        f"training.epochs={EPOCHS}",
        "training.checkpoint_every=2",
        "data.validation=0.2",
        "optimizer={sgd: {lr: 0.1, momentum: 0.9}}",
    )
    experiment = training.prepare(load(tmp_path, *settings, layers=LAYERS), EAGER)
    straight = RunFolder.create(experiment, tmp_path / "straight")
    recorder, started = Recorder(straight, experiment), monotonic()
    recorder.finished(training.run(experiment, "cpu", [recorder]))
    epoch_seconds = (monotonic() - started) / EPOCHS

    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # for the server below, which must have one thread to be forked
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["__main__", "adtrain.training"])
    run = RunFolder.create(experiment, tmp_path / "killed").path
    moments, steps = random.Random(0), [0]
    for _ in range(KILLS):
        heard, said = forks.Pipe(duplex=False)
        process = forks.Process(target=train, args=(str(run), said))
        process.start()
        assert heard.recv() == "ready"
        sleep(moments.uniform(0, 1.5 * epoch_seconds))
        process.kill()
        process.join()
        assert process.exitcode == -9, "the run was over before it was killed: give it more epochs"
        if (run / "last.safetensors").exists():
            origin = checkpoint.read(run / "last.safetensors")
            assert origin.load(experiment).progress.step >= steps[-1]
            steps.append(origin.progress.step)
    assert len(set(steps)) > KILLS / 5
    heard, said = forks.Pipe(duplex=False)
    process = forks.Process(target=train, args=(str(run), said))
    process.start()
    process.join()
    assert process.exitcode == 0
    for name in ("model.safetensors", "last.safetensors", "best.safetensors", "config.yaml"):
        assert (run / name).read_bytes() == (straight.path / name).read_bytes(), name
    epochs = [[x for x in training.read_metrics(at) if x["kind"] == "epoch"] for at in (run, straight.path)]
    for one, other in zip(*epochs, strict=True):
        assert [one[name] for name in ("epoch", "step", "train", "validation")] == [
            other[name] for name in ("epoch", "step", "train", "validation")
        ]
    assert sorted(os.listdir(run)) == sorted(os.listdir(straight.path))
