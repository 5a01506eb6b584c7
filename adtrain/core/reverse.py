"""Reverse mode: the trace that records operations, and the backward pass over the record.

The backward pass visits each operation once, newest first (A. Griewank, A. Walther: "Evaluating Derivatives", 2nd ed.,
ch. 3). Its work is a small multiple of the forward pass's, and it does not recurse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adtrain.core.array import Value
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import Primitive, Pullback
from adtrain.core.scope import at, current_scope
from adtrain.core.trace import Trace, Tracer, bind
from adtrain.core.types import ArrayType

_node_numbers = itertools.count()


class Node:
    """A recorded operation, or an input (``pull`` is None). Only ``pull`` refers to residuals.

    Args:
        parents: the node and the output's position behind each traced argument.
        pull: from the cotangents of the outputs to those of the traced arguments.
        outputs: types of the outputs.
    """

    __slots__ = ("index", "name", "outputs", "parents", "pull", "scope")

    def __init__(
        self,
        name: str,
        parents: Sequence[tuple[Node, int]],
        pull: Callable[[list[Value | None]], Sequence[Value | None]] | None,
        outputs: Sequence[ArrayType],
    ) -> None:
        self.index = next(_node_numbers)  # larger than its parents', so descending order is topological
        self.name = name
        self.parents = parents
        self.pull = pull
        self.outputs = outputs
        self.scope = current_scope()


class ReverseTracer(Tracer):
    """Output number ``position`` of a node. ``primal`` is its value one level down."""

    __slots__ = ("device", "dtype", "node", "position", "primal", "shape", "trace")

    def __init__(self, trace: Trace, primal: Value, node: Node, position: int = 0) -> None:
        self.trace = trace
        self.primal = primal
        self.node = node
        self.position = position
        self.shape = primal.shape
        self.dtype = primal.dtype
        self.device = primal.device


class ReverseTrace:
    """Runs each operation one level down, and records the pullbacks to its traced arguments."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.live = True

    def input(self, primal: Value) -> ReverseTracer:
        """A tracer for an argument to differentiate by."""
        return ReverseTracer(self, primal, Node("input", (), None, [ArrayType(primal.shape, primal.dtype)]))

    def lower(self, x: Any) -> Any:
        """``x`` one level down: the primal of a tracer of this trace; anything else unchanged."""
        return x.primal if isinstance(x, ReverseTracer) and x.trace is self else x

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        primals = [self.lower(x) for x in args]
        out = bind(primitive, *primals, **params)
        if not primitive.differentiable:
            return out
        if primitive.joint_vjp is not None:
            return self._record_joint(primitive, out, args, primals, params)
        parents: list[tuple[Node, int]] = []
        pullbacks: list[Pullback] = []
        for position, x in enumerate(args):
            if isinstance(x, ReverseTracer) and x.trace is self:
                rule = primitive.rule(position)
                if rule is not None:
                    parents.append((x.node, x.position))
                    pullbacks.append(rule(out, *primals, **params))
        if not parents:
            return out
        pull = _pull_one if isinstance(out, Value) else _pull_many
        return self.record(primitive.name, out, parents, pull, pullbacks)

    def _record_joint(
        self, primitive: Primitive, out: Any, args: Sequence[Value], primals: Sequence[Value], params: Mapping[str, Any]
    ) -> Any:
        assert primitive.joint_vjp is not None
        traced = [(i, x) for i, x in enumerate(args) if isinstance(x, ReverseTracer) and x.trace is self]
        if not traced:
            return out
        single = isinstance(out, Value)

        def pull(pullback: Any, cts: list[Value | None]) -> list[Value | None]:
            found = pullback(cts[0] if single else tuple(cts))
            return [found[i] for i, _ in traced]

        parents = [(x.node, x.position) for _, x in traced]
        return self.record(primitive.name, out, parents, pull, primitive.joint_vjp(out, *primals, **params))

    def record(self, name: str, out: Any, parents: Sequence[tuple[Node, int]], pull: Any, pullbacks: Any) -> Any:
        """Record an operation as a node, and wrap its floating-point outputs in tracers."""
        single = isinstance(out, Value)
        outputs = (out,) if single else out
        node = Node(name, parents, lambda cts: pull(pullbacks, cts), [ArrayType(x.shape, x.dtype) for x in outputs])
        wrapped = [ReverseTracer(self, x, node, i) if x.dtype.kind == "f" else x for i, x in enumerate(outputs)]
        return wrapped[0] if single else tuple(wrapped)


def _pull_one(pullbacks: Sequence[Pullback], cts: list[Value | None]) -> Sequence[Value]:
    return [pullback(cts[0]) for pullback in pullbacks]


def _pull_many(pullbacks: Sequence[Pullback], cts: list[Value | None]) -> Sequence[Value]:
    return [pullback(tuple(cts)) for pullback in pullbacks]


def fill_zeros(ct: Value | None, zero: tuple[Any, Any, str]) -> Value | None:
    """The cotangent, or zeros of (shape, dtype, device) if there is none; None for integers."""
    shape, dtype, device = zero
    return Value._ops.zeros(shape, dtype, device) if ct is None and dtype.kind == "f" else ct


def backpropagate(
    seeds: Sequence[tuple[ReverseTracer, Value]], inputs: Sequence[ReverseTracer], retain: bool
) -> list[Value | None]:
    """The cotangents of a trace's inputs, from those of its outputs.

    Args:
        seeds: outputs with their cotangents.
        inputs: the tracers that `ReverseTrace.input` returned.
        retain: keep the residuals in memory for another backward pass. Otherwise each is freed after its use.

    Returns:
        For each input its cotangent; None where no output depends on it.

    Raises:
        ShapeError: a pullback returned a cotangent that does not have its argument's shape and dtype.
    """
    cotangents: dict[Node, list[Value | None]] = {}
    for tracer, seed in seeds:
        _accumulate(cotangents, tracer.node, tracer.position, seed)
    order = _reachable(cotangents)
    while order:
        node = order.pop()
        pull, parents = node.pull, node.parents
        if pull is None or node not in cotangents:
            continue
        if not retain:
            node.pull, node.parents = None, ()
        with at(node.scope, "backward"):
            for (parent, position), ct in zip(parents, pull(cotangents.pop(node)), strict=True):
                if ct is not None:
                    _check(node, ct, parent.outputs[position])
                    _accumulate(cotangents, parent, position, ct)
        del pull
    return [cotangents[x.node][0] if x.node in cotangents else None for x in inputs]


def _check(node: Node, ct: Value, expected: ArrayType) -> None:
    if ct.shape != expected.shape or ct.dtype != expected.dtype:
        raise ShapeError(
            f"{node.name}: its derivative returned a cotangent {ArrayType(ct.shape, ct.dtype)}, expected {expected} "
            "like the argument"
        )


def _accumulate(cotangents: dict[Node, list[Value | None]], node: Node, position: int, ct: Value) -> None:
    cts = cotangents.setdefault(node, [None] * len(node.outputs))
    before = cts[position]
    cts[position] = ct if before is None else before + ct


def _reachable(roots: Mapping[Node, Any]) -> list[Node]:
    """``roots`` and all their ancestors, oldest first."""
    seen = set(roots)
    stack = list(roots)
    while stack:
        for parent, _ in stack.pop().parents or ():
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen, key=lambda node: node.index)
