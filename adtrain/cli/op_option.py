"""The `--op` option, which selects rows from a table of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import click

from adtrain.config.problems import known
from adtrain.custom_op import OWN_OPS, OwnOp


class HasOp(Protocol):
    @property
    def op(self) -> str: ...


Row = TypeVar("Row", bound=HasOp)


op_option = click.option(
    "--op",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this operation, as in adtrain.ops or a plug-in; repeatable.",
)
"""`--op NAME`, repeatable; passed to the command as `names`."""


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
