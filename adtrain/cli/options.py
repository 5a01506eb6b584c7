"""Arguments and options that several commands share: their types, what a shell completes, and their errors."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from adtrain import config
from adtrain.cli.output import ON_STDOUT, QUIET, STDOUT, print_json, progress, show, write_file
from adtrain.config.problems import known, shortened
from adtrain.distributed.environment import place
from adtrain.files import expect_writable

if TYPE_CHECKING:
    from adtrain.bench.result import Result
    from adtrain.custom_ops import OwnOp

LAUNCHING = "adtrain.launching"
"""The key in the meta data of click's context: the command starts ranks, and itself needs no device."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


class _Checked(click.ParamType):
    """A type of click whose error is "found VALUE, expected ..."."""

    def expected(self) -> str:
        """What the type accepts, in words."""
        raise NotImplementedError

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"found {shortened(str(value))!r}, expected {self.expected()}", param, ctx)


class Whole(_Checked, click.IntRange):
    """A whole number with bounds, N in the help."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"

    def expected(self) -> str:
        return f"a whole number{_bounds(self)}"


class Number(_Checked, click.FloatRange):
    """A finite number with bounds. `advice` ends the error: what to do in place of a number outside."""

    def __init__(self, *bounds: Any, advice: str = "", **options: Any) -> None:
        super().__init__(*bounds, **options)
        self.advice = advice and f"; {advice}"

    def expected(self) -> str:
        return f"a number{_bounds(self)}{self.advice}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"found {value!r}, expected a finite number{_bounds(self)}{self.advice}", param, ctx)
        return number


class OneOf(_Checked, click.Choice[str]):
    """One of some words."""

    def expected(self) -> str:
        *others, last = self.choices
        return f"{', '.join(others)} or {last}"


def _bounds(kind: click.IntRange | click.FloatRange) -> str:
    if kind.max is None:
        return f" above {kind.min}" if kind.min_open else f" of at least {kind.min}"
    return f" above {kind.min}, at most {kind.max}" if kind.min_open else f" from {kind.min} to {kind.max}"


class HeadedCommand(click.Command):
    """A command whose help has its options under headings: each with the names of options, without dashes.

    Options that no heading has, such as --help, come last.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.headings = {heading: names.split() for heading, names in headings.items()}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        lines = {option.opts[-1].lstrip("-"): option.get_help_record(ctx) for option in options}
        others = [name for name in lines if not any(name in names for names in self.headings.values())]
        for heading, names in {**self.headings, "Other options": others}.items():
            with formatter.section(heading):
                formatter.write_dl([line for name in names if (line := lines[name]) is not None])


class FilePath(click.Path):
    """A parameter of type Path. Refuses an empty string (an unset shell variable), because Path("") is "."."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("found an empty path", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilePath):
    """A file that the command writes by `output.write_file`; `-` is standard output.

    A command gives one result to standard output. Beside a file, the other lines of its result go to standard error.
    Before the command does anything, it refuses a file that cannot be written, one whose name has another extension
    than `extension`, and a terminal for a `binary` file.
    """

    def __init__(self, extension: str | None = None, binary: bool = False) -> None:
        super().__init__()
        self.extension, self.binary = extension, binary

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if ctx is None or param is None or ctx.resilient_parsing:
            return path
        if path == STDOUT:
            given = param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name
            _take_stdout(ctx, f"{given} -")
            if self.binary:
                refuse_terminal()
        else:
            expect_writable(path)
            if self.extension and path.suffix != self.extension:
                found = f"the extension {path.suffix}" if path.suffix else "no extension"
                self.fail(f"{path}: found {found}, expected {self.extension}", param, ctx)
        return path


def _take_stdout(ctx: click.Context, given: str) -> None:
    """Note that standard output gets the result that is `given`. UsageError if it gets another one already."""
    if (other := ctx.meta.setdefault(ON_STDOUT, given)) != given:
        raise click.UsageError(f"{other} and {given}: only one result fits on standard output")


def refuse_terminal() -> None:
    """UsageError if a binary file would go to a terminal."""
    if sys.stdout.isatty():
        raise click.UsageError("-: the file is binary, and standard output is a terminal; redirect it: > FILE")


def format_option(suffixes: Iterable[str]) -> Callable[[Decorated], Decorated]:
    """`--format`, passed to the command as `suffix`; None if it is not given."""
    names = [suffix[1:] for suffix in suffixes]
    return click.option(
        "--format",
        "suffix",
        type=OneOf(names),
        metavar="FORMAT",
        callback=lambda ctx, param, value: value and f".{value}",
        is_eager=True,  # the type of the file's argument asks for it
        help=f"The format of the file: {', '.join(names)}. Needed where FILE is -.  [default: that of the extension]",
    )


def format_of(output: Path, suffix: str | None, binary: Collection[str]) -> str:
    """The extension of a format: `suffix`, or else that of the path.

    UsageError where `-` has none, and where a terminal would get a file of a `binary` format.
    """
    if output == STDOUT and suffix is None:
        raise click.UsageError("- has no extension that says the format; give --format")
    found = suffix or output.suffix
    if output == STDOUT and found in binary:
        refuse_terminal()
    return found


class ConfigName(click.ParamType):
    """A config as `config.load` takes it: the name of a packaged config, a YAML file, or the folder of a run."""

    name = "config"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [*_matching(config.packaged(), incomplete), *_runs(incomplete), CompletionItem(incomplete, type="file")]


class RunPath(FilePath):
    """The folder of a run."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [*_runs(incomplete), CompletionItem(incomplete, type="dir")]


