from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import command
from report_runs import one_line, train
from training_runs import write_config

from adtrain.training import ClassScore, Interval
from adtrain.training.progress import Epoch, read_metrics
from adtrain.training.tensorboard import EventFiles


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), read back by TensorBoard's own reader."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs it")
    from tensorboard.util.tensor_util import make_ndarray

    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }


def test_events_equal_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    options = ("--tensorboard", "--set", "data.validation=0.2", "--set", "schedule=cosine")
    run = train(write_config(tmp_path), tmp_path / "run", *options)
    lines = read_metrics(run)
    intervals = [line for line in lines if isinstance(line, Interval)]
    scores = [(line.step, line.validation) for line in lines if isinstance(line, Epoch)]
    expected = {
        **{f"{name}/train": [(x.step, getattr(x.train, name)) for x in intervals] for name in ("loss", "accuracy")},
        **{f"{name}/validation": [(step, getattr(x, name)) for step, x in scores] for name in ("loss", "accuracy")},
        **{name: [(x.step, getattr(x, name)) for x in intervals] for name in ("learning_rate", "images_per_second")},
    }
    found = scalars(run / "tensorboard")
    assert found.keys() == expected.keys()
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points])


def test_events_can_be_read_during_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    events = EventFiles(tmp_path)
    events.interval_done(Interval(1, 100, ClassScore(0.5, 0.75), 0.25, 1000.0))
    assert scalars(tmp_path) == {
        "loss/train": [(100, 0.5)],
        "accuracy/train": [(100, 0.75)],
        "learning_rate": [(100, 0.25)],
        "images_per_second": [(100, 1000.0)],
    }
    events.close()


@pytest.mark.parametrize("cut", [0, 3])
def test_a_resumed_run_writes_no_step_twice(tmp_path: Path, cut: int) -> None:
    """Also where the process was killed while it wrote an event."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    first = EventFiles(tmp_path)
    for step in (100, 200, 300, 400):
        first.interval_done(Interval(1, step, ClassScore(0.5, 0.75), 0.25, 1000.0))
    first.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[: -cut or None])
    second = EventFiles(tmp_path, resumed_at=200)
    second.interval_done(Interval(1, 300, ClassScore(0.25, 0.75), 0.25, 1000.0))
    second.close()
    assert scalars(tmp_path)["loss/train"] == [(100, 0.5), (200, 0.5), (300, 0.25)]


def test_without_tensorboard_the_command_fails_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    cfg = write_config(tmp_path)
    arguments = ("train", cfg, "--device", "cpu", "--tensorboard", "--output-dir", tmp_path / "run")
    assert one_line(command(*arguments, expect=2)) == (
        "writing event files needs tensorboard; pip install 'adtrain[tensorboard]'"
    )
    assert not (tmp_path / "run").exists()
