"""`adtrain graph`: its files, options and errors."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
import training_runs
from click.testing import Result
from command_line import command
from program_samples import ALL, ON_GPU
from report_runs import one_line

from adtrain import config
from adtrain.backends.cuda import TARGETS
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.core.staging import Pass
from adtrain.passes import SIMPLIFY
from adtrain.training.preparation import outline

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
VARIANTS: list[list[str]] = [[], ["--horizontal"], ["--program"], ["--program", "--detail", "--after", "readers_first"]]


def run(*arguments: str, expect: int = 0) -> Result:
    return command("graph", *arguments, expect=expect)


def written(folder: Path, name: str, *options: str) -> bytes:
    """The file `name` that the command writes."""
    run("smoke", "-o", str(folder / name), *options)
    return (folder / name).read_bytes()


def test_a_network_as_text_is_a_table_of_layers(tmp_path: Path) -> None:
    lines = [line.split() for line in written(tmp_path, "net.txt").decode().splitlines()]
    assert lines[0] == ["layer", "kind", "output", "parameters"]
    assert lines[1:] == [
        ["input", "784"],
        ["0", "linear", "16", "12,560"],
        ["1", "relu", "16"],
        ["2", "linear", "10", "170"],
        ["loss", "cross_entropy"],
        ["total", "12,730"],
    ]


def test_overrides_change_the_picture(tmp_path: Path) -> None:
    assert b"784 \xe2\x86\x92 7" in written(tmp_path, "net.svg", "--set", "model.layers.0.linear.out_features=7")


def test_a_step_as_text_has_a_line_for_each_equation(tmp_path: Path) -> None:
    traced, simplified = (
        written(tmp_path, "step.txt", "--program", *options).decode() for options in (["--after", "trace"], [])
    )
    assert traced.count(" = ") > simplified.count(" = ") > 100
    assert re.search(
        r"^0.linear.matmul: float32\[64, 16\] = matmul\(input, 0.weight, .*  # forward 0.linear$", simplified, re.M
    )


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ([], ALL),
        (["--device", "cpu"], ALL),
        (["--device", "gpu"], ON_GPU),
        (["--device", "gpu", "--arch", "sm_75"], (*SIMPLIFY, *gpu_fusions(TARGETS["sm_75"]))),
    ],
)
def test_the_fusions_are_those_of_the_device(options: list[str], passes: Sequence[Pass], tmp_path: Path) -> None:
    text = written(tmp_path, "step.txt", "--program", "--after", "readers_first", *options).decode()
    assert equations_in(text) == equations_after(passes, "smoke")


def tanh_layers(*widths: int) -> list[str]:
    return ["--set", f"model.layers=[{''.join(f'{{linear: {n}}}, tanh, ' for n in widths)}{{linear: 1}}]"]


LARGE = ["--device", "gpu", "--set", "data.batch_size=4096"]
WIDE = [*LARGE, *tanh_layers(256, 256, 16)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--device", "gpu"], "a step has 1,024 rows, expected at least 2,048"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ([], None),
                (LARGE, None),
                ([*LARGE, "--arch", "sm_75"], "the GPU is older than sm_80"),
                (WIDE, "0.linear has 256 columns, expected at most 128"),
                ([*WIDE, "--arch", "sm_75"], None),
                (
                    [*LARGE, *tanh_layers(*[128] * 5)],
                    "its weights and the values of 16 rows do not fit into",
                ),
                ([*LARGE, "--set", "loss.1.points=4096"], None),
            )
        ),
    ],
)
def test_the_condition_that_a_chain_of_rows_nearly_meets_is_named(
    options: list[str], reason: str | None, tmp_path: Path
) -> None:
    page = tmp_path / "step.html"
    notes = command("graph", "poisson", "--program", *options, "-o", page).stderr
    assert (f"The fusion row_chain nearly applies: {reason}" in notes) is (reason is not None)
    assert ("nearly applies" in page.read_text()) is ("nearly applies" in notes) is (reason is not None)


@pytest.mark.exhaustive
def test_a_process_of_its_own_shows_the_fusions_of_a_gpu(tmp_path: Path) -> None:
    """The kernels that the passes ask for are registered by the command."""
    options = ["--program", "--device", "gpu", "--after", "readers_first", "-o", str(tmp_path / "step.txt")]
    subprocess.run([sys.executable, "-m", "adtrain", "graph", "lenet5", *options], check=True, capture_output=True)
    assert equations_in((tmp_path / "step.txt").read_text()) == equations_after(ON_GPU, "lenet5")


def equations_in(text: str) -> list[str]:
    """The primitives of a Program's text, without those in bodies."""
    return re.findall(r"^(?!return)\S.* = (\S+)\(", text, re.M)


