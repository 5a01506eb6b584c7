"""Commands of `adtrain`, in the process of the tests."""

from __future__ import annotations

from click.testing import CliRunner, Result

from adtrain.cli import main


def invoke(*arguments: object, columns: int | None = None) -> Result:
    """What `adtrain` prints for the arguments on a terminal with this number of columns, and its exit code."""
    runner = CliRunner(env={} if columns is None else {"COLUMNS": str(columns)})
    return runner.invoke(main.cli, [str(x) for x in arguments])


def command(*arguments: object, expect: int = 0) -> Result:
    """What `adtrain` prints for the arguments; its exit code must be `expect`."""
    result = invoke(*arguments)
    assert result.exit_code == expect, result.output
    return result
