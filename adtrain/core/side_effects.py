"""What a staged function may not do: leave something behind that a replay of its Program would not."""

from __future__ import annotations

import dis
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

from adtrain.core.errors import TraceError

_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")


def refuse_assignments_outside(f: Callable[..., Any]) -> None:
    """Raise TraceError, naming the line, if ``f`` or a function inside it assigns a variable that is not its own."""
    while isinstance(f, functools.partial):
        f = f.func
    code = getattr(getattr(f, "__func__", f), "__code__", None)
    if code is not None:
        for name, line in _assignments(code, frozenset(code.co_freevars)):
            raise TraceError(
                f"{code.co_filename}:{line}: a staged function assigns {name!r}, which is not its own: a replay would "
                "not do that; pass the value in and return the new one"
            )


def _assignments(code: CodeType, outside: frozenset[str]) -> Iterator[tuple[str, int]]:
    lines = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset) or line
        name = instruction.argval
        if instruction.opname in _STORES and (instruction.opname.endswith("GLOBAL") or name in outside):
            yield name, line
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _assignments(inner, outside & frozenset(inner.co_freevars))


def refuse_kept(made: Sequence[tuple[weakref.ref[Any], str]]) -> None:
    """Raise TraceError for the first of the symbols that somebody still holds when tracing is over.

    Args:
        made: each symbol, weakly, with the line that made it.
    """
    if any(symbol() is not None for symbol, _ in made):
        gc.collect()  # cycles of the tracers themselves hold nothing
    for symbol, line in made:
        if symbol() is not None:
            raise TraceError(
                f"{line}: the value computed here is kept after the staged function has returned, and is no number: a "
                "side effect that a replay would not repeat; return the value instead"
            )
