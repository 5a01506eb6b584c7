"""The `--op` option, which selects rows from a table of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import click

from adtrain.config.problems import known


class HasOp(Protocol):
    @property
    def op(self) -> str: ...


Row = TypeVar("Row", bound=HasOp)


op_option = click.option(
    "--op", "names", multiple=True, metavar="NAME", help="Only this operation, as in adtrain.ops; repeatable."
)
"""`--op NAME`, repeatable; passed to the command as `names`."""


def select_ops(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of the operations `names`, in the table's order; all rows if `names` is empty.

    Raises UsageError for a name without a row.
    """
    ops = {row.op for row in rows}
    for name in names:
        if name not in ops:
            raise click.UsageError(f"--op {name}: no such operation; {known(name, sorted(ops))}")
    return [row for row in rows if not names or row.op in names]
