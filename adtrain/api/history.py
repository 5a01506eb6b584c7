"""The metrics of a training by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.api.callbacks import Metrics
from adtrain.core.errors import AdtrainError


class History(dict[str, np.ndarray]):
    """A NumPy array (epochs,) for each metric; `callbacks.Metrics` lists the names."""

    @classmethod
    def of(cls, rows: Sequence[Metrics]) -> History:
        """The history of epochs with these metrics, first to last."""
        return cls({name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {})

    def to_pandas(self) -> Any:
        """The history as a DataFrame, a row for each epoch. Raises AdtrainError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise AdtrainError("to_pandas needs pandas; pip install 'adtrain[pandas]'") from None
        return pandas.DataFrame(dict(self))
