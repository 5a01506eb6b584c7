from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import CLASSES, images_of, prepare

import adtrain as ad
from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.staging import stage
from adtrain.core.trace import Call, Hook, hook
from adtrain.data.statistics import PIXEL_MAX
from adtrain.training import Experiment, Mode, TrainState, copied, evaluation_step
from adtrain.training.step import all_finite, empty_log, random_state, repeated, zero_totals

CONVOLUTIONAL = (
    "[conv2d: {out_channels: 4, kernel_size: 3}, batch_norm2d, relu, max_pool2d: 2, flatten, dropout: 0.5, linear: 3]"
)


def batch(count: int = 8) -> tuple[Value, Value, Value]:
    """A data set of `count` images, and the indices of all of them."""
    labels = np.arange(count) % CLASSES
    return ad.array(images_of(labels, seed=5)[:, np.newaxis]), ad.array(labels), ad.array(np.arange(count))


def normalized(experiment: Experiment, images: Value) -> np.ndarray:
    net = experiment.network
    return (images.numpy() / PIXEL_MAX - net.mean[0]) / net.std[0]


def test_pixels_are_normalised_by_channel_and_reshaped(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "training.precision=float64")
    images, *_ = batch()
    inputs = experiment.network.inputs(images)
    assert inputs.shape == (8, 36)
    assert inputs.dtype == np.float64
    np.testing.assert_allclose(inputs.numpy(), normalized(experiment, images).reshape(8, 36), rtol=1e-12, atol=1e-12)


def test_pixels_are_only_scaled_without_normalisation(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "data.normalize=false")
    images, *_ = batch()
    expected = images.numpy().reshape(8, 36) / PIXEL_MAX
    np.testing.assert_allclose(experiment.network.inputs(images).numpy(), expected, rtol=1e-6)


def test_a_step_of_sgd_follows_the_gradient_of_softmax_regression(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "training.precision=float64", "optimizer={sgd: {lr: 0.5}}", layers="[linear: 3]")
    state, (images, labels, indices) = experiment.initial_state("cpu"), batch()
    weight, bias = (state.params["0"][name].numpy().copy() for name in ("weight", "bias"))
    new, metrics = experiment.train_step(state, experiment.seed("cpu"), images, labels, indices)

    x = normalized(experiment, images).reshape(8, 36)
    logits = x @ weight.T + bias
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    target = np.eye(CLASSES)[labels.numpy()]
    np.testing.assert_allclose(float(metrics.loss), -np.log((p * target).sum(axis=1)).mean(), rtol=1e-12)
    assert int(metrics.sums) == (logits.argmax(axis=1) == labels.numpy()).sum()
    assert float(metrics.learning_rate) == 0.5
    np.testing.assert_allclose(new.params["0"]["weight"].numpy(), weight - 0.5 * (p - target).T @ x / 8, rtol=1e-10)
    np.testing.assert_allclose(new.params["0"]["bias"].numpy(), bias - 0.5 * (p - target).mean(axis=0), rtol=1e-10)
    assert int(new.step) == 1


def test_a_batch_is_gathered_from_the_data_set_at_its_indices(tmp_path: Path) -> None:
    experiment = prepare(tmp_path)
    images, labels, _ = batch(20)
    indices = np.array([17, 3, 3, 11, 0])
    picked = images.numpy()[indices], labels.numpy()[indices], np.arange(5)
    state, seed = experiment.initial_state("cpu"), experiment.seed("cpu")
    steps: list[tuple[Callable[..., Any], Sequence[Any]]] = [
        (replace(experiment, mode=Mode.EAGER).train_step, (state, seed)),
        (replace(experiment, mode=Mode.EAGER).logged_step, (state, empty_log(experiment.network.task, 3, "cpu"), seed)),
        (
            evaluation_step(experiment.network),
            (zero_totals(experiment.network.task, "cpu"), state.params, state.statistics),
        ),
    ]
    for number, (step, inputs) in enumerate(steps):
        order, same = (x if number == 0 else x[None] for x in (indices, picked[2]))
        found = step(*inputs, images, labels, ad.array(order))
        expected = step(*inputs, *map(ad.array, picked[:2]), ad.array(same))
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    for wrong in (20, -1):
        with pytest.raises(ad.ShapeError, match="out of range"):
            experiment.train_step(copied(state), seed, images, labels, ad.array([0, wrong]))


def moved(old: TrainState, new: TrainState) -> np.ndarray:
    pairs = zip(tree.leaves(old.params), tree.leaves(new.params), strict=True)
    return np.concatenate([(b.numpy() - a.numpy()).ravel() for a, b in pairs])


def test_gradients_are_clipped_before_the_update(tmp_path: Path) -> None:
    sgd = ("training.precision=float64", "optimizer={sgd: {lr: 1.0}}")
    for clip, measure in (("clip_norm", np.linalg.norm), ("clip_value", lambda x: np.abs(x).max())):
        experiment = prepare(tmp_path, *sgd, f"training.{clip}=0.01")
        state = experiment.initial_state("cpu")
        new, _ = experiment.train_step(copied(state), experiment.seed("cpu"), *batch())
        np.testing.assert_allclose(measure(moved(state, new)), 0.01, rtol=1e-3)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "binary_cross_entropy_with_logits"])
