"""Single operations: which module runs one for a system, and the error of a result against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adtrain import ops
from adtrain.bench.op_table import OpCase, cases
from adtrain.bench.peers.systems import SYSTEMS, load
from adtrain.core.array import array
from adtrain.core.autodiff import vjp

REPEATS = 10
"""Runs of an operation in one call."""

CHECKED_ITEMS = 4
"""Items (rows, images) of a result that are compared with float64, where items are independent."""


class OpRunner(NamedTuple):
    """A system's operation.

    Attributes:
        run: makes the given number of calls of REPEATS runs, waits for the device, returns one element of the result.
        results: the arrays that one run returns: the output, or the gradients of the floating-point inputs. In phase
            "backward" it takes another cotangent as an optional argument.
    """

    run: Callable[[int], float]
    results: Callable[..., list[np.ndarray]]


def find(name: str, device: str) -> OpCase:
    """The case of that name."""
    return next(case for case in cases(device) if case.name == name)


def runner(name: str, case: OpCase, phase: str, device: str) -> OpRunner:
    """The operation in a system, ready to run.

    Raises:
        Unsupported: the system has no counterpart of it.
    """
    system = SYSTEMS[name]
    found: OpRunner = load(system).operation(case, phase, device, system.form)
    return found


def error(case: OpCase, phase: str, runner: OpRunner) -> float:
    """The relative error of a result: norm of its difference from the NumPy reference in float64, over the norm of the
    reference. Of several gradients, the largest error.

    Where the items of a batch are independent, only the first CHECKED_ITEMS are checked. The cotangent is then 0 for
    all other items, so that the gradient of a weight is still checked in every element.
    """
    count = CHECKED_ITEMS if case.by_item else None
    inputs = [x[:count] if i in case.by_item else x for i, x in enumerate(case.arrays())]
    exact = [array(x.astype(np.float64) if x.dtype.kind == "f" else x) for x in inputs]
    if phase == "forward":
        expected = [case.of(ops)(*exact).numpy()]
        results = [x[:count] if count else x for x in runner.results()]
    else:
        cotangent = case.cotangent()
        if count:
            cotangent[count:] = 0
        _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(exact, floats)), *case.floats(exact))
        exact_cotangent = (cotangent[:count] if count else cotangent).astype(np.float64)
        expected = [x.numpy() for x in pullback(array(exact_cotangent))]
        results = runner.results(cotangent)
        results = [x[: len(y)] if x.shape != y.shape else x for x, y in zip(results, expected, strict=True)]
    return max(map(_relative_error, results, expected))


def _relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)
