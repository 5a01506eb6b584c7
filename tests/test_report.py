from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from report_runs import summary, train
from training_runs import images_of, write_config

from adtrain import config, report
from adtrain.metrics import ByClass
from adtrain.report import classes
from adtrain.report.classes import png, shown, signed, worst_mistakes
from adtrain.report.plot import ticks
from adtrain.report.predictions import Predictions
from adtrain.report.record import panels
from adtrain.report.times import kernels, lanes, strip
from adtrain.training import evaluation, model_file
from adtrain.training.evaluation import BATCH_SIZE
from adtrain.training.progress import Epoch
from adtrain.training.summary import OperationTime, Span

numbers = st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-30)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return train(write_config(folder), folder / "run", "--epochs", "2", "--set", "data.validation=0.2")


def predictions(labels: np.ndarray, predicted: np.ndarray, classes: int) -> Predictions:
    images = np.zeros((len(labels), 1, 2, 2), np.uint8)
    probabilities = np.eye(classes)[predicted] * np.linspace(0.5, 1, len(labels))[:, None]
    return Predictions(images, labels, tuple(map(str, range(classes))), probabilities)


@given(numbers, numbers)
def test_ticks_enclose_the_values_at_equal_distances(a: float, b: float) -> None:
    low, high = sorted((a, b))
    found = np.array(ticks(low, high))
    assert 2 <= len(found) <= 8
    size = abs(found).max()
    assert found[0] <= low + 1e-5 * size
    assert found[-1] >= high - 1e-5 * size
    assert np.allclose(np.diff(found), found[1] - found[0], atol=1e-6 * size)


@given(st.integers(1, 5000))
def test_ticks_of_epochs_are_whole(epochs: int) -> None:
    found = ticks(0, epochs, whole=True)
    assert found[0] == 0
    assert found[-1] >= epochs
    assert all(tick == int(tick) for tick in found)
    assert len(found) <= 8


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_the_confusion_matrix_counts_every_image_once(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = (np.array(column) for column in zip(*pairs, strict=True))
    found = predictions(labels, predicted, 4)
    for label in range(4):
        for prediction in range(4):
            assert found.confusion[label, prediction] == pairs.count((label, prediction))
    assert found.correct == sum(label == prediction for label, prediction in pairs)
    worst = worst_mistakes(found, 10)
    assert len(worst) == min(10, len(pairs) - found.correct)
    tops = [x.candidates[0] for x in worst]
    assert all(
        found.classes[pairs[x.image][1]] == top.name and not top.correct for x, top in zip(worst, tops, strict=True)
    )
    assert [x.probability for x in tops] == sorted((x.probability for x in tops), reverse=True)
    labels_shown = [[y.name for y in x.candidates if y.correct] for x in worst]
    assert labels_shown == [[found.classes[pairs[x.image][0]]] for x in worst]
    assert all(len(x.candidates) == 3 for x in worst)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 99))
