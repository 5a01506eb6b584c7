"""Where a training's first number came from that is no finite one: the step, the operation and its layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.primitive import Primitive
from adtrain.core.scope import current_phase, current_scope
from adtrain.core.trace import EvaluationTrace, base_trace
from adtrain.training.checkpoint import Progress
from adtrain.training.examples import Examples
from adtrain.training.experiment import Experiment
from adtrain.training.step import TrainState

RESULT = {"forward": "result", "backward": "gradient", "update": "update"}


class _Watch(EvaluationTrace):
    """Runs operations as ever, and notes the first whose result is not finite."""

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
    """What happened in the step on `batch` that made of `state` one that is not finite, and what to do about it.

    The step is run one operation at a time. Sums in another order, of numbers at the edge of their type's range, need
    not overflow; then no operation is named.
    """
    watch = _Watch()
    with base_trace(watch):
        experiment.plain_step(state, experiment.seed(examples.device), *examples.batches(batch))
    what = "a number of the new state is not finite" if math.isfinite(loss) else f"the loss is {loss}"
    first = f", first {watch.found}" if watch.found else ""
    return (
        f"{what} at step {before.step + 1} (epoch {before.epoch}){first}; training stopped: "
        "lower the optimizer's lr, or set training.clip_norm"
    )
