"""bind, which applies a primitive, and the levels of traces that process it; scopes, phases, and hooks.

Every operation is ``bind(primitive, *args, **params)``. The trace with the highest level among the arguments' tracers
processes it. That trace replaces its tracers by their values one level down, and calls ``bind`` again. At level 0 the
base trace runs the operation. Derivatives of derivatives are nested levels. (HIPS/autograd; J. Bradbury et al., JAX:
"Autodidax".)

Programs and timings show the scope (layer) and phase (part of the step) of each operation. Hooks observe every
operation and every Program that runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from adtrain.core.array import Array, Value
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError, DTypeError, TraceError
from adtrain.core.primitive import Primitive
from adtrain.core.program import Program
from adtrain.core.setting import Setting
from adtrain.core.types import ArrayType

_where = Setting(("", "forward"))
"""Scope and phase."""


def current_scope() -> str:
    """The names of the enclosing scopes, outermost first, joined by dots."""
    return _where.value[0]


def current_phase() -> str:
    """``forward``, ``backward`` or ``update``."""
    return _where.value[1]


def scope(name: str) -> AbstractContextManager[None]:
    """Set the layer of the operations in a block: ``with scope("0.linear")``. Scopes nest."""
    outer, phase = _where.value
    return _where.replaced((f"{outer}.{name}" if outer else name, phase))


def phase(name: str) -> AbstractContextManager[None]:
    """Set the phase of the operations in a block."""
    return _where.replaced((current_scope(), name))


def at(scope: str, phase: str) -> AbstractContextManager[None]:
    """Set both for a block, to the scope and phase of a recorded operation."""
    return _where.replaced((scope, phase))


@dataclass(frozen=True)
class Call:
    """One run of a primitive, with its scope and phase."""

    primitive: Primitive
    args: Sequence[Array]
    params: Mapping[str, Any]
    outputs: Sequence[ArrayType]
    device: str
    scope: str
    phase: str


class Hook:
    """Base of observers. Nothing but the backend's work happens between `before` and `after`."""

    def before(self, call: Call) -> None:
        """Called after the shape rule, before the backend runs."""

    def after(self, call: Call) -> None:
        """Called when the backend has returned. A GPU may still be running."""

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        """Called when a jitted function's Program has run, with the seconds of each equation."""


_active = Setting[tuple[Hook, ...]](())


def active_hooks() -> tuple[Hook, ...]:
    """The observers of this thread, the outermost block's first."""
    return _active.value


def hook(observer: Hook) -> AbstractContextManager[None]:
    """Call ``observer`` for everything that this thread runs in a block."""
    return _active.replaced((*_active.value, observer))


class Trace(Protocol):
    """Processes operations: by differentiation, by staging, or by running them."""

    level: int
    live: bool

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        """The operation's output; a tuple for a primitive with several outputs."""
        ...


class Tracer(Value):
    """A value that stands for an array while a trace records the operations on it."""

    __slots__ = ("trace",)

    trace: Trace

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)}, level {self.trace.level})"


class EvaluationTrace:
    """The base trace: applies the shape rule, calls hooks, and runs the primitive on the arrays' device."""

    level = 0
    live = True

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        outputs = primitive.output_types(args, params)
        device = common_device(primitive, args, params)
        runner = backend(device)
        buffers = [x.buffer for x in args]  # type: ignore[attr-defined]
        hooks = active_hooks()
        if not hooks:
            results = runner.run(primitive, buffers, params, outputs)
        else:
            call = Call(primitive, args, params, outputs, device, current_scope(), current_phase())  # type: ignore[arg-type]
            for observer in hooks:
                observer.before(call)
            results = runner.run(primitive, buffers, params, outputs)
            for observer in reversed(hooks):
                observer.after(call)
        if len(outputs) == 1:
            return Array(results[0], outputs[0].shape, outputs[0].dtype, device)
        return tuple(Array(b, t.shape, t.dtype, device) for b, t in zip(results, outputs, strict=True))


_base = Setting[Trace](EvaluationTrace())
_level_numbers = itertools.count(1)


def bind(primitive: Primitive, *args: Value, **params: Any) -> Any:
    """Apply ``primitive`` to values.

    Args:
        args: arrays or tracers.
        params: the primitive's static parameters, hashable.

    Returns:
        The output; a tuple for a primitive with several outputs.

    Raises:
        ShapeError, DTypeError: the shape rule refuses the arguments, or one is not a Value.
        DeviceError: the arguments are on different devices.
        TraceError: an argument is a tracer, and its trace has ended.
    """
    trace = _base.value
    for x in args:
        if isinstance(x, Tracer):
            if not x.trace.live:
                raise TraceError(
                    f"{primitive.name}: an argument ({x}) is a traced value from a function that has already returned; "
                    "return it from that function instead of storing it"
                )
            if x.trace.level > trace.level:
                trace = x.trace
        elif not isinstance(x, Array):
            raise DTypeError(f"{primitive.name}: found an argument of type {type(x).__name__}, expected an array")
    return trace.process(primitive, args, params)


def base_trace(trace: Trace) -> AbstractContextManager[None]:
    """Make ``trace`` the base trace (level 0) of a block, in this thread.

    Staging records operations in this way. The levels above do not depend on what the base does.
    """
    return _base.replaced(trace)


def new_level() -> int:
    """A level above all others, in any thread."""
    return next(_level_numbers)


def common_device(primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> str:
    """The device of an operation. Raises DeviceError if its arguments are on different ones."""
    if not args:
        return params["device"]
    device = args[0].device
    for x in args:
        if x.device != device:
            raise DeviceError(
                f"{primitive.name}: arguments are on {device} and {x.device}, expected one device; move one with .to()"
            )
    return device
