"""Gradients of single examples and eigenvalues of Hessians, against loops and dense matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_runs
from command_line import invoke

import adtrain as ad
from adtrain import config, curvature, ops, training
from adtrain.training import model_file
from adtrain.training.evaluation import predictions


def test_gradients_of_examples_are_those_of_each_alone() -> None:
    rng = np.random.default_rng(0)
    params, x, y = {"w": rng.normal(size=4)}, rng.normal(size=(6, 4)), rng.normal(size=6)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return ops.square(ops.matmul(x, params["w"]) - y)

    found = ad.per_example_grad(loss)(params, x, y)["w"].numpy()
    np.testing.assert_allclose(found, 2 * (x @ params["w"] - y)[:, None] * x, rtol=1e-13)
    swapped = ad.per_example_grad(lambda x, y, params: loss(params, x, y), -1)(x, y, params)["w"].numpy()
    np.testing.assert_array_equal(swapped, found)


def test_eigenvalues_are_the_largest_of_the_dense_hessian() -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(5, 4)), "b": rng.normal(size=5)}
    x = rng.normal(size=(30, 4))

    def loss(params: Any, x: Any) -> Any:
        return ops.mean(ops.sin(ops.matmul(x, params["w"], transpose_b=True) + params["b"]).sum(1) ** 2)

    blocks = ad.hessian(loss)(params, x)
    dense = np.block([[blocks[a][b].numpy().reshape(params[a].size, -1) for b in "wb"] for a in "wb"])
    expected = np.linalg.eigvalsh(dense)
    expected = expected[np.argsort(-np.abs(expected))][:6]
    np.testing.assert_allclose(ad.top_eigenvalues(loss, 6, tolerance=1e-10)(params, x), expected, rtol=1e-9)


def test_repeated_eigenvalues_are_found_where_the_first_vectors_span_too_little() -> None:
    found = ad.top_eigenvalues(lambda x: 3.0 * (x[:2] ** 2).sum() + 0.0 * x.sum(), 3)(np.zeros(7))
    np.testing.assert_allclose(found, [6, 6, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ad.top_eigenvalues(ops.sum, 0), ad.OptionError, "top_eigenvalues: count is 0, expected an integer"),
        (lambda: ad.top_eigenvalues(ops.sum, 4)(np.ones(3)), ad.OptionError, "found 3 elements, expected at least 4"),
        (
            lambda: ad.top_eigenvalues(lambda x: (1.0 / x).sum(), 1)(np.zeros(3)),
            ad.AdtrainError,
            "a product with the Hessian is not finite",
        ),
    ],
)
def test_invalid_uses_are_one_line(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as raised, np.errstate(all="ignore"):
        call()
    assert "\n" not in str(raised.value)


def loss_of_images(params: Any, others: Any, images: Any, labels: Any) -> Any:
    return ops.mse_loss(ops.tanh(ops.matmul(images, params["w"])) + others, labels)


def test_metrics_of_a_loss_are_those_of_all_gradients_and_of_the_dense_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "CHUNK_BYTES", 600)  # several chunks
    rng = np.random.default_rng(2)
    params, images, labels = {"w": rng.normal(size=3)}, rng.normal(size=(8, 3)), rng.normal(size=8)
    arrays = [ad.array(x) for x in (images, labels)]
    found = curvature.LossAt(curvature.Curvature(loss_of_images), params, 0.5, *arrays)
    grads = np.array(
        [
            ad.grad(loss_of_images)(params, 0.5, x[None], y[None])["w"].numpy()
            for x, y in zip(images, labels, strict=True)
        ]
    )
    noise = grads.var(axis=0, ddof=1).sum() / np.square(grads.mean(0)).sum()
    assert curvature.gradient_noise(found) == pytest.approx(noise, rel=1e-10)
    assert curvature.per_example_norm(found) == pytest.approx(np.linalg.norm(grads, axis=1).mean(), rel=1e-12)
    dense = np.linalg.eigvalsh(ad.hessian(loss_of_images)(params, 0.5, *arrays)["w"]["w"].numpy())
    expected = dense[np.argsort(-np.abs(dense))][:2]
    assert curvature.leading(found, 2) == pytest.approx(expected.tolist(), rel=1e-10)


def test_a_training_measures_curvature_and_an_evaluation_the_same(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    metrics = "training.metrics=[gradient_noise, per_example_norm, {top_eigenvalues: 3}]"
    run = tmp_path / "run"
    assert invoke("train", path, "--output-dir", str(run), "--set", metrics, "--device", "cpu").exit_code == 0
    found = json.loads((run / "summary.json").read_text())["metrics"]
    assert list(found) == ["gradient_noise", "per_example_norm", "top_eigenvalues"]
    assert len(found["top_eigenvalues"]) == 3
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert last["top_eigenvalues"] == found["top_eigenvalues"][0]
    again = json.loads(invoke("eval", str(run), "--json", "--device", "cpu").stdout)["metrics"]
    assert again["top_eigenvalues"] == pytest.approx(found["top_eigenvalues"])
    assert invoke("report", str(run)).exit_code == 0
    assert "top_eigenvalues[2]" in (run / "report.html").read_text()


def test_a_training_on_numbers_measures_the_curvature_of_its_loss(tmp_path: Path) -> None:
    rows = np.random.default_rng(4).normal(size=(40, 3))
    np.savetxt(tmp_path / "rows.csv", rows, delimiter=",", header="a,b,target", comments="")
    (tmp_path / "rows.yaml").write_text(
        "name: rows\n"
        f"data: {{path: {tmp_path}/rows.csv, test: 0.5, target: target, batch_size: 8}}\n"
        "model: {layers: [{linear: 1}]}\n"
        "loss: mse\n"
        "optimizer: adam\n"
        "training: {epochs: 1, metrics: [per_example_norm, {top_eigenvalues: 1}]}\n"
    )
    run = tmp_path / "run"
    arguments = ("train", str(tmp_path / "rows.yaml"), "--output-dir", str(run), "--device", "cpu")
    assert invoke(*arguments).exit_code == 0
    found = json.loads((run / "summary.json").read_text())["metrics"]
    trained = model_file.load(run)
    test = trained.test_split()
    network = trained.network
    predicted = predictions(network, trained.params, trained.statistics, test.images, "cpu")
    x = (np.asarray(test.images)[:, :, 0, 0] - network.mean) / network.std
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    gradients = 2 * (predicted - np.asarray(test.labels)) * x
    assert found["per_example_norm"] == pytest.approx(np.linalg.norm(gradients, axis=1).mean(), rel=1e-4)
    largest = np.linalg.eigvalsh(2 * x.T @ x / len(x))[-1]
    assert found["top_eigenvalues"] == pytest.approx([largest], rel=1e-3)


def test_lower_curvature_is_better() -> None:
    metrics = {"gradient_noise": curvature.gradient_noise}
    assert not training.evaluation.higher_is_better("gradient_noise", metrics)
    with pytest.raises(config.ConfigError, match="expected an integer in"):
        config.load("smoke", ["training.metrics=[top_eigenvalues: 0]"])
