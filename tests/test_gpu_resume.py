"""A stopped and resumed run on a GPU equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_parity import gpu
from resumed_runs import check_same, resume_run, train
from test_train_resume import LAYERS, SETTINGS
from training_runs import prepare

from adtrain import training
from adtrain.core.staging import Staged
from adtrain.training import RunFolder, loop, trainer

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu

AUGMENT = "data.augment=[crop: 1, flip, noise: 0.1, mixup: 0.5]"


def test_a_resumed_run_on_a_gpu_ends_with_the_same_bytes(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam, dropout, batch norm, augmentation, a schedule and a validation split; stopped within epochs and between."""
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, *SETTINGS, AUGMENT, layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "straight"), device="gpu")
    for asked in (2, 5, 6, 13):
        name = f"stopped-{asked}"
        assert not train(experiment, RunFolder.create(experiment, tmp_path / name), stop_call=asked, device="gpu")
        assert resume_run(tmp_path / name, training.prepare(experiment.config), device="gpu")
        check_same(tmp_path / "straight", tmp_path / name)


def recorded(method: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    """The method, whose calls add its name to the events."""

    def call(*args: Any, **options: Any) -> Any:
        events.append(method.__name__)
        return method(*args, **options)

    return call


def test_steps_that_begin_before_the_rest_is_compiled_end_with_the_same_bytes(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = prepare(tmp_path, *SETTINGS, layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "compiled-first"), device="gpu")
    events: list[str] = []
    monkeypatch.setattr(trainer, "LONG_PREPARATION", 0.0)
    for owner, name in ((trainer._Training, "_steps"), (Staged, "compile")):
        monkeypatch.setattr(owner, name, recorded(getattr(owner, name), events))
    again = training.prepare(experiment.config)
    assert train(again, RunFolder.create(again, tmp_path / "steps-first"), device="gpu")
    check_same(tmp_path / "compiled-first", tmp_path / "steps-first")
    first = events.index("_steps")
    assert events[first + 1] == "compile"
