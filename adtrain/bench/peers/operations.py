"""An operation as each side runs it, and how far each side's result is from float64."""

from __future__ import annotations

import numpy as np

from adtrain import ops
from adtrain.bench.peers.op_cases import CHECKED_ITEMS, OpCase, OpWork, cases
from adtrain.core.array import array
from adtrain.core.autodiff import vjp


def find(name: str, device: str) -> OpCase:
    """The case of a name."""
    return next(case for case in cases(device) if case.name == name)


def work(side: str, case: OpCase, phase: str, device: str) -> OpWork:
    """The operation on a side's device, ready to run.

    Raises:
        SideSkips: the peer has no counterpart for it.
    """
    package, _, form = side.partition("-")
    match package:
        case "torch":
            from adtrain.bench.peers import torch_operations

            return torch_operations.operation(case, phase, device, form)
        case "jax":
            from adtrain.bench.peers import jax_operations

            return jax_operations.operation(case, phase, device)
        case "numpy":
            from adtrain.bench.peers import numpy_operations

            return numpy_operations.operation(case, phase)
    from adtrain.bench.peers import ours

    return ours.operation(case, phase, device)


def error(case: OpCase, phase: str, found: OpWork) -> float:
    """The norm of the difference from this package's NumPy reference in float64, over the norm of that; of several
    gradients the largest.

    Where items do not depend on one another the first CHECKED_ITEMS are looked at: gradients are then those for a
    cotangent that is 0 in all other items, so that every element of a weight's gradient is checked.
    """
    few = CHECKED_ITEMS if case.by_item else None
    inputs = [x[:few] if i in case.by_item else x for i, x in enumerate(case.arrays())]
    exact = [array(x.astype(np.float64) if x.dtype.kind == "f" else x) for x in inputs]
    if phase == "forward":
        expected = [case.of(ops)(*exact).numpy()]
        results = [x[:few] if few else x for x in found.results()]
    else:
        cotangent = case.cotangent()
        if few:
            cotangent[few:] = 0
        _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(exact, floats)), *case.floats(exact))
        expected = [
            x.numpy()
            for x in pullback(array(cotangent[:few].astype(np.float64) if few else cotangent.astype(np.float64)))
        ]
        results = found.results(cotangent)
        results = [x[: len(y)] if x.shape != y.shape else x for x, y in zip(results, expected, strict=True)]
    return max(map(_distance, results, expected))


def _distance(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)
