"""Why a training ends before its last step: early stopping, and numbers that are not finite."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_files import no_plugins
from resumed_runs import train
from training_runs import load, prepare, write_config

from adtrain import config, nn, ops, training
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import AdtrainError
from adtrain.training import (
    Best,
    Checkpoint,
    ClassScore,
    Epoch,
    Experiment,
    NotFinite,
    Observer,
    RunFolder,
    TrainState,
    loop,
    trainer,
)
from adtrain.training.loop import FiniteCheck

pytestmark = pytest.mark.unfused

__all__ = ["no_plugins"]

DEEP = "[linear: 8, relu, linear: 3]"
GROWING = ("optimizer={sgd: {lr: 0.001}}", "schedule={exponential: {gamma: 1.0e+6}}", "training.epochs=9")
"""The rate grows tenfold a step, 1e6 times an epoch of 6 steps, until the numbers overflow."""


class Recorder(Observer):
    """Records the checkpoints, and why the run stopped."""

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.reasons: list[str] = []

    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        self.checkpoints.append(checkpoint)

    def stopped(self, reason: str, progress: training.Progress) -> None:
        self.reasons.append(reason)


def overflow(experiment: Experiment) -> tuple[str, Checkpoint]:
    """The error message at the end of the training, and the last checkpoint."""
    recorder = Recorder()
    with pytest.raises(NotFinite) as error:
        training.run(experiment, "cpu", [recorder])
    assert recorder.reasons == ["not_finite"]
    return str(error.value), recorder.checkpoints[-1]


def after(experiment: Experiment, steps: int) -> TrainState:
    """The state of a run that is stopped after `steps` steps."""
    recorder = Recorder()
    calls = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "REPORT_SECONDS", 0.0)
        with pytest.raises(training.Interrupted):
            training.run(experiment, "cpu", [recorder], stop=lambda: next(calls) == steps - 1)
    assert recorder.checkpoints[-1].progress.step == steps
    return recorder.checkpoints[-1].state


def check_state(found: Checkpoint, experiment: Experiment) -> None:
    """The state is finite, and equals that of a run stopped at the same step."""
    for x, y in zip(tree.leaves(found.state), tree.leaves(after(experiment, found.progress.step)), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("check_seconds", "copies"),
    [(1.0, True), (0.0, True), (0.0, False)],
    ids=["", "checked", "checked, not copied"],
)
def test_the_state_before_the_first_bad_step_is_kept_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_seconds: float, copies: bool
) -> None:
    monkeypatch.setattr(trainer, "CHECK_SECONDS", check_seconds)
    monkeypatch.setattr(trainer, "COPY_SHARE", 0.02 if copies else -1e9)
    experiment = prepare(tmp_path, *GROWING, layers=DEEP)
    message, last = overflow(experiment)
    assert 6 < last.progress.step < 54
    where = f"at step {last.progress.step + 1} (epoch {last.progress.epoch}), first the "
    assert where in message
    assert message.endswith("; training stopped: lower the optimizer's lr, or set training.clip_norm")
    check_state(last, experiment)


def test_a_training_that_no_observer_saves_goes_back_over_several_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = prepare(tmp_path, *GROWING, "training.final_model=last", layers=DEEP)
    message, last = overflow(experiment)
    assert last.progress.epoch > 2
    monkeypatch.setattr(trainer, "COPY_SHARE", -1.0)  # no copy but those for checkpoints
    copied: list[int] = []
    begin = trainer._Training._fetch_state

    def counted(run: Any) -> Any:
        copied.append(run.progress.step)
        return begin(run)

    monkeypatch.setattr(trainer._Training, "_fetch_state", counted)
    with pytest.raises(NotFinite) as error:
        training.run(experiment)
    assert (str(error.value), copied) == (message, [])


@pytest.mark.compiled
def test_a_compiled_training_goes_back_to_the_same_step(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, *GROWING, layers=DEEP)
    _, last = overflow(experiment)
    check_state(last, experiment)


def test_a_loss_that_is_not_finite_names_step_operation_and_layer(tmp_path: Path) -> None:
    message, last = overflow(prepare(tmp_path, "optimizer={sgd: {lr: 1.0e+30}}"))
    assert re.fullmatch(
        r"the loss is nan at step 2 \(epoch 1\), first the result of matmul in 2\.linear, from 16x16 \(0 to \S+e\+30\) "
        r"and 2\.weight 3x16 \(-\S+e\+29 to \S+e\+29\); training stopped: "
        r"lower the optimizer's lr, or set training\.clip_norm",
        message,
    )
    assert last.progress.step == 1


class Root(nn.ReLU):
    """The root of 0, whose derivative is not finite."""

    def forward(self, params: nn.Params, state: nn.State, x: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        return ops.sqrt(x * 0.0), state


def test_a_non_finite_gradient_is_found_although_the_loss_is_finite(tmp_path: Path) -> None:
    """The only step has a finite loss and a non-finite new state."""
    experiment = prepare(tmp_path, "training.steps=1", layers=DEEP)
    first, _, third = experiment.network.model.layers
    network = replace(experiment.network, model=nn.Sequential(first, Root(), third))
    message, last = overflow(replace(experiment, network=network))
    assert message.startswith("a number of the new state is not finite at step 1 (epoch 1), first the gradient of ")
    assert " of div in 1.root, from 16x" in message
    assert "; training stopped: a divisor is 0, add a small number to it; or lower the optimizer's lr" in message
    assert last.progress.step == 0


NOT_FINITE: dict[str, tuple[Callable[[Value], Value], str]] = {
    "log": (lambda x: ops.log(x * 0.0), "log needs numbers above 0, "),
    "sqrt": (lambda x: ops.sqrt(x * 0.0 - 1.0), "sqrt needs numbers of at least 0; "),
    "exp": (lambda x: ops.exp(x * 0.0 + 100.0), "exp overflows, "),
    "div": (lambda x: x / (x * 0.0), "a divisor is 0, "),
}
"""Functions whose results are not finite, and what their errors say."""


@dataclass(frozen=True)
class NotFiniteLayer(nn.ReLU):
    name: str = "log"

    def forward(self, params: nn.Params, state: nn.State, x: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        return NOT_FINITE[self.name][0](x), state


@pytest.mark.parametrize("name", NOT_FINITE)
def test_the_error_of_an_operation_says_what_its_operands_lack(tmp_path: Path, name: str) -> None:
    experiment = prepare(tmp_path, "training.steps=1", layers=DEEP)
    first, _, third = experiment.network.model.layers
    network = replace(experiment.network, model=nn.Sequential(first, NotFiniteLayer(name), third))
    message, _ = overflow(replace(experiment, network=network))
    assert f"; training stopped: {NOT_FINITE[name][1]}" in message
    assert message.endswith("; or lower the optimizer's lr, or set training.clip_norm")


def test_a_nondeterministic_device_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False])
    monkeypatch.setattr(FiniteCheck, "__call__", lambda self, state: partial(next, answers, True))
    with pytest.raises(AdtrainError, match="is not deterministic"):
        training.run(prepare(tmp_path))


EARLY = ("training.epochs=40", "data.validation=0.2", "training.early_stopping.patience=3")


def test_early_stopping_ends_the_run_and_gives_back_the_best_epoch(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, *EARLY, "training.best_by=validation_loss", "optimizer={sgd: {lr: 3.0}}")
    recorder = Recorder()
    result = training.run(experiment, "cpu", [recorder])
    assert (result.ended, result.restored) == ("early_stopping", True)
    assert result.epochs == result.best.epoch + 3 < 40
    best = recorder.checkpoints[result.best.epoch - 1]
    for x, y in zip(tree.leaves(result.state), tree.leaves(best.state), strict=True):
        np.testing.assert_array_equal(x.numpy(), y)
    assert best.progress.validation is not None
    assert result.best.value == best.progress.validation.loss
    examples = training.on_device(experiment.test, "cpu")
    evaluation = training.Evaluation(experiment.evaluation_step, experiment.network.task, examples)
    assert result.test == evaluation.score(result.state.params, result.state.statistics)


def test_early_stopping_remembers_the_best_across_resumptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, *EARLY, "training.best_by=validation_loss", "optimizer={sgd: {lr: 3.0}}")
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    lines = [x for x in training.read_metrics(tmp_path / "uninterrupted") if x.kind == "epoch"]
    run = RunFolder.create(experiment, tmp_path / "stopped")
    assert not train(experiment, run, stop_call=6 * (len(lines) - 1))  # during the last epoch, after the best one
    _, folder, start, notes = training.resume(run.path)
    assert train(experiment, folder, start)
    assert notes == []
    for name in ("model.safetensors", "last.safetensors", "best.safetensors"):
        assert (run.path / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes()
    (run.path / "summary.json").write_text("{}")
    with pytest.raises(AdtrainError, match=r"stopped is finished: it stopped early after epoch \d+; continue with "):
        training.resume(run.path)


def test_an_observer_ends_the_training_after_an_epoch(tmp_path: Path) -> None:
    class Ending(Recorder):
        def epoch_done(self, epoch: training.Epoch, state: Callable[[], TrainState]) -> bool:
            return epoch.epoch == 2

    first, second = Ending(), Recorder()
    result = training.run(prepare(tmp_path, "training.epochs=5"), "cpu", [first, second])
    assert (result.ended, result.epochs, result.restored) == ("callback", 2, False)
    assert first.reasons == second.reasons == []
    assert [x.progress.epochs_done for x in second.checkpoints] == [1, 2]


WORSE = ("optimizer={sgd: {lr: 3.0}}", "training.epochs=6", "data.validation=0.2", "training.best_by=validation_loss")
"""A training whose last epoch is not the best."""


@pytest.mark.parametrize("setting", ["data.validation=0.2", "training.final_model=best", "training.final_model=last"])
def test_with_validation_the_best_epoch_is_the_model_unless_the_config_says_otherwise(
    tmp_path: Path, setting: str
) -> None:
    experiment, recorder = prepare(tmp_path, *WORSE, setting), Recorder()
    result = training.run(experiment, "cpu", [recorder])
    restored = setting != "training.final_model=last"
    assert (result.ended, result.restored, result.epochs) == ("finished", restored, 6)
    assert result.best.epoch < 6
    epoch = result.best.epoch if restored else 6
    assert training.summarize(experiment, result, "cpu").model_epoch == epoch
    for x, y in zip(tree.leaves(result.state), tree.leaves(recorder.checkpoints[epoch - 1].state), strict=True):
        np.testing.assert_array_equal(x.numpy(), y)


def test_without_validation_the_last_epoch_is_the_model(tmp_path: Path) -> None:
    result = training.run(prepare(tmp_path, "optimizer={sgd: {lr: 0.5}}", "training.epochs=6"))
    assert (result.ended, result.restored, result.best.by) == ("finished", False, "train_loss")


def test_the_best_epoch_of_a_run_that_was_stopped_after_it_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    experiment = prepare(tmp_path, *WORSE)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "uninterrupted"))
    run = RunFolder.create(experiment, tmp_path / "stopped")
    assert not train(experiment, run, stop_call=32)  # in the last epoch
    _, folder, start, _ = training.resume(run.path)
    assert train(experiment, folder, start)
    assert (run.path / "model.safetensors").read_bytes() == (tmp_path / "uninterrupted/model.safetensors").read_bytes()


OWN_METRIC = """\
import adtrain as ad

