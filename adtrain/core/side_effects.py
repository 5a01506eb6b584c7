"""Refuse side effects of a jitted function: they would happen once, when it is traced, and not in later calls.

`stage` refuses what it can detect reliably:

- a traced value that is still referenced after tracing, wherever it is stored (JAX calls it a leaked tracer);
- a ``global`` or ``nonlocal`` variable assigned by the function, by functions that it defines, and by functions that it
  names: those of its own module, and those in its closure;
- an attribute of the function, of the callable object, or of the object of the method, if tracing replaces it
  (``self.count += 1``).

It does not detect other side effects on values that are not traced: items of lists and dictionaries, attributes of
other objects, variables assigned by other methods or by functions of other modules, and input and output.
"""

from __future__ import annotations

import dis
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

from adtrain.core.errors import TraceError

CACHED_CODES = 1024
"""Code objects whose names are kept: functions are traced again for other shapes, and name the same functions."""

_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")


def refuse_assignments(f: Callable[..., Any]) -> None:
    """Check that ``f`` and the functions that it names assign only their own variables. Nothing is called.

    Raises:
        TraceError: one assigns a global variable or a variable of an enclosing function; names the line.
    """
    pending = _functions([f])
    seen: set[FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        code = function.__code__
        for name, line in _assignments(code, frozenset(code.co_freevars)):
            raise TraceError(
                f"{code.co_filename}:{line}: a jitted function assigns {name!r}, a variable outside of it, which would "
                "happen only once, when it is traced; pass the value in and return the new one"
            )
        in_module = [function.__globals__.get(name) for name in _global_names(code)]
        pending += [x for x in in_module if isinstance(x, FunctionType) and x.__globals__ is function.__globals__]
        pending += _functions(_contents(function))


@contextmanager
def refuse_attribute_changes(f: Callable[..., Any]) -> Iterator[None]:
    """Check that a block leaves the attributes of ``f``, or of the object that ``f`` is a method of, as they were.

    A cached property may be computed in the block.

    Raises:
        TraceError: an attribute was set, replaced or deleted.
    """
    f = _without_partial(f)
    owner = getattr(f, "__self__", f)
    before = dict(getattr(owner, "__dict__", {}))
    yield
    after, absent = getattr(owner, "__dict__", {}), object()
    for name in [*before, *after]:
        cached = isinstance(getattr(type(owner), name, None), functools.cached_property)
        if before.get(name, absent) is not after.get(name, absent) and not cached:
            raise TraceError(
                f"a jitted function changes the attribute {name!r} of its {type(owner).__name__}, which happens only "
                "once, when it is traced; pass the value in and return the new one"
            )


def refuse_leaks(traced: Sequence[tuple[weakref.ref[Any], str]]) -> None:
    """Check that no traced value is referenced after tracing.

    Args:
        traced: a weak reference to each traced value, and its line and origin.

    Raises:
        TraceError: one is referenced; names its line.
    """
    if any(value() is not None for value, _ in traced):
        gc.collect()  # frees reference cycles among the tracers themselves
    for value, origin in traced:
        if value() is not None:
            raise TraceError(
                f"{origin} is stored outside the jitted function; it is a traced value, which has no elements, and "
                "later calls do not replace it; return it instead"
            )


def _functions(objects: Sequence[Any]) -> list[FunctionType]:
    """The Python functions among ``objects``: functions, methods, partial functions and callable objects."""
    found: list[FunctionType] = []
    for x in map(_without_partial, objects):
        if isinstance(x, MethodType):
            x = x.__func__
        elif callable(x) and not isinstance(x, FunctionType):
            x = type(x).__call__
        if isinstance(x, FunctionType):
            found.append(x)
    return found


def _without_partial(f: Any) -> Any:
    while isinstance(f, functools.partial):
        f = f.func
    return f


def _contents(function: FunctionType) -> list[Any]:
    """The values of the closure's variables."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found


@functools.lru_cache(CACHED_CODES)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The global names that a function and the functions inside it load."""
    names = [x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _global_names(inner)
    return tuple(names)


@functools.lru_cache(CACHED_CODES)
def _assignments(code: CodeType, outside: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """Name and line of each assignment to a global variable or to one of the variables ``outside``."""
    lines = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    found = []
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset) or line
        name = instruction.argval
        if instruction.opname in _STORES and (instruction.opname.endswith("GLOBAL") or name in outside):
            found.append((name, line))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found += _assignments(inner, outside & frozenset(inner.co_freevars))
    return tuple(found)
