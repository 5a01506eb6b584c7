"""Finds NaN and infinity in a state, and the operation and layer that produced the first one of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core import communicator, tree
from adtrain.core.array import Value
from adtrain.core.primitive import Primitive
from adtrain.core.scope import current_phase, current_scope
from adtrain.core.staging import Staged
from adtrain.core.trace import EvaluationTrace, base_trace
from adtrain.training import agreement
from adtrain.training.examples import Examples
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Progress
from adtrain.training.step import TrainState

RESULT = {"forward": "result", "backward": "gradient", "update": "update"}


class FiniteCheck:
    """Whether a state on a device has only finite numbers, over all ranks. All ranks check together.

    The call starts the check, so the next step may then overwrite the state. The function that it returns waits for
    the answer.
    """

    def __init__(self, experiment: Experiment, device: str) -> None:
        self.experiment, self.device = experiment, device

    def begin_compiling(self, state: TrainState) -> None:
        """Begin to compile the check of such states."""
        if isinstance(self.experiment.finite_check, Staged):
            self.experiment.finite_check.compile(state)

    def __call__(self, state: TrainState) -> Callable[[], bool]:
        if self.device == "cpu":  # NumPy needs no Program, which would take seconds to compile
            numbers = tree.leaves(self.experiment.without_padding(state))
            found = all(np.isfinite(x.numpy()).all() for x in numbers)
            return lambda: not agreement.any_rank(not found)
        wait = self.experiment.finite_check(state).fetch()
        return lambda: not agreement.any_rank(not wait())


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