@ad.register.metric("errors")
class Errors:
    higher_is_better = False

    def __call__(self, predictions):
        return float((predictions.probabilities.argmax(axis=1) != predictions.labels).mean())
"""


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(
    "metric",
    ["f1", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("precision", "recall", "top5")), "errors"],
)
def test_the_best_epoch_can_be_chosen_by_every_metric_of_the_validation_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    """`training.metrics` need not name those of adtrain. A lower value of the plug-in's metric is better."""
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    settings = [*WORSE[:3], f"training.best_by=validation_{metric}", "training.early_stopping={patience: 9}"]
    if metric == "errors":
        (tmp_path / "own.py").write_text(OWN_METRIC)
        settings.append("training.metrics=[errors]")
    cfg = config.load(write_config(tmp_path), settings, [str(tmp_path / "own.py")] if metric == "errors" else [])
    experiment = training.prepare(cfg)
    folder = RunFolder.create(experiment, tmp_path / "run")
    assert not train(experiment, folder, stop_call=20)
    allowed = training.Trust(files=[str(tmp_path / "own.py")]) if metric == "errors" else training.Trust()
    _, folder, start, _ = training.resume(folder.path, trust=allowed)
    result = training.run_in_folder(folder, experiment, "cpu", [], start)
    epochs = [x for x in training.read_metrics(folder.path) if isinstance(x, training.Epoch)]
    sign = 1 if metric == "errors" else -1
    best = min(epochs, key=lambda x: (sign * x.metrics[metric], x.validation.loss if x.validation else 0.0))
    assert len(epochs) == 6
    assert (result.best.value, result.best.epoch) == (best.metrics[metric], best.epoch)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["training.best_by=train_f1"],
            "expected train_ or validation_ with one of loss, accuracy, or validation_ with",
        ),
        (["training.best_by=validation_confusion"], "or validation_ with one of top5, precision, recall, f1"),
        (["training.best_by=accuracy"], "expected train_ or validation_ with a metric, such as validation_loss"),
    ],
)
def test_best_by_a_metric_that_is_not_one_number_of_an_epoch_is_an_error(
    tmp_path: Path, settings: list[str], expected: str
) -> None:
    with pytest.raises(config.ConfigError, match=expected):
        training.prepare(load(tmp_path, "data.validation=0.2", *settings))


