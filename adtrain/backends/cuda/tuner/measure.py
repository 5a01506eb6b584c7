"""Measures the candidates for one equation: checks their results, then times the right ones in alternating rounds.

Nothing here needs a GPU: a `Trial` runs and times a candidate.
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
from adtrain.core.precision import mantissa
from adtrain.core.program import Equation
from adtrain.core.types import BITS

ROUNDS = 5
SLOW = 1.5
"""A candidate slower than this many times the fastest one in the first round is not timed again."""

_log = logging.getLogger(__name__)


class Trial(Protocol):
    """The candidates for one equation, run on the same arguments."""

    def expected(self) -> Sequence[np.ndarray]:
        """The right results, or parts of them: of the NumPy reference in float64."""
        ...

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        """The same parts of the candidate's results. Its outputs and scratch hold NaN (integers: -1) before it runs.

        Raises:
            NotOffered: the library does not offer the candidate.
            DeviceFault: the kernel crashed. This process cannot use the device any more.
            AdtrainError: it does not compile, or cannot be launched.
        """
        ...

    def microseconds(self, kernel: Candidate) -> float:
        """The mean time of consecutive launches."""
        ...


def measure(equation: Equation, kernels: Sequence[Candidate], trials: Sequence[Trial]) -> Mapping[str, float]:
    """Microseconds by label, of the candidates that are right: the median over rounds of the mean over trials.

    A candidate whose results are wrong in any trial is left out, with a warning that names it.
    """
    labels = [kernel.label for kernel in kernels]
    right = dict(zip(labels, kernels, strict=True))
    for trial in trials:
        expected = trial.expected()
        for name, short in zip(labels, distinct(labels), strict=True):
            if name in right and not _is_right(equation, right[name], short, trial, expected):
                del right[name]

    def microseconds(kernel: Candidate) -> float:
        return sum(trial.microseconds(kernel) for trial in trials) / len(trials)

    times = {name: [microseconds(kernel)] for name, kernel in right.items()}
    best = min((first[0] for first in times.values()), default=0.0)
    close = [name for name, first in times.items() if first[0] < SLOW * best]
    for _ in range(ROUNDS - 1):
        for name in close:
            times[name].append(microseconds(right[name]))
    return {name: median(rounds) for name, rounds in times.items()}


def _is_right(equation: Equation, kernel: Candidate, name: str, trial: Trial, expected: Sequence[np.ndarray]) -> bool:
    try:
        found = trial.results(kernel)
    except DeviceFault:
        raise
    except NotOffered:
        return False
    except AdtrainError as error:
        _log.warning("adtrain: warning: %s: not used for %s (%s)", name, described(equation), error)
        return False
    if agree(found, expected, tolerance(equation)):
        return True
    _log.warning("adtrain: warning: %s: not used for %s, its result is wrong", name, described(equation))
    return False


def agree(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether integers are equal, and floats within ``tolerance`` times the largest magnitude. NaN never agrees."""

    def same(x: np.ndarray, y: np.ndarray) -> bool:
        if y.dtype.kind != "f":
            return np.array_equal(x, y)
        with np.errstate(invalid="ignore"):
            return bool(np.all(np.abs(x - y) <= tolerance * np.abs(y).max(initial=0)))

    return all(same(x, y) for x, y in zip(found, expected, strict=True))


def tolerance(equation: Equation) -> float:
    """The largest error of a right result, as a share of the largest magnitude.

    It grows with the square root of the length of sums, and with the rounding of operands by ``precision`` and of
    results to bfloat16.
    """
    inputs, params = [v.type for v in equation.inputs], equation.params
    floats = [t.dtype for t in (*inputs, *(v.type for v in equation.outputs)) if t.dtype.kind == "f"]
    eps = max((float(np.finfo(dtype).eps) for dtype in floats), default=0.0)
    outputs = max(sum(v.size for v in equation.outputs), 1)
    lengths = [1, equation.primitive.cost(inputs, params).flops / outputs, *(t.size / outputs for t in inputs)]
    if "axis" in params:
        lengths.append(inputs[0].shape[params["axis"]])
    precision = equation.kernel_params.get("precision", "full")
    rounding = 0.0 if precision == "full" else 2 * 2.0 ** -mantissa(precision)
    if any(v.type.dtype == BITS for v in equation.outputs):
        rounding += 2.0 ** -mantissa("bfloat16")
    return 8 * eps * math.sqrt(max(lengths)) + rounding


def distinct(labels: Sequence[str]) -> list[str]:
    """The labels without the words that all of them contain, except the first word."""
    common = set.intersection(*(set(label.split()[1:]) for label in labels)) if len(labels) > 1 else set()
    return [" ".join(word for i, word in enumerate(label.split()) if i == 0 or word not in common) for label in labels]


def described(equation: Equation) -> str:
    """The problem in a few words: "matmul float32[128, 784] float32[512, 784]"."""
    return " ".join([equation.name, *(str(v.type) for v in equation.inputs)])
