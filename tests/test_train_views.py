"""Views of evaluated images: predictions are the mean of the probabilities of all views."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import command, invoke
from hypothesis import given
from hypothesis import strategies as st
from sweep_runs import run as sweep_run
from sweep_runs import session
from training_runs import CLASSES, load, prepare, write_config

import adtrain as ad
from adtrain import training
from adtrain.config import ConfigError
from adtrain.training import evaluation, model_file
from adtrain.training.network import views_of

BOTH = "data.views=[flip, shift]"
FLOAT64 = "training.precision=float64"


def views(images: np.ndarray, flip: bool = True, shift: bool = True) -> list[np.ndarray]:
    """The views, by NumPy."""
    found = [images]
    if shift:
        padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
        found += [padded[:, :, 2:, 2:], padded[:, :, :-2, :-2]]
    return [*found, *(view[..., ::-1] for view in found)] if flip else found


@given(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.integers(2, 5)), st.booleans())
def test_views_are_shifted_by_one_pixel_with_reflection_and_mirrored(shape: tuple[int, ...], flip: bool) -> None:
    images = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    found = views_of(ad.array(images), ["shift", *(["flip"] if flip else [])])
    np.testing.assert_array_equal(
        found.numpy().reshape(shape[0], -1, *shape[1:]), np.stack(views(images, flip), axis=1)
    )


@pytest.mark.parametrize("loss", ["cross_entropy", "nll"])
def test_predictions_and_score_are_those_of_the_mean_of_the_probabilities(tmp_path: Path, loss: str) -> None:
    layers = "[linear: 3, log_softmax]" if loss == "nll" else "[linear: 3]"
    experiment = prepare(tmp_path, BOTH, FLOAT64, f"loss={loss}", layers=layers)
    plain = prepare(tmp_path, FLOAT64, f"loss={loss}", layers=layers)
    state, test = experiment.initial_state("cpu"), experiment.test
    of_views = [
        evaluation.predictions(plain.network, state.params, {}, view, "cpu") for view in views(np.asarray(test.images))
    ]
    expected = np.mean(of_views, axis=0)
    found = evaluation.predictions(experiment.network, state.params, {}, test.images, "cpu")
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    examples = training.on_device(test, "cpu")
    step, task = experiment.evaluation_step, experiment.network.task
    score = training.Evaluation(step, task, examples).score(state.params, {})
    assert score.loss == pytest.approx(-np.log(expected[np.arange(len(test)), test.labels]).mean(), rel=1e-12)
    assert score._asdict()["accuracy"] == (expected.argmax(axis=1) == test.labels).mean()


def test_a_member_of_a_sweep_is_scored_with_views(tmp_path: Path) -> None:
    settings = BOTH, "training.epochs=1", FLOAT64
    found = session(tmp_path, "{training.seed: [1]}", *settings, layers="[linear: 3]")
    sweep = sweep_run(found, tmp_path / "sweep")
    (member,) = sweep.run().members
    alone = training.run(prepare(tmp_path, *settings, "training.seed=1", layers="[linear: 3]"))
    assert member.test == pytest.approx(alone.test, rel=1e-9)


def test_eval_takes_views_and_an_exported_file_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, run = write_config(tmp_path), tmp_path / "run"
    command("train", path, "--output-dir", run, "--set", BOTH, "--device", "cpu")
    scored = json.loads((run / "summary.json").read_text())["test"]
    assert json.loads(command("eval", run, "--device", "cpu", "--json").stdout)["test"] == scored
    without = json.loads(command("eval", run, "--device", "cpu", "--json", "--set", "data.views=null").stdout)["test"]
    assert without != scored
    model, images = model_file.load(run), prepare(tmp_path).test.images
    found = evaluation.predictions(model.network, model.params, model.statistics, images, "cpu")
    assert found.shape == (30, CLASSES)
    caplog.clear()
    command("export", run, tmp_path / "net.safetensors")
    assert not caplog.messages
    invoke("export", run, tmp_path / "net.onnx")  # where onnx is not installed it fails after the warning
    reason = "the file has no data.views: its predictions are those for the image itself"
    assert f"adtrain: warning: {run}: {reason}" in caplog.messages


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.views=[turn]"], "--set data.views: data.views[0]: found 'turn', expected one of flip, shift"),
        (["data.views=flip"], "--set data.views: found 'flip', expected a list"),
        (["data.views=[flip, flip]"], "--set data.views: data.views[1]: found flip twice, expected each view once"),
        (
            [BOTH, "loss=mse"],
            "--set data.views: found [flip, shift], expected none: views need a loss of class labels, such as "
            "cross_entropy",
        ),
    ],
)
def test_the_error_of_wrong_views_names_the_key(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        training.prepare(load(tmp_path, *overrides))
    assert str(error.value) == message


def test_rows_of_a_table_have_no_views(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "".join(f"{i},{i * i},{i % 2}\n" for i in range(20)))
    settings = [f"data={{path: {tmp_path / 'rows.csv'}, test: 0.2, views: [flip]}}", "model.input=[2]"]
    with pytest.raises(ConfigError) as error:
        training.prepare(load(tmp_path, *settings))
    assert str(error.value).endswith(
        "data.views: found examples of shape [2, 1, 1], expected images of at least 2x2 pixels"
    )