class NameOf(click.ParamType):
    """One of `names`; with `separator`, several, received as a tuple. The command checks them."""

    name = "name"

    def __init__(self, names: Sequence[str], separator: str = "") -> None:
        self.names = list(dict.fromkeys(names))
        self.separator = separator

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self.separator or not isinstance(value, str):
            return value
        return tuple(word.strip() for word in value.split(self.separator))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, separator, last = incomplete.rpartition(self.separator) if self.separator else ("", "", incomplete)
        return _matching([f"{before}{separator}{name}" for name in self.names], f"{before}{separator}{last}")


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _runs(incomplete: str) -> list[CompletionItem]:
    """The runs in the folder `runs`, and those in the folder that the incomplete word begins with."""
    folders = dict.fromkeys([Path("runs"), Path(os.path.dirname(incomplete))])
    found = sorted(
        str(file.parent) for folder in folders for name in ("config", "sweep") for file in folder.glob(f"*/{name}.yaml")
    )
    return _matching(found, incomplete)


def resolve_device(device: str, before_note: Callable[[], object] | None = None) -> str:
    """The device to run on, "cpu" or "gpu". "auto" is the GPU if there is one, with a note on stderr.

    Args:
        before_note: called before the note is printed, to remove a progress bar.

    Raises:
        DeviceError: `device` is "gpu", and the GPU or a library for it is missing.
    """
    from adtrain.core.backend import backend, usable_device

    usable = usable_device(device)
    if device == "auto" and usable == "gpu":
        if before_note is not None:
            before_note()
        progress(f"running on gpu, {backend(usable).device_name()}")
    return usable


def _device_option(is_resolved: Callable[[click.Context], bool]) -> Callable[[Any], Any]:
    return click.option(
        "--device",
        type=OneOf(["auto", "cpu", "gpu"]),
        default="auto",
        callback=lambda ctx, param, value: resolve_device(value) if is_resolved(ctx) else value,
        help="Where to run.",
    )


device_option = _device_option(lambda ctx: not ctx.meta.get(LAUNCHING))
"""`--device auto|cpu|gpu`; passed to the command after `resolve_device`."""

unresolved_device_option = _device_option(lambda ctx: place(os.environ) is not None)
"""`--device auto|cpu|gpu` for a command that calls `resolve_device` itself. In a rank it is resolved before."""


autotune_option = click.option(
    "--autotune",
    type=OneOf(["off", "cached", "full"]),
    metavar="MODE",
    default="cached",
    help="How a GPU chooses a kernel for an operation. off: by estimated times; cached: by times from earlier "
    "measurements, where there are any; full: by times that are measured first.",
)
"""`--autotune off|cached|full`, passed to the command as `autotune`; see `set_autotune`."""


def set_autotune(device: str, autotune: str) -> None:
    """Set how the device chooses its kernels.

    Raises:
        UsageError: `autotune` is "full" on the CPU, which has only one kernel for each operation.
    """
    if device == "gpu":
        from adtrain.backends.cuda.tuner.autotune import Mode
        from adtrain.core.backend import backend

        tuner = cast(Any, backend(device)).tuner
        tuner.mode = Mode(autotune)
        tuner.report = progress
    elif autotune == "full":
        raise click.UsageError("--autotune full: only a GPU has kernels to choose from, and this runs on the CPU")


def resolve_tuned_device(device: str, autotune: str, before_note: Callable[[], object] | None = None) -> str:
    """Call `resolve_device`, and `set_autotune` for the device that it returns. Raises the errors of both."""
    usable = resolve_device(device, before_note)
    set_autotune(usable, autotune)
    return usable


