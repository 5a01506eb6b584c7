from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import prepare

from adtrain import training
from adtrain.core import timeline, tree
from adtrain.core.errors import AdtrainError
from adtrain.training import ClassScore, Epoch, Interval, Observer, TrainState, Validated, trainer
from adtrain.training.loop import FiniteCheck

pytestmark = pytest.mark.unfused


class Events(Observer):
    """Collects all events of a run."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int, int]] = []
        self.images: list[int] = []
        self.intervals: list[Interval] = []
        self.epochs: list[Epoch] = []
        self.validations: list[Validated] = []

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        self.started.append((epoch, epochs, images))

    def step_done(self, images: int) -> None:
        self.images.append(images)

    def interval_done(self, interval: Interval) -> None:
        self.intervals.append(interval)

    def validated(self, validated: Validated) -> None:
        self.validations.append(validated)

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        self.epochs.append(epoch)


class Clock:
    """It advances by a second whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def weights(state: TrainState) -> list[np.ndarray]:
    return [x.numpy() for x in tree.leaves(state.params)]


def test_a_training_of_eight_epochs_classifies_every_test_image(tmp_path: Path) -> None:
    result = training.run(prepare(tmp_path, "training.epochs=8"))
    assert isinstance(result.test, ClassScore)
    assert result.test.accuracy == 1.0
    assert result.test.loss < 0.1
    assert result.train.loss < 0.1


