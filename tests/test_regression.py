"""Runs that predict numbers and labels, from a generated table to the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import command
from idx_files import write_idx
from report_runs import Elements, one_line
from resumed_runs import check_stops, train

from adtrain import config, training
from adtrain.bench.peers import jobs
from adtrain.bench.peers.systems import Unsupported
from adtrain.training import RegressionScore, RunFolder, loop

pytestmark = pytest.mark.unfused

TEXT = """\
name: prices
data: {path: PATH, target: TARGET, test: 0.2, batch_size: 20}
model: {input: [3], layers: [linear: 1]}
loss: mse
optimizer: {sgd: {lr: 0.1}}
training: {epochs: 3, seed: 0, precision: float64}
"""


def table(count: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, 3) of different sizes, and a noisy linear function of them, about 100,000, (N,)."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(count, 3)) * [1, 20, 300] + [0, 50, 1000]).astype(np.float32).astype(np.float64)
    return x, 1e5 + x @ [3e3, 200.0, -10.0] + rng.normal(size=count) * 500


def write_table(folder: Path, target: str = "price", text: str = TEXT) -> Path:
    """Write a table with the columns price, size and two labels, and a config; returns the config's path."""
    x, price = table()
    rows = zip(x.tolist(), price.tolist(), (x[:, 0] > 0).tolist(), (x[:, 1] > 50).tolist(), strict=True)
    lines = [",".join(map(repr, [*features, y, y / 7, int(a), int(b)])) for features, y, a, b in rows]
    (folder / "t.csv").write_text("\n".join(["x,y,z,price,size,positive,large", *lines]) + "\n")
    path = folder / "prices.yaml"
    path.write_text(text.replace("PATH", str(folder / "t.csv")).replace("TARGET", target))
    return path


def use_columns(folder: Path, names: list[str]) -> None:
    """Leave only these columns in the table."""
    lines = [line.split(",") for line in (folder / "t.csv").read_text().splitlines()]
    kept = [lines[0].index(name) for name in names]
    (folder / "t.csv").write_text("".join(",".join(line[i] for i in kept) + "\n" for line in lines))


def prepare(folder: Path, target: str, columns: list[str], *overrides: str) -> training.Experiment:
    path = write_table(folder, target)
    use_columns(folder, ["x", "y", "z", *columns])
    return training.prepare(config.load(path, overrides))


@pytest.mark.parametrize("normalized", ["true", pytest.param("false", marks=pytest.mark.exhaustive)])
def test_a_linear_layer_converges_to_least_squares(tmp_path: Path, normalized: str) -> None:
    settings = (f"data.normalize_targets={normalized}", "data.batch_size=80", "training.epochs=400")
    experiment = prepare(tmp_path, "price", ["price"], *settings)
    result = training.run(experiment)
    x, y = np.asarray(experiment.train.images)[:, :, 0, 0].astype(np.float64), experiment.train.labels
    weights = np.linalg.lstsq(np.c_[x, np.ones(80)], y)[0]
    test = np.asarray(experiment.test.images)[:, :, 0, 0].astype(np.float64)
    errors = np.c_[test, np.ones(20)] @ weights - experiment.test.labels
    assert isinstance(result.test, RegressionScore)
    assert result.test.rmse == pytest.approx(np.sqrt(np.square(errors).mean()), rel=1e-6)
    assert result.test.mae == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    spread = np.square(experiment.test.labels - experiment.test.labels.mean()).sum()
    assert result.test.r2 == pytest.approx(1 - np.square(errors).sum() / spread, rel=1e-6)


@pytest.mark.needs_torch
@pytest.mark.parametrize("loss", ["mse", "l1", "{huber: {delta: 0.5}}"])
def test_steps_equal_those_of_pytorch(tmp_path: Path, loss: str) -> None:
    import torch

    settings = (f"loss={loss}", "data.normalize_targets=true", "data.batch_size=80", "training.epochs=20")
    experiment = prepare(
        tmp_path, "[price, size]", ["price", "size"], *settings, "model.layers=[linear: 4, tanh, linear: 2]"
    )
    x, y = np.asarray(experiment.train.images)[:, :, 0, 0].astype(np.float64), experiment.train.labels
    inputs = torch.tensor((x - experiment.network.mean) / experiment.network.std)
    targets = torch.tensor((y - y.mean(axis=0)) / y.std(axis=0))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    state = experiment.initial_state("cpu")
    for i in (0, 2):
        for name in ("weight", "bias"):
            getattr(model[i], name).data = torch.tensor(state.params[str(i)][name].numpy())
    f = torch.nn.functional
    losses = {"mse": f.mse_loss, "l1": f.l1_loss}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        outputs = model(inputs)
        (losses[loss](outputs, targets) if loss in losses else f.huber_loss(outputs, targets, delta=0.5)).backward()
        optimizer.step()
    found = training.run(experiment).state
    for i in (0, 2):
        for name in ("weight", "bias"):
            np.testing.assert_allclose(
                found.params[str(i)][name].numpy(), getattr(model[i], name).detach().numpy(), rtol=1e-9, atol=1e-12
            )


