"""The report of a run, or of several: an HTML page.

record = report.read(Path("runs/mlp"))
text = report.page.render(record, report.predict(Path("runs/mlp"), "cpu"))
"""

from __future__ import annotations

from adtrain.report import page, runs_page, sweep_page
from adtrain.report.predictions import AnyPredictions, Predictions, predict
from adtrain.report.record import Record, read

__all__ = ["AnyPredictions", "Predictions", "Record", "page", "predict", "read", "runs_page", "sweep_page"]