def test_results_depend_on_the_seed_only(tmp_path: Path) -> None:
    first, second = (training.run(prepare(tmp_path, layers="[dropout: 0.2, linear: 3]")) for _ in range(2))
    other = training.run(prepare(tmp_path, "training.seed=1", layers="[dropout: 0.2, linear: 3]"))
    for a, b, c in zip(weights(first.state), weights(second.state), weights(other.state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
    assert (first.train, first.test) == (second.train, second.test)


def test_an_epoch_uses_every_image_once(tmp_path: Path) -> None:
    events = Events()
    result = training.run(prepare(tmp_path), observers=[events])
    assert events.started == [(1, 3, 90), (2, 3, 90), (3, 3, 90)]
    assert (sum(events.images), events.images.count(10)) == (270, 3)
    assert (result.epochs, result.steps, result.images, len(result.step_seconds)) == (3, 18, 270, 18)
    assert int(result.state.step) == 18
    assert [epoch.step for epoch in events.epochs] == [6, 12, 18]


def test_the_time_of_steps_is_without_that_of_the_state_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is checked after the last step of an epoch, which takes 1000 s here."""
    clock = Clock()

    def slow_check(check: FiniteCheck, state: object) -> Callable[[], bool]:
        clock.now += 1000
        activities.append(timeline.current().activity)
        return lambda: True

    activities: list[str] = []
    monkeypatch.setattr(trainer, "perf_counter", clock)
    monkeypatch.setattr(FiniteCheck, "__call__", slow_check)
    result = training.run(prepare(tmp_path))
    assert activities == ["checkpoint"] * 3
    assert result.train_seconds < 1000


def test_the_share_of_operations_is_that_of_the_mean_step_of_the_training(tmp_path: Path) -> None:
    experiment = prepare(tmp_path)
    result = replace(training.run(experiment), step_seconds=[0.01, 0.01, 0.07])
    of_profile: dict[str, Any] = {"ops_sum_ms": 9.0, "profiled_step_ms": 10.0}
    assert training.summarize(experiment, result, "cpu", **of_profile).ops_to_step_ratio == pytest.approx(0.3)
    resumed_at_the_end = replace(result, step_seconds=[])
    assert training.summarize(experiment, resumed_at_the_end, "cpu", **of_profile).ops_to_step_ratio == pytest.approx(
        0.9
    )


@pytest.mark.parametrize("epochs", ["3", "null"])
def test_the_option_steps_limits_training_with_epochs_and_without(tmp_path: Path, epochs: str) -> None:
    events = Events()
    result = training.run(prepare(tmp_path, "training.steps=8", f"training.epochs={epochs}"), observers=[events])
    assert (result.epochs, result.steps, result.images) == (2, 8, 90 + 32)
    assert events.started == [(1, 2, 90), (2, 2, 32)]
    assert result.train == events.epochs[-1].train


@pytest.mark.parametrize("groups", ["null", "[{paths: vectors, lr_factor: 2}]"])
def test_the_learning_rate_of_a_sequence_is_that_of_the_optimizer_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str
) -> None:
    monkeypatch.setattr(trainer, "LOG_ROWS", 2)
    events = Events()
    sequence = "{sequence: {lr: 0.5, first: {sgd: 0.25}, steps: 4, then: {sgd: 0.125}}}"
    settings = (f"optimizer={sequence}", f"parameter_groups={groups}", "training.steps=6", "schedule=constant")
    training.run(prepare(tmp_path, *settings), observers=[events])
    rates = [(interval.step, interval.learning_rate) for interval in events.intervals]
    assert rates == [(2, 0.125), (4, 0.125), (6, 0.0625)]


@pytest.mark.parametrize(("steps", "warns"), [(8, True), (9, False)])
def test_a_warm_up_that_the_training_ends_in_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, warns: bool
) -> None:
    prepare(tmp_path, "schedule={cosine: {warmup_steps: 8}}", f"training.steps={steps}")
    reason = "found a warm-up of 8 steps, expected fewer than the 8 of the training, which ends before the full"
    warning = f"adtrain: warning: --set schedule: schedule: {reason} learning rate"
    assert caplog.messages == [warning] * warns


def test_metrics_are_means_over_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "LOG_ROWS", 4)
    events = Events()
    training.run(prepare(tmp_path, "training.epochs=1", "schedule={cosine: {}}"), observers=[events])
    assert [interval.step for interval in events.intervals] == [4, 6]
    (first, second), (epoch,) = events.intervals, events.epochs
    np.testing.assert_allclose(epoch.train.loss, (first.train.loss * 64 + second.train.loss * 26) / 90, rtol=1e-12)
    accuracy = [line.train._asdict()["accuracy"] for line in (epoch, first, second)]
    np.testing.assert_allclose(accuracy[0], (accuracy[1] * 64 + accuracy[2] * 26) / 90)
    assert first.learning_rate > second.learning_rate > 0


def test_validation_images_are_excluded_from_training_and_scored_each_epoch(tmp_path: Path) -> None:
    events = Events()
    experiment = prepare(tmp_path, "data.validation=0.2")
    result = training.run(experiment, observers=[events])
    assert experiment.validation is not None
    assert (len(experiment.train), len(experiment.validation)) == (72, 18)
    assert events.started[0] == (1, 3, 72)
    assert [epoch.validation for epoch in events.epochs][-1] == result.validation is not None


def test_an_overflow_in_the_last_update_is_detected_by_the_evaluation(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "optimizer={sgd: {lr: 1.0e+30}}", "training.steps=1")
    with pytest.raises(AdtrainError, match=r"^the loss on the test examples is nan: the model's numbers "):
        training.run(experiment)


def test_a_continuation_uses_full_batches_and_does_not_modify_the_result(tmp_path: Path) -> None:
    experiment = prepare(tmp_path)
    result = training.run(experiment)
    before = [x.copy() for x in weights(result.state)]
    take_steps = training.continuation(experiment, result.state)
    assert not np.array_equal(before[0], weights(take_steps(1))[0])
    assert [int(take_steps(times).step) for times in (1, 3, 150)] == [20, 23, 173]
    for a, b in zip(before, weights(result.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_larger_than_the_data_is_one_batch(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "data.batch_size=500", "training.epochs=2")
    assert training.run(experiment).steps == 2
    assert int(training.continuation(experiment, experiment.initial_state("cpu"))(1).step) == 1


def test_the_validation_images_are_also_evaluated_within_an_epoch(tmp_path: Path) -> None:
    """72 of 90 images are trained on, in 9 batches of 8."""
    settings = ("data.validation=0.2", "data.batch_size=8", "training.final_model=last")
    events, plain = Events(), Events()
    result = training.run(prepare(tmp_path, *settings, "training.validate_every=4"), "cpu", [events])
    without = training.run(prepare(tmp_path, *settings), "cpu", [plain])
    found = [(x.epoch, x.step) for x in events.validations]
    assert found == [(1, 4), (1, 8), (2, 12), (2, 16), (3, 20), (3, 24)]  # step 27 ends an epoch
    for x, y in zip(weights(result.state), weights(without.state), strict=True):
        np.testing.assert_array_equal(x, y)
    assert [x.validation for x in events.epochs] == [x.validation for x in plain.epochs]
    at_step_12 = training.run(prepare(tmp_path, *settings, "training.steps=12"))
    assert events.validations[2].validation == at_step_12.validation
    assert plain.validations == []


def test_evaluations_within_an_epoch_need_validation_images(tmp_path: Path) -> None:
    with pytest.raises(AdtrainError, match=r"training\.validate_every: found 4, expected none, for there are no valid"):
        prepare(tmp_path, "training.validate_every=4")


def test_balanced_weights_give_each_class_of_the_training_examples_the_same_total(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "loss={cross_entropy: {weight: balanced}}", "data.validation=0.3")
    weights = experiment.network.class_weights
    assert weights is not None
    counts = np.bincount(experiment.train.labels, minlength=len(weights))
    totals = counts * weights
    np.testing.assert_allclose(totals[counts > 0], len(experiment.train) / len(weights))
    assert experiment.config.loss.options()["weight"] == weights
    assert "weight: balanced" not in experiment.config_text
