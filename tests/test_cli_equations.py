"""Commands on a run that solves equations: train, report, predict, eval, export, seeds, sweep, and Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from command_line import command
from report_runs import Elements, train
from test_train_equations import DECAY

from adtrain import config
from adtrain.cli.train_run import result_lines
from adtrain.data.points import SEED
from adtrain.report import functions
from adtrain.report.predictions import SolutionPredictions
from adtrain.training import read_metrics
from adtrain.training.summary import read_summary

pytestmark = pytest.mark.unfused

PLANE = """\
name: plane
data: {points: {t: [0, 1], x: [0, 2]}, batch_size: 8, steps_per_epoch: 2, test_points: 30, reference: t + 2 * x}
model: {input: [t, x], output: [u], coefficients: {k: 0.5}, layers: [{linear: 4}, tanh, {linear: 1}]}
loss:
  - {equation: "u_t - k * u_x"}
  - {at: {t: 0}, equation: "u - 2 * x"}
  - {at: {x: [0, 2]}, equation: "u - t - 2 * x"}
optimizer: adam
training: {epochs: 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plane")
    (folder / "plane.yaml").write_text(PLANE)
    return train(folder / "plane.yaml", folder / "run")


def test_the_report_shows_solution_error_residual_and_coefficients(run: Path) -> None:
    command("report", run)
    page = (run / "report.html").read_text()
    found = Elements(page)
    assert {"Solution", "Coefficients"} <= set(found.headings)
    titles = re.findall(r"<figcaption><strong>(.*?)</strong>", page)
    assert titles[-3:] == ["u", "error of u", "u_t - k * u_x"]
    assert len(re.findall(r'<image class="" .*?href="data:image/png;base64,', page)) == 3
    assert any(row[0] == "k" for row in found.rows if row)


def test_the_result_says_which_coefficients_were_learnt(run: Path) -> None:
    (value,) = json.loads((run / "summary.json").read_text())["coefficients"].values()
    assert value != 0.5
    summary = read_summary(run)
    assert summary is not None
    assert f"learnt  k {value:.6g}" in result_lines(summary, 1, config.load("burgers").data)


def test_a_training_ends_where_the_line_search_finds_no_lower_loss(tmp_path: Path) -> None:
    (tmp_path / "decay.yaml").write_text(DECAY)
    search = "optimizer.sequence.then.lbfgs={history: 3, max_evaluations: 3}"
    settings = (
        "--set",
        "training.precision=float32",
        "--set",
        search,
        "--epochs",
        "100",
        "--output-dir",
        tmp_path / "run",
    )
    printed = command("train", tmp_path / "decay.yaml", *settings, "--device", "cpu").stdout
    found = read_summary(tmp_path / "run")
    assert found is not None
    assert (found.ended, found.steps) == ("line_search", 20 * found.epochs)
    assert found.epochs < 100
    assert f"after {found.steps:,} steps: the line search finds no lower loss in float32" in printed
    losses = [x.train.loss for x in read_metrics(tmp_path / "run") if x.kind == "interval"]
    assert losses[-1] == pytest.approx(min(losses), rel=1e-5)
    refused = command("train", "--resume", tmp_path / "run", expect=2).stderr
    assert "the line search has failed after step" in refused
    advised = refused.split("begin a new run with another optimizer and ")[1].strip()
    others = ("--set", advised, "--set", "optimizer=adam", "--set", "training.precision=float32", "--epochs", "1")
    command("train", tmp_path / "decay.yaml", *others, "--output-dir", tmp_path / "more", "--device", "cpu", "-q")


def test_a_map_has_the_first_variable_to_the_right_and_the_second_upwards() -> None:
    points = np.array([[t, x] for t in (0.0, 1.0) for x in (0.0, 1.0, 2.0)])
    values = np.array([0.0, 0.0, 9.0, 0.0, 0.0, 0.0])  # at t = 0 and x = 2: the upper left
    found = SolutionPredictions(("t", "x"), ("u",), points, values[:, np.newaxis], None, [], {})
    (figure,) = functions.figures(found)
    from PIL import Image

    (content,) = re.findall(r'base64,([^"]+)"', str(figure.picture))
    pixels = np.asarray(Image.open(io.BytesIO(b64decode(content))))
    assert pixels.shape == (3, 2, 3)
    coloured = (pixels != 255).any(axis=2)
    assert np.argwhere(coloured).tolist() == [[0, 0]]


def test_points_that_are_no_grid_have_no_pictures() -> None:
    points = np.random.default_rng(SEED).random((5, 2))
    found = SolutionPredictions(("t", "x"), ("u",), points, points[:, :1], None, [], {})
    assert functions.figures(found) == []


def test_a_solution_of_one_variable_is_drawn_as_a_line(tmp_path: Path) -> None:
    (tmp_path / "decay.yaml").write_text(DECAY.replace("epochs: 4", "epochs: 1"))
    folder = train(tmp_path / "decay.yaml", tmp_path / "run")
    command("report", folder)
    page = (folder / "report.html").read_text()
    assert re.findall(r"<figcaption><strong>(.*?)</strong>", page)[-3:] == ["u", "error of u", "u_t + u"]
    assert 'aria-label="u over t"' in page


def test_outputs_are_predicted_at_the_points_of_a_table(run: Path, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("x,t\n0.5,0\n2,1\n")
    result = command("predict", run, tmp_path / "points.csv", "--json")
    rows = json.loads(result.stdout)
    assert len(rows) == 2
    table = tmp_path / "known.csv"
    table.write_text("t,x,u\n0,0.5,1\n1,2,5\n")
    scored = json.loads(command("eval", run, "--set", f"data.reference={table}", "--json").stdout)
    assert set(scored["test"]) == {"loss", "error"}


def test_a_solution_is_exported_as_c(run: Path, tmp_path: Path) -> None:
    command("export", run, tmp_path / "net.c")
    text = (tmp_path / "net.c").read_text()
    assert "coefficients" not in text


@pytest.mark.exhaustive
def test_seeds_train_together_and_differ(tmp_path: Path) -> None:
    (tmp_path / "plane.yaml").write_text(PLANE)
    command("train", tmp_path / "plane.yaml", "--device", "cpu", "--seeds", "2", "--output-dir", tmp_path / "seeds")
    results = json.loads((tmp_path / "seeds" / "results.json").read_text())
    errors = [member["test"]["error"] for member in results["members"]]
    assert len(set(errors)) == 2


def test_members_of_a_sweep_equal_their_trainings_alone(tmp_path: Path) -> None:
    swept = DECAY.replace("epochs: 4", "epochs: 2") + "sweep: {training.seed: [0, 3]}\n"
    (tmp_path / "decay.yaml").write_text(swept)
    command("sweep", tmp_path / "decay.yaml", "--device", "cpu", "--output-dir", tmp_path / "sweep")
    results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    other, of_seed = sorted(results["members"], key=lambda x: x["member"])
    assert other["test"]["error"] != of_seed["test"]["error"]
    (tmp_path / "alone.yaml").write_text(swept)
    alone = train(tmp_path / "alone.yaml", tmp_path / "alone", "--set", "sweep=null", "--set", "training.seed=3")
    test = json.loads((alone / "summary.json").read_text())["test"]
    assert of_seed["test"]["error"] == pytest.approx(test["error"], rel=1e-6)
    assert of_seed["test"]["loss"] == pytest.approx(test["loss"], rel=1e-6)


def test_the_examples_write_tables_that_configs_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[1] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import burgers_solution
    import heat_measurements

    t, x = np.array([0.0, 0.3, 0.9]), np.array([0.4, 0.7, 0.05])
    far = np.linspace(-3, 3, 200_001)
    expected = [-np.sin(0.4 * np.pi)]
    for ti, xi in zip(t[1:], x[1:], strict=True):
        viscosity = burgers_solution.VISCOSITY
        heat = -np.cos(np.pi * (xi - far)) / (2 * np.pi * viscosity) - far**2 / (4 * viscosity * ti)
        weights = np.exp(heat - heat.max())
        expected.append(-(np.sin(np.pi * (xi - far)) * weights).sum() / weights.sum())
    np.testing.assert_allclose(burgers_solution.solution(t, x), expected, rtol=1e-9)
    rows = heat_measurements.rows()
    assert np.abs(rows[:, 2] - heat_measurements.temperatures(*rows[:, :2].T)).std() < 2 * heat_measurements.NOISE
    for name in ("burgers_solution", "heat_measurements"):
        sys.modules.pop(name)


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_the_network_of_the_tutorial_solves_the_heat_equation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/how-to/equations.md").read_text(encoding="utf-8")
    (content,) = re.findall(r"`heat\.yaml`:\n\n```yaml\n(.*?)```", text, re.DOTALL)
    assert content.count("\n") <= 20
    (tmp_path / "heat.yaml").write_text(content)
    run = train(tmp_path / "heat.yaml", tmp_path / "run")
    assert json.loads((run / "summary.json").read_text())["test"]["error"] < 0.02


def test_the_flow_in_a_cavity_is_that_of_ghia_et_al(monkeypatch: pytest.MonkeyPatch) -> None:
    """U. Ghia, K. Ghia and C. Shin: "High-Re solutions for incompressible flow", 1982: velocities along both middle
    lines at a Reynolds number of 100."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import cavity_solution

    cells = 32
    u, v, _ = cavity_solution.flow(cells, np.ones_like)
    at = np.array([0, *(np.arange(cells) + 0.5) / cells, 1])
    y, x = np.array([0.0547, 0.1719, 0.4531, 0.5, 0.7344, 0.9531]), np.array([0.0625, 0.2344, 0.5, 0.8047, 0.9531])
    along_y = np.interp(y, at, [0, *u[cells // 2], 1])
    along_x = np.interp(x, at, [0, *v[:, cells // 2], 0])
    np.testing.assert_allclose(along_y, [-0.03717, -0.10150, -0.21090, -0.20581, 0.00332, 0.68717], atol=0.006)
    np.testing.assert_allclose(along_x, [0.09233, 0.17527, 0.05454, -0.24533, -0.08864], atol=0.006)
    divergence = np.diff(u, axis=0) + np.diff(v, axis=1)
    np.testing.assert_allclose(divergence, 0, atol=1e-12)
    rows = cavity_solution.table(5)
    assert rows.shape == (25, 5)
    np.testing.assert_allclose(rows[12], [0.5, 0.5, -0.161, 0.050, -0.022], atol=0.01)
    sys.modules.pop("cavity_solution")


def test_the_derivatives_of_equations_and_coefficients_are_checked(tmp_path: Path) -> None:
    (tmp_path / "plane.yaml").write_text(PLANE)
    found = json.loads(command("gradcheck", tmp_path / "plane.yaml", "--device", "cpu", "--json").stdout)["rows"]
    assert {row["op"] for row in found} == {"0.weight", "0.bias", "2.weight", "2.bias", "coefficients.k"}
    assert all(row["passed"] and 0 < row["error"] < 1e-6 for row in found)
