"""The report of a run, or of several: an HTML page.

record = report.read(Path("runs/mlp"))
text = report.pages.run_page(record, report.predict(Path("runs/mlp"), "cpu"))
"""

from __future__ import annotations

from adtrain.report import pages
from adtrain.report.predictions import AnyPredictions, Predictions, predict
from adtrain.report.record import Record, read

__all__ = ["AnyPredictions", "Predictions", "Record", "pages", "predict", "read"]
