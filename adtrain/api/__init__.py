"""Training from Python: `adtrain.train`, `adtrain.load` and `adtrain.save`, and the types that they use.

The package's `__init__.py` loads this part at the first use of one of these names, because it imports all of training.
"""

from __future__ import annotations

from adtrain.api.model import Model, Predictions, load, save
from adtrain.api.training import Callback, History, Metrics, TrainingResult, train