def test_mean_and_deviation_of_targets_are_those_of_the_training_part(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "price", ["price"], "data.validation=0.25", "data.normalize_targets=true")
    y = experiment.train.labels
    assert len(y) == 60
    assert experiment.data.target_mean == pytest.approx(y.mean(axis=0))
    assert experiment.data.target_std == pytest.approx(y.std(axis=0))


def test_a_stopped_and_resumed_run_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    settings = ("data.validation=0.25", "data.normalize_targets=true", "training.epochs=2")
    experiment = prepare(tmp_path, "[price, size]", ["price", "size"], *settings, "model.layers=[linear: 2]")
    assert train(experiment, RunFolder.create(experiment, tmp_path / "whole"))
    assert check_stops(experiment, tmp_path / "whole", 1, 2) > 3


def test_the_commands_work_on_a_run_that_predicts_numbers(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    use_columns(tmp_path, ["x", "y", "z", "price"])
    folder = tmp_path / "run"
    settings = ("--set", "data.normalize_targets=true", "--set", "data.validation=0.1", "--set", "training.epochs=30")
    trained = command("train", str(path), "--output-dir", str(folder), *settings)
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["test"]) == ["loss", "rmse", "mae", "r2"]
    assert summary["best"]["by"] == "validation_rmse"
    assert f"rmse {summary['test']['rmse']:.4g}, mae" in trained.stdout
    found = json.loads(command("eval", str(folder), "--json").stdout)
    assert found["test"] == pytest.approx(summary["test"])
    assert f"{summary['test']['rmse']:.4g}" in command("compare", str(folder)).stdout

    x, price = table()
    write_idx(tmp_path / "rows-idx4", x.astype(np.float32).reshape(100, 3, 1, 1))
    rows = json.loads(command("predict", str(folder), str(tmp_path / "rows-idx4"), "--json").stdout)
    predicted = np.array([row["predicted"]["price"] for row in rows])
    assert np.abs(predicted - price).mean() < 1500
    assert f"{predicted[0]:.6g}" in command("predict", str(folder), str(tmp_path / "rows-idx4")).stdout
    for option in ("--invert", "--center"):
        error = one_line(command("predict", str(folder), str(tmp_path / "rows-idx4"), option, "yes", expect=2))
        assert error.startswith(f"{option} is for runs on images; this one is on a table or a text")

    command("report", str(folder))
    page = Elements((folder / "report.html").read_text())
    assert {"Targets", "Predictions and residuals"} <= set(page.headings)
    assert page.by_id["test-rmse"] == f"{summary['test']['rmse']:.4g}"


@pytest.mark.needs_onnx
@pytest.mark.parametrize("target", ["[price, size]", "[positive, large]"])
def test_an_exported_file_predicts_in_original_units(tmp_path: Path, target: str) -> None:
    import onnxruntime

    path = write_table(tmp_path, target)
    use_columns(tmp_path, ["x", "y", "z", *target.strip("[]").split(", ")])
    loss = "mse" if "price" in target else "binary_cross_entropy_with_logits"
    settings = (
        f"loss={loss}",
        f"data.normalize_targets={'true' if loss == 'mse' else 'false'}",
        "model.layers=[linear: 2]",
    )
    options = [part for setting in (*settings, "training.epochs=40") for part in ("--set", setting)]
    command("train", str(path), "--output-dir", str(tmp_path / "run"), *options)
    assert "same predictions" in command("export", str(tmp_path / "run"), str(tmp_path / "m.onnx")).stdout
    session = onnxruntime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    x, price = table()
    name = "values" if loss == "mse" else "probabilities"
    (found,) = session.run([name], {"rows": x.astype(np.float32).reshape(100, 3, 1, 1)})
    if loss == "mse":
        assert np.abs(found[:, 0] - price).mean() < 1500
    else:
        assert ((found[:, 0] > 0.5) == (x[:, 0] > 0)).mean() > 0.8


def test_labels_of_0_and_1_are_scored_by_subset_accuracy_and_f1(tmp_path: Path) -> None:
    settings = (
        "loss=binary_cross_entropy_with_logits",
        "model.layers=[linear: 2]",
        "training.epochs=60",
        "optimizer={sgd: {lr: 3.0}}",
        "training.final_model=last",
    )
    experiment = prepare(tmp_path, "[positive, large]", ["positive", "large"], *settings, "data.validation=0.25")
    assert experiment.best_by == "validation_f1"
    result = training.run(experiment)
    assert isinstance(result.test, training.MultilabelScore)
    assert result.test.accuracy > 0.8
    assert result.test.f1 > 0.9


