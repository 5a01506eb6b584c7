"""Convolutions on a GPU that share operands laid out once: which do, and that they compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from program_samples import for_gpu, names

import adtrain as ad
from adtrain import ops
from adtrain.core.array import array
from adtrain.core.chip import CHIP
from adtrain.core.fused import convolution_p
from adtrain.core.program import Program
from adtrain.core.staging import stage

LAID = ("conv2d_laid", "conv2d_input_grad_laid", "conv2d_weight_grad_laid")


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHIP, "multiprocessors", 132)
    monkeypatch.setattr(CHIP, "capability", (9, 0))


def gradients(count: int, channels: int) -> tuple[Program, list[np.ndarray]]:
    """Of a layer with relu by its images and weights, before it is fused."""
    rng = np.random.default_rng(0)
    shapes = (count, channels, 8, 14), (channels, channels, 3, 3)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def loss(x: Any, w: Any) -> Any:
        return ops.sum(ops.square(ops.relu(ops.conv2d(x, w, padding=1))))

    return stage(ad.grad(loss, (0, 1))).program(*map(array, args)), args


def convolutions(program: Program) -> list[str]:
    found = [e.params["body"].equations[0] if e.primitive is convolution_p else e for e in program.equations]
    return [e.primitive.name for e in found if e.primitive.name.startswith("conv2d")]


def test_a_large_convolution_and_its_gradients_share_operands_and_compute_the_same() -> None:
    program, args = gradients(200, 64)
    shared = for_gpu(program)
    assert sorted(convolutions(shared)) == sorted(LAID)
    assert names(shared).count("in_halves") == 2
    for found, expected in zip(shared.evaluate(*map(array, args)), program.evaluate(*map(array, args)), strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kernel", [3, 5])
def test_convolutions_of_the_same_images_do_not_share_with_one_another(kernel: int) -> None:
    """Nor is another's layout taken, of a kernel of another size."""
    rng = np.random.default_rng(0)
    x, a = (rng.standard_normal(shape).astype(np.float32) for shape in ((200, 64, 8, 14), (64, 64, 3, 3)))
    b = rng.standard_normal((64, 64, kernel, kernel)).astype(np.float32)

    def loss(x: Any, a: Any, b: Any) -> Any:
        first, second = ops.conv2d(x, a, padding=1), ops.conv2d(x, b, padding=1)
        return ops.sum(ops.square(first)) + ops.sum(ops.square(second))

    program = for_gpu(stage(ad.grad(loss, (0, 1, 2))).program(*map(array, (x, a, b))))
    shared = 0
    for e in program.equations:
        inside = e.params["body"].equations[0] if e.primitive is convolution_p else e
        if inside.primitive.name in LAID[:2]:
            laid = next(q for q in program.equations if inside.inputs[1] in q.outputs)
            assert laid.params["size"] == inside.inputs[2].type.shape[2:]
            assert laid.inputs[0] is inside.inputs[0]
            shared += 1
    assert shared >= 2


def test_small_ones_and_those_of_other_gpus_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "in_halves" not in names(for_gpu(gradients(2, 8)[0]))
    program, _ = gradients(200, 64)
    monkeypatch.setattr(CHIP, "capability", (10, 0))
    assert "in_halves" not in names(for_gpu(program))


def test_without_gradients_nothing_is_shared() -> None:
    x, w = (array(np.ones(shape, np.float32)) for shape in ((200, 64, 8, 14), (64, 64, 3, 3)))
    program = stage(lambda x, w: ops.relu(ops.conv2d(x, w, padding=1))).program(x, w)
    assert "in_halves" not in names(for_gpu(program))