@given(
    st.lists(st.tuples(*[st.sampled_from([0.25, 0.5, 0.75]) | st.floats(0, 1, allow_subnormal=False)] * 2), min_size=1),
    st.sampled_from(["train_loss", "train_accuracy", "validation_loss", "validation_accuracy"]),
    st.sampled_from([0.0, 0.1]),
)
def test_of_equally_good_epochs_the_first_with_the_smallest_loss_is_the_best(
    values: Sequence[tuple[float, float]], by: str, min_delta: float
) -> None:
    best = Best.start(by, higher=by.endswith("accuracy"))
    for epoch, value in enumerate(values, 1):
        score, other = ClassScore(*value), ClassScore(0.5, 0.5)
        train, validation = (score, other) if by.startswith("train") else (other, score)
        best = best.after(Epoch(epoch, 1, train, validation, 1.0, 1.0), min_delta)
    if by.endswith("accuracy"):
        loss, extreme = min(values, key=lambda x: (-x[1], x[0]))
        epochs = [i for i, x in enumerate(values, 1) if x == (loss, extreme)]
        same = [i for i, x in enumerate(values, 1) if x[1] == extreme]
    else:
        extreme = loss = min(x[0] for x in values)
        epochs = same = [i for i, x in enumerate(values, 1) if x[0] == extreme]
    assert (best.value, best.epoch, best.loss) == (extreme, epochs[0], loss)
    if not min_delta:
        assert best.waited == len(values) - same[0]


@pytest.mark.parametrize("by", ["validation_loss", "validation_accuracy"])
def test_best_by_a_metric_that_does_not_exist_is_refused(tmp_path: Path, by: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        training.prepare(load(tmp_path, f"training.best_by={by}"))
    assert str(error.value) == (
        f"--set training.best_by: found {by}, expected train_accuracy or train_loss, for there are "
        "no validation examples (data.validation)"
    )
