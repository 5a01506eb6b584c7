"""Commands whose output is a closed pipe or cannot be written, and signals: the exit code, and no half-written file."""

from __future__ import annotations

import ast
import importlib
import io
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest
from command_line import invoke
from forked_commands import CLOSED, FULL, Case, Commands
from training_runs import write_config

import adtrain
from adtrain.cli import COMMANDS, main, module_of
from adtrain.cli.options import OutputFile
from adtrain.cli.output import BROKEN_PIPE
from adtrain.signals import USAGE

STEPS = ["--eager", "--steps", "2", "--output-dir", "run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("streams")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained = invoke("train", str(write_config(folder)), *STEPS)
        assert trained.exit_code == 0, trained.stderr
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


PRINTING = ["--help", "eval --help", "data list", "report run -o page.html", "compare run"]


@pytest.mark.parametrize(
    ("arguments", "message_to_file"),
    [
        *((x, True) for x in PRINTING[2:4]),
        (PRINTING[0], False),
        *(pytest.param(x, True, marks=pytest.mark.exhaustive) for x in (*PRINTING[:2], PRINTING[4])),
        *(pytest.param(x, False, marks=pytest.mark.exhaustive) for x in PRINTING[1:]),
    ],
)
def test_a_command_whose_output_is_not_read_or_cannot_be_written_has_an_exit_code_of_its_own(
    commands: Commands, arguments: str, message_to_file: bool, tmp_path: Path
) -> None:
    full, closed = tmp_path / "full", tmp_path / "closed"
    to_closed, to_full = (str(closed), str(full)) if message_to_file else (CLOSED, FULL)
    assert commands.run(Case(arguments, CLOSED, to_closed)) == BROKEN_PIPE
    assert commands.run(Case(arguments, FULL, to_full)) == USAGE
    if message_to_file:
        assert closed.read_text() == ""
        assert full.read_text() == "adtrain: error: standard output: No space left on device\n"


def test_a_usage_error_has_its_exit_code_although_the_message_is_not_read(commands: Commands) -> None:
    mistakes = ["", "eval run --nonsense"]
    cases = [Case(mistake, stream, stream) for mistake in mistakes for stream in (CLOSED, FULL)]
    assert list(map(commands.run, cases)) == [USAGE] * len(cases)


@pytest.mark.exhaustive
def test_a_signal_ends_a_command_whose_output_is_not_read(commands: Commands, folder: Path, tmp_path: Path) -> None:
    before, file = sorted(folder.rglob("*")), tmp_path / "messages"
    interrupted = {
        "eval run": "adtrain.training.Evaluation",
        "report run -o new.html": "os.fsync",  # the page is written, and not yet in its place
        "data fetch fashion-mnist --mirror http://127.0.0.1:9": "urllib.request.urlopen",
    }
    cases = [(*each, str(file)) for each in interrupted.items()]
    for arguments, function, err in [("eval run", interrupted["eval run"], CLOSED), *cases]:
        assert commands.run(Case(arguments, CLOSED, err, f"signalled({function!r}, {signal.SIGINT:d})")) == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        signalled = f"signalled('adtrain.training.Evaluation', {number:d})"
        assert commands.run(Case("eval run", CLOSED, str(file), signalled)) == 128 + number
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("bench: ")]
    assert lines == ["adtrain: interrupted"] * len(interrupted)  # the other signals need no message
    assert sorted(folder.rglob("*")) == before


def test_a_repeated_warning_is_printed_once(commands: Commands, folder: Path) -> None:
    text = (folder / "tiny.yaml").read_text().replace("- linear: 3\n", "- linear: 3\n    - softmax\n")
    (folder / "seeds.yaml").write_text(f"{text}sweep: {{training.seed: {{range: 5}}}}\n")
    printed = folder / "warnings"
    assert commands.run(Case("sweep seeds.yaml --dry-run", str(folder / "plan"), str(printed))) == 0
    (line,) = (x for x in printed.read_text().splitlines() if "warning" in x)
    assert "found softmax, but the loss cross_entropy takes logits" in line


def test_every_warning_of_the_package_says_that_it_is_one() -> None:
    texts = []
    for path in Path(adtrain.__file__).parent.rglob("*.py"):
        code = path.read_text()
        for node in ast.walk(ast.parse(code)) if ".warning(" in code else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warning":
                first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                texts.append(first.value if isinstance(first, ast.Constant) else "")
    assert len(texts) > 10
    assert [text for text in texts if text and not str(text).startswith("adtrain: warning: ")] == []


def outputs() -> Iterator[tuple[str, click.Parameter, list[str]]]:
    """Each parameter that names a file which a command writes, and the arguments that the command requires besides."""
    for path, found in ((path, x) for name in COMMANDS for path, x in leaves(name, load(name))):
        for parameter in found.params:
            if isinstance(parameter.type, OutputFile):
                required = [x for x in found.params if x.required and x is not parameter]
                given = [["run"] if isinstance(x, click.Argument) else [x.opts[-1], "1"] for x in required]
                yield path, parameter, [*chain.from_iterable(given)]


