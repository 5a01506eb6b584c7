"""Reads the results of a run from its folder, also of an unfinished run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from adtrain.config import Config
from adtrain.core.errors import AdtrainError
from adtrain.files import read_regular
from adtrain.training import model_file
from adtrain.training.run_folder import SUMMARY, read_metrics

# The fields of summary.json that reports use, with their types.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "device": str,
    "device_name": str,
    "precision": str,
    "seed": int,
    "parameters": int,
    "epochs": int,
    "steps": int,
    "batch_size": int,
    "train_seconds": float,
    "total_seconds": float,
    "images_per_second": (float, NoneType),
    "step_ms": (dict, NoneType),
    "test": dict,
    "ops": list,
    "versions": dict,
}


@dataclass(frozen=True)
class Record:
    """A run: its config, its metrics (one dict per line), and its summary, None if the run is not finished."""

    path: Path
    config: Config
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def intervals(self) -> list[dict[str, Any]]:
        """The metrics of the intervals: `step`, `train`, `learning_rate`."""
        return [line for line in self.metrics if line["kind"] == "interval"]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The metrics of the complete epochs: `epoch`, `step`, `train`, `validation`."""
        return [line for line in self.metrics if line["kind"] == "epoch"]

    @property
    def stopped(self) -> dict[str, Any] | None:
        """The last line of the metrics (`reason`, `step`) if it says that the run was stopped, else None."""
        return self.metrics[-1] if self.metrics and self.metrics[-1]["kind"] == "stopped" else None

    @property
    def steps(self) -> int:
        """The highest step in the metrics."""
        return max((int(line["step"]) for line in self.metrics), default=0)


def read(run: Path) -> Record:
    """The record of the run in a folder.

    Raises:
        ConfigError: its config.yaml is wrong.
        AdtrainError: the folder holds no run, or its metrics or summary are damaged.
    """
    return Record(run, model_file.config_of(run), read_metrics(run), _summary(run / SUMMARY))


def _summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise AdtrainError(f"{path}: cannot be read ({cause})") from None
    for field, kind in FIELDS.items():
        if not isinstance(found, dict) or not isinstance(found.get(field), kind):
            raise AdtrainError(f"{path}: found no {field}, expected a file that adtrain train wrote")
    return found
