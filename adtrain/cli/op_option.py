"""The `--op` option: the rows of a table of operations that the user asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import click

from adtrain.config.problems import known


class HasOp(Protocol):
    @property
    def op(self) -> str: ...


Row = TypeVar("Row", bound=HasOp)
Function = TypeVar("Function", bound=Callable[..., Any])


def op_option(function: Function) -> Function:
    """`--op NAME`, as often as one likes; received as `names`."""
    return click.option(
        "--op", "names", multiple=True, metavar="NAME", help="Only this operation, as in adtrain.ops; repeatable."
    )(function)


def select_ops(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of the operations `names`, in the table's order; all for none. UsageError for a name that has no row."""
    ops = {row.op for row in rows}
    for name in names:
        if name not in ops:
            raise click.UsageError(f"--op {name}: no such operation; {known(name, sorted(ops))}")
    return [row for row in rows if not names or row.op in names]
