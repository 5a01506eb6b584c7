"""In float64, every peer that trains many networks together has adtrain's losses, up to rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peer_marks import crossed, marked, quick
from training_runs import load

from adtrain.bench.peers import jobs
from adtrain.bench.peers.jobs import MembersJob, members_job
from adtrain.bench.peers.systems import Unsupported
from adtrain.sweeps.members import with_seeds

__all__ = ["quick"]

FORMS = marked("torch-vmap", "jax-vmap")
LAYERS = "[{linear: 16}, relu, {linear: 3}]"
OPTIMIZERS = "sgd: {lr: 0.1, momentum: 0.9}", "adam: {lr: 0.01, weight_decay: 0.01}"


def two_members(folder: Path, *overrides: str, layers: str = LAYERS) -> MembersJob:
    fixed = "training.precision=float64", "model.input=[36]", with_seeds(7, 2)
    return members_job(load(folder, *fixed, *overrides, layers=layers), "cpu")


def losses(name: str, given: MembersJob) -> np.ndarray:
    """The losses (steps, members) of two calls."""
    runner = jobs.runner(name, given, "members")
    return np.array([x for _ in range(2) for x in runner.losses()])


@pytest.mark.parametrize(("name", "optimizer"), crossed(FORMS, OPTIMIZERS))
def test_each_member_of_a_peer_has_the_losses_of_adtrain(tmp_path: Path, name: str, optimizer: str) -> None:
    given = two_members(tmp_path, f"optimizer={{{optimizer}}}")
    expected = losses("adtrain", given)
    assert expected.shape == (10, 2)
    assert not np.isclose(expected[:, 0], expected[:, 1]).any()
    np.testing.assert_allclose(losses(name, given), expected, rtol=1e-9)


@pytest.mark.needs_torch
def test_networks_that_pytorch_cannot_vmap_are_reported_as_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"running statistics in torch\.func\.vmap"):
        losses("torch-vmap", two_members(tmp_path, layers="[{linear: 4}, batch_norm1d, {linear: 3}]"))
    with pytest.raises(Unsupported, match=r"training\.clip_norm in torch\.func\.vmap"):
        losses("torch-vmap", two_members(tmp_path, "training.clip_norm=1.0"))


def test_a_run_returns_the_mean_loss_of_its_steps_and_members(tmp_path: Path) -> None:
    given = two_members(tmp_path)
    runner = jobs.runner("adtrain", given, "members")
    assert runner.run(2) == pytest.approx(losses("adtrain", given).mean(), rel=1e-12)
