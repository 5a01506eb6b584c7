"""The `--op` option, which selects rows from a table of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import click

from adtrain.cli.names import NameOf
from adtrain.config.problems import known
from adtrain.custom_op import OWN_OPS, OwnOp


class HasOp(Protocol):
    @property
    def op(self) -> str: ...


Row = TypeVar("Row", bound=HasOp)
Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


def op_option(names: Iterable[str]) -> Callable[[Decorated], Decorated]:
    """`--op NAME`, repeatable; passed to the command as `names`. The shell completes the given names."""
    return click.option(
        "--op",
        "names",
        multiple=True,
        metavar="NAME",
        type=NameOf(sorted(names)),
        help="Only this operation, as in adtrain.ops or a plug-in; repeatable.",
    )


def own_ops(names: Sequence[str]) -> list[OwnOp]:
    """The operations of plug-ins, or those of `names`. UsageError if there is none."""
    for name in names:
        if name not in OWN_OPS:
            raise click.UsageError(f"--op {name}: no plug-in defines it; {known(name, sorted(OWN_OPS))}")
    found = [op for name, op in OWN_OPS.items() if not names or name in names]
    if not found:
        raise click.UsageError("--plugin: the file registers no operation with ad.custom_op or ad.register.op")
    return found


def select_ops(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of the operations `names`, in the table's order; all rows if `names` is empty.

    Raises UsageError for a name without a row.
    """
    ops = {row.op for row in rows}
    for name in names:
        if name not in ops:
            raise click.UsageError(f"--op {name}: no such operation; {known(name, sorted(ops))}")
    return [row for row in rows if not names or row.op in names]
