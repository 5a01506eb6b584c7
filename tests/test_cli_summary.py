from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from click.testing import Result
from command_line import command
from report_runs import one_line

from adtrain import config
from adtrain.text import short

LAYERS = """\
name: net
data: {path: nowhere, batch_size: 8}
model:
  input: [1, 8, 8]
  layers:
    - conv2d: {out_channels: 4, kernel_size: 3}
    - batch_norm2d
    - residual:
        - conv2d: {out_channels: 4, kernel_size: 3, padding: 1}
    - flatten
    - linear: 10
loss: cross_entropy
optimizer: adam
training: {epochs: 1}
"""


def summary(*arguments: str, expect: int = 0) -> Result:
    return command("summary", *arguments, expect=expect)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "net.yaml").write_text(LAYERS)
    return str(tmp_path / "net.yaml")


def test_layers_shapes_parameters_and_costs(path: str) -> None:
    found = json.loads(summary(path, "--json").stdout)
    assert (found["name"], found["input"], found["batch_size"], found["parameters"]) == ("net", [1, 8, 8], 8, 1646)
    rows = {row["name"]: row for row in found["layers"]}
    layers = {name: row for name, row in rows.items() if row["output_shape"]}
    assert [(name, row["kind"], row["output_shape"], row["parameters"]) for name, row in layers.items()] == [
        ("0", "conv2d", [4, 6, 6], 40),
        ("1", "batch_norm2d", [4, 6, 6], 8),
        ("2.body.0", "conv2d", [4, 6, 6], 148),
        ("2", "residual", [4, 6, 6], 0),
        ("3", "flatten", [144], 0),
        ("4", "linear", [10], 1450),
    ]
    assert {"input", "loss", "accuracy"} <= rows.keys()
    # the sum with the shortcut: one FLOP per element, which reads two numbers and writes one
    assert rows["2"]["forward"] == {"equations": 1, "flops": 8 * 144, "bytes": 8 * 144 * 3 * 4}
    for phase in ("forward", "backward"):
        for field in ("flops", "bytes"):
            assert found[phase][field] == sum(row[phase][field] for row in rows.values())
    for field, total in found["total"].items():
        assert total == sum(found[phase][field] for phase in ("forward", "backward", "update"))
    assert found["fused"]["equations"] < found["total"]["equations"]
    memory = found["memory"]
    resident = sum(memory[name] for name in ("parameters", "statistics", "optimizer", "data"))
    assert memory["peak"] == resident + memory["values"] + memory["scratch"]
    assert memory["parameters"] == 4 * 1646


@pytest.mark.parametrize("width", [60, 120])
def test_the_tables_fit_the_terminal(path: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in (path, "resnet", "mlp"):
        lines = summary(name).stdout.splitlines()[1:]
        assert max(map(len, lines)) <= width
        lines = [line for line in lines if "hidden" not in line]
        tables = [list(table) for empty, table in groupby(lines, lambda line: not line) if not empty]
        assert [table[0].split()[0] for table in tables] == ["layer", "step", "memory"]
        assert [table[-1].split()[0] for table in tables] == ["total", "fused", "peak"]


def test_the_folder_of_a_run_stands_for_its_config(tmp_path: Path) -> None:
    """`summary` and `graph` take it; `train` says how to continue the run."""
    run = tmp_path / "runs" / "mlp"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.dump(config.load("mlp")))
    assert summary(str(run)).stdout == summary("mlp").stdout
    for name, source in (("run", str(run)), ("config", "mlp")):
        command("graph", source, "-o", tmp_path / f"{name}.dot")
    assert (tmp_path / "run.dot").read_text() == (tmp_path / "config.dot").read_text()
    assert f"--resume {run} continues it" in one_line(command("train", run, expect=2))


def test_plugins_of_a_run_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(LAYERS + "plugins: [mine.py]\n")
    (tmp_path / "mine.py").write_text("raise AssertionError('was run')\n")
    message = one_line(summary(str(tmp_path), expect=2))
    assert message.endswith(
        f"found mine.py, which is code from {tmp_path} and is not trusted; give {tmp_path}/config.yaml to run it"
    )


def test_data_at_a_path_are_counted_as_one_batch(path: str) -> None:
    assert "data set (one batch)" in summary(path).stdout
    assert "\ndata set  " in summary("smoke").stdout


def test_a_layer_that_does_not_fit_is_a_one_line_error(path: str) -> None:
    result = summary(path, "--set", "model.layers.0.conv2d.kernel_size=9", expect=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("adtrain: error: ")
    assert "conv2d" in line
    assert "9" in line


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, ""), (7, "7 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_900, "1 MB"),
        (3_214_000, "3.21 MB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits(number: float, text: str) -> None:
    assert short(number, "B") == text


def test_a_number_without_a_unit_ends_with_its_prefix() -> None:
    assert [short(12), short(3_214_000)] == ["12", "3.21 M"]
