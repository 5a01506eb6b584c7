"""The search for the first NaN or infinity of a step, and its message: where it is, of which operands, what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core import communicator, tree
from adtrain.core.array import Value
from adtrain.core.primitive import Primitive
from adtrain.core.trace import EvaluationTrace, base_trace, current_phase, current_scope
from adtrain.training.examples import Examples
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Progress
from adtrain.training.step import TrainState

RESULT = {"forward": "result", "backward": "gradient", "update": "update"}

CAUSES: dict[str, tuple[Callable[..., Any], str]] = {
    "div": (lambda x, y: y == 0, "a divisor is 0, add a small number to it"),
    "reciprocal": (lambda x: x == 0, "a divisor is 0, add a small number to it"),
    "rsqrt": (lambda x: x <= 0, "rsqrt needs numbers above 0, add a small number to its operand"),
    "sqrt": (lambda x: x < 0, "sqrt needs numbers of at least 0"),
    "log": (lambda x: x <= 0, "log needs numbers above 0, add a small number, or use a loss that takes logits"),
    "exp": (lambda x: x > np.log(np.finfo(x.dtype).max), "exp overflows, subtract the largest number, as softmax does"),
}
"""What makes the result of an operation infinite or NaN, as a condition on its operands, and what to do."""

ADVICE = "lower the optimizer's lr, or set training.clip_norm"


class _FirstNotFinite(EvaluationTrace):
    """Runs operations and records the first one whose result is not finite.

    Attributes:
        found: the operation, its layer and its operands, and what to do; empty before.
    """

    found = ""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names` are those of arrays, by their id."""
        self.names = names

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        results = super().process(primitive, args, params)
        if not self.found:
            for x in (results,) if isinstance(results, Value) else results:
                if not np.isfinite(x.numpy()).all():
                    part = f" in {current_scope()}" if current_scope() else ""
                    operands = " and ".join(map(self._described, args))
                    where = f"the {RESULT[current_phase()]} of {primitive.name}{part}, from {operands}"
                    self.found = f", first {where}; training stopped: {_advice(primitive, args)}"
        return results

    def _described(self, x: Value) -> str:
        """Name, shape, and least and largest number."""
        numbers, name = x.numpy(), self.names.get(id(x), "")
        shape = "x".join(map(str, x.shape)) or "a number"
        interval = f"{numbers.min():.3g} to {numbers.max():.3g}" if numbers.size else "empty"
        return f"{name} {shape} ({interval})".lstrip()


def _advice(primitive: Primitive, args: Sequence[Value]) -> str:
    """What to do about an operation whose result on these operands is not finite."""
    holds, cause = CAUSES.get(primitive.name, (lambda *_: False, ""))
    return f"{cause}; or {ADVICE}" if np.any(holds(*(x.numpy() for x in args))) else ADVICE


def not_finite_message(
    experiment: Experiment, state: TrainState, examples: Examples, batch: np.ndarray, before: Progress, loss: float
) -> str:
    """The error message for a step on `batch` that made the finite `state` non-finite.

    Repeats the step one operation at a time to find the first one that overflows. Sums are then computed in another
    order, which may not overflow near the limit of the dtype; in that case the message names no operation.
    """
    names = zip(tree.leaves(state.params), tree.paths(state.params), strict=True)
    trace = _FirstNotFinite({id(x): path for x, path in names})
    with base_trace(trace):
        inputs = examples.batches(experiment.part(batch))
        seed, size = experiment.seed(examples.device), experiment.batch_arguments(len(batch))
        experiment.eager_step(state, seed, *inputs, *size)
    what = "a number of the new state is not finite" if math.isfinite(loss) else f"the loss is {loss}"
    where = next(filter(None, communicator.gathered_texts(trace.found)), f"; training stopped: {ADVICE}")
    return f"{what} at step {before.step + 1} (epoch {before.epoch}){where}"
