"""Checkpoint files: damaged, foreign and hostile files are refused in one line; a failed write loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy
from training_runs import prepare

from adtrain import training
from adtrain.core.errors import AdtrainError
from adtrain.text import short
from adtrain.training import Recorder, RunFolder, checkpoint

pytestmark = pytest.mark.unfused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of the initial state."""
    folder = tmp_path_factory.mktemp("checkpoint")
    experiment = prepare(folder, layers="[linear: 2, batch_norm1d, linear: 3]")
    state = experiment.initial_state("cpu")
    start = training.Progress.start(experiment.best_start, experiment.network.task)
    initial = training.Checkpoint(checkpoint.fetch(state)(), start)
    Recorder(RunFolder.create(experiment, folder / "run"), experiment).checkpoint(initial, best=False)
    return folder / "run"


@pytest.fixture(scope="module")
def experiment(run: Path) -> training.Experiment:
    return training.resume(run).experiment


def parts(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """The arrays, the adtrain metadata and the header of a file."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return safetensors_numpy.load(content), json.loads(header["__metadata__"]["adtrain"]), header


def refusal(run: Path, folder: Path, content: bytes) -> str:
    """The one-line error for a run with this checkpoint."""
    shutil.copytree(run, folder / "copy")
    path = folder / "copy" / "last.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdtrainError) as error:
        training.resume(folder / "copy")
    line = str(error.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert len(line) < 700
    return line.removeprefix(f"{path}: ")


UNREADABLE = "cannot be read as safetensors ("
UNFIT = "does not fit the config's network and optimizer: "
CHANGES: list[tuple[Any, str]] = [
    (
        lambda t, a: a.update(format=9, version="9.9"),
        "has checkpoint format 9, written by adtrain '9.9'; this version reads",
    ),
    (lambda t, a: a.update(kind="model"), "is not a checkpoint; expected a run's last.safetensors or best.safetensors"),
    (lambda t, a: a.update(config=7), "metadata: config: found 7, expected a valid string"),
    (lambda t, a: a.update(progress=[1]), "metadata: progress: found [1], expected an object"),
    (lambda t, a: a["progress"].pop("step"), "metadata: found no key progress.step"),
    (lambda t, a: a["progress"].update(step=float("nan")), "metadata: progress.step: found nan, expected an integer"),
    (lambda t, a: a["progress"].update(loss=float("nan")), "metadata: progress.loss: found nan, expected a number"),
    (
        lambda t, a: a["progress"].update(epoch=-1),
        "metadata: progress.epoch: found -1, expected an integer in [1",
    ),
    (lambda t, a: a["progress"].update(step=10**30), "metadata: progress.step: found 1000000000000000000000000000000"),
    (lambda t, a: a["progress"].update(train=["x", []]), "metadata: progress.train[0]: found 'x', expected a number"),
    (lambda t, a: a["progress"].update(sums=[1.0]), "is damaged: its counters are impossible"),
    (lambda t, a: a["progress"].update(epoch=3), "is damaged: its numbers of steps and epochs disagree"),
    (
        lambda t, a: t.update({"optimizer.step": np.array(4)}),
        "is damaged: its optimizer is at step 4, its progress at 0",
    ),
    (lambda t, a: t.pop("0.bias"), UNFIT + "missing 0.bias"),
    (
        lambda t, a: t.update({"../../x": np.zeros(1)}),
        UNFIT + "unexpected ../../x",
    ),
    (
        lambda t, a: t.update({"a\nb": np.zeros(1)}),
        UNFIT + r"unexpected 'a\nb'",
    ),
    (
        lambda t, a: t.update({"0.bias": np.zeros(3, np.float32)}),
        UNFIT + "0.bias is float32[3], expected float32[2]",
    ),
    (
        lambda t, a: t.update({"0.bias": np.zeros(2)}),
        UNFIT + "0.bias is float64[2], expected float32[2]",
    ),
    (
        lambda t, a: t.update({"0.bias": np.array([1, np.inf], np.float32)}),
        "0.bias holds numbers that are not finite",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=range(len(CHANGES)))
def test_inconsistent_content_is_refused(run: Path, tmp_path: Path, change: Any, message: str) -> None:
    tensors, about, _ = parts((run / "last.safetensors").read_bytes())
    change(tensors, about)
    content = safetensors_numpy.save(tensors, {"adtrain": json.dumps(about)})
    assert refusal(run, tmp_path, content).startswith(message)


def test_an_invalid_config_in_the_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    tensors, about, _ = parts((run / "last.safetensors").read_bytes())
    about["config"] = "a: ["
    path = tmp_path / "last.safetensors"
    path.write_bytes(safetensors_numpy.save(tensors, {"adtrain": json.dumps(about)}))
    with pytest.raises(AdtrainError, match=r"last\.safetensors:1:5: not valid YAML"):
        training.resume(path)


@pytest.mark.parametrize("length", [0, 5, 8, 100, -100, -1])
def test_a_truncated_file_is_refused(run: Path, tmp_path: Path, length: int) -> None:
    assert refusal(run, tmp_path, (run / "last.safetensors").read_bytes()[:length]).startswith(
        "cannot be read as safetensors ("
    )


def test_a_size_beyond_the_file_is_refused_before_allocation(run: Path, tmp_path: Path) -> None:
    content = (run / "last.safetensors").read_bytes()
    _, _, header = parts(content)
    for name, shape in (("0.weight", [1 << 50, 36]), ("0.weight", [1 << 40, 1 << 40])):
        changed = {**header, name: {**header[name], "shape": shape}}
        text = json.dumps(changed).encode()
        found = struct.pack("<Q", len(text)) + text + content[8 + int.from_bytes(content[:8], "little") :]
        assert refusal(run, tmp_path / str(shape[1]), found).startswith(UNREADABLE)
    assert refusal(run, tmp_path / "header", struct.pack("<Q", 1 << 62) + content[8:]).startswith(
        "cannot be read as safetensors ("
    )


@settings(max_examples=80)
@given(data=st.data())
def test_a_randomly_corrupted_file_loads_or_is_refused(
    run: Path, experiment: training.Experiment, data: st.DataObject
) -> None:
    """Most of the changed bytes are in the header, where they have an effect."""
    content = bytearray((run / "last.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    places = st.one_of(st.integers(0, header), st.integers(0, len(content) - 1))
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        content[place] = byte
    path = run.parent / "mutated.safetensors"
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    with suppress(AdtrainError):
        file = checkpoint.read(path)
        file.config()
        file.load(experiment)


def test_resuming_a_path_without_a_run_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(AdtrainError) as error:
        training.resume(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: found no last.safetensors, expected the folder of a run that has written a checkpoint"
    )
    with pytest.raises(AdtrainError, match=r"/nothing: found nothing, expected a run's folder or a checkpoint$"):
        training.resume(tmp_path / "nothing")


def test_a_full_disk_leaves_the_old_checkpoint(run: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs a limit on the size of files")
    shutil.copytree(run, tmp_path / "run")
    experiment, folder, start, _ = training.resume(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before["last.safetensors"]) - 10, limits[1]))
    try:
        with pytest.raises(AdtrainError) as error:
            Recorder(folder, experiment).checkpoint(start.checkpoint, best=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    size = short(len(before["last.safetensors"]), "B")
    path = folder.path / "last.safetensors"
    assert str(error.value) == f"{path}: cannot be written (File too large); it needs {size}"
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


@pytest.mark.parametrize("broken", ["replace", "fsync", "open"])
def test_a_read_only_folder_leaves_the_old_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Writing fails when the new file is created, flushed or renamed."""
    shutil.copytree(run, tmp_path / "run")
    experiment, folder, start, _ = training.resume(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    if broken == "open":
        monkeypatch.setattr(Path, "open", refuse)
    else:
        monkeypatch.setattr(os, broken, refuse)
    with pytest.raises(AdtrainError) as error:
        Recorder(folder, experiment).checkpoint(start.checkpoint, best=False)
    monkeypatch.undo()
    name = "metrics.jsonl" if broken != "replace" else "last.safetensors"
    assert str(error.value) == f"{folder.path / name}: cannot be written (Read-only file system)"
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
