"""`adtrain gradcheck`: checks derivatives against central differences, and custom kernels against NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import click
from tqdm import tqdm

from adtrain import config, gradcheck, training
from adtrain.cases import CASES, Case
from adtrain.cli.options import ConfigName, OneOf, device_option, json_option, op_option, own_ops, select_ops
from adtrain.cli.output import print_json, show
from adtrain.gradcheck import Row
from adtrain.plugins import find
from adtrain.table import TEXT, CellFormat, Column, render, terminal_width
from adtrain.text import counted

ORDERS = (1, 2, 3, 4)
OUTCOME: tuple[Column[Row], ...] = (
    Column("error", lambda row: row.error, CellFormat("{:.1e}".format)),
    Column("tolerance", lambda row: row.tolerance, CellFormat("{:.0e}".format), rank=2),
    Column("result", lambda row: "ok" if row.passed else "FAILED", TEXT),
)
OPERATIONS: tuple[Column[Row], ...] = (
    Column("operation", lambda row: row.op, TEXT),
    Column("case", lambda row: row.case, TEXT),
    Column("order", lambda row: row.order or None, rank=1),
    Column("mode", lambda row: row.mode, TEXT, rank=1),
)
PARAMETERS: tuple[Column[Row], ...] = (Column("parameter", lambda row: row.op, TEXT),)


@click.command()
@click.argument("config_path", metavar="[CONFIG|RUN]", required=False, type=ConfigName())
@op_option(case.op for case in CASES if case.order)
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    help="Check the operations of this file, or run it before CONFIG; repeatable.",
)
@click.option("--order", type=OneOf(list(map(str, ORDERS))), help="Check only derivatives of this order.")
@device_option
@json_option
def command(
    config_path: str | None,
    names: tuple[str, ...],
    plugins: tuple[str, ...],
    order: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Check the derivatives of every operation in float64: of elementwise operations up to order 4, of others up to
    order 3. Reverse mode is checked against central differences, and forward mode against reverse mode. With CONFIG,
    check the derivatives of the loss of its network with respect to each parameter. With --plugin, check the operations
    that a file registers: their derivatives, their axes and rules for vmap, and their kernels against their NumPy
    references.

    The exit code is 1 if a check fails.
    """
    orders = ORDERS if order is None else (int(order),)
    if config_path is not None:
        if names or order not in (None, "1"):
            option = "--op" if names else f"--order {order}"
            raise click.UsageError(f"{option} is for operations; remove it, or remove CONFIG")
        cfg = training.with_input(config.load(config_path, plugins=plugins))
        checks, total = gradcheck.check_config(cfg, device), None
    elif plugins:
        for name in plugins:
            find(name).run()
        checks, total = gradcheck.check_own_ops(own_ops(names), orders, device), None
    else:
        cases = _with_derivative(select_ops(CASES, names), names)
        total = sum(n <= case.order for case in cases for n in orders)
        checks = gradcheck.check_cases(cases, orders, device)
    rows = list(tqdm(checks, total=total, desc="gradcheck", unit=" checks", disable=None))
    if as_json:
        print_json({"passed": all(row.passed for row in rows), "rows": [_record(row) for row in rows]})
    else:
        show(*_report(rows, OPERATIONS if config_path is None else PARAMETERS, terminal_width()))
    if not all(row.passed for row in rows):
        raise SystemExit(1)


def _with_derivative(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The cases with a derivative. UsageError if an operation in `names` has none."""
    found = [case for case in cases if case.order]
    for name in names:
        if not any(case.op == name for case in found):
            raise click.UsageError(f"--op {name}: has no derivative to check")
    return found


def _record(row: Row) -> dict[str, Any]:
    """The row as JSON values; `error` is null if the rule raised an error or returned NaN."""
    return {**row._asdict(), "error": row.error if math.isfinite(row.error) else None}


def _report(rows: Sequence[Row], names: Sequence[Column[Row]], width: int) -> list[str]:
    """The table of the checks, whose first columns are `names`, and the verdict."""
    failed = [row for row in rows if not row.passed]
    all_checks = counted(len(rows), "checks")
    verdict = f"{len(failed)} of {all_checks} failed" if failed else f"all {all_checks} passed"
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    return [
        *render([*names, *OUTCOME], rows, width),
        "",
        f"{verdict} ({dtypes}, {rows[0].device}; largest error {max(row.error for row in rows):.1e})",
        *(f"  FAILED {' '.join(column.text(row) for column in names)}: error {row.error:.1e}, expected at most "
          f"{row.tolerance:.0e}" for row in failed),
    ]  # fmt: skip
