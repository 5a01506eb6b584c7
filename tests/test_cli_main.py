from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from command_line import invoke

from adtrain import docstrings
from adtrain.cli import COMMANDS, main
from adtrain.cli.options import device_option
from adtrain.cli.output import print_json
from adtrain.config.specs import FAMILIES
from adtrain.core.errors import AdtrainError
from adtrain.signals import INTERRUPTED


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Defines a command `fail`, which raises the first exception in the returned list."""
    errors: list[BaseException] = []

    @click.command()
    def command() -> None:
        raise errors[0]

    monkeypatch.setitem(COMMANDS, "fail", "Fail.")
    monkeypatch.setitem(sys.modules, "adtrain.cli.fail", SimpleNamespace(command=command))
    return errors


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_debug(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert "--debug" in result.stdout
    assert f"adtrain {name}" in result.stdout
    assert COMMANDS[name] in invoke("--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_in_a_terminal_of_60_columns(name: str) -> None:
    result = CliRunner().invoke(main.cli, [name, "--help"], terminal_width=58)  # two columns are a margin
    assert max(map(len, result.stdout.splitlines())) <= 60


def test_the_help_of_train_has_its_own_options_under_headings() -> None:
    *_, others = invoke("train", "--help").stdout.partition("Other options:")
    assert re.findall(r"^ +(?:-\w, )?--([a-z-]+)", others, re.MULTILINE) == ["debug", "help"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (AdtrainError("the file is bad"), 2, "adtrain: error: the file is bad"),
        (
            FileNotFoundError(2, "No such file or directory", "x.yaml"),
            2,
            "adtrain: error: x.yaml: No such file or directory",
        ),
        (MemoryError(), 2, "adtrain: error: not enough memory"),
        (MemoryError("Unable to allocate 8 TiB"), 2, "adtrain: error: not enough memory; Unable to allocate 8 TiB"),
        (click.ClickException("no"), 2, "adtrain: error: no"),
        (click.UsageError("no such thing"), 2, "adtrain: error: no such thing (see 'adtrain fail --help')"),
        (KeyboardInterrupt(), 130, "adtrain: interrupted"),
        (KeyError("x"), 70, "adtrain: internal error: KeyError: 'x' (please report it; --debug shows the traceback)"),
    ],
)
def test_an_error_is_one_line_on_stderr(
    failing: list[BaseException], error: BaseException, code: int, line: str
) -> None:
    failing.append(error)
    result = invoke("fail")
    assert result.exit_code == code
    assert result.stderr.strip() == line
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [("--debug", "fail"), ("fail", "--debug")])
def test_debug_shows_the_traceback(failing: list[BaseException], arguments: tuple[str, ...]) -> None:
    failing.append(AdtrainError("the file is bad"))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "adtrain: error: the file is bad" in result.stderr


def test_a_commands_own_exit_code_is_kept(failing: list[BaseException]) -> None:
    failing.append(SystemExit(1))
    assert invoke("fail").exit_code == 1


def test_an_unknown_command_is_refused_with_the_nearest_name() -> None:
    result = invoke("trian")
    assert result.exit_code == 2
    assert "adtrain: error: unknown command 'trian'; did you mean train? (see" in result.stderr
    assert "did you mean" not in invoke("xyz").stderr
    assert "unknown command 'mlp'; did you mean adtrain train mlp? (see" in invoke("mlp").stderr


@pytest.mark.parametrize("group", [(), ("data",), ("bench",)])
def test_the_list_of_commands_has_whole_sentences(group: tuple[str, ...]) -> None:
    assert "..." not in invoke(*group, "--help").stdout.partition("Commands:")[2]


def test_no_command_shows_the_help_and_is_an_error() -> None:
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


def test_python_m_adtrain_is_the_script() -> None:
    arguments = ("trian",)
    commands = ["-m", "adtrain"], ["-c", "from adtrain.__main__ import main; main()"]
    by_module, by_script = (
        subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True) for command in commands
    )
    assert by_module.returncode == by_script.returncode
    assert (by_module.stdout, by_module.stderr) == (by_script.stdout, by_script.stderr)


SCRIPT = "from adtrain.__main__ import main; main()"
MODULE = """
sys.argv[0], sys.orig_argv = "-m", ["python", "-m", "adtrain"]
import runpy
runpy.run_module("adtrain", run_name="__main__", alter_sys=True)
"""


def interrupted(command: str, module: str, arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command such that SIGINT arrives when `module` is imported; `before` is code to run first."""
    code = f"""
import os, signal, sys
class InterruptAtImport:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, InterruptAtImport())
{before}
{command}
"""
    return subprocess.run([sys.executable, "-c", code, arguments], capture_output=True, text=True)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("module", ["numpy", "adtrain.cli.main", "adtrain.cli.devices"])
@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_ctrl_c_during_the_imports_prints_no_traceback(command: str, module: str) -> None:
    done = interrupted(command, module, "devices")
    assert (done.returncode, done.stdout) == (INTERRUPTED, "")
    assert done.stderr in ("", "\nadtrain: interrupted\n")  # before and after the command has begun


def test_ctrl_c_during_the_imports_stays_ignored_where_the_caller_ignores_it() -> None:
    done = interrupted(SCRIPT, "numpy", "schema", "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_output_stream_is_no_internal_error(closed: int) -> None:
    script = "from adtrain.cli.main import main; main()"
    code = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    arguments, status = (["data", "list"], 0) if closed == 1 else (["trian"], 2)
    command = [sys.executable, "-c", code, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_without_a_gpu_auto_is_the_cpu_and_gpu_is_refused(without_gpu: None) -> None:
    @click.command()
    @device_option
    def command(device: str) -> None:
        click.echo(device)

    result = CliRunner().invoke(command, ["--device", "gpu"])
    assert str(result.exception).startswith("device gpu: cuda-bindings is missing")
    assert str(result.exception).endswith("pip install 'adtrain[gpu]'")
    result = CliRunner().invoke(command, [])
    assert (result.stdout, result.stderr) == ("cpu\n", "")


def test_nan_in_json_output_is_an_error() -> None:
    with pytest.raises(AdtrainError, match="NaN or infinity, which JSON does not have"):
        print_json({"loss": float("nan")})


TEXTS = """\
import click
from adtrain import docstrings
from adtrain.cli import main
def show(command, name):
    context = click.Context(command, info_name=name)
    print(command.get_help(context))
    for other in getattr(command, "list_commands", lambda _: [])(context):
        show(command.get_command(context, other), f"{name} {other}")
show(main.cli, "adtrain")
main.cli(["schema"])
"""
"""A program that prints the help of all commands, and the JSON Schema."""


@pytest.mark.exhaustive
def test_help_and_schema_do_not_depend_on_how_python_optimises() -> None:
    plain, stripped = (
        subprocess.run([sys.executable, *option, "-c", TEXTS], capture_output=True, text=True)
        for option in ([], ["-OO"])
    )
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "The sum of the outputs of branches" in plain.stdout
    assert plain.stdout == stripped.stdout


def test_a_docstring_is_the_same_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [spec.target for family in FAMILIES.values() for spec in family.values() if hasattr(spec, "target")]
    before = [docstrings.of(target) for target in targets]
    monkeypatch.setattr(docstrings, "STRIPPED", True)
    assert [docstrings.of(target) for target in targets] == before
    assert all(before)
