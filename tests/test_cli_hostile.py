"""Names and contents of files that could control a terminal, in the arguments and the input of every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from command_line import invoke
from npz_files import write_npz
from PIL import Image

from adtrain.cli import COMMANDS, main, output
from adtrain.text import visible

pytestmark = pytest.mark.unfused

NAMES = (
    "\x1b[31mred\x1b[0m",
    "two\nlines\r",
    "\u202ertl\u2066\u200f",
    "\u2028\u2029\x85\x9b31m",
    "\udcff",
    "tab\tbell\x07\x7f",
)
ARGUMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "train": (
        ("NAME",),
        ("mlp", "--set", "NAME=1"),
        ("mlp", "--set", "training.epochs=NAME"),
        ("mlp", "--set", "data.dataset='NAME'"),
        ("mlp", "--set", "loss=NAME"),
        ("mlp", "--set", "model.layers=[{'NAME': 1}]"),
        ("--resume", "NAME"),
        ("mlp", "NAME"),
        ("mlp", "--NAME"),
    ),
    "sweep": (
        ("NAME",),
        ("mlp", "--set", "sweep={'NAME': [1]}"),
        ("mlp", "--set", "sweep={training.seed: 'NAME'}"),
        ("mlp", "--set", "sweep={training.seed: {'NAME': 1}}"),
        ("--resume", "NAME"),
        ("mlp", "--set", "sweep={training.seed: [1]}", "--by", "NAME"),
    ),
    "lr-find": (("NAME",), ("mlp", "--from", "NAME"), ("mlp", "-o", "NAME/NAME")),
    "eval": (("NAME",), ("NAME", "--device", "NAME")),
    "predict": (("NAME", "NAME"),),
    "sample": (("NAME",), ("NAME", "--temperature", "NAME")),
    "report": (("NAME",), ("NAME", "-o", "NAME")),
    "compare": (("NAME", "NAME"),),
    "export": (("NAME", "NAME"), ("NAME", "NAME.onnx")),
    "summary": (("NAME",), ("mlp", "--set", "NAME")),
    "explain": (("NAME",), ("mlp", "--set", "NAME")),
    "graph": (
        ("NAME", "-o", "NAME.dot"),
        ("mlp", "-o", "NAME"),
        ("mlp", "-o", "x.txt", "--program", "--after", "NAME"),
    ),
    "new": (("NAME",),),
    "schema": (("NAME",),),
    "data": (("inspect", "NAME"), ("fetch", "NAME"), ("verify", "NAME"), ("fetch", "kmnist", "--mirror", "NAME")),
    "devices": (("NAME",),),
    "gradcheck": (("NAME",), ("--op", "NAME")),
    "bench": (
        ("NAME",),
        ("--op", "NAME"),
        ("compare", "NAME", "NAME"),
        ("race", "NAME", "--target", "1"),
        ("mlp", "--json-file", "NAME/NAME"),
    ),
}
"""Arguments of each command that are refused whatever stands for NAME."""


def assert_visible(result: Result) -> None:
    for line in (result.stdout + result.stderr).split("\n"):
        assert visible(line) == line
    assert result.exit_code in (0, 2), result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_name_is_one_line_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for hostile in NAMES:
        for arguments in ARGUMENTS[name]:
            result = invoke(name, *(x.replace("NAME", hostile) for x in arguments))
            assert_visible(result)
            lines = result.stderr.splitlines()
            if name == "data" and "fetch" in arguments and "--mirror" in arguments:
                lines = lines[-1:]  # after the progress
            assert len(lines) == 1, result.stderr
            assert lines[0].startswith("adtrain: error: ")
            assert result.exit_code == 2


def test_every_command_takes_a_hostile_name() -> None:
    assert list(ARGUMENTS) == list(COMMANDS)


def test_a_traceback_shows_names_escaped() -> None:
    result = invoke("summary", NAMES[0], "--debug")
    assert_visible(result)
    assert "Traceback" in result.stderr


def test_hostile_config_keys_and_values_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    escaped = r"\e[31m\n\u202E\x85\0"
    values = f'"{escaped}": 1\nname: "{escaped}"\ndata: {{path: "{escaped}"}}\nmodel: "{escaped}"\n'
    values += f'loss: {{"{escaped}": 2}}\noptimizer: "{escaped}"\ntraining: ["{escaped}"]\n'
    path.write_text(values)
    result = invoke("summary", path)
    assert_visible(result)
    lines = result.stderr.splitlines()
    assert len(lines) == 7
    assert all(line.removeprefix("adtrain: error: ").startswith(f"{path}:") for line in lines)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a folder with a hostile name, on images with hostile names of files and classes, one of them broken."""
    folder = tmp_path_factory.mktemp("hostile")
    for i, name in enumerate(NAMES):
        (folder / "images" / name).mkdir(parents=True)
        for k in range(4):
            Image.fromarray(np.full((4, 4), 40 * i + k, np.uint8)).save(folder / "images" / name / f"{name}{k}.png")
    (folder / "images" / NAMES[0] / f"broken{NAMES[4]}.png").write_bytes(b"\x00")
    (folder / "c.yaml").write_text(
        "name: hostile\n"
        f"data: {{path: '{folder}/images', batch_size: 4, skip_broken: true, test: 0.3}}\n"
        f"model: {{input: [16], layers: [linear: {len(NAMES)}]}}\n"
        "loss: cross_entropy\noptimizer: {sgd: 0.1}\ntraining: {epochs: 1}\n"
    )
    result = invoke("train", folder / "c.yaml", "--output-dir", folder / "".join(NAMES), "--eager")
    assert result.exit_code == 0, result.stderr
    assert_visible(result)
    return folder / "".join(NAMES)


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "RUN"),
        ("predict", "RUN", "IMAGE"),
        ("predict", "RUN", "IMAGE", "--json"),
        ("report", "RUN"),
        ("compare", "RUN", "RUN"),
        ("train", "--resume", "RUN", "--epochs", "2"),
        ("data", "inspect", "IMAGES", "--set", "skip_broken=true"),
        ("data", "inspect", "IMAGES", "--set", "skip_broken=true", "--json"),
    ],
    ids=" ".join,
)
def test_results_show_hostile_names_escaped(hostile_run: Path, arguments: tuple[str, ...]) -> None:
    images = hostile_run.parent / "images"
    paths = {"RUN": hostile_run, "IMAGES": images, "IMAGE": images / NAMES[1] / f"{NAMES[1]}1.png"}
    result = invoke(*(paths.get(x, x) for x in arguments))
    assert result.exit_code == 0, result.stderr
    assert_visible(result)


