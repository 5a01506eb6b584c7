"""Commands whose output nobody reads or takes, and signals that come then: the exit code, and nothing half-written."""

from __future__ import annotations

import ast
import signal
from pathlib import Path

import pytest
from command_line import invoke
from forked_commands import CLOSED, FULL, Case, Commands
from training_runs import write_config

import adtrain
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
        *((x, True) for x in PRINTING),
        (PRINTING[0], False),
        *(pytest.param(x, False, marks=pytest.mark.exhaustive) for x in PRINTING[1:]),
    ],
)
def test_a_command_whose_output_nobody_reads_or_takes_says_so_by_its_exit_code(
    commands: Commands, arguments: str, message_to_file: bool, tmp_path: Path
) -> None:
    full, closed = tmp_path / "full", tmp_path / "closed"
    to_closed, to_full = (str(closed), str(full)) if message_to_file else (CLOSED, FULL)
    assert commands.run(Case(arguments, CLOSED, to_closed)) == BROKEN_PIPE
    assert commands.run(Case(arguments, FULL, to_full)) == USAGE
    if message_to_file:
        assert closed.read_text() == ""
        assert full.read_text() == "adtrain: error: standard output: No space left on device\n"


def test_a_usage_error_has_its_exit_code_although_nobody_reads_the_message(commands: Commands) -> None:
    mistakes = ["", "nonsense", "eval", "eval run --nonsense", "eval nowhere"]
    cases = [Case(mistake, stream, stream) for mistake in mistakes for stream in (CLOSED, FULL)]
    assert list(map(commands.run, cases)) == [USAGE] * len(cases)


def test_a_signal_ends_a_command_whose_output_nobody_reads(commands: Commands, folder: Path, tmp_path: Path) -> None:
    before, file = sorted(folder.rglob("*")), tmp_path / "messages"
    interrupted = {
        "eval run": "adtrain.training.Evaluation",
        "report run -o new.html": "os.fsync",  # the page is written, and not yet in its place
        "bench --op relu": "numpy.random.default_rng",
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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warning":
                first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                texts.append(first.value if isinstance(first, ast.Constant) else "")
    assert len(texts) > 20
    assert [text for text in texts if text and not str(text).startswith("adtrain: warning: ")] == []
