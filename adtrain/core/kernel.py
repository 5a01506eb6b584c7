"""CKernel: how an operation names its C function, as plain data that a backend reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def first_dtype(*args: Any, **params: Any) -> tuple[np.dtype, ...]:
    return (args[0].dtype,)


def no_numbers(*args: Any, **params: Any) -> tuple[int, ...]:
    return ()


def no_bytes(*args: Any, **params: Any) -> int:
    return 0


def not_local(*args: Any, **params: Any) -> None:
    return None


@dataclass(frozen=True, eq=False)
class CKernel:
    """A function in `kernels/cpu`: ``name_T([team,] inputs..., outputs..., numbers...[, scratch][, prepared])``.

    All but ``file`` and ``name`` are functions of the arguments (anything with a shape and a dtype) and the parameters.

    Args:
        file: the source, compiled once for each combination of element types it is used with.
        name: the function, without the suffix made of the dtypes' names: ``softmax`` is called as ``softmax_float32``.
        numbers: integers (int64_t) and floats (double) that are passed by value: lengths, strides, options.
        dtypes: the element types that the source is compiled for, as T and U.
        items: for a function that one thread runs: for each argument True where item n of the output needs item n of
            it only (item: index of axis 0), False where it needs all of it; None where the output has no such items,
            and then the function gets the arguments whole. ``numbers`` are asked for arguments with one item.
        sums: the outputs are sums over the items; the function adds the contribution of one item to them.
        team: all threads call the function at once with the same arguments, and divide the work among themselves; it
            may return in one thread while others still write.
        scratch: bytes of memory for the function's own use, for each thread.
        prepared: for a function on items: bytes that ``name_prepare(shared inputs..., numbers..., char *prepared)``
            fills once for each thread, before its items, from the arguments that are not by item (weights, packed); the
            function then gets them as its last argument, after scratch.
        each: the function is called once for each argument, with it and the output; ``numbers`` gets the argument's
            position first. For primitives with any number of arguments.
        checked: the function returns int: 0, or 1 where an index is out of range. The caller then raises
            ShapeError, which names the operation and its scope.
    """

    file: str
    name: str
    numbers: Callable[..., Sequence[int | float]] = no_numbers
    dtypes: Callable[..., tuple[np.dtype, ...]] = first_dtype
    items: Callable[..., tuple[bool, ...] | None] = not_local
    sums: bool = False
    team: bool = False
    scratch: Callable[..., int] = no_bytes
    prepared: Callable[..., int] = no_bytes
    each: bool = False
    checked: bool = False
