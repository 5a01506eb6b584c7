"""summary.json: the run's settings, scores and times."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import adtrain
from adtrain import nn
from adtrain.core.backend import backend
from adtrain.training.endings import Result
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.memory import planned_peak

OP_FIELDS = ("op", "scope", "phase", "calls", "ms", "share", "flops", "bytes", "gflops_per_s", "gbytes_per_s")


def summarize(
    experiment: Experiment,
    result: Result,
    device: str,
    total_seconds: float,
    ops: Sequence[Mapping[str, Any]] = (),
    ops_sum_ms: float | None = None,
    ops_to_step_ratio: float | None = None,
) -> dict[str, Any]:
    """The content of summary.json. Times cover the training since the start or the resumption.

    `ops` are the rows of a profile, with times per step in milliseconds. Fields that were not measured are None or
    empty.
    """
    cfg = experiment.config
    return {
        "config": cfg.model_dump(mode="json", exclude_none=True),
        "device": device,
        "device_name": backend(device).device_name(),
        "precision": cfg.training.precision,
        "seed": cfg.training.seed,
        "parameters": nn.count_parameters(result.state.params),
        "ended": result.ended,
        "best": {"by": result.best.by, "value": result.best.value, "epoch": result.best.epoch},
        "model_epoch": result.best.epoch if result.restored else result.epochs,
        "epochs": result.epochs,
        "steps": result.steps,
        "batch_size": cfg.data.batch_size,
        "train_seconds": result.train_seconds,
        "total_seconds": total_seconds,
        "images_per_second": result.images / result.train_seconds if result.images else None,
        "step_ms": _step_ms(result.step_seconds),
        "memory": _memory(experiment, device),
        "train": result.train._asdict(),
        "validation": result.validation._asdict() if result.validation is not None else None,
        "test": result.test._asdict(),
        "ops": [{field: row[field] for field in OP_FIELDS} for row in ops],
        "ops_sum_ms": ops_sum_ms,
        "ops_to_step_ratio": ops_to_step_ratio,
        "versions": {"adtrain": adtrain.__version__, "python": platform.python_version(), "numpy": np.__version__},
    }


def _step_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles of the steps' times in milliseconds; None if no step was taken since the resumption."""
    if not seconds:
        return None
    p20, median, p80 = np.percentile(np.array(seconds) * 1e3, [20, 50, 80]).tolist()
    return {"median": median, "p20": p20, "p80": p80}


def _memory(experiment: Experiment, device: str) -> dict[str, int | None]:
    """The planned peak for full batches, and the memory that the device has allocated, also for evaluation and
    measurements; None if unknown."""
    planned = None if experiment.mode is Mode.EAGER else planned_peak(experiment, device)
    return {"planned_bytes": planned, "held_bytes": backend(device).allocated()}
