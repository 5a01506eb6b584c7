"""`adtrain bench`: measures operations and training steps."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from adtrain import config
from adtrain.cli.bench_compare import against, compare, devices
from adtrain.cli.bench_ops import ops
from adtrain.cli.bench_training import scaling, startup, step
from adtrain.config.problems import similar


class BenchGroup(click.Group):
    """A group of commands that has defaults.

    Without the name of a command, a CONFIG chooses `step`, or with --ranks `scaling`. Without a CONFIG it is `ops`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        (argument, *_) = (param for param in self.commands["step"].params if param.name == "config_path")
        return [*super().shell_complete(ctx, incomplete), *argument.shell_complete(ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((arg for arg in args if arg != "--debug"), None)
        completing_first = ctx.resilient_parsing and first is None
        if first not in (*self.commands, *ctx.help_option_names) and not completing_first:
            lenient = click.Context(self.commands["ops"], resilient_parsing=True, ignore_unknown_options=True)
            _, rest, _ = lenient.command.make_parser(lenient).parse_args(list(args))
            words = [arg for arg in rest if not arg.startswith("-")]
            if words and not _is_config(words[0]) and (hint := similar(words[0], self.commands)):
                ctx.fail(f"{words[0]}: neither a command nor a config; {hint}")
            of_config = "scaling" if any(arg.partition("=")[0] == "--ranks" for arg in args) else "step"
            args = [of_config if words else "ops", *args]
        return super().parse_args(ctx, args)


def _is_config(name: str) -> bool:
    return Path(name).exists() or name in config.packaged()


@click.group(cls=BenchGroup, short_help="Time operations and training steps.")
def command() -> None:
    """Time operations and training steps, and compare them with other systems, devices and versions.

    Without the name of a command, `adtrain bench CONFIG` is `bench step CONFIG`, and `adtrain bench` is `bench ops`.

    Every time is a median after a warm-up, with its 95% confidence interval. "~" marks an interval wider than 5% of the
    median. GFLOP/s and GB/s count the FLOPs of an operation, and the bytes that it must read and write. "of peak" is
    the share of the device's roofline: the minimum time for these FLOPs and bytes, divided by the measured time.
    """


for subcommand in (ops, step, scaling, startup, against, devices, compare):
    command.add_command(subcommand)
