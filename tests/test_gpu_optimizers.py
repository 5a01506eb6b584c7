"""Trainings on a GPU with each optimizer, average of weights and layer for gates agree with those on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu
from resumed_runs import check_same, resume_run, train
from sweep_runs import groups, trained
from training_runs import prepare

from adtrain import training
from adtrain.core import tree
from adtrain.sweeps.wave import WaveTraining, run_to_end
from adtrain.training import RunFolder, loop

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu

CONV = "{conv2d: {out_channels: 4, kernel_size: 3, padding: 1, bias: false, weight_init: partial_dirac}}"
LAYERS = (
    f"[{CONV}, {{batch_norm2d: {{affine: bias}}}}, hardswish, {CONV}, {{instance_norm2d: {{affine: true}}}}, "
    "{multiply: [[prelu], [{adaptive_max_pool2d: 1}, sigmoid]]}, {upsample: 2}, {max_pool2d: 2}, "
    "{upsample: {scale_factor: 2, mode: bilinear}}, {adaptive_max_pool2d: 4}, {reshape: [4, 16]}, "
    "{conv1d: {out_channels: 4, kernel_size: 3, padding: same}}, {rms_norm: {eps: 0.01}}, flatten, {scale: 0.5}, "
    "linear: 3]"
)
GROUPS = "parameter_groups=[no_decay, {paths: 0.weight, trainable: false}, {paths: vectors, lr_factor: 2}]"
MUON = "optimizer={muon: {lr: 0.02, normalize_weights: true, rest: {sgd: {lr: 0.05, momentum: 0.9}}, rest_paths: 15.*}}"
IMAGES = "model.input=[1,6,6]"
CASES = {
    "muon, groups, moving average": (MUON, GROUPS, "training.average={ema: 0.8}", "training.clip_norm=1"),
    "muon, plateau, lookahead": (
        MUON, "schedule={plateau: {patience: 0, factor: 0.5}}", "training.average={lookahead: {steps: 2}}",
    ),
    "lion, trapezoid": ("optimizer={lion: {lr: 0.003, weight_decay: 0.1}}", "schedule=trapezoid"),
    "amsgrad, restarts": ("optimizer={adamw: {lr: 0.01, amsgrad: true}}", "schedule={cosine_restarts: 1}"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_training_agrees_with_one_on_the_cpu(gpu: Any, tmp_path: Path, case: str) -> None:
    settings = IMAGES, "training.epochs=2", "training.precision=float64", *CASES[case]
    experiment = prepare(tmp_path, *settings, layers=LAYERS)
    expected, found = (training.run(experiment, device).state for device in ("cpu", "gpu"))
    for path, x, y in zip(tree.paths(found), tree.leaves(found), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-6, atol=1e-8, err_msg=path)


@pytest.mark.parametrize("case", ["muon, groups, moving average", "muon, plateau, lookahead"])
def test_a_stopped_run_resumes_with_the_same_bytes(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, IMAGES, "training.epochs=2", *CASES[case], layers=LAYERS)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "straight"), device="gpu")
    assert not train(experiment, RunFolder.create(experiment, tmp_path / "stopped"), stop_call=5, device="gpu")
    assert resume_run(tmp_path / "stopped", training.prepare(experiment.config), device="gpu")
    check_same(tmp_path / "straight", tmp_path / "stopped")


def test_members_with_other_rates_and_factors_agree_with_those_on_the_cpu(gpu: Any, tmp_path: Path) -> None:
    sweep = "{optimizer.muon.rest.sgd.lr: [0.05, 0.1], parameter_groups.2.lr_factor: [2, 3]}"
    more: Sequence[str] = (IMAGES, "training.epochs=1", MUON, GROUPS, "schedule=cosine", "training.average=ema")
    (group,) = groups(tmp_path, sweep, *more, layers=LAYERS)
    expected = trained(group, group.members)
    wave = WaveTraining(group, group.members, "gpu")
    assert run_to_end(wave.epoch_in_parts(lambda: False)) is not None
    for x, y in zip(tree.leaves(wave.host_state().state), tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-2, atol=1e-3)
