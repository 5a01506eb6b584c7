"""Metrics against formulas of single predictions, and the sums of a task against metrics of a whole split."""

from __future__ import annotations

from itertools import pairwise
from math import fsum, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain import metrics, ops
from adtrain.core.array import array
from adtrain.training.tasks import Classification, Multilabel, Regression, Task, plausible

seeds = st.integers(0, 10**6)


def score_of_batches(task: Task, outputs: np.ndarray, labels: np.ndarray, bounds: list[int]) -> dict[str, Any]:
    """The score from the sums of the batches between `bounds`."""
    total = task.zero()
    for first, end in pairwise(bounds):
        total = total + task.sums(array(outputs[first:end]), array(labels[first:end])).numpy()
    return dict(task.score(0.25, total.reshape(-1).tolist(), len(labels), lambda: labels)._asdict())


@given(seeds, st.integers(1, 3), st.integers(2, 40), st.booleans(), st.sampled_from([0.0, 1e3, -1e7]))
def test_regression_metrics_of_batches_equal_those_of_the_split(
    seed: int, targets: int, count: int, normalized: bool, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(count, targets)) * 3 + offset
    outputs = rng.normal(size=(count, targets))
    task = Regression(tuple(true.mean(axis=0).tolist()), (2.5,) * targets, normalized)
    predicted = outputs * 2.5 + true.mean(axis=0) if normalized else outputs
    found = score_of_batches(task, outputs, true, [0, count // 2, count])
    rmse, mae, r2 = [], [], []
    for t, p in zip(true.T.tolist(), predicted.T.tolist(), strict=True):
        errors = [a - b for a, b in zip(t, p, strict=True)]
        mean = fsum(t) / count
        rmse.append(sqrt(fsum(e * e for e in errors) / count))
        mae.append(fsum(map(abs, errors)) / count)
        r2.append(1 - fsum(e * e for e in errors) / fsum((x - mean) ** 2 for x in t))
    expected = {"loss": 0.25, "rmse": np.mean(rmse), "mae": np.mean(mae), "r2": np.mean(r2)}
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize(("predicted", "r2"), [(5.3, 1.0), (5.4, 0.0)])
def test_the_r2_of_a_constant_target_is_1_or_0(predicted: float, r2: float) -> None:
    true = np.full((7, 1), 5.3)
    found = score_of_batches(Regression((5.3,), (1.0,), False), np.full((7, 1), predicted), true, [0, 3, 7])
    assert found["r2"] == r2


def test_the_r2_of_a_target_that_hardly_varies_is_bounded() -> None:
    found = metrics.r2(np.array([[0.0], [1e-200]]), np.array([1e200]))
    np.testing.assert_array_equal(found, [metrics.LOWEST_R2])


@given(seeds, st.integers(1, 4), st.integers(1, 30))
def test_multilabel_metrics_equal_their_formulas(seed: int, labels: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    true, outputs = rng.integers(0, 2, (count, labels)).astype(float), rng.normal(size=(count, labels))
    predicted = (outputs > 0).astype(int)
    found = score_of_batches(Multilabel(labels), outputs, true, [0, count // 3, count])
    f1 = []
    for t, p in zip(true.T.tolist(), predicted.T.tolist(), strict=True):
        tp = sum(a == b == 1 for a, b in zip(t, p, strict=True))
        wrong = sum(a != b for a, b in zip(t, p, strict=True))
        f1.append(2 * tp / (2 * tp + wrong) if tp + wrong else 0.0)
    exact = sum(t == p for t, p in zip(true.tolist(), predicted.tolist(), strict=True)) / count
    assert found == pytest.approx({"loss": 0.25, "accuracy": exact, "f1": np.mean(f1)})


def test_accuracy_counts_the_largest_output() -> None:
    outputs, labels = np.array([[1.0, 2, 0], [3, 1, 1], [0, 0, 1]]), np.array([1, 1, 2])
    task = Classification(False, ops.softmax)
    assert score_of_batches(task, outputs, labels, [0, 1, 3])["accuracy"] == 2 / 3


@given(seeds, st.integers(2, 8), st.integers(1, 30))
def test_metrics_by_name_equal_their_formulas(seed: int, classes: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    scores, labels = rng.random((count, classes)), rng.integers(0, classes, count)
    names = [f"class {i}" for i in range(classes)]
    found = {name: f(metrics.ClassPredictions(scores, labels, names)) for name, f in metrics.METRICS.items()}
    pairs = list(zip(labels.tolist(), scores.argmax(axis=1).tolist(), strict=True))
    assert found["confusion"] == [[pairs.count((i, j)) for j in range(classes)] for i in range(classes)]
    ranks = [sum(x > row[label] for x in row) for row, label in zip(scores.tolist(), labels.tolist(), strict=True)]
    assert found["top5"] == pytest.approx(sum(rank < 5 for rank in ranks) / count)
    expected: dict[str, dict[str, float]] = {"precision": {}, "recall": {}, "f1": {}}
    for i, name in enumerate(names):
        tp = pairs.count((i, i))
        predicted, true = sum(p == i for _, p in pairs), sum(t == i for t, _ in pairs)
        expected["precision"][name] = tp / predicted if predicted else 0.0
        expected["recall"][name] = tp / true if true else 0.0
        expected["f1"][name] = 2 * tp / (predicted + true) if predicted + true else 0.0
    used = [name for i, name in enumerate(names) if any(i in pair for pair in pairs)]
    for metric, values in expected.items():
        result = found[metric]
        assert isinstance(result, metrics.ByClass)
        assert result.by_class == pytest.approx(values)
        assert result.macro == pytest.approx(np.mean([values[name] for name in used]))


@given(seeds, st.integers(2, 5), st.integers(2, 40), st.integers(1, 8))
def test_areas_and_the_calibration_error_equal_their_definitions(
    seed: int, classes: int, count: int, levels: int
) -> None:
    """With few levels many scores are equal."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels + 1, (count, classes)) / levels
    labels = rng.integers(0, classes, count)
    names = [f"class {i}" for i in range(classes)]
    predictions = metrics.ClassPredictions(scores, labels, names)
    roc, precision = (metrics.METRICS[name](predictions) for name in ("roc_auc", "average_precision"))
    assert isinstance(roc, metrics.ByClass)
    assert isinstance(precision, metrics.ByClass)
    expected_roc, expected_precision = {}, {}
    for i, name in enumerate(names):
        yes, no = (scores[labels == i, i].tolist(), scores[labels != i, i].tolist())
        if yes and no:
            expected_roc[name] = np.mean([(p > n) + (p == n) / 2 for p in yes for n in no])
            expected_precision[name] = np.mean([sum(p >= t for p in yes) / sum(s >= t for s in yes + no) for t in yes])
    assert roc.by_class == pytest.approx(expected_roc)
    assert precision.by_class == pytest.approx(expected_precision)
    if expected_roc:
        assert roc.macro == pytest.approx(np.mean([*expected_roc.values()]))
    error = 0.0
    for i in range(15):
        inside = [j for j in range(count) if min(int(scores[j].max() * 15), 14) == i]
        right = [float(scores[j].argmax() == labels[j]) for j in inside]
        error += abs(sum(right) - sum(scores[j].max() for j in inside)) / count
    assert metrics.METRICS["calibration_error"](predictions) == pytest.approx(error)


def test_impossible_sums_of_a_checkpoint_are_recognised() -> None:
    classes, numbers, labels = Classification(False, ops.softmax), Regression((0.0,), (1.0,), False), Multilabel(1)
    cases: list[tuple[Task, list[float], list[float]]] = [
        (classes, [3.0], [5.0]),
        (classes, [3.0], [3.0, 1.0]),
        (numbers, [1.0, 1.0], [1.0, -1.0]),
        (labels, [1.0, 2.0, 0.0, 4.0], [1.0, 2.0, 0.0, -1.0]),
    ]
    for task, good, bad in cases:
        assert plausible(task, good, 4)
        assert not plausible(task, bad, 4)
