"""Augmentations on a GPU draw the same numbers and make the same images as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gpu_parity import TOLERANCE, check, gpu, poisoned
from test_augment import EVERY, FURTHER, UNIT, images_of

import adtrain as ad
from adtrain import ops
from adtrain.augment import Augmentation, Batch, Crop, VerticalFlip, moved
from adtrain.core import tree
from adtrain.core.staging import stage
from adtrain.passes import ALL

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


def results(changes: Sequence[Augmentation], dtype: str, device: str) -> list[np.ndarray]:
    """Images and mixed labels of three steps, fused on the GPU and eager on the CPU."""

    def f(images: Any, labels: Any, rng: Any) -> tuple[Any, Any]:
        batch = Batch(images, labels, UNIT)
        for change in changes:
            batch = change(batch, rng)
        return batch.images, batch.mixed or ()

    images = images_of((130, 3, 9, 11), dtype)
    run: Any = f if device == "cpu" else stage(f, ALL)
    given = [ad.array(x, device=device) for x in (images / images.max(), np.arange(len(images)))]
    found = [run(*given, ops.rng_state(7, step).to(device)) for step in range(3)]
    return [x.numpy() for x in tree.leaves(found)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "changes",
    [*((change,) for change in (*EVERY, *FURTHER)), EVERY],
    ids=[*(c.kind() for c in EVERY), "reflecting crop", "alternating flip", "all"],
)
def test_an_augmentation_makes_the_same_images_as_on_the_cpu(changes: Sequence[Augmentation], dtype: str) -> None:
    found = results(changes, dtype, "gpu")
    check(found, results(changes, dtype, "cpu"), 10 * TOLERANCE[dtype])
    for x, y in zip(found, results(changes, dtype, "gpu"), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_composed_moves_make_the_same_images_as_on_the_cpu(count: int) -> None:
    moves = [*FURTHER, VerticalFlip(0.4), Crop(2)][:count]

    def f(data: Any, indices: Any, rng: Any, epoch: Any) -> Any:
        stored = ops.embedding(indices, data)
        batch = Batch(ops.astype(stored, "float32"), indices, UNIT, stored=stored, epoch=epoch)
        return ops.astype(moved(batch, moves, rng, data, indices), "float32")

    data, indices = (images_of((130, 3, 9, 11)) % 251).astype(np.uint8), np.random.default_rng(0).integers(0, 130, 64)
    runs: list[tuple[Any, str]] = [(f, "cpu"), (stage(f, ALL), "gpu")]
    for step in range(2):
        found = [
            run(
                *(ad.array(x, device=device) for x in (data, indices)),
                ops.rng_state(7, step).to(device),
                ad.array(np.int64(step), device=device),
            ).numpy()
            for run, device in runs
        ]
        np.testing.assert_array_equal(found[1], found[0])
