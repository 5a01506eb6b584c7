from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import summary, train
from training_runs import images_of, write_config

from adtrain import report
from adtrain.report import figures, sections
from adtrain.report.chart import chart
from adtrain.report.curves import panels
from adtrain.report.pixels import png, shown
from adtrain.report.predictions import Predictions
from adtrain.report.ticks import ticks
from adtrain.training import evaluation, model_file
from adtrain.training.evaluation import BATCH_SIZE

numbers = st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-30)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return train(write_config(folder), folder / "run", "--epochs", "2", "--set", "data.validation=0.2")


def predictions(labels: np.ndarray, predicted: np.ndarray, classes: int) -> Predictions:
    images = np.zeros((len(labels), 1, 2, 2), np.uint8)
    return Predictions(images, labels, tuple(map(str, range(classes))), predicted, np.linspace(0.5, 1, len(labels)))


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
    worst = found.worst(10)
    assert len(worst) == min(10, len(pairs) - found.correct)
    assert all(pairs[x.image] == (x.label, x.prediction) and x.label != x.prediction for x in worst)
    assert [x.probability for x in worst] == sorted((x.probability for x in worst), reverse=True)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 99))
def test_a_png_holds_the_pixels(height: int, width: int, channels: int, seed: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    with image.open(BytesIO(png(pixels))) as read:
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


def test_predictions_agree_with_the_summary(run: Path) -> None:
    found = report.predict(run, "cpu")
    assert isinstance(found, Predictions)
    assert found.correct / len(found.labels) == pytest.approx(summary(run)["test"]["accuracy"])
    assert found.confusion.sum() == len(found.labels) == 30
    assert (found.probability >= 1 / 3).all()


def test_compiled_and_eager_probabilities_agree(run: Path) -> None:
    trained = model_file.load(run)
    images = images_of(np.arange(BATCH_SIZE + 7) % 3, seed=3)[:, np.newaxis]
    model = trained.network, trained.params, trained.statistics
    some = [evaluation.predictions(*model, images[i : i + 50], "cpu") for i in range(0, len(images), 50)]
    assert np.allclose(evaluation.predictions(*model, images, "cpu"), np.concatenate(some), atol=1e-6)


def test_the_curves_end_at_the_scores_of_the_last_epoch(run: Path) -> None:
    found = report.read(run)
    loss, accuracy, rate = panels(found)
    ends = {curve.name: curve.values[-1] for curve in accuracy.curves if curve.name}
    assert ends == {part: getattr(found.epochs[-1], part).accuracy for part in ("train", "validation")}
    assert [list(curve.epochs) for curve in loss.curves if curve.name] == [[1, 2], [1, 2]]
    assert rate.curves[0].values[0] == 0.01
    for panel in (loss, accuracy, rate):
        assert "nan" not in chart(panel)


def test_many_classes_have_a_list_instead_of_a_matrix() -> None:
    labels = np.arange(40)
    predicted = np.where(labels < 30, labels, 0)
    found = predictions(labels, predicted, 40)
    assert "too large for a page" in sections.confusion(found)
    text = sections.by_class(found)
    assert text.count("<tr>") == 1 + sections.MOST_CLASSES
    assert text.index('<td class="text">39</td>') < text.index('<td class="text">0</td>')
    assert "15 classes with higher accuracy are left out" in text


def test_pictures_accept_any_class_names(run: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    wrong = predictions(np.array([0, 1, 1]), np.array([0, 0, 1]), 2)
    found = replace(wrong, classes=("$x_$", "a name beyond all bounds"))
    written = figures.write(report.read(run), found, tmp_path / "png")
    assert [path.name for path in written] == ["learning_curves.png", "confusion_matrix.png", "worst_mistakes.png"]
    for path in written:
        with image.open(path) as drawn:
            assert drawn.format == "PNG"


def test_a_model_without_mistakes_has_an_empty_section() -> None:
    labels = np.array([0, 1])
    found = predictions(labels, labels, 2)
    assert sections.worst_mistakes(found) == "<p>There are no mistakes.</p>\n"
    assert "2 of 2 test images are classified correctly" in sections.confusion(found)