def test_integer_labels_under_a_regression_loss_with_one_output_are_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x_train=table()[0], y_train=np.arange(100) % 7)
    text = TEXT.replace("target: TARGET, ", "").replace("PATH", str(tmp_path / "t.npz"))
    (tmp_path / "c.yaml").write_text(text)
    experiment = training.prepare(config.load(tmp_path / "c.yaml"))
    assert (experiment.data.classes, experiment.data.targets) == ((), ("y_train",))
    many = training.prepare(config.load(tmp_path / "c.yaml", ["model.layers=[linear: 7]"]))
    assert (len(many.data.classes), many.data.targets) == (7, ())


def test_metrics_by_name_are_in_summary_eval_and_report(tmp_path: Path) -> None:
    path = write_table(tmp_path, text=TEXT.replace("target: TARGET", "label: positive"))
    use_columns(tmp_path, ["x", "y", "z", "positive"])
    settings = [
        "loss=cross_entropy",
        "model.layers=[linear: 2]",
        "training.metrics=[top5, precision, recall, f1, confusion]",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    folder = tmp_path / "run"
    shown = command("train", str(path), "--output-dir", str(folder), *options).stdout
    summary = json.loads((folder / "summary.json").read_text())
    metrics = summary["metrics"]
    assert list(metrics) == ["top5", "precision", "recall", "f1", "confusion"]
    assert metrics["top5"] == 1.0
    confusion = np.array(metrics["confusion"])
    assert np.trace(confusion) / 20 == pytest.approx(summary["test"]["accuracy"])
    title, heading, *rows = shown.splitlines()[:4]
    assert title == "examples by label and predicted class"
    assert [row.split()[1:] for row in rows] == [list(map(str, row)) for row in confusion.tolist()]
    assert heading.split() == ["label", *(row.split()[0] for row in rows)]
    of_classes = ", ".join(f"{name} {x:.2%}" for name, x in metrics["f1"]["by_class"].items())
    assert f"f1 (macro)        {metrics['f1']['macro']:.2%} ({of_classes})" in shown
    assert json.loads(command("eval", str(folder), "--json").stdout)["metrics"] == metrics
    command("report", str(folder))
    page = Elements((folder / "report.html").read_text())
    assert "Metrics" in page.headings
    assert page.by_id["f1-macro"] == f"{metrics['f1']['macro']:.2%}"


@pytest.mark.parametrize(
    ("target", "overrides", "message"),
    [
        (
            "price",
            ["loss=cross_entropy"],
            "loss: found cross_entropy for the numbers of price, expected mse, l1 or huber, or",
        ),
        (
            "price",
            ["model.layers=[linear: 3]"],
            r"model.layers.0.: found the output \[3\], expected \[1\], one for each of pr",
        ),
        (
            "price",
            ["loss=binary_cross_entropy_with_logits"],
            r"loss: found .* in price, expected 0 and 1 only for binary_c",
        ),
        (
            "price",
            ["training.best_by=train_accuracy"],
            "training.best_by: found train_accuracy, expected train_ or valid",
        ),
        (
            "price",
            ["training.metrics=[top5]"],
            "training.metrics: found top5, which are for classes; this task always ha",
        ),
        (
            "positive",
            ["loss=binary_cross_entropy_with_logits", "data.normalize_targets=true"],
            "data.normalize_targets: found true, expected false",
        ),
    ],
)
def test_what_does_not_fit_the_targets_is_reported_in_one_line(
    tmp_path: Path, target: str, overrides: list[str], message: str
) -> None:
    path = write_table(tmp_path, target)
    use_columns(tmp_path, ["x", "y", "z", target])
    with pytest.raises(config.ConfigError, match=message) as caught:
        training.prepare(config.load(path, overrides))
    assert len(str(caught.value).splitlines()) == 1


def test_the_example_in_the_documents_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs/how-to/predict-numbers.md").read_text()
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "house-prices" in block]
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = [f"f{i}" for i in range(8)]
    rows = [",".join(map(repr, row)) for row in rng.normal(size=(60, 9)).tolist()]
    Path("houses.csv").write_text("\n".join([",".join([*names, "price"]), *rows]) + "\n")
    Path("c.yaml").write_text(example)
    result = training.run(training.prepare(config.load("c.yaml", ["training.epochs=1"])))
    assert isinstance(result.test, RegressionScore)


def test_other_systems_are_not_compared_on_numbers_to_predict(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "price", ["price"])
    with pytest.raises(Unsupported, match="no counterpart of numbers to predict"):
        jobs.runner("numpy", jobs.Job(experiment, "cpu"))


def test_a_summary_of_a_config_with_targets_needs_no_data(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    (tmp_path / "t.csv").unlink()
    assert "prices: input 3, float64" in command("summary", str(path)).stdout
