"""A training in a process of its own, for the tests that kill it; imports no more than it needs."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from adtrain import config, training
from adtrain.training import Recorder, RunFolder

EAGER = training.Mode.EAGER  # which begins at once, where a staged step is traced and compiled first


def train(folder: str, said: Connection) -> None:
    """Go on with the run in `folder` in this process, from its config if it has no checkpoint yet."""
    run = Path(folder)
    start = None
    if (run / "last.safetensors").exists():
        experiment, kept, start, _ = training.resume(run, mode=EAGER)
    else:
        experiment, kept = training.prepare(config.load(run / "config.yaml"), EAGER), RunFolder(run)
    said.send("ready")
    if start is not None:
        kept.reopen(experiment, start)
    recorder = Recorder(kept, experiment)
    recorder.finished(training.run(experiment, "cpu", [recorder], start))
