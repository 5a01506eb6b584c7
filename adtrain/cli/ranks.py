"""The options `--ranks N` and `--timeout S`: a command that starts itself N times, or runs as a rank of a job."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from adtrain.cli.options import LAUNCHING, Number, Whole
from adtrain.cli.output import message, message_of_rank
from adtrain.distributed.environment import place
from adtrain.distributed.launch import launch
from adtrain.distributed.session import joined
from adtrain.plugins import named_errors
from adtrain.signals import end_on_signals

MOST_RANKS = 4096


def ranks_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command. It starts itself N times, or, where a launcher started it, runs as a rank."""

    def is_launching(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
        ctx.meta[LAUNCHING] = value is not None and place(os.environ) is None
        return value

    @functools.wraps(command)
    def as_rank(*args: Any, ranks: int | None, timeout: float, **options: Any) -> None:
        found = place(os.environ)
        if ranks is not None and found is None:
            raise SystemExit(launch(ranks, sys.argv[1:], timeout, message))
        if ranks is not None and found is not None and ranks != found.size:
            raise click.UsageError(f"found --ranks {ranks}, but {found.launcher} started {found.size} processes")
        with joined(timeout, message_of_rank, _described), named_errors():
            end_on_signals()
            command(*args, **options)

    ranks_option = click.option(
        "--ranks",
        type=Whole(1, MOST_RANKS),
        metavar="N",
        is_eager=True,
        callback=is_launching,
        help="Train with N processes on this machine, each with a GPU of its own if it has GPUs. With data.shards set, "
        "the result is the same for each N that divides it.",
    )
    timeout_option = click.option(
        "--timeout",
        type=Number(min=1),
        metavar="S",
        default=300.0,
        show_default=True,
        help="With several processes: end all of them if one does not answer for S seconds.",
    )
    decorated: Callable[..., None] = ranks_option(timeout_option(as_rank))
    return decorated


def _described(error: Exception) -> tuple[str, int]:
    from adtrain.cli.main import described  # it imports the commands

    lines, code = described(error)
    return "\n".join(lines), code