def equations_after(passes: Sequence[Pass], name: str) -> list[str]:
    """The primitives of a config's step after passes."""
    program = outline(config.load(name)).step_program(passes=())
    for improve in passes:
        program = improve(program)
    return [equation.name for equation in program.equations]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", VARIANTS[::3])
def test_every_format_is_written(options: list[str], tmp_path: Path) -> None:
    assert ElementTree.fromstring(written(tmp_path, "g.svg", *options)).tag == "{http://www.w3.org/2000/svg}svg"
    assert written(tmp_path, "g.png", *options).startswith(b"\x89PNG\r\n")
    page = written(tmp_path, "g.html", *options).decode()
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"(src|href)=|https?://(?!www.w3.org/2000/svg)", page)


@needs_graphviz
@pytest.mark.parametrize("options", VARIANTS)
def test_graphviz_draws_the_dot_file(options: list[str], tmp_path: Path) -> None:
    text = written(tmp_path, "g.dot", *options)
    drawn = subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, check=True)
    assert drawn.stderr == b""
    nodes = [element.get("class") for element in ElementTree.fromstring(drawn.stdout).iter()].count("node")
    assert nodes == len(re.findall(rb"^ *b\d+ \[label=", text, re.M)) > 4


@pytest.mark.exhaustive
def test_the_page_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    options = ["--program"]
    page = written(tmp_path, "g.html", *options)
    other = tmp_path / "other.html"
    arguments = [sys.executable, "-m", "adtrain", "graph", "smoke", "-o", str(other), *options]
    subprocess.run(arguments, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "77"})
    made = rb'<p class="made">.*?</p>'  # when and by which command
    assert re.sub(made, b"", other.read_bytes()) == re.sub(made, b"", page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-o", "x.svg", "--program", "--after", "remove_ded_code"],
            "unknown pass 'remove_ded_code'; did you mean remove_d",
        ),
        (["-o", "x.jpg"], "x.jpg: found the extension .jpg, expected .svg, .png, .html, .dot or .txt"),
        (["-o", "net"], "net: found no extension, expected .svg, .png, .html, .dot or .txt"),
        (["-o", "absent/x.svg"], "absent/x.svg: cannot be written (No such file or directory)"),
        (["-o", "x.svg", "--set", "model.layers.1=flaten"], "model.layers"),
    ],
)
def test_a_mistake_is_a_one_line_error_and_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in one_line(run("smoke", *arguments, expect=2))
    assert not list(tmp_path.iterdir())


def test_values_are_those_of_the_run(tmp_path: Path) -> None:
    cfg = training_runs.write_config(tmp_path)
    command("train", cfg, "--epochs", 1, "--output-dir", tmp_path / "run", "--device", "cpu", "-q")
    found = []
    for source in (cfg, tmp_path / "run"):
        command("graph", source, "--program", "--values", "-o", tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text()
        found.append(re.findall(r"histogram of 0.linear.*?<dt>mean</dt><dd>(.*?)</dd>", text, re.S))
    assert found[0]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--after", "trace"], "--after needs --program"),
        (["--detail"], "--detail needs --program"),
        (["--device", "gpu"], "--device needs --program"),
        (["--program", "--arch", "sm_80"], "--arch needs --device gpu"),
        (
            ["--program", "--device", "gpu", "--arch", "sm_7"],
            "found 'sm_7', expected sm_75, sm_80",
        ),
        (["--values"], "--values needs --program"),
        (["--program", "--values"], "--values needs a page: FILE.html"),
        (["--program", "--horizontal"], "--horizontal draws layers, found --program"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str) -> None:
    assert message in run("smoke", "-o", "x.svg", *options, expect=2).stderr


def test_a_png_needs_a_font_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resvg = pytest.importorskip("resvg_py")
    written(tmp_path, "g.png")
    without_fonts = functools.partial(resvg.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setattr(resvg, "svg_to_bytes", without_fonts)
    line = one_line(run("smoke", "-o", str(tmp_path / "other.png"), expect=2))
    assert line.startswith("a PNG needs a font, and the system has none: apt install ")
    assert not (tmp_path / "other.png").exists()


def test_without_the_extra_report_a_png_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    old = tmp_path / "net.png"
    old.write_text("old")
    assert one_line(run("smoke", "-o", str(old), expect=2)) == (
        "a PNG needs resvg_py: pip install 'adtrain[report]'; an SVG needs nothing"
    )
    assert old.read_text() == "old"