def load(name: str) -> click.Command:
    found: click.Command = importlib.import_module(module_of(name)).command
    return found


def leaves(path: str, found: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(found, click.Group):
        for name, inner in found.commands.items():
            yield from leaves(f"{path} {name}", inner)
    else:
        yield path, found


OUTPUTS = [pytest.param(*each, id=f"{each[0]} {each[1].name}") for each in outputs()]


def with_file(path: str, parameter: click.Parameter, others: list[str], file: str) -> list[str]:
    given = [file] if isinstance(parameter, click.Argument) else [parameter.opts[-1], file]
    return [*path.split(), *others, *given]


def test_commands_write_files_by_the_function_that_knows_standard_output_alone() -> None:
    found = {
        path.name
        for path in (Path(adtrain.__file__).parent / "cli").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.alias) and node.name == "write_atomic")
        or (isinstance(node, ast.Attribute) and node.attr in ("write_text", "write_bytes"))
    }  # fmt: skip
    assert found == {"output.py"}


@pytest.mark.parametrize(("path", "parameter", "others"), OUTPUTS)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    path: str, parameter: click.Parameter, others: list[str]
) -> None:
    result = invoke(*with_file(path, parameter, others, "absent/x.svg"))
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert result.stderr.endswith("error: absent/x.svg: cannot be written (No such file or directory)\n")


@pytest.mark.parametrize(("path", "parameter", "others"), OUTPUTS)
def test_standard_output_takes_one_result(path: str, parameter: click.Parameter, others: list[str]) -> None:
    second = [*with_file(path, parameter, others, "-"), "--json"]
    result = invoke(*second)
    if path in ("report", "graph"):
        assert "No such option '--json'" in result.stderr
    else:
        assert "only one result fits on standard output" in result.stderr
    assert (result.exit_code, result.stdout) == (USAGE, "")


BINARY = {"graph": ["--format", "png"], "export": ["--format", "onnx"]}


@pytest.mark.parametrize(
    ("path", "parameter", "others"),
    [x for x in OUTPUTS if x.values[0] in BINARY or x.values[1].type.binary],  # type: ignore[union-attr]
)
def test_a_binary_file_is_not_written_to_a_terminal(
    path: str,
    parameter: click.Parameter,
    others: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    formats = BINARY.get(path, [])
    monkeypatch.setattr("sys.stdout", Terminal())
    with pytest.raises(SystemExit):
        main.cli.main([*with_file(path, parameter, others, "-"), *formats])
    assert "standard output is a terminal; redirect it: > FILE" in capsys.readouterr().err


SAMPLES = {
    "graph": ("graph smoke --format dot -o", "digraph"),
    "lr-find": ("lr-find tiny.yaml --device cpu --rates 3 --steps 1 -o", "<svg xmlns="),
    "report": ("report run -o", "<!DOCTYPE html>"),
    "export": ("export run --format safetensors", '{"'),
    "explain": ("explain smoke --device cpu --json-file", '{\n  "kind": "explain"'),
    "data inspect": ("data inspect data --contact-sheet", "\x89PNG"),
    "bench ops": ("bench ops --op relu --sizes 64 --device cpu --json-file", '{\n  "kind": "ops"'),
}


@pytest.mark.exhaustive
def test_a_dash_is_standard_output_for_each_command_that_writes_a_file() -> None:
    paths = {each.values[0] for each in OUTPUTS}
    assert {path for path in paths if not str(path).startswith("bench ")} | {"bench ops"} == set(SAMPLES)
    for arguments, start in SAMPLES.values():
        result = invoke(*arguments.split(), "-")
        assert result.exit_code == 0, result.stderr
        assert start.encode("latin-1") in result.stdout_bytes[:40], result.stdout_bytes[:40]
        assert not Path("-").exists()


@pytest.mark.parametrize("arguments", [SAMPLES["graph"][0], SAMPLES["export"][0], SAMPLES["data inspect"][0]])
def test_standard_output_gets_the_bytes_of_the_file_and_standard_error_the_other_lines(arguments: str) -> None:
    to_file, to_stdout = (invoke(*arguments.split(), name) for name in ("found.png", "-"))
    assert to_stdout.stdout_bytes == Path("found.png").read_bytes()
    assert to_stdout.stderr.replace("file    -", "file    found.png") in (to_file.stdout, "")


def test_c_is_two_files_and_a_dash_needs_a_format() -> None:
    assert "C is two files" in invoke("export", "run", "-", "--format", "c").stderr
    for arguments in ("export run -", "graph smoke -o -"):
        assert "- has no extension that says the format; give --format" in invoke(*arguments.split()).stderr
