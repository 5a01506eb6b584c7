"""What an error advises can be pasted: into a shell, or as a value into a config."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest
from command_line import invoke

import adtrain
from adtrain import config
from adtrain.cli import COMMANDS, main

PACKAGE = Path(adtrain.__file__).parent
COMMAND = re.compile(rf"\badtrain ({'|'.join(COMMANDS)})\b([^;:,()\n]*)")
BEFORE_A_PATH = re.compile(r"(\badtrain (?!data fetch)[a-z]+( [a-z]+)? |--(resume|plugin|data|output-dir) )$")
"""The end of a text before a path or a name of the user; the names of data sets need no quotes."""
MAY_ADVISE = re.compile(r"adtrain( (?!import)|\[)|--[a-z]")
"""Is in every file with a message that these tests look at. To parse the other files takes most of the time."""
VALUE = "VALUE"


@cache
def messages() -> list[tuple[str, list[str | ast.expr]]]:
    """The texts of several words in files that may advise, with their places: parts, and what is put between them."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        if MAY_ADVISE.search(code) is None:
            continue
        tree, name = ast.parse(code), path.relative_to(PACKAGE.parent)
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                parts = [
                    x.value if isinstance(x, ast.FormattedValue) else str(x.value)
                    for x in node.values
                    if isinstance(x, (ast.FormattedValue, ast.Constant))
                ]
                found.append((place, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                found.append((place, [node.value]))
    return [(place, parts) for place, parts in found if any(isinstance(x, str) and " " in x for x in parts)]


def texts() -> Iterator[tuple[str, str]]:
    for place, parts in messages():
        yield place, "".join(part if isinstance(part, str) else VALUE for part in parts)


def options_of(words: list[str]) -> set[str]:
    """The options of the command, or the subcommand, that the first words name."""
    context = click.Context(main.cli)
    command = main.cli.get_command(context, words[0])
    assert command is not None
    below = getattr(command, "commands", {})
    chosen = [below[words[1]]] if words[1:2] and words[1] in below else [command, *below.values()]
    return {option for each in chosen for parameter in each.params for option in parameter.opts}


@pytest.mark.exhaustive
def test_a_command_in_a_message_has_the_options_that_the_message_names() -> None:
    found = 0
    for place, text in texts():
        for name, rest in COMMAND.findall(text):
            options = options_of([name, *rest.split()])
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
                found += 1
                assert option in options, f"{place}: adtrain {name}{rest}"
    assert found > 3


def problems_of(setting: str) -> list[str]:
    try:
        config.load("mlp", [setting])
    except config.ConfigError as error:
        return list(error.lines)
    return []


def test_a_setting_in_a_message_names_a_key_of_the_config() -> None:
    found = 0
    for place, text in texts():
        for key in re.findall(r"--set ([a-z_]+\.[a-z_.]+)=", text):
            found += 1
            assert not any("unknown key" in line for line in problems_of(f"{key}=null")), f"{place}: {key}"
    assert found > 1


def test_a_name_in_a_command_to_paste_is_quoted_for_the_shell() -> None:
    for place, parts in messages():
        for before, value in pairwise(parts):
            if isinstance(before, str) and BEFORE_A_PATH.search(before) and not isinstance(value, str):
                assert ast.unparse(value).startswith("shlex.quote("), f"{place}: {before}{{{ast.unparse(value)}}}"


def test_the_extras_in_messages_exist() -> None:
    extras = set(
        re.findall(r"^([a-z-]+) = \[", (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    )
    named = {extra for _, text in texts() for extra in re.findall(r"pip install 'adtrain\[([a-z-]+)\]'", text)}
    assert named
    assert named <= extras


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", "|"), ("a.csv", "\t"), ("a.csv", ";"), ("a.tsv", ","), ("a.tsv", ";")]
)
def test_the_delimiter_that_an_error_advises_is_taken_by_the_shell_and_by_a_config(
    tmp_path: Path, name: str, delimiter: str
) -> None:
    table = tmp_path / name
    table.write_text("".join(f"{delimiter.join(row)}\n" for row in [("a", "label"), *[("1.5", "x"), ("2", "y")] * 20]))
    message = invoke("data", "inspect", str(table)).stderr
    advised = re.search(r"set data\.delimiter to (.+)$", message.strip())
    assert advised is not None
    (pasted,) = shlex.split(f"delimiter={advised[1]}")
    proposed = invoke("new", str(table), "--set", pasted)
    assert proposed.exit_code == 0, proposed.stderr
    path = tmp_path / "c.yaml"
    path.write_text(proposed.stdout)
    assert config.load(path).data.options.delimiter == delimiter
    path.write_text(re.sub(r"delimiter: .+", f"delimiter: {advised[1]}".replace("\\", r"\\"), proposed.stdout))
    assert config.load(path).data.options.delimiter == delimiter


@pytest.mark.parametrize("name", ["my rows.csv", "it's.csv", "a&b.csv", "$HOME.csv"])
def test_the_command_for_data_that_are_given_as_a_config_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("a,label\n" + "1.5,x\n2,y\n" * 20)
    advised = re.search(r"adtrain (new .+) prints", invoke("train", name).stderr)
    assert advised is not None
    assert invoke(*shlex.split(advised[1])).exit_code == 0
