"""Notes about a run's model, which commands print beside their output."""

from __future__ import annotations

from pathlib import Path

from adtrain.cli.output import progress
from adtrain.config import Config
from adtrain.core.errors import AdtrainError
from adtrain.core.precision import PRECISIONS
from adtrain.training.summary import SUMMARY, model_text, read_summary


def note_precision(cfg: Config, device: str) -> None:
    """Print a note if the evaluation has another precision than the training; see `model_file.load`."""
    if device == "cpu" and cfg.training.precision in PRECISIONS:
        progress(f"trained in {cfg.training.precision}, evaluated in float32: the cpu has no {cfg.training.precision}")


def note_epoch(run: Path) -> int | None:
    """Print which epoch's weights the model of a run has, where there was a choice, or the run is not finished.

    Returns the epoch, if it is known.
    """
    try:
        summary = read_summary(run)
    except AdtrainError as error:
        progress(f"adtrain: warning: {error}")
        return None
    if summary is None:
        progress(f"{run}: found no {SUMMARY}, so the run is not finished; its weights are of the last complete epoch")
        return None
    if (chosen := model_text(summary)) is not None:
        progress(f"{run}: the weights are {chosen}")
    return summary.model_epoch