def test_regression_losses_use_one_hot_targets(tmp_path: Path, loss: str) -> None:
    experiment = prepare(tmp_path, f"loss={loss}", "training.precision=float64")
    outputs = np.random.default_rng(0).normal(size=(8, CLASSES))
    labels = batch()[1]
    found = experiment.network.loss_of(ad.array(outputs), labels)
    targets = ad.array(np.eye(CLASSES)[labels.numpy()])
    function = getattr(ops, loss if loss.startswith("binary") else f"{loss}_loss")
    assert float(found) == float(function(ad.array(outputs), targets))


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (7, 3), (2**63 + 5, 2**32 + 9), (2**32, 2**32 - 1)])
def test_the_random_state_of_traced_values_equals_that_of_python_numbers(seed: int, step: int) -> None:
    words = ad.array(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))
    found = random_state(words, ad.array(np.array(step, np.int64)))
    np.testing.assert_array_equal(found.numpy(), ops.rng_state(seed, step).numpy())


def test_dropout_masks_differ_between_steps(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "optimizer={sgd: {lr: 1.0e-30}}", layers="[dropout: 0.5, linear: 3]")
    step, state, seed = experiment.train_step, experiment.initial_state("cpu"), experiment.seed("cpu")
    state, first = step(state, seed, *batch())
    again, second = step(copied(state), seed, *batch())
    assert float(first.loss) != float(second.loss)
    assert float(step(state, seed, *batch())[1].loss) == float(second.loss)
    assert int(again.step) == 2


def test_evaluation_uses_running_statistics_and_no_dropout(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "model.input=[1, 6, 6]", layers=CONVOLUTIONAL)
    state = experiment.initial_state("cpu")
    evaluate = evaluation_step(experiment.network)
    examples = batch(6)[:2]
    zero, all_six = zero_totals(experiment.network.task, "cpu"), ad.array(np.arange(6)[None])
    whole = evaluate(zero, state.params, state.statistics, *examples, all_six)
    parts = zero
    for _ in range(6):
        parts = evaluate(parts, state.params, state.statistics, *examples, ad.array(np.arange(6)[:, None]))
    assert (int(whole.position), int(parts.position)) == (1, 6)
    np.testing.assert_allclose(float(whole.loss), float(parts.loss), rtol=1e-5)
    assert int(whole.sums) == int(parts.sums)

    trained, _ = experiment.train_step(copied(state), experiment.seed("cpu"), *batch(6))
    assert not np.array_equal(
        trained.statistics["1"]["running_mean"].numpy(), state.statistics["1"]["running_mean"].numpy()
    )
    other = evaluate(zero, state.params, trained.statistics, *examples, all_six)
    assert float(other.loss) != float(whole.loss)


def test_staged_and_eager_steps_and_evaluations_are_bit_identical(tmp_path: Path) -> None:
    experiment = prepare(
        tmp_path, "model.input=[1, 6, 6]", "training.clip_norm=1.0", "schedule=cosine", layers=CONVOLUTIONAL
    )
    eager = replace(experiment, mode=Mode.EAGER)
    state = experiment.initial_state("cpu")
    images, labels, indices = batch()
    order = ad.array(np.stack([indices.numpy(), indices.numpy()[::-1]]))
    inputs, weights = (images, labels, order), (state.params, state.statistics)
    log, zero = empty_log(experiment.network.task, 2, "cpu"), zero_totals(experiment.network.task, "cpu")
    cases: list[tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]] = [
        (experiment.evaluation_step, eager.evaluation_step, (zero,), (*weights, *inputs)),
        (experiment.logged_step, eager.logged_step, (state, log), (experiment.seed("cpu"), *inputs)),
    ]
    for staged_step, eager_step, carry, rest in cases:
        expected = tree.leaves(repeated(eager_step, 2, carry, *rest))
        found = tree.leaves(repeated(staged_step, 2, carry, *rest))
        assert len(found) == len(expected) > 1
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


class ScopeHook(Hook):
    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], set[str]] = {}

    def before(self, call: Call) -> None:
        self.seen.setdefault((call.scope, call.phase), set()).add(call.primitive.name)


def test_every_operation_has_the_scope_and_phase_of_its_layer(tmp_path: Path) -> None:
    experiment = replace(prepare(tmp_path), mode=Mode.EAGER)
    where = ScopeHook()
    state = experiment.initial_state("cpu")
    with hook(where):
        experiment.train_step(state, experiment.seed("cpu"), *batch())
    assert where.seen["0.linear", "forward"] >= {"matmul", "add"}
    assert where.seen["2.linear", "backward"] >= {"matmul"}
    assert {scope for scope, _ in where.seen} - {""} == {
        "0.linear", "1.relu", "2.linear", "input", "random", "loss", "accuracy", "optimizer"
    }  # fmt: skip
    assert {phase for scope, phase in where.seen if scope == "optimizer"} == {"update"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_check_of_a_state_finds_one_number_that_is_not_finite(bad: float) -> None:
    """A GPU runs this function as a Program."""
    good = TrainState({"w": ad.array(np.ones((3, 4), np.float32))}, {"m": ad.array(np.ones(2))}, {"step": ad.array(7)})
    assert all_finite(good).numpy()
    assert not all_finite(good._replace(statistics={"m": ad.array([1.0, bad])})).numpy()
    assert not stage(all_finite)(good._replace(params={"w": ad.array([[1.0, bad]])})).numpy()
    assert all_finite(TrainState({}, {}, {"step": ad.array(7)})).numpy()