def test_a_png_holds_the_pixels(height: int, width: int, channels: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    with Image.open(BytesIO(png(pixels))) as read:
        assert read.format == "PNG"
        assert np.array_equal(np.asarray(read).reshape(pixels.shape), pixels)


def test_uint8_images_are_shown_unchanged() -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    assert np.array_equal(shown(images), images.transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("values", "grey"),
    [([0.25, 0.5, 1.0], [64, 128, 255]), ([-2.0, 0.0, 2.0], [0, 128, 255]), ([7.0, 7.0, 7.0], [0, 0, 0])],
)
def test_float_images_are_scaled_from_black_to_white(values: list[float], grey: list[int]) -> None:
    images = np.array(values, np.float32).reshape(1, 1, 1, 3)
    assert shown(images).ravel().tolist() == grey


def test_images_with_other_channel_counts_are_shown_as_their_mean() -> None:
    images = np.array([[10], [20], [30], [40]], np.uint8).reshape(1, 4, 1, 1)
    assert shown(images).tolist() == [[[[25]]]]


def test_weights_are_blue_above_zero_and_orange_below() -> None:
    blue, white, orange = signed(np.array([2.0, 0.0, -2.0]).reshape(1, 1, 1, 3))[0, 0].tolist()
    assert white == [255, 255, 255]
    assert blue[2] > blue[0]
    assert orange[0] > orange[2]


def test_predictions_agree_with_the_summary(run: Path) -> None:
    found = report.predict(run, "cpu")
    assert isinstance(found, Predictions)
    assert found.correct / len(found.labels) == pytest.approx(summary(run)["test"]["accuracy"])
    assert found.confusion.sum() == len(found.labels) == 30
    assert np.allclose(found.probabilities.sum(axis=1), 1)


def test_compiled_and_eager_probabilities_agree(run: Path) -> None:
    trained = model_file.load(run)
    images = images_of(np.arange(BATCH_SIZE + 7) % 3, seed=3)[:, np.newaxis]
    model = trained.network, trained.params, trained.statistics
    some = [evaluation.predictions(*model, images[i : i + 50], "cpu") for i in range(0, len(images), 50)]
    assert np.allclose(evaluation.predictions(*model, images, "cpu"), np.concatenate(some), atol=1e-6)


def test_the_curves_end_at_the_scores_of_the_last_epoch(run: Path) -> None:
    found = report.read(run)
    loss, accuracy, rate = panels(found)
    ends = {curve.name: curve.ys[-1] for curve in accuracy.curves if curve.name}
    assert ends == {part: getattr(found.epochs[-1], part).accuracy for part in ("train", "validation")}
    assert [list(curve.xs) for curve in loss.curves if curve.name] == [[1, 2], [1, 2]]
    assert rate.curves[0].ys[0] == 0.01
    for panel in (loss, accuracy, rate):
        assert "nan" not in panel.draw()


def test_the_metrics_of_each_epoch_are_curves_with_their_value_on_the_test_part(run: Path) -> None:
    found = report.read(run)
    assert found.summary is not None
    lines = [replace(x, metrics={"f1": x.epoch / 4}) if isinstance(x, Epoch) else x for x in found.metrics]
    summary = replace(found.summary, metrics={"f1": ByClass(0.7, {})})
    panel = panels(replace(found, metrics=lines, summary=summary))[2]
    (curve,) = panel.curves
    assert (panel.title, panel.test, curve.name) == ("f1", 0.7, "validation")
    assert (list(curve.xs), list(curve.ys)) == ([1, 2], [0.25, 0.5])


def test_the_classes_of_a_page_begin_with_the_least_accurate() -> None:
    labels = np.arange(40)
    found = predictions(labels, np.where(labels < 30, labels, 0), 40)
    rows = classes.by_class(found)
    assert [row.name for row in rows] == [*map(str, range(30, 40)), *map(str, range(30))]
    assert classes.most_confused(found) == [(str(label), "0", 1) for label in range(30, 40)]
    assert [[cell.images for cell in row] for row in classes.confusion(found)] == found.confusion.tolist()


def test_a_block_of_the_network_has_the_time_of_its_kernels() -> None:
    ops = [operation("0.conv2d+1.relu", ms=3.0), operation("0.conv2d", "backward", ms=2.0), operation("loss", ms=1.0)]
    found = strip(config.load("cnn"), [*ops, operation("optimizer", "update", ms=4.0)])
    blocks = {block.name: block for block in found.blocks}
    assert (blocks["0"].kind, blocks["0"].shape, blocks["0"].numbers) == ("conv2d", "32x26x26", 32 * 26 * 26)
    assert blocks["0"].ms == {"forward": 3.0, "backward": 2.0}
    assert (blocks["1"].ms, blocks["loss"].ms, found.rest_ms) == ({}, {"forward": 1.0}, 4.0)
    assert [block.share for block in found.blocks if block.ms] == [1.0, 0.2]
    assert max(block.height for block in found.blocks) == blocks["2"].height == 1.0


def test_every_layer_of_a_residual_network_has_a_block() -> None:
    found = strip(config.load("resnet"), [operation("3.residual", ms=1.0)])
    assert [block.name for block in found.blocks if block.ms] != []
    assert found.rest_ms == 0.0


spans = st.builds(Span, st.sampled_from(["data", "training"]), st.floats(0, 1e3), st.floats(0, 1e3))


@given(st.lists(spans, min_size=1))
def test_the_spans_of_a_run_fit_on_its_axis(found: list[Span]) -> None:
    drawn = lanes(cast(Any, SimpleNamespace(spans=found)))
    assert drawn is not None
    assert sum(lane.seconds for lane in drawn.lanes) == pytest.approx(sum(span.seconds for span in found))
    bars = [bar for lane in drawn.lanes for bar in lane.bars]
    assert all(bar.left >= 0 and bar.left + bar.width < 100.1 for bar in bars)


def test_kernels_of_the_same_layers_are_one_row() -> None:
    ops = [operation("0.linear+1.relu", ms=3.0, flops=6e6), operation("0.linear+1.relu", ms=1.0, flops=2e6)]
    times = {"ops_sum_ms": 9.0, "ops_to_step_ratio": 0.9, "profiled_step_ms": 10.0}
    found = kernels(cast(Any, SimpleNamespace(ops=[*ops, operation("0.linear", "backward", ms=5.0)], **times)))
    first, second = found.slowest
    assert (first.layers, first.phase, first.length) == (["0.linear"], "backward", 1.0)
    assert (second.layers, second.ms, second.gflops_per_s) == (["0.linear", "1.relu"], 4.0, 2.0)
    assert second.primitives == "matmul + add: 3.000 ms\nmatmul + add: 1.000 ms"
    assert found.phases == {"forward": 4.0, "backward": 5.0}


def test_curves_mark_the_test_result_and_the_kept_epoch(run: Path) -> None:
    found = report.read(run)
    loss, accuracy, rate = panels(found)
    assert found.summary is not None
    assert (loss.test, loss.kept) == (found.summary.test.loss, found.summary.model_epoch)
    assert rate.test is None
    assert [panel.has_log_scale for panel in (loss, accuracy, rate)] == [True, False, False]
    text = loss.draw(logarithmic=True)
    assert text.count('class="level"') == text.count('class="kept-epoch"') == 1


def operation(scope: str, phase: str = "forward", ms: float = 1.0, flops: float = 0.0) -> OperationTime:
    return OperationTime("matmul+add", scope, phase, 1, ms, 0.1, flops, 0.0, None, None)