def _set_option(name: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--set", name, multiple=True, metavar="K=V", help=f"{help}; repeatable.")


set_option = _set_option("overrides", "Set a key of the config, such as training.epochs=3")
"""`--set K=V`, repeatable; passed to the command as `overrides`."""

set_data_option = _set_option(
    "data_overrides", "Set a key of the config's section data, such as label=species or test=0.2"
)
"""`--set K=V` of a command on data, repeatable; passed to the command as `data_overrides`."""


def _on_stdout(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    if value:
        _take_stdout(ctx, "--json")
    return value


json_option = click.option("--json", "as_json", is_flag=True, callback=_on_stdout, help="Print the result as JSON.")
"""`--json`, passed to the command as `as_json`."""


plugin_option = click.option(
    "--plugin", "plugins", multiple=True, metavar="FILE", help="Run this plug-in, a Python file, first; repeatable."
)
"""`--plugin FILE`, repeatable; passed to the command as `plugins`."""

trust_option = click.option(
    "--trust-plugins", "copies", is_flag=True, help="Run the copies of the plug-ins that the run or sweep holds."
)
"""`--trust-plugins`, passed to the command as `copies`."""


def trust_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about the plug-ins of a run or a sweep; passed to the command as `trust`."""

    @functools.wraps(command)
    def with_trust(*args: Any, plugins: tuple[str, ...], copies: bool, override: bool, **options: Any) -> None:
        from adtrain.config.plugged import Trust

        command(*args, trust=Trust(plugins, copies, override), **options)

    options = (
        click.option(
            "--plugin",
            "plugins",
            multiple=True,
            metavar="FILE",
            help="Run this Python file as the run's plug-in of the same name; repeatable.",
        ),
        trust_option,
        click.option("--override", is_flag=True, help="Accept a plug-in that has changed since the training."),
    )
    for option in reversed(options):
        with_trust = option(with_trust)
    return with_trust


def quiet_option(result: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option `--quiet` of a command whose result is the folder of a "run" or "sweep"."""

    def set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[QUIET] = value

    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=set_quiet,
        help=f"Print nothing but the {result}'s folder, warnings and errors.",
    )


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
    from adtrain.custom_ops import OWN_OPS

    for name in names:
        if name not in OWN_OPS:
            raise click.UsageError(f"--op {name}: no plug-in defines it; {known(name, sorted(OWN_OPS))}")
    found = [op for name, op in OWN_OPS.items() if not names or name in names]
    if not found:
        raise click.UsageError("--plugin: the file registers no operation with ad.custom_op or ad.register.op")
    return found


class HasOp(Protocol):
    @property
    def op(self) -> str: ...


Row = TypeVar("Row", bound=HasOp)


def select_ops(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of the operations `names`, in the table's order; all rows if `names` is empty.

    Raises UsageError for a name without a row.
    """
    ops = {row.op for row in rows}
    for name in names:
        if name not in ops:
            raise click.UsageError(f"--op {name}: no such operation; {known(name, sorted(ops))}")
    return [row for row in rows if not names or row.op in names]


Refusals = Iterable[tuple[Collection[str], str]]
"""Names of parameters without an effect, and the error for one of them, with `{}` for the option."""


def refusing(rule: Callable[..., Refusals]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that refuses the options of a command that have no effect beside the others that are given.

    Args:
        rule: takes the command's parameters, and returns those without an effect beside the others.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def checked(*args: Any, **parameters: Any) -> None:
            ctx = click.get_current_context()
            for refused, error in rule(**parameters):
                for parameter in ctx.command.params:
                    source = ctx.get_parameter_source(str(parameter.name))
                    if parameter.name in refused and source is ParameterSource.COMMANDLINE:
                        is_option = isinstance(parameter, click.Option)
                        name = parameter.opts[-1] if is_option else parameter.human_readable_name.strip("[]")
                        raise click.UsageError(error.format(name))
            command(*args, **parameters)

        return checked

    return decorate


class Output(NamedTuple):
    """The options about the result of a command that measures: text, JSON, and a page."""

    as_json: bool
    json_file: Path | None
    html_file: Path | None

    def write(self, result: Result) -> None:
        from adtrain.bench import page, text
        from adtrain.table import terminal_width

        values = result.to_json()
        if self.as_json:
            print_json(values)
        else:
            show(*text.render(result, terminal_width()))
        if self.json_file is not None:
            write_file(self.json_file, json.dumps(values, indent=2, allow_nan=False).encode() + b"\n")
        if self.html_file is not None:
            write_file(self.html_file, page.render(result).encode())
        for file in (self.json_file, self.html_file):
            if file is not None and file != STDOUT:
                progress(f"wrote {file}")


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--json`, `--json-file FILE` and `--html FILE`; passed to the command as `output`."""

    @click.option(
        "--html", "html_file", type=OutputFile(".html"), metavar="FILE", help="Write a page with plots: FILE.html."
    )
    @click.option("--json-file", type=OutputFile(), metavar="FILE", help="Also write the result as JSON.")
    @json_option
    @functools.wraps(command)
    def with_output(*args: Any, as_json: bool, json_file: Path | None, html_file: Path | None, **options: Any) -> None:
        command(*args, output=Output(as_json, json_file, html_file), **options)

    return with_output
