"""Commands of `adtrain`, in the process of the tests."""

from __future__ import annotations

from click.testing import CliRunner, Result

from adtrain.cli import main


def invoke(*arguments: object, columns: int | None = None, stdin: str | bytes = "") -> Result:
    """What `adtrain` prints for the arguments on a terminal with this number of columns, and its exit code.

    Standard input is a pipe with the text `stdin`.
    """
    runner = CliRunner(env={} if columns is None else {"COLUMNS": str(columns)})
    return runner.invoke(main.cli, [str(x) for x in arguments], input=stdin)


def command(*arguments: object, expect: int = 0, stdin: str | bytes = "") -> Result:
    """What `adtrain` prints for the arguments and the text of standard input; its exit code must be `expect`."""
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == expect, result.output
    return result
