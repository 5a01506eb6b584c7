"""A note about the precision of an evaluation."""

from __future__ import annotations

from adtrain.cli.output import progress
from adtrain.config import Config
from adtrain.core.precision import PRECISIONS


def note_precision(cfg: Config, device: str) -> None:
    """Print a note if the evaluation has another precision than the training; see `model_file.load`."""
    if device == "cpu" and cfg.training.precision in PRECISIONS:
        progress(f"trained in {cfg.training.precision}, evaluated in float32: the cpu has no {cfg.training.precision}")
