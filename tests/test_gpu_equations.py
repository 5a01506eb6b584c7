"""Training on equations on a GPU: the points are those of the CPU in all bits, and a training agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu
from test_train_equations import ADAPTIVE, DECAY, prepared

import adtrain as ad
from adtrain import ops, training
from adtrain.core import tree

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sampling", ["uniform", "sobol", "latin_hypercube"])
def test_points_have_the_bits_of_those_of_the_cpu(gpu: Any, tmp_path: Path, sampling: str) -> None:
    box = "data.points={t: [0.1, 2.3]}", "loss=[{equation: u_t + u}, {equation: u, at: {t: 0.1}}]"
    settings = "optimizer=adam", "data.resample=step", f"data.sampling={sampling}", "data.batch_size=1000"
    experiment = prepared(tmp_path, *box, *settings)
    (change,) = experiment.augmentations
    images = np.asarray(experiment.train.images)

    def points(state: Any, stored: Any) -> Any:
        return change(ad.augment.Batch(stored, stored, experiment.network.unit), state).images

    found = [
        ad.jit(points)(ops.rng_state(5, 7).to(device), ad.array(images, device=device)).numpy()
        for device in ("cpu", "gpu")
    ]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("settings", [(), ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_training_agrees_with_one_on_the_cpu(gpu: Any, tmp_path: Path, settings: tuple[str, ...]) -> None:
    experiment = prepared(tmp_path, *settings, "training.epochs=2", text=DECAY)
    expected, found = (training.run(experiment, device).state for device in ("cpu", "gpu"))
    arrays = tree.leaves(found.params), tree.leaves(expected.params)
    for path, x, y in zip(tree.paths(found.params), *arrays, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-7, err_msg=path)
