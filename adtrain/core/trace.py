"""bind, which applies a primitive, and the levels of traces that process it.

Every operation is ``bind(primitive, *args, **params)``. The trace with the highest level among the arguments' tracers
processes it. That trace replaces its tracers by their values one level down, and calls ``bind`` again. At level 0 the
base trace runs the operation. Derivatives of derivatives are nested levels. (HIPS/autograd; J. Bradbury et al., JAX:
"Autodidax".)
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


class _Levels(threading.local):
    def __init__(self) -> None:
        self.base: Trace = EvaluationTrace()


_levels = _Levels()
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
    trace = _levels.base
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


@contextmanager
def base_trace(trace: Trace) -> Iterator[None]:
    """Make ``trace`` the base trace (level 0) of a block, in this thread.

    Staging records operations in this way. The levels above do not depend on what the base does.
    """
    outer = _levels.base
    _levels.base = trace
    try:
        yield
    finally:
        _levels.base = outer


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
