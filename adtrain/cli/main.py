"""The `adtrain` command: finds and runs a subcommand, and turns its errors into one line and an exit code.

A subcommand's module is imported only when it is called, so that `adtrain --help` is fast.
Exit codes: 0 success, 1 a check failed, 2 an error in usage, config or data, 70 a defect of adtrain, 130 interrupted,
129 or 143 ended by SIGHUP or SIGTERM, 141 broken pipe.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from adtrain import __version__, docstrings, plugins
from adtrain.cli import COMMANDS, module_of
from adtrain.cli.output import BROKEN_PIPE, broken_pipes, close_stdout, open_streams, print_warnings, silence
from adtrain.cli.output import message as print_message
from adtrain.core import timeline
from adtrain.core.errors import AdtrainError, DeviceFault
from adtrain.distributed.environment import divide_host, is_rank, other_rank
from adtrain.signals import INTERRUPTED, USAGE, end_on_signals, let_signals_kill

INTERNAL = 70
NO_THREADS = (
    "the system does not let this process start a thread; raise its limits (ulimit -u, -v), or end other processes"
)

debug_option = click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error.")


class Commands(click.Group):
    """A group whose subcommands are modules of this package, each with a click command named `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with timeline.during("imports"):
            command: click.Command = importlib.import_module(module_of(cmd_name)).command
        if not gc.isenabled():
            gc.freeze()  # modules live until exit: the collector can skip them
            gc.enable()
        accept_debug(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            ctx.fail(unknown_command(name))
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with broken_pipes():  # --help prints
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with broken_pipes(), plugins.named_errors():
            return super().invoke(ctx)

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = "adtrain", *_: Any, **extra: Any
    ) -> NoReturn:
        arguments = list(sys.argv[1:] if args is None else args)
        # --debug is found before parsing, because parsing itself can fail. After `--` it is not an option.
        options = arguments[: arguments.index("--")] if "--" in arguments else arguments
        status: Any
        try:
            status = super().main(arguments, "adtrain", **{**extra, "standalone_mode": False})
        except SystemExit as error:
            status = error.code
        except Exception as error:
            if "--debug" in options and not isinstance(error, click.ClickException | click.Abort):
                for line in traceback.format_exc().splitlines():
                    print_message(line)
            status = report(error)
            if isinstance(error, DeviceFault):
                sys.stdout.flush()
                os._exit(status)  # skips clean-up, which would fail in the driver with further messages
        try:
            sys.stdout.flush()
        except OSError as error:
            close_stdout()
            status = status or (BROKEN_PIPE if isinstance(error, BrokenPipeError) else report(error))
        sys.exit(status)


def accept_debug(command: click.Command) -> None:
    """Add the `--debug` option to the command and its subcommands, so that it can be anywhere on the command line."""
    if command.help is None and command.callback is not None:
        command.help = docstrings.of(command.callback)  # Python -OO has stripped it
    if debug_option not in command.params:
        command.params.append(debug_option)
    for subcommand in getattr(command, "commands", {}).values():
        accept_debug(subcommand)


def unknown_command(name: str) -> str:
    """The message for an unknown command: with the nearest name, a list of all commands, or `train` for a config."""
    from adtrain.config.names import packaged
    from adtrain.config.problems import known

    if name in packaged() or os.path.isfile(name):
        return f"unknown command {name!r}; did you mean adtrain train {shlex.quote(name)}?"
    return f"unknown command {name!r}; {known(name, COMMANDS, 'commands')}"


def report(error: Exception) -> int:
    """Print the error to stderr, a line for each of its problems, and return the exit code."""
    lines, code = described(error)
    for line in lines:
        print_message(line)
    return code


def described(error: Exception) -> tuple[list[str], int]:
    """The lines that say what the error is, and the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return (error.ctx.get_help() if error.ctx else "").splitlines(), USAGE
    if isinstance(error, click.Abort):
        return ["adtrain: interrupted"], INTERRUPTED
    code, kind, more = USAGE, "error", list[str]()
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "adtrain"
        hint = _advice(error) if isinstance(error, click.NoSuchOption) else ""
        message = f"{hint or error.format_message()} (see '{path} --help')"
    elif isinstance(error, click.ClickException):
        message = error.format_message()
    elif isinstance(error, AdtrainError):
        message, *more = error.lines
        place = _plugin_line(error)
        if place is not None and not more and not message.startswith(place.rpartition(":")[0]):
            message = f"{place}: {message}"
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}"
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # it has no class of its own
        message = NO_THREADS
    elif isinstance(error, MemoryError) or (isinstance(error, ImportError) and "failed to map segment" in str(error)):
        message = f"not enough memory; {error}".rstrip("; ")
    else:
        code, kind = INTERNAL, "internal error"
        message = f"{type(error).__name__}: {error} (please report it; --debug shows the traceback)"
    return [f"adtrain: {kind}: {message}", *more], code


def _advice(error: click.NoSuchOption) -> str:
    """The message for an option that a config has as a key; empty for others."""
    params = {param.name for param in error.ctx.command.params} if error.ctx is not None else set()
    if not params & {"overrides", "data_overrides"}:
        return ""
    from adtrain.config.problems import similar

    if similar(error.option_name, error.possibilities or (), 0.8):
        return ""  # click says what was misspelt
    from adtrain.config.habits import SENTENCES, key_of, option_of_optimizer

    name = error.option_name.lstrip("-").replace("-", "_")
    key = key_of(name) or option_of_optimizer(name)
    which = " for the optimizer adam" if key and ".adam." in key else ""
    advice = f"it is a key of the config: --set {key}=VALUE{which}" if key else SENTENCES.get(name)
    if key and "data_overrides" in params and not key.startswith("data."):
        advice = f"it is a key of the config, but not of its data: adtrain train CONFIG --set {key}=VALUE{which}"
    return f"No such option {error.option_name!r}; {advice}" if advice else ""


def _plugin_line(error: AdtrainError) -> str | None:
    """`file:line` of the plug-in that raised the error; None if the message names a place itself, or for none."""
    where = plugins.place(error)
    if where is None or isinstance(error, plugins.PluginError):
        return None
    from adtrain.config.problems import ConfigError

    return None if isinstance(error, ConfigError) else where


@click.command(
    cls=Commands, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="adtrain")
def cli() -> None:
    """Train the neural network that a YAML file describes, and measure its operations.

    `adtrain train mlp` trains the packaged config mlp.
    """


accept_debug(cli)


def main() -> NoReturn:
    """The entry point of the `adtrain` script."""
    timeline.current().change(timeline.OTHER)
    open_streams()
    if other_rank(os.environ):
        silence()
    divide_host(os.environ)
    if is_rank(os.environ):
        let_signals_kill()  # until the ranks are connected: see train.ranks_options
    else:
        end_on_signals()
    print_warnings()
    atexit.register(gc.freeze)  # or Python would look at every object at exit, for a sixth of a short command's time
    cli.main()
