"""The operations of plug-ins as rows of the table that `adtrain bench` times."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from adtrain.bench.ops.table import ELEMENTS, Bench
from adtrain.core.errors import OptionError
from adtrain.custom_ops import OwnOp
from adtrain.samplers import Sampler


def own_bench(op: OwnOp) -> Bench:
    """The operation on its samples: at the sizes of ELEMENTS if the samples have one, otherwise at their own.

    Raises OptionError where it has no samples, or a size is asked for and its samples have one size only.
    """
    if op.samples is None:
        raise OptionError(f"{op.place}: custom_op {op.name} has no samples to time it with; give samples=")
    samples = op.samples
    sized = len(inspect.signature(samples).parameters) > 1

    def drawn(*size: int) -> list[np.ndarray]:
        return [np.asarray(x) for x in samples(np.random.default_rng(0), *size)]

    def inputs(n: int) -> tuple[Sampler, ...]:
        arrays = drawn(n) if sized else drawn()
        if not sized and n != sizes["cpu"][0]:
            raise OptionError(f"{op.place}: the samples of {op.name} have one size; give them a second parameter")
        return tuple(lambda rng, x=x: x for x in arrays)

    largest = 0 if sized else max(x.size for x in drawn())
    sizes = ELEMENTS if sized else {"cpu": (largest,), "gpu": (largest,)}
    differentiable = op.custom is None or op.custom.has_vjp
    return Bench(op.name, "samples", sizes, inputs, _named(op), differentiable)


def _named(op: OwnOp) -> Callable[..., Any]:
    """The operation with named parameters, which name the gradients."""
    if op.custom is None:
        return op.f
    return wraps(op.custom.primitive.reference)(lambda *args: op.f(*args))
