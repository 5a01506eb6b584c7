from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from adtrain.cli import main
from adtrain.cli.summary import flops

LAYERS = """\
name: net
data: {dataset: mnist, batch_size: 8}
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
    result = CliRunner().invoke(main.cli, ["summary", *arguments])
    assert result.exit_code == expect, result.stderr
    return result


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "net.yaml").write_text(LAYERS)
    return str(tmp_path / "net.yaml")


def test_layers_shapes_parameters_and_flops(path: str) -> None:
    found = json.loads(summary(path, "--json").stdout)
    rows = {row["name"]: row for row in found["layers"]}
    assert [(name, row["kind"], row["output_shape"], row["parameters"]) for name, row in rows.items()] == [
        ("0", "conv2d", [4, 6, 6], 40),
        ("1", "batch_norm2d", [4, 6, 6], 8),
        ("2.body.0", "conv2d", [4, 6, 6], 148),
        ("2", "residual", [4, 6, 6], 0),
        ("3", "flatten", [144], 0),
        ("4", "linear", [10], 1450),
    ]
    # a multiply-add is two operations, adding the bias one
    assert rows["0"]["forward_flops"] == 2 * 36 * 4 * 9 + 144
    assert rows["2.body.0"]["forward_flops"] == 2 * 36 * 4 * 4 * 9 + 144
    assert rows["4"]["forward_flops"] == 2 * 144 * 10 + 10
    assert rows["2"]["forward_flops"] == 144
    # two products where the input's gradient is needed too, one in the first layer, whose input is data
    assert 2 * 2 * 144 * 10 <= rows["4"]["backward_flops"] <= 2 * 2 * 144 * 10 + 20
    assert 2 * 36 * 4 * 9 <= rows["0"]["backward_flops"] <= 2 * 36 * 4 * 9 + 200
    for field in ("parameters", "forward_flops", "backward_flops"):
        assert found[field] == sum(row[field] for row in found["layers"])


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_fits_the_terminal(path: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in (path, "resnet", "mlp"):
        lines = summary(name).stdout.splitlines()
        assert max(map(len, lines)) <= width
        assert lines[-1].startswith("total")


def test_no_data_are_read(path: str) -> None:
    found = json.loads(summary(path, "--set", "data={path: nowhere, batch_size: 1}", "--json").stdout)
    assert found["parameters"] == 40 + 8 + 148 + 1450


def test_a_layer_that_does_not_fit_is_one_line(path: str) -> None:
    result = summary(path, "--set", "model.layers.0.conv2d.kernel_size=9", expect=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("adtrain: error: ")
    assert "conv2d" in line
    assert "9" in line


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, ""), (7, "7"), (999, "999"), (1000, "1 k"), (999_499, "999 k"), (999_900, "1 M"), (3_214_000, "3.21 M")],
)
def test_flops_have_three_digits(number: float, text: str) -> None:
    assert flops(number) == text
