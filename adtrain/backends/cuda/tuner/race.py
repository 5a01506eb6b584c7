"""A contest of the candidates for one problem: those whose results are right are timed, turn and turn about.

Nothing here needs a GPU: what runs and times a candidate is a `Trial`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Protocol

import numpy as np

from adtrain.backends.cuda.lower import Candidate
from adtrain.backends.cuda.vendor import NotOffered
from adtrain.core.errors import AdtrainError, DeviceFault
from adtrain.core.program import Equation

ROUNDS = 5
HOPELESS = 1.5
"""A candidate that takes so many times the fastest one's time in the first round is not timed again."""

ROUNDED_TO = {"tf32": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number, by the `precision` that operands of products are rounded to."""

_log = logging.getLogger(__name__)


class Trial(Protocol):
    """The candidates for one equation, run on the same random arguments."""

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        """The elements of the outputs, which are NaN (and -1) before the kernel runs.

        Raises:
            NotOffered: there is no such candidate.
            DeviceFault: it has failed in the middle of its work; the device is of no use any more.
            AdtrainError: it does not compile or cannot be launched.
        """
        ...

    def microseconds(self, kernel: Candidate) -> float:
        """A launch, as the mean over many in a row."""
        ...


def compete(equation: Equation, kernels: Sequence[Candidate], trial: Trial) -> Mapping[str, float]:
    """The microseconds of a launch, by label, of all that compute what the first one computes.

    A candidate that does not is left out, with a warning that names it.
    """
    expected = None
    right: dict[str, Candidate] = {}
    labels = [kernel.label for kernel in kernels]
    for kernel, name, short in zip(kernels, labels, distinct(labels), strict=True):
        try:
            found = trial.results(kernel)
        except DeviceFault:
            raise
        except NotOffered:
            continue
        except AdtrainError as error:
            _log.warning("adtrain: %s: not used for %s (%s)", short, described(equation), error)
            continue
        expected = found if expected is None else expected
        if agree(found, expected, tolerance(equation)):
            right[name] = kernel
        else:
            _log.warning("adtrain: %s: not used for %s, its result is wrong", short, described(equation))
    rounds = {name: [trial.microseconds(kernel)] for name, kernel in right.items()}
    best = min((times[0] for times in rounds.values()), default=0.0)
    close = [name for name, times in rounds.items() if times[0] < HOPELESS * best]
    for _ in range(ROUNDS - 1):
        for name in close:
            rounds[name].append(trial.microseconds(right[name]))
    return {name: median(times) for name, times in rounds.items()}


def agree(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether results are the same: integers exactly, others to a share of the largest magnitude. NaN never is."""

    def same(x: np.ndarray, y: np.ndarray) -> bool:
        if y.dtype.kind != "f":
            return np.array_equal(x, y)
        with np.errstate(invalid="ignore"):
            return bool(np.all(np.abs(x - y) <= tolerance * np.abs(y).max(initial=0)))

    return all(same(x, y) for x, y in zip(found, expected, strict=True))


def tolerance(equation: Equation) -> float:
    """How far two right results lie apart at most, as a share of the largest magnitude: sums are formed in different
    orders, and products of operands that are rounded first in different ways."""
    inputs, params = [v.type for v in equation.inputs], equation.params
    floats = [t.dtype for t in (*inputs, *(v.type for v in equation.outputs)) if t.dtype.kind == "f"]
    eps = max((float(np.finfo(dtype).eps) for dtype in floats), default=0.0)
    outputs = max(sum(v.size for v in equation.outputs), 1)
    lengths = [1, equation.primitive.cost(inputs, params).flops / outputs, *(t.size / outputs for t in inputs)]
    if "axis" in params:
        lengths.append(inputs[0].shape[params["axis"]])
    return 8 * eps * math.sqrt(max(lengths)) + 2 * ROUNDED_TO.get(params.get("precision", ""), 0.0)


def distinct(labels: Sequence[str]) -> list[str]:
    """The labels without the words that are in all of them, but for the first word."""
    common = set.intersection(*(set(label.split()[1:]) for label in labels)) if len(labels) > 1 else set()
    return [" ".join(word for i, word in enumerate(label.split()) if i == 0 or word not in common) for label in labels]


def described(equation: Equation) -> str:
    """The problem in a few words: "matmul float32[128, 784] float32[512, 784]"."""
    return " ".join([equation.primitive.name, *(str(v.type) for v in equation.inputs)])
