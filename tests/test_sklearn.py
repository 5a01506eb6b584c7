"""Estimators for scikit-learn keep its conventions, and work in its pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.datasets import load_diabetes, load_wine
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import has_fit_parameter

import adtrain as ad
from adtrain.sklearn import AdtrainClassifier, AdtrainRegressor

pytestmark = [pytest.mark.unfused, pytest.mark.needs_sklearn]

OPTIONS: dict[str, Any] = {"device": "cpu", "random_state": 0}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([AdtrainClassifier(device="cpu"), AdtrainRegressor(device="cpu")])
def test_the_checks_of_scikit_learn_pass(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_a_pipeline_classifies_wines_by_their_names() -> None:
    X, y = load_wine(return_X_y=True)
    names = np.array(["barbera", "barolo", "grignolino"])[y]
    model = make_pipeline(StandardScaler(), AdtrainClassifier(epochs=20, **OPTIONS))
    assert cross_val_score(model, X, names, cv=3).mean() > 0.9


def test_a_search_tries_layers_and_rates() -> None:
    X, y = load_wine(return_X_y=True)
    grid = {"layers": [[], [{"linear": 8}, "relu"]], "optimizer": [{"adam": {"lr": 0.02}}]}
    found = GridSearchCV(AdtrainClassifier(epochs=5, **OPTIONS), grid, cv=2).fit(X, y)
    assert found.best_score_ > 0.8
    assert found.predict(X[:3]).shape == (3,)


def test_the_regressor_predicts_in_the_shape_of_its_targets() -> None:
    X, y = load_diabetes(return_X_y=True)
    single = AdtrainRegressor(epochs=20, **OPTIONS).fit(X, y)
    assert single.score(X, y) > 0.4
    assert single.predict(X).shape == y.shape
    assert AdtrainRegressor(epochs=1, **OPTIONS).fit(X, np.stack([y, -y], 1)).predict(X).shape == (len(y), 2)


def test_weights_of_rows_are_refused_in_one_line_and_not_promised() -> None:
    """By the signature scikit-learn decides whether `fit` takes them."""
    for estimator in AdtrainClassifier(epochs=1), AdtrainRegressor(epochs=1):
        assert not has_fit_parameter(estimator, "sample_weight")
        with pytest.raises(TypeError, match=r"^fit: found sample_weight, expected rows and labels only; repeat rows"):
            estimator.fit([[0.0], [1.0]], [0, 1], sample_weight=[1, 2])


def test_a_wrong_option_is_the_error_of_the_config() -> None:
    X, y = load_wine(return_X_y=True)
    with pytest.raises(ad.AdtrainError, match="liner"):
        AdtrainClassifier(layers=[{"liner": 3}], **OPTIONS).fit(X, y)


@pytest.mark.parametrize("option", [{"layers": "relu"}, {"layers": 5}, {"batch_size": "a"}])
def test_an_option_of_a_wrong_type_is_named(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ad.AdtrainError, match=rf"{name}: found .* expected"):
        AdtrainRegressor(**option, **OPTIONS).fit([[0.0], [1.0]], [0, 1])
