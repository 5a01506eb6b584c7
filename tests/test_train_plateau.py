"""The schedule plateau in trainings: its state is resumed, differs by member, and is the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from resumed_runs import check_same, resume_run, train
from sweep_runs import groups, trained
from training_runs import prepare

from adtrain import training
from adtrain.core import tree
from adtrain.training import RunFolder, loop
from adtrain.training.progress import Interval

# A rate at which the loss soon stops falling.
SETTINGS = (
    "optimizer={sgd: {lr: 2.0, momentum: 0.9}}", "training.epochs=6", "training.final_model=last",
    "schedule={plateau: {factor: 0.5, patience: 0}}",
)  # fmt: skip


def test_a_stopped_run_resumes_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, *SETTINGS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    lines = training.read_metrics(tmp_path / "uninterrupted")
    rates = [x.learning_rate for x in lines if isinstance(x, Interval)]
    assert min(rates) < 2.0 == max(rates)
    assert set(np.log2(np.array(rates)).tolist()) <= {1.0, 0.0, -1.0, -2.0, -3.0, -4.0}  # each half of the one before
    for stop_call in (7, 20):
        run = RunFolder.create(experiment, tmp_path / f"stopped-{stop_call}")
        assert not train(experiment, run, stop_call=stop_call)
        assert resume_run(run.path, experiment)
        check_same(tmp_path / "uninterrupted", run.path)


def test_a_member_agrees_with_its_own_training_and_other_options_are_another_group(tmp_path: Path) -> None:
    sweep = "{schedule.plateau.patience: [0, 1], optimizer.sgd.lr: [2.0, 0.1]}"
    first, second = groups(tmp_path, sweep, *SETTINGS, "training.epochs=4", layers="[linear: 8, relu, linear: 3]")
    assert len(first.members) == len(second.members) == 2
    together = trained(first, first.members)
    factors = together.state.optimizer["plateau"]["factor"]
    for row, member in enumerate(first.members):
        alone = training.run(training.prepare(member.config)).state
        assert alone.optimizer["plateau"]["factor"].item() == np.asarray(factors)[row]
        for x, expected in zip(tree.leaves(together.state.params), tree.leaves(alone.params), strict=True):
            np.testing.assert_allclose(np.asarray(x)[row], expected.numpy(), rtol=1e-3, atol=1e-5)
