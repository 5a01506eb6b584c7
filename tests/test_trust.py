"""No command runs code that a folder holds, unless the command line asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import invoke
from plugin_files import LAYER, forgetting, no_plugins, write_plugged

import adtrain as ad
from adtrain import plugins
from adtrain.cli import main
from adtrain.cli.options import ConfigName, FilePath, RunPath
from adtrain.core.errors import AdtrainError

pytestmark = pytest.mark.unfused

__all__ = ["no_plugins"]

MARK = "ADTRAIN_TEST_MARK"
CODE = f"""\
import os
if "{MARK}" in os.environ:
    open(os.environ["{MARK}"], "w").close()
    raise RuntimeError("the plug-in runs")
{LAYER}"""
FOLDERS = ("run", "sweep", "sweep/members/0")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands with the words that call them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def takes_a_folder(parameter: click.Parameter) -> bool:
    is_text = isinstance(parameter, click.Argument) and parameter.type == click.STRING
    return is_text or isinstance(parameter.type, (ConfigName, RunPath, FilePath))


def _is_file(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument) and isinstance(parameter.type, FilePath)


def calls(command: click.Command) -> Iterator[tuple[click.Parameter, list[str]]]:
    """The arguments that give FOLDER to each parameter that takes a folder.

    Others get the name of a file, if they are required or a file.
    """
    for parameter in filter(takes_a_folder, command.params):
        arguments: list[str] = []
        for other in command.params:
            if other is parameter or other.required or _is_file(other):
                value = "FOLDER" if other is parameter or isinstance(other.type, RunPath) else "file.onnx"
                arguments += [value] if isinstance(other, click.Argument) else [other.opts[0], value]
        yield parameter, arguments


ALL = [(path, parameter, arguments) for path, x in commands(main.cli) for parameter, arguments in calls(x)]
TRUSTING = [x for x in ALL if isinstance(x[1].type, RunPath) and x[0] != ("compare",)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and a sweep that is finished, whose config names a plug-in."""
    here = tmp_path_factory.mktemp("made")
    path = write_plugged(here, text=CODE)
    common = ("--device", "cpu", "--set", f"data.path={here / 'data'}")
    for arguments in (
        ("train", str(path), "--output-dir", str(here / "run")),
        ("sweep", str(path), "--output-dir", str(here / "sweep"), "--set", "sweep={training.seed: [0]}"),
    ):
        with forgetting():
            result = invoke(*arguments, *common)
        assert result.exit_code == 0, result.stderr
    return here


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None) -> Path:
    """The folder, in which the plug-in leaves the file `mark` when it runs."""
    monkeypatch.chdir(made)
    monkeypatch.setenv(MARK, str(made / "mark"))
    (made / "mark").unlink(missing_ok=True)
    plugins._loaded.clear()
    return made


@pytest.mark.parametrize(
    ("path", "arguments", "folder"),
    [(path, arguments, FOLDERS[i % len(FOLDERS)]) for i, (path, _, arguments) in enumerate(ALL)],
    ids=[" ".join([*path, str(parameter.name)]) for path, parameter, _ in ALL],
)
def test_a_command_that_is_given_a_folder_does_not_run_its_code(
    here: Path, path: tuple[str, ...], arguments: list[str], folder: str
) -> None:
    """One of the kinds of folders. The tests below take all of them."""
    result = invoke(*path, *(folder if x == "FOLDER" else x for x in arguments))
    assert not (here / "mark").exists(), result.output
    assert result.exit_code in (0, 2), result.output


@pytest.mark.parametrize(
    ("path", "parameter", "arguments"), TRUSTING, ids=[" ".join([*path, str(x.name)]) for path, x, _ in TRUSTING]
)
def test_a_command_runs_the_code_of_a_folder_where_it_is_asked_to(
    here: Path, path: tuple[str, ...], parameter: click.Parameter, arguments: list[str]
) -> None:
    folder = "sweep" if path == ("sweep",) else "run"
    invoke(*path, *(folder if x == "FOLDER" else x for x in arguments), "--trust-plugins")
    assert (here / "mark").exists()


@pytest.mark.parametrize("key", ["training.init_from", "data.path", "data.test_path", "plugins"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_setting_that_names_a_folder_does_not_run_its_code(here: Path, folder: str, key: str) -> None:
    result = invoke("train", "mlp", "--dry-run", "--device", "cpu", "--set", f"{key}={folder}")
    assert not (here / "mark").exists(), result.output


@pytest.mark.parametrize("folder", FOLDERS)
def test_python_does_not_run_the_code_of_a_folder(here: Path, folder: str) -> None:
    with pytest.raises(AdtrainError):
        ad.load(folder)
    assert not (here / "mark").exists()
