"""jit: compile a function of arrays at its first call, and run the compiled Program in later calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, overload

from adtrain.core.errors import OptionError
from adtrain.core.options import is_integer, require_function, shown
from adtrain.core.program import Program
from adtrain.core.staging import Declared, Staged
from adtrain.passes import ALL


class Jitted:
    """A function that runs as a compiled Program; `jit` returns it. It has the name and docstring of the function."""

    # functools.wraps copies the __dict__ of what it wraps into a new function, which must not run this one's Programs.
    __slots__ = ("__dict__", "__weakref__", "_staged")

    __name__: str

    def __init__(self, f: Callable[..., Any], donate: Declared, static: Declared) -> None:
        functools.update_wrapper(self, f, updated=())
        self._staged = Staged(f, ALL, donate, static)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._staged(*args, **options)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"jit({self._staged.f!r})"

    def program(self, *args: Any, **options: Any) -> Program:
        """The Program for arguments of these types; ``print`` shows its equations. Nothing is compiled or run."""
        return self._staged.program(*args, **options)

    def trace(self, *args: Any, **options: Any) -> tuple[Program, Sequence[tuple[int | str, str]]]:
        """The Program before the passes, and for each of its inputs the argument and the path in it."""
        return self._staged.trace(*args, **options)


@overload
def jit(
    f: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Jitted: ...


@overload
def jit(
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Jitted]: ...


def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
) -> Any:
    """A function that computes the same as ``f``, as a compiled Program on the device of its arguments.

    The first call traces ``f``: it runs once on values without elements, and its operations are written down. Passes
    simplify and fuse them, and the backend compiles the result. Later calls with arguments of the same types run only
    that. Also a decorator: ``@jit`` or ``@jit(static_argnums=1)``.

    ``f`` must have no side effects: they would happen only once, when it is traced. What is refused, and what cannot be
    seen, is listed in `adtrain.core.side_effects`. A call under another `matmul_precision` makes another Program.

    Args:
        f: function of trees of arrays to a tree of arrays, written with public ops; it may take gradients and update
            parameters. Arrays that ``f`` uses without getting them as arguments become constants of the Program.
            Python floats are traced: another value runs the same Program. In ``f`` such a float takes the dtype of the
            array beside it, as outside of it. Integers, bools and strings are static: each value has its own Program.
        static_argnums, static_argnames: arguments that are constants of the Program, by position or name: floats that
            decide about a branch, and hashable objects, such as a model.
        donate_argnums: arguments whose memory may be overwritten with results. Their arrays cannot be used after the
            call, even if it fails.

    Returns:
        The function. It keeps its last 64 Programs; ``program(*args)`` returns the one for such arguments.

    Raises:
        OptionError: an argument of ``jit`` names no argument of ``f``, or one is static and donated.
        TraceError (when called): ``f`` reads the elements of a traced value, has a side effect that is refused, or an
            argument was donated before. Names the line where it can.
        DTypeError (when called): an argument is neither an array, a number, a string nor static, or a static one is not
            hashable; ``f`` returns something other than arrays.
    """
    if f is None:
        return functools.partial(
            jit, static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums
        )
    require_function("jit", f)
    static = _declared("static", f, static_argnums, static_argnames)
    donate = _declared("donate", f, donate_argnums, ())
    if both := sorted(static.positions & donate.positions):
        raise OptionError(f"jit: argument {both[0]} is static and donated, expected one of them")
    return Jitted(f, donate, static)


def _declared(
    what: str, f: Callable[..., Any], argnums: int | Sequence[int], argnames: str | Sequence[str]
) -> Declared:
    """The arguments named in ``argnums`` and ``argnames``, each by position and by name where it has both."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # a function written in C
        parameters = []
    variadic = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    any_name = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)

    positions, names = set[int](), set[str]()
    numbers: Any = (argnums,) if is_integer(argnums, None) else argnums
    for i in numbers:
        count = len(by_position)
        if not is_integer(i, -count) or (i >= count and not variadic):
            expected = f"integers of at least {-count}" if variadic else f"integers in [{-count}, {count})"
            raise OptionError(f"jit: found {shown(i)} in {what}_argnums, expected {expected}")
        positions.add(i if i >= 0 else i + len(by_position))
    for name in (argnames,) if isinstance(argnames, str) else argnames:
        if not any_name and name not in by_name:
            known = ", ".join(sorted(by_name)) or "none"
            raise OptionError(f"jit: {what}_argnames names {shown(name)}, found no such argument (known: {known})")
        names.add(name)
    positions |= {by_position.index(name) for name in names if name in by_position}
    names |= {by_position[i] for i in positions if i < len(by_position) and by_position[i] in by_name}
    return Declared(frozenset(positions), frozenset(names))
