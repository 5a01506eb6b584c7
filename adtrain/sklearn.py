"""Estimators for scikit-learn: networks that `adtrain.train` trains, for its pipelines, searches and validations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from adtrain.api import train

LAYERS = ({"linear": 64}, "relu")
SEEDS = 2**31
"""Seeds are drawn from the integers below."""
FLOATS = [np.float64, np.float32]


class Estimator(BaseEstimator):
    """What `AdtrainClassifier` and `AdtrainRegressor` share.

    Args:
        layers: the config's layers before the last one, which is `linear` with an output for each class or target.
        optimizer: the config's.
        loss: the config's; by default `cross_entropy` for classes, and for numbers `mse` of normalised targets.
        epochs: how often the training sees each row.
        batch_size: rows of a step; all rows where there are fewer.
        overrides: values of the config by their dotted keys, such as {"schedule": "cosine"}.
        device: "cpu", "gpu", or "auto" for the GPU if there is one.
        random_state: the seed, or a RandomState that draws it; None for another seed at each `fit`.

    Attributes:
        model_: what `adtrain.train` trained, a `Model`.
        history_: the metrics by epoch.
        n_features_in_: columns of the training rows. `feature_names_in_` are their names, if they have some.
    """

    def __init__(
        self,
        layers: Sequence[Any] = LAYERS,
        *,
        optimizer: Mapping[str, Any] | str = "adam",
        loss: Mapping[str, Any] | str | None = None,
        epochs: int = 50,
        batch_size: int = 32,
        overrides: Mapping[str, Any] | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.layers = layers
        self.optimizer = optimizer
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.overrides = overrides
        self.device = device
        self.random_state = random_state

    def _train(self, rows: np.ndarray, labels: np.ndarray, outputs: int, loss: str, **data: Any) -> None:
        # What is not a list, or not an integer, is an error of the config.
        is_list = isinstance(self.layers, Sequence) and not isinstance(self.layers, str)
        layers = [*self.layers, {"linear": outputs}] if is_list else self.layers
        size = min(self.batch_size, len(rows)) if isinstance(self.batch_size, int) else self.batch_size
        config = {
            "name": type(self).__name__,
            "data": {"batch_size": size, **data},
            "model": {"input": [rows.shape[1]], "layers": layers},
            "loss": loss if self.loss is None else self.loss,
            "optimizer": self.optimizer,
            "training": {"epochs": self.epochs, "seed": int(check_random_state(self.random_state).randint(SEEDS))},
        }
        # All rows are trained on. `train` needs a test part too, and the caller has the rows to test on.
        found = train(
            config,
            (rows, labels),
            test_data=(rows[:1], labels[:1]),
            overrides=self.overrides,
            device=self.device,
            progress=False,
        )
        self.model_, self.history_ = found.model, found.history

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        rows: np.ndarray = validate_data(self, X, reset=False, dtype=FLOATS)
        return rows


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that `fit` does not take.

    They are not in its signature, by which scikit-learn decides whether an estimator takes weights.
    """
    if others:
        instead = (
            "repeat rows that count more, or give classes weights by loss={'cross_entropy': {'weight': 'balanced'}}"
        )
        raise TypeError(f"fit: found {', '.join(others)}, expected rows and labels only; {instead}")


class AdtrainClassifier(ClassifierMixin, Estimator):
    """A network that predicts classes. Its arguments are those of `Estimator`.

    Attributes:
        classes_: the labels, sorted, as the columns of `predict_proba`.
    """

    def fit(self, X: Any, y: Any, **others: Any) -> AdtrainClassifier:
        """Train on rows (N, features) of numbers and N labels.

        Raises:
            ValueError: rows or labels that no classifier takes, or of one class only.
            AdtrainError: an argument of the constructor is wrong.
            TypeError: there are other arguments, such as weights of the rows.
        """
        _refuse(others)
        X, y = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"found labels of one class ({self.classes_[0]}), expected two classes or more")
        self._train(X, numbers, len(self.classes_), "cross_entropy")
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities (N, classes) for rows (N, features). Raises ValueError for wrong rows."""
        rows = self._checked(X)
        return self.model_.predict(rows).probabilities

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label (N,) of rows (N, features). Raises ValueError for wrong rows."""
        numbers = self.predict_proba(X).argmax(axis=1)
        found: np.ndarray = self.classes_[numbers]
        return found


class AdtrainRegressor(RegressorMixin, Estimator):
    """A network that predicts one number or several. Its arguments are those of `Estimator`."""

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, **others: Any) -> AdtrainRegressor:
        """Train on rows (N, features) of numbers, and numbers to predict, (N,) or (N, targets).

        Raises:
            ValueError: rows or numbers that no regressor takes.
            AdtrainError: an argument of the constructor is wrong.
            TypeError: there are other arguments, such as weights of the rows.
        """
        _refuse(others)
        X, y = validate_data(self, X, y, dtype=FLOATS, multi_output=True, y_numeric=True)
        self._shape = y.shape[1:]
        outputs = self._shape[0] if self._shape else 1
        self._train(X, y.astype(np.float64), outputs, "mse", normalize_targets=self.loss is None)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The numbers for rows (N, features), (N,) or (N, targets) as in `fit`. Raises ValueError for wrong rows."""
        rows = self._checked(X)
        return self.model_.predict_values(rows).reshape(len(rows), *self._shape)