def test_the_report_shows_hostile_classes_escaped(hostile_run: Path, tmp_path: Path) -> None:
    assert invoke("report", hostile_run, "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(visible(line) == line for line in page.split("\n"))
    assert r"\x1b[31mred" in page


def test_hostile_headers_and_labels_of_tables_are_escaped(tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    table.write_bytes(b'"a\x1b[31m\n",b\xe2\x80\xae,label\n1,2,"x\x1b\x00\n"\n3,4,\xc2\x9by\n')
    arrays = write_npz(tmp_path / "x.npz", {"images": np.eye(2), "labels": np.array(["\x1b\n", "\u202e\x9b"])})
    for path in (table, arrays):
        result = invoke("data", "inspect", path)
        assert result.exit_code == 0
        assert_visible(result)
        assert result.stdout.count("\\x1b") >= 1
    table.write_bytes(b'"a\x1b\n",label\n"1\x1b\n",2\n')
    result = invoke("data", "inspect", table)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert_visible(result)


def test_only_one_module_prints() -> None:
    """`sys.stdout`, `click.echo` and `print` elsewhere could print a name as it is."""
    root = Path(main.__file__).parent.parent
    allowed = {"cli/output.py": ("print",), "cli/main.py": ("echo",), "bench/peers/worker.py": ("print",)}
    allowed |= {f"bench/{name}.py": ("print",) for name in ("scaling_worker", "startup")}  # JSON for their parents
    allowed["api/training.py"] = ("print",)  # of visible text, for callers from Python
    for path in root.rglob("*.py"):
        found = re.findall(r"\b(print|s?echo|print_exc|std(?:out|err)\.write)\(", path.read_text(encoding="utf-8"))
        assert set(found) <= set(allowed.get(path.relative_to(root).as_posix(), ())), path


def command(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    script = f"{code}\nfrom adtrain.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, env={**os.environ, **environment}
    )


def test_logs_and_warnings_are_one_line_each() -> None:
    code = (
        "import atexit, logging, warnings\n"
        "def late():\n"
        "    logging.getLogger('adtrain.x').warning('adtrain: %s', 'a\\x1b\\nb')\n"
        "    warnings.warn('c\\x9b\\nd', RuntimeWarning)\n"
        "atexit.register(late)"
    )
    done = command(code, "data", "verify", "x")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [rb"adtrain: a\x1b\nb", rb"adtrain: warning: c\x9b\nd"]


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.exhaustive)])
def test_characters_that_the_terminal_lacks_are_shown_in_ascii(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("größe,label\n" + "".join(f"{i},{'猫…'[i % 2]}\n" for i in range(20)), encoding="utf-8")
    code = "import logging, atexit\natexit.register(logging.getLogger('adtrain').warning, '猫…')"
    done = command(code, "data", "inspect", str(path), PYTHONIOENCODING=f"{encoding}:strict", LC_ALL="C")
    assert done.returncode == 0
    assert done.stderr == b"\\u732b...\n"
    text = done.stdout.decode(encoding)
    assert "\n\\u732b " in text
    assert "\n... " in text
    assert ("größe" if encoding == "latin-1" else r"gr\xf6\xdfe") in text


@pytest.mark.exhaustive
def test_the_locale_does_not_change_how_files_and_compilers_are_read(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'cc \\303\\251\\n'\n")
    compiler.chmod(0o755)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = command("", "devices", CC=str(compiler), XDG_CACHE_HOME=str(tmp_path), **locale)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"compiler    cc \\xe9\n" in done.stdout
    for path in Path(main.__file__).parent.parent.rglob("*.py"):
        assert not re.search(r"(read_text|\.open)\(\)|text=True, c", path.read_text(encoding="utf-8")), path


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json(list(NAMES))
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize("key", ["data.path", "data.test_path", "training.init_from"])
@pytest.mark.parametrize("path", [r"a\0b", "~nobody-here", "loop", ""])
def test_a_path_that_cannot_be_read_is_one_line(
    hostile_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    config = (hostile_run / "config.yaml").read_text().replace("test: 0.3,", "")
    Path("c.yaml").write_text(config)
    result = invoke("train", "c.yaml", "--set", f'{key}="{path}"')
    assert_visible(result)
    assert result.exit_code == 2
    assert len([line for line in result.stderr.splitlines() if "skipped" not in line]) == 1
    assert not Path("runs").exists()


def test_null_is_no_path(hostile_run: Path, tmp_path: Path) -> None:
    arguments = ("--set", "training.init_from=~", "--set", "data.test_path=~", "--eager")
    assert invoke("train", hostile_run / "config.yaml", "--output-dir", tmp_path, *arguments).exit_code == 0


def test_a_data_path_that_config_yaml_cannot_store_is_refused(
    hostile_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "\udcff"
    (folder / "images").mkdir(parents=True)
    monkeypatch.chdir(folder)
    result = invoke("train", hostile_run / "config.yaml", "--set", "data.path=images")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert r"\udcff/images, expected one in UTF-8, as config.yaml stores it" in result.stderr
    assert not Path("runs").exists()
    result = invoke("data", "inspect", folder)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_tensorboard_into_a_folder_that_is_not_utf8_is_refused_before_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    result = invoke("train", "smoke", "--tensorboard", "--output-dir", tmp_path / "\udcff")
    assert result.exit_code == 2
    assert "found a name that is not UTF-8, which TensorBoard cannot write to" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", [".", "loop", "loop/x.html"])
def test_an_output_that_is_no_file_is_one_line(
    hostile_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    result = invoke("report", hostile_run, "-o", output)
    assert_visible(result)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"adtrain: error: {output}: cannot be written (")
