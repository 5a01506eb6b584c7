"""A training in a separate process, for the tests that kill it. Imports only what it needs, to start quickly."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from adtrain import config, training
from adtrain.training import Recorder, RunFolder

EAGER = training.Mode.EAGER  # starts at once, because nothing is traced and compiled


def train(path: str, ready: Connection) -> None:
    """Train the run in the folder `path` to its end, from its last checkpoint or else from its config.

    Sends "ready" just before it writes into the folder.
    """
    run = Path(path)
    start = None
    if (run / "last.safetensors").exists():
        experiment, folder, start, _ = training.resume(run, mode=EAGER)
    else:
        experiment, folder = training.prepare(config.load(run / "config.yaml"), EAGER), RunFolder(run)
    ready.send("ready")
    if start is not None:
        folder.reopen(experiment, start)
    recorder = Recorder(folder, experiment)
    recorder.finished(training.run(experiment, "cpu", [recorder], start))
