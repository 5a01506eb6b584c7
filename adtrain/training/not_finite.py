"""Finds the operation and layer that produced the first NaN or infinity of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core import communicator
from adtrain.core.array import Value
from adtrain.core.primitive import Primitive
from adtrain.core.scope import current_phase, current_scope
from adtrain.core.trace import EvaluationTrace, base_trace
from adtrain.training.examples import Examples
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Progress
from adtrain.training.step import TrainState

RESULT = {"forward": "result", "backward": "gradient", "update": "update"}


class _FirstNotFinite(EvaluationTrace):
    """Runs operations and records the first one whose result is not finite."""

    found = ""

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        results = super().process(primitive, args, params)
        if not self.found:
            for x in (results,) if isinstance(results, Value) else results:
                if not np.isfinite(x.numpy()).all():
                    part = f" in {current_scope()}" if current_scope() else ""
                    self.found = f"the {RESULT[current_phase()]} of {primitive.name}{part}"
        return results


def message(
    experiment: Experiment, state: TrainState, examples: Examples, batch: np.ndarray, before: Progress, loss: float
) -> str:
    """The error message for a step on `batch` that made the finite `state` non-finite.

    Repeats the step one operation at a time to find the first one that overflows. Sums are then computed in another
    order, which may not overflow near the limit of the dtype; in that case the message names no operation.
    """
    trace = _FirstNotFinite()
    with base_trace(trace):
        inputs = examples.batches(experiment.part(batch))
        seed, size = experiment.seed(examples.device), experiment.batch_arguments(len(batch))
        experiment.eager_step(state, seed, *inputs, *size)
    what = "a number of the new state is not finite" if math.isfinite(loss) else f"the loss is {loss}"
    found = next(filter(None, communicator.gathered_texts(trace.found)), "")
    first = f", first {found}" if found else ""
    return (
        f"{what} at step {before.step + 1} (epoch {before.epoch}){first}; training stopped: "
        "lower the optimizer's lr, or set training.clip_norm"
    )
