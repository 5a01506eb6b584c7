"""grad, value_and_grad and vjp, by reverse mode: they take and return functions of trees of arrays.

A trace records operations. The backward pass visits each of them once, newest first (A. Griewank, A. Walther:
"Evaluating Derivatives", 2nd ed., ch. 3). Its work is a small multiple of the forward pass's, and it does not recurse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

from adtrain.core import tree
from adtrain.core.array import TracedNumber, Value, array, returned_no_array
from adtrain.core.errors import AdtrainError, DTypeError, ShapeError
from adtrain.core.options import is_integer, require_function, shown
from adtrain.core.primitive import Primitive, Pull
from adtrain.core.trace import Trace, Tracer, at, bind, current_scope, new_level, phase
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
        pull: Pull | None,
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

    def owns(self, x: Any) -> TypeGuard[ReverseTracer]:
        """Whether ``x`` is a tracer of this trace."""
        return isinstance(x, ReverseTracer) and x.trace is self

    def lower(self, x: Any) -> Any:
        """``x`` one level down: the primal of a tracer of this trace; anything else unchanged."""
        return x.primal if self.owns(x) else x

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        args = spread_numbers(primitive, args, self.owns) if primitive.differentiable else args
        primals = [self.lower(x) for x in args]
        out = bind(primitive, *primals, **params)
        if not primitive.differentiable:
            return out
        positions, parents = [], []
        by_all = primitive.joint_vjp or primitive.by_composition
        for i, x in enumerate(args):
            if self.owns(x) and (by_all or primitive.rule(i) is not None):
                positions.append(i)
                parents.append((x.node, x.position))
        if not positions:
            return out
        if (composition := primitive.by_composition) is not None:
            pull = pulled_back(partial(composition, **params), primals, positions)
        else:
            pull = primitive.pullback(out, primals, params, positions)
        return self.record(primitive.name, out, parents, pull)

    def record(self, name: str, out: Any, parents: Sequence[tuple[Node, int]], pull: Pull) -> Any:
        """Record an operation as a node, and wrap its floating-point outputs in tracers."""
        single = isinstance(out, Value)
        outputs = (out,) if single else out
        node = Node(name, parents, pull, [ArrayType(x.shape, x.dtype) for x in outputs])
        wrapped = [ReverseTracer(self, x, node, i) if x.dtype.kind == "f" else x for i, x in enumerate(outputs)]
        return wrapped[0] if single else tuple(wrapped)


def spread_numbers(primitive: Primitive, args: Sequence[Any], owns: Callable[[Any], bool]) -> Sequence[Any]:
    """The arguments of a primitive. If it is elementwise, each one of shape () that is differentiated is broadcast.

    So in a rule for derivatives only constants are numbers. `vmap` makes such arguments of what all members share.
    """
    if primitive.expression is None or all(x.shape == args[0].shape for x in args):
        return args
    shape = max((x.shape for x in args), key=len)
    return [Value._ops.broadcast_to(x, shape) if owns(x) else x for x in args]


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

    def cotangents(self, cts: Sequence[Any], retain: bool) -> list[Value | None]:
        """The cotangents of the inputs, None for zeros, from those of the outputs (None: zero).

        Without ``retain`` the residuals are freed, and this can be called once only.
        """
        seeds = [
            (x, ct)
            for x, ct in zip(self.outputs, cts, strict=True)
            if ct is not None and isinstance(x, ReverseTracer) and x.trace is self.trace
        ]
        if not retain:
            self.outputs = []
        return backpropagate(seeds, self.inputs, retain)

    def pull_back(self, cts: Sequence[Any], retain: bool) -> tuple[Any, ...]:
        """`cotangents` as the trees of the arguments."""
        found = self.cotangents(cts, retain)
        zeros_like = Value._ops.zeros_like
        leaves = [zeros_like(x.primal) if ct is None else ct for x, ct in zip(self.inputs, found, strict=True)]
        remaining = iter(leaves)
        return tuple(tree.unflatten(structure, list(islice(remaining, count))) for structure, count in self.arguments)

    def pullback(self, ct: Any) -> tuple[Any, ...]:
        """The cotangent trees of the arguments, from a tree of cotangents. It may be called more than once."""
        return self.pull_back(_cotangents(self, ct), retain=True)


def pulled_back(f: Callable[..., Any], args: Sequence[Value], positions: Sequence[int]) -> Pull:
    """The pullback of ``f`` to the arguments at these positions. It runs ``f`` when it is called, not before."""

    def pull(cts: Sequence[Any]) -> list[Value | None]:
        recording = Recording("vjp", f, args, positions, has_aux=False)
        return recording.cotangents(cts[: len(recording.outputs)], retain=False)

    return pull


def checked_position(name: str, argnum: int, count: int) -> int:
    """``argnum`` as a position from 0; a negative one counts from the end. Raises ShapeError for any other."""
    if not is_integer(argnum, -count) or argnum >= count:
        raise ShapeError(f"{name}: found {shown(argnum)} in argnums, expected an integer in [{-count}, {count})")
    return int(argnum) % count


def checked_positions(name: str, argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """``argnums``, one or several, as positions from 0. Raises ShapeError for any other, and for one given twice."""
    named = argnums if isinstance(argnums, Sequence) else (argnums,)
    positions = tuple(checked_position(name, i, count) for i in named)
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


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of ``f`` and its pullback: the function that multiplies a cotangent by the transposed Jacobian.

    Args:
        f: function of trees of floating-point arrays that returns a tree of arrays; with ``has_aux`` a pair of such a
            tree and one that is not differentiated.
        primals: the arguments of ``f``, one tree each.

    Returns:
        ``(out, pullback)``, with ``has_aux`` ``(out, pullback, aux)``. ``pullback(ct)`` takes a tree with the structure
        and shapes of ``out``. It returns a tuple of trees with those of ``primals``. It may be called more than once,
        and holds the residuals in memory.

    Raises:
        DTypeError: an argument is not of floating point, or ``f`` returns something other than arrays.
        ShapeError (by ``pullback``): ``ct`` does not have the structure, shapes and dtypes of ``out``.
    """
    require_function("vjp", f)
    recording = Recording("vjp", f, primals, range(len(primals)), has_aux)
    return (recording.value, recording.pullback, recording.aux) if has_aux else (recording.value, recording.pullback)


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the value of ``f`` and its gradient.

    Args:
        f: returns a floating-point array of shape (); with ``has_aux`` a pair of that and a tree that is not
            differentiated.
        argnums: position of the argument to differentiate by, or several positions. Each argument is a tree of
            floating-point arrays.

    Returns:
        A function with the arguments of ``f`` that returns ``(value, gradient)``, with ``has_aux``
        ``((value, aux), gradient)``. The gradient is a tree with the structure and shapes of the argument, or a tuple
        of such trees. Keyword arguments are passed to ``f`` and not differentiated.

    Raises (when called):
        ShapeError: the value is not of shape (), or ``argnums`` names no argument or one twice.
        DTypeError: an argument or the value is not of floating point.
    """
    require_function("grad", f)
    several = not isinstance(argnums, (int, np.integer))

    @wraps(f)
    def value_and_gradient(*args: Any, **options: Any) -> tuple[Any, Any]:
        positions = checked_positions("grad", argnums, len(args))
        recording = Recording("grad", partial(f, **options), args, positions, has_aux)
        if len(recording.primals_out) != 1 or recording.primals_out[0].shape != ():
            shapes = ", ".join(str(x.shape) for x in recording.primals_out)
            found = f"shape {shapes}" if shapes else "no array"
            raise ShapeError(f"grad: the function returned {found}, expected one scalar of shape ()")
        out = recording.primals_out[0]
        differentiable("grad", "the function's value", out)
        with phase("backward"):
            seed = Value._ops.ones_like(out)
        grads = recording.pull_back([seed], retain=False)
        value = (recording.value, recording.aux) if has_aux else recording.value
        return value, grads if several else grads[0]

    return value_and_gradient


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradient of ``f``; with ``has_aux`` ``(gradient, aux)``.

    Arguments and errors are those of `value_and_grad`.
    """
    both = value_and_grad(f, argnums, has_aux)

    @wraps(f)
    def gradient(*args: Any, **options: Any) -> Any:
        value, found = both(*args, **options)
        return (found, value[1]) if has_aux else found

    return gradient
