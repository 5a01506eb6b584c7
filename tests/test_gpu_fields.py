"""Neural fields on a GPU: the elements that a step draws are those of the CPU, and a training repeats in all bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu
from test_train_fields import prepared

import adtrain as ad
from adtrain import ops, training
from adtrain.augment import Drawn
from adtrain.core import tree

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu


def test_the_elements_of_a_step_are_those_of_the_cpu(gpu: Any) -> None:
    def drawn(state: Any, indices: Any) -> Any:
        return Drawn().examples(indices, 12_345_678, state)

    indices = np.zeros(4096, np.int64)
    found = [
        ad.jit(drawn)(ops.rng_state(5, 7).to(device), ad.array(indices, device=device)).numpy()
        for device in ("cpu", "gpu")
    ]
    np.testing.assert_array_equal(found[0], found[1])


def test_a_training_repeats_in_all_bits_and_agrees_with_the_cpu(gpu: Any, tmp_path: Path) -> None:
    found = [
        training.run(prepared(tmp_path, "training.epochs=1", "training.precision=float64"), device)
        for device in ("gpu", "gpu", "cpu")
    ]
    first, second, on_cpu = ([x.numpy() for x in tree.leaves(each.state.params)] for each in found)
    for x, y in zip(first, second, strict=True):
        assert x.tobytes() == y.tobytes()
    for x, y in zip(first, on_cpu, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
