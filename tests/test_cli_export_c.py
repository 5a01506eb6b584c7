"""`adtrain export RUN FILE.c`, its options and its report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import c_programs
import numpy as np
import pytest
import report_runs
from click.testing import Result
from command_line import command
from report_runs import one_line
from training_runs import write_config

from adtrain.export import evaluation
from adtrain.export.c.source import Compiled
from adtrain.export.evaluation import Comparison

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not c_programs.has("gcc"), reason="gcc is not installed"),
]


def run(*arguments: str | Path, expect: int = 0) -> Result:
    return command("export", *arguments, expect=expect)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return report_runs.train(write_config(folder), folder / "run")


def test_c_is_written_and_compared_on_the_test_images(trained: Path, tmp_path: Path) -> None:
    found = json.loads(run(trained, tmp_path / "net.c", "--json").stdout)
    assert list(found) == [
        *("run", "file", "bytes", "parameters", "format", "inputs", "outputs", "memory", "weights", "object", "check")
    ]
    assert (found["format"], found["memory"], found["parameters"]) == ("C99", 256, 37 * 16 + 17 * 3)
    assert found["inputs"] == {"image": {"type": "uint8_t", "shape": [1, 6, 6]}}
    assert (found["check"]["images"], found["check"]["different"]) == (30, 0)
    assert found["check"]["outputs"]["probabilities"] < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.c", "net.h"]
    c_programs.compile_c(["gcc"], tmp_path, "-DNET_MAIN", "net.c", "-o", "program", "-lm")


def test_the_report_fits_70_columns(trained: Path, tmp_path: Path) -> None:
    for options in ((), ("--simd",), ("--int8", "--max-loss", "100"), ("--training",)):
        lines = run(trained, tmp_path / "net.c", *options).stdout.replace(f"{tmp_path}/", "").splitlines()
        assert max(map(len, lines)) <= 70
        assert lines[0] == "file    net.c"
        assert lines[2:4] == [
            "input   image uint8_t [1, 6, 6]",
            f"output  probabilities {'uint16_t' if '--int8' in options else 'float'} [3]",
        ]


def test_a_different_prediction_is_exit_code_1(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "compare", lambda *_: Comparison(30, 2, {"probabilities": 0.25}))
    result = run(trained, tmp_path / "net.c", expect=1)
    assert "30 test images: 2 predicted otherwise" in result.stdout


def test_int8_prints_both_accuracies(trained: Path, tmp_path: Path) -> None:
    found = json.loads(run(trained, tmp_path / "net.c", "--int8", "--max-loss", "100", "--json").stdout)["check"]
    assert found["passed"]
    assert abs(found["accuracy"]["int8"] - found["accuracy"]["float32"]) < 0.1


def test_an_int8_that_loses_too_much_is_exit_code_1(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_class(program: Compiled, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(images), 3), np.float32), np.zeros(len(images), np.int32)

    monkeypatch.setattr(Compiled, "predict", first_class)
    result = run(trained, tmp_path / "net.c", "--int8", expect=1)
    assert "int8    accuracy 33.33%, float32 " in result.stdout
    assert "more than 0.2 points lost" in result.stdout
    assert (tmp_path / "net.c").is_file()


def test_weights_are_written_to_their_file(trained: Path, tmp_path: Path) -> None:
    run(trained, tmp_path / "net.c", "--weights", tmp_path / "net.bin")
    assert (tmp_path / "net.bin").stat().st_size == 8 + 4 * (37 * 16 + 17 * 3)
    assert (tmp_path / "net.c").stat().st_size < 8000


def test_the_batch_of_a_training_step_can_be_chosen(trained: Path, tmp_path: Path) -> None:
    run(trained, tmp_path / "net.c", "--training", "--batch-size", "4")
    assert "NET_BATCH = 4," in (tmp_path / "net.h").read_text()
    (tmp_path / "main.cpp").write_text('#include "net.h"\nint main() { return NET_BATCH - 4; }\n')
    subprocess.run(["g++", "-c", "main.cpp"], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("net.onnx", ["--simd"], "net.onnx: found options for a .c file: leave out --simd"),
        (
            "net.html",
            ["--int8", "--max-loss", "1"],
            "net.html: found options for a .c file: leave out --int8, --max-loss",
        ),
        ("net.c", ["--int8", "--simd"], "--int8 needs no vector extensions and keeps its weights in the C file"),
        ("net.c", ["--training", "--simd"], "--training changes weights in float32, which are in the C file"),
        ("net.c", ["--max-loss", "1"], "--max-loss is for --int8"),
        (
            "net.c",
            ["--int8", "--max-loss", "nan"],
            "Invalid value for '--max-loss': found 'nan', expected a finite number",
        ),
        ("net.c", ["--batch-size", "1"], "--batch-size is for --training"),
        ("net.c", ["--weights", "net.h"], "net.h: is the C file or its header"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert one_line(run(trained, name, *options, expect=2)).startswith(line)
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_nothing_is_compared(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run(trained, tmp_path / "net.c")
    assert result.stdout.splitlines()[-1] == "check   not checked: CC=no-such-compiler: no such program"
    assert (tmp_path / "net.c").is_file()


@pytest.mark.parametrize("blocked", ["net.h", "w.bin"])
def test_nothing_is_written_where_one_of_the_files_cannot_be(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(blocked).mkdir()
    line = one_line(run(trained, "net.c", "--weights", "w.bin", expect=2))
    assert line == f"{blocked}: cannot be written (Is a directory)"
    assert [path.name for path in tmp_path.iterdir()] == [blocked]
