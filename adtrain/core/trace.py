"""bind, the one door, and the trace levels behind it.

Every operation is ``bind(primitive, *args, **params)``. Of the traces whose tracers are among the arguments the one at
the highest level takes the operation: it unwraps its own tracers, works one level down, and so the operation sinks
until it reaches the base, which runs it. Levels nest, so the gradient of a gradient needs no flag.
(HIPS/autograd; J. Bradbury et al., JAX: "Autodidax".)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from adtrain.core.array import Array, Value
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError, DTypeError, TraceError
from adtrain.core.hooks import Call, active_hooks
from adtrain.core.primitive import Primitive
from adtrain.core.scope import current_phase, current_scope


class Trace(Protocol):
    """What takes an operation: differentiation, staging, or running it at once."""

    level: int
    live: bool

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        """The operation's output, a value (a tuple of values for a primitive with several outputs)."""
        ...


class Tracer(Value):
    """A value whose history a trace is following."""

    __slots__ = ("trace",)

    trace: Trace

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)}, level {self.trace.level})"


class EvaluationTrace:
    """The base: shape rule, hooks, then the backend of the arrays' device."""

    level = 0
    live = True

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        outputs = primitive.output_types(args, params)
        device = _common_device(primitive, args, params)
        worker = backend(device)
        buffers = [x.buffer for x in args]  # type: ignore[attr-defined]
        hooks = active_hooks()
        if not hooks:
            results = worker.run(primitive, buffers, params, outputs)
        else:
            call = Call(primitive, args, params, outputs, device, current_scope(), current_phase())  # type: ignore[arg-type]
            for observer in hooks:
                observer.before(call)
            results = worker.run(primitive, buffers, params, outputs)
            for observer in reversed(hooks):
                observer.after(call)
        if len(outputs) == 1:
            return Array(results[0], outputs[0].shape, outputs[0].dtype, device)
        return tuple(Array(b, t.shape, t.dtype, device) for b, t in zip(results, outputs, strict=True))


class _Levels(threading.local):
    def __init__(self) -> None:
        self.base: Trace = EvaluationTrace()


_levels = _Levels()
_level_numbers = itertools.count(1)


def bind(primitive: Primitive, *args: Value, **params: Any) -> Any:
    """Apply ``primitive`` to values; ``params`` are its static (hashable) parameters.

    Raises:
        ShapeError, DTypeError: by the primitive's shape rule.
        DeviceError: the arguments lie on different devices.
        TraceError: an argument is a tracer whose trace has ended.
    """
    trace = _levels.base
    for x in args:
        if isinstance(x, Tracer):
            if not x.trace.live:
                raise TraceError(
                    f"{primitive.name}: an argument ({x}) was kept from a function that has been traced "
                    "already; return it from that function instead of storing it"
                )
            if x.trace.level > trace.level:
                trace = x.trace
        elif not isinstance(x, Array):
            raise DTypeError(f"{primitive.name}: found an argument of type {type(x).__name__}, expected an array")
    return trace.process(primitive, args, params)


@contextmanager
def base_trace(trace: Trace) -> Iterator[None]:
    """Let ``trace`` (level 0) take, in a block, every operation that would otherwise run at once.

    This is where staging records: the differentiating levels above neither know nor care whether what is below them
    computes or writes down.
    """
    outer = _levels.base
    _levels.base = trace
    try:
        yield
    finally:
        _levels.base = outer


def new_level() -> int:
    """A level above all there have been, in any thread."""
    return next(_level_numbers)


def _common_device(primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> str:
    if not args:
        return params["device"]
    device = args[0].device
    for x in args:
        if x.device != device:
            raise DeviceError(
                f"{primitive.name}: arguments lie on {device} and {x.device}, expected one device; move one with .to()"
            )
    return device
