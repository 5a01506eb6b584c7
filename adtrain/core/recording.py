"""Recorded calls of functions, from which reverse mode pulls cotangents back, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array, returned_no_array
from adtrain.core.errors import AdtrainError, DTypeError, ShapeError
from adtrain.core.reverse import ReverseTrace, ReverseTracer, backpropagate
from adtrain.core.trace import new_level
from adtrain.core.traced_number import TracedNumber


class Recording:
    """A function's value, with what reverse mode recorded to differentiate it by some of the arguments."""

    def __init__(self, name: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], has_aux: bool):
        self.name = name
        trace = ReverseTrace(new_level())
        try:
            traced = list(args)
            self.inputs: list[ReverseTracer] = []
            self.arguments: list[tuple[tree.TreeDef, int]] = []  # structure and number of leaves
            for i in argnums:
                leaves, structure = tree.flatten(args[i])
                tracers = [trace.input(differentiable(name, f"argument {i}", x)) for x in leaves]
                self.inputs += tracers
                self.arguments.append((structure, len(leaves)))
                traced[i] = tree.unflatten(structure, tracers)
            out = f(*traced)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise DTypeError(f"{name}: has_aux is set, but the function did not return a pair (value, aux)")
            out, aux = out if has_aux else (out, None)
        finally:
            trace.live = False
        self.outputs, self.out_structure = tree.flatten(out)
        for x in self.outputs:
            if not isinstance(x, Value):
                raise returned_no_array(name, x)
        self.primals_out: list[Value] = [trace.lower(x) for x in self.outputs]
        self.value = tree.unflatten(self.out_structure, self.primals_out)
        self.aux = tree.map(trace.lower, aux)
        self.trace = trace

    def pull_back(self, cts: Sequence[Any], retain: bool) -> tuple[Any, ...]:
        """The cotangent trees of the arguments, from the cotangents of the outputs (None: zero).

        Without ``retain`` the residuals are freed, and this can be called once only.
        """
        seeds = [
            (x, ct)
            for x, ct in zip(self.outputs, cts, strict=True)
            if ct is not None and isinstance(x, ReverseTracer) and x.trace is self.trace
        ]
        if not retain:
            self.outputs = []
        found = backpropagate(seeds, self.inputs, retain)
        zeros_like = Value._ops.zeros_like
        leaves = [zeros_like(x.primal) if ct is None else ct for x, ct in zip(self.inputs, found, strict=True)]
        remaining = iter(leaves)
        return tuple(tree.unflatten(structure, list(islice(remaining, count))) for structure, count in self.arguments)

    def pullback(self, ct: Any) -> tuple[Any, ...]:
        """The cotangent trees of the arguments, from a tree of cotangents. It may be called more than once."""
        return self.pull_back(_cotangents(self, ct), retain=True)


def checked_positions(name: str, argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """``argnums`` as positions from 0; negative ones count from the end."""
    named = (argnums,) if isinstance(argnums, (int, np.integer)) else tuple(argnums)
    for i in named:
        if not -count <= i < count:
            raise ShapeError(f"{name}: argnums names argument {i}, found {count} arguments")
    positions = tuple(i % count for i in named)
    if len(set(positions)) != len(positions):
        raise ShapeError(f"{name}: argnums {argnums} names an argument twice")
    return positions


def differentiable(name: str, what: str, x: Any) -> Value:
    """``x`` as a value; DTypeError, which names it by `what`, unless it is of floating point."""
    value = x.array() if isinstance(x, TracedNumber) else x if isinstance(x, Value) else array(x)
    if value.dtype.kind != "f":
        raise DTypeError(f"{name}: {what} is {value.dtype}, expected float32 or float64")
    return value


def _cotangents(recording: Recording, ct: Any) -> list[Any]:
    leaves = tree.flatten_like(recording.out_structure, ct)
    if leaves is None:
        found = tree.flatten(ct)[1]
        raise ShapeError(f"vjp: found a cotangent of structure {found}, expected {recording.out_structure}")
    return [
        _matching("vjp: found a cotangent", out, x) if out.dtype.kind == "f" else x
        for out, x in zip(recording.primals_out, leaves, strict=True)
    ]


def matching_tangents(name: str, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Value]:
    """The arrays of the tangents, of the structure of the primals; ShapeError unless shapes and dtypes are equal."""
    leaves, structure = tree.flatten(tuple(primals))
    vectors = tree.flatten_like(structure, tuple(tangents)) or []
    return [_matching(f"{name}: found a tangent", x, t) for x, t in zip(leaves, vectors, strict=True)]


def _matching(found: str, like: Any, x: Any) -> Value:
    """The cotangent or tangent ``x`` as a value; ShapeError unless it has the shape and dtype of ``like``."""
    like, x = (x.array() if isinstance(x, TracedNumber) else x for x in (like, x))
    like = like if isinstance(like, Value) else array(like)
    value = x if isinstance(x, Value) else array(np.asarray(x, like.dtype), device=like.device)
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ShapeError(f"{found} {value.dtype}{list(value.shape)}, expected {like.dtype}{list(like.shape)}")
    return value


def check_tuples(name: str, primals: Sequence[Any], tangents: Sequence[Any]) -> None:
    """Raises an error unless primals and tangents are tuples of the same structure."""
    for what, found in (("primals", primals), ("tangents", tangents)):
        if not isinstance(found, (tuple, list)):
            raise AdtrainError(
                f"{name}: {what} must be a tuple with one entry for each argument, found {type(found).__name__}"
            )
    if tree.flatten_like(tree.flatten(tuple(primals))[1], tuple(tangents)) is None:
        raise ShapeError(f"{name}: primals and tangents have different structures")
