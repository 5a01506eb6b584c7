"""Neural fields: the elements that a step draws, scores, runs and resumption, errors, and the commands on a run."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import c_programs
import numpy as np
import pytest
import resumed_runs
from command_line import command
from config_files import load
from PIL import Image
from report_runs import Elements, train

import adtrain as ad
from adtrain import metrics, ops, training
from adtrain.augment import Batch, Drawn
from adtrain.config import ConfigError
from adtrain.report import functions
from adtrain.report.predictions import FieldPredictions
from adtrain.training.tasks import Field

pytestmark = pytest.mark.unfused

CONFIG = """\
name: field
data: {image: FOLDER/photo.png, batch_size: 64, steps_per_epoch: 40}
model:
  layers:
    [{hash_grid: {levels: 3, log2_table_size: 8, base_resolution: 2, finest_resolution: 12}}, {linear: 16}, relu,
     {linear: 3}]
loss: mse
optimizer: {adam: {lr: 0.02}}
training: {epochs: 3}
"""
SIDE = 12


def photo() -> np.ndarray:
    y, x = np.mgrid[:SIDE, : SIDE + 2]
    return np.stack([20 * y, 18 * x, 255 * (x > y)], axis=-1).astype(np.uint8)


def text(folder: Path, **replaced: str) -> str:
    """The config and the photograph that it names."""
    Image.fromarray(photo()).save(folder / "photo.png")
    found = CONFIG.replace("FOLDER", str(folder))
    for old, new in replaced.items():
        found = found.replace(old, new)
    return found


def prepared(folder: Path, *overrides: str) -> training.Experiment:
    return training.prepare(load(folder, text(folder), *overrides))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("field")
    (folder / "field.yaml").write_text(text(folder))
    return train(folder / "field.yaml", folder / "run")


def test_a_network_learns_an_image(run: Path) -> None:
    test = json.loads((run / "summary.json").read_text())["test"]
    assert set(test) == {"loss", "psnr", "rmse"}
    assert test["psnr"] > 20
    assert test["psnr"] == pytest.approx(-20 * np.log10(test["rmse"]))


def test_each_step_draws_all_elements_with_equal_probability_and_independently() -> None:
    def drawn(step: int, count: int) -> np.ndarray:
        state = ops.rng_state(3, step)
        return Drawn().examples(ad.array(np.zeros(50_000, np.int64)), count, state).numpy()

    counts = np.bincount(drawn(0, 7), minlength=7)
    assert len(counts) == 7
    np.testing.assert_allclose(counts, 50_000 / 7, rtol=0.05)
    assert (drawn(0, 1) == 0).all()
    assert (drawn(0, 10**6) == drawn(1, 10**6)).mean() < 1e-3
    assert drawn(0, 3 << 40).max() > 2 << 40


def test_the_elements_of_a_step_have_their_own_labels(tmp_path: Path) -> None:
    experiment = prepared(tmp_path)
    seen: list[Batch] = []

    class Seen(Drawn):
        def __call__(self, batch: Batch, rng: Any) -> Batch:
            seen.append(batch)
            return batch

    step = training.train_step(replace(experiment.step_parts, augmentations=[Seen()]))
    images, labels = (ad.array(np.asarray(x)) for x in (experiment.train.images, experiment.train.labels))
    state = experiment.initial_state("cpu")
    step(state, experiment.seed("cpu"), images, labels, ad.array(np.arange(64)))
    places = seen[0].images.numpy()[:, :, 0, 0]
    rows = np.floor(places * (SIDE, SIDE + 2)).astype(int)
    np.testing.assert_allclose(seen[0].labels.numpy(), photo()[rows[:, 0], rows[:, 1]] / 255, rtol=1e-6)
    assert len(np.unique(rows, axis=0)) > 32


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    experiment = prepared(tmp_path)
    assert resumed_runs.train(experiment, training.RunFolder.create(experiment, tmp_path / "whole"))
    stopped = training.RunFolder.create(experiment, tmp_path / "stopped")
    assert not resumed_runs.train(experiment, stopped, stop_call=1)
    assert resumed_runs.resume_run(tmp_path / "stopped", experiment)
    resumed_runs.check_same(tmp_path / "whole", tmp_path / "stopped")


def test_the_psnr_is_that_of_its_definition() -> None:
    task = Field((0.0, 0.0), (1.0, 1.0), False, peak=4.0)
    outputs, labels = (np.random.default_rng(i).normal(size=(9, 2)) for i in range(2))
    sums = task.sums(ad.array(outputs), ad.array(labels)).numpy().tolist()
    score = task.score(1.0, sums, 9, lambda: labels)
    mse = np.square(outputs - labels).mean()
    assert score._asdict() == pytest.approx({"loss": 1.0, "psnr": 10 * np.log10(16 / mse), "rmse": np.sqrt(mse)})
    assert metrics.psnr(0.0, 3.0) == pytest.approx(metrics.HIGHEST_PSNR)
    assert metrics.psnr(9.0, 3.0) == pytest.approx(0)


@pytest.mark.parametrize(
    "layers",
    [
        "fourier_features: {frequencies: 8, scale: 1}, linear: 8, relu",
        "sine: {out_features: 16, omega: 3, first: true}, sine: {out_features: 16, omega: 3}",
    ],
)
def test_other_encodings_learn_a_volume(tmp_path: Path, layers: str) -> None:
    np.save(tmp_path / "field.npy", np.sin(np.arange(60.0) / 9).reshape(3, 4, 5) * 10)
    overrides = (
        f"data.volume={tmp_path / 'field.npy'}",
        "data.image=null",
        "data.peak=20",
        "data.normalize_targets=true",
        "optimizer.adam.lr=0.01",
        "training.epochs=6",
    )
    of_model = f"model.layers=[{layers}, linear: 1]"
    (tmp_path / "field.yaml").write_text(text(tmp_path))
    options = [word for x in (*overrides, of_model) for word in ("--set", x)]
    folder = train(tmp_path / "field.yaml", tmp_path / "run", *options)
    assert json.loads((folder / "summary.json").read_text())["test"]["psnr"] > 20


def test_the_report_shows_the_image_beside_the_truth(run: Path) -> None:
    command("report", run)
    page = (run / "report.html").read_text()
    assert "Field" in Elements(page).headings
    psnr = json.loads((run / "summary.json").read_text())["test"]["psnr"]
    assert f"PSNR {psnr:.2f} dB" in page
    images = re.findall(r'<img class="field" src="data:image/png;base64,([^"]+)" alt="(.*?)">', page)
    assert [name for _, name in images] == ["network", "truth", "error"]
    with Image.open(io.BytesIO(b64decode(images[1][0]))) as truth:
        np.testing.assert_array_equal(np.asarray(truth), photo())


def test_of_an_array_the_middle_slice_is_shown() -> None:
    true = np.arange(5 * 4 * 2.0).reshape(5, 4, 2, 1)
    found = FieldPredictions(("x", "y", "z"), true, true + 1, 30.0, is_image=False)
    _, truth, error = functions.pictures(found)
    assert (truth.legend, error.legend) == ("black 16, white 23", "at most 1")
    assert functions.slice_text(found) == "x = 0.5"
    with Image.open(io.BytesIO(b64decode(truth.picture.partition(",")[2]))) as image:
        np.testing.assert_array_equal(np.asarray(image), np.round(255 * np.arange(8).reshape(4, 2) / 7))


def test_large_pictures_are_thinned_out() -> None:
    true = np.zeros((1, 3 * functions.MOST_PIXELS, 1))
    found = FieldPredictions(("y", "x"), true, true, 200.0, is_image=True)
    with Image.open(io.BytesIO(b64decode(functions.pictures(found)[0].picture.partition(",")[2]))) as image:
        assert image.size == (functions.MOST_PIXELS, 1)


def test_colours_are_predicted_at_the_points_of_a_table(run: Path, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("x,y\n0.1,0.9\n0.9,0.1\n")
    rows = json.loads(command("predict", run, tmp_path / "points.csv", "--json").stdout)
    assert [list(row["predicted"]) for row in rows] == [["red", "green", "blue"]] * 2
    assert rows[0]["predicted"]["red"] > rows[1]["predicted"]["red"]


def test_points_outside_the_image_are_a_warning(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "points.csv").write_text("y,x\n0,1\n0.5,-1\n3,0.5\n")
    found = "found 2 points outside [0, 1] x [0, 1], such as [0.5, -1.0] in row 1: the network was trained inside only"
    command("predict", run, tmp_path / "points.csv")
    assert f"points.csv: {found}" in caplog.text
    caplog.clear()
    model = ad.load(run)
    model.predict_values(np.array([[0.0, 1.0], [0.5, -1.0], [3.0, 0.5]], np.float32))
    assert found in caplog.text
    caplog.clear()
    model.predict_values(np.array([[0.0, 1.0]], np.float32))
    assert not caplog.text


@pytest.mark.compiled
@pytest.mark.skipif(not c_programs.has("gcc"), reason="gcc is not installed")
def test_a_field_is_exported_as_c_which_has_the_same_numbers(run: Path, tmp_path: Path) -> None:
    result = command("export", run, tmp_path / "net.c")
    assert f"compiled, {SIDE * (SIDE + 2)} test points: same predictions" in result.stdout


def test_members_of_a_sweep_draw_the_elements_of_their_seeds(tmp_path: Path) -> None:
    swept = text(tmp_path) + "sweep: {training.seed: [0, 3]}\n"
    (tmp_path / "field.yaml").write_text(swept)
    command("sweep", tmp_path / "field.yaml", "--device", "cpu", "--output-dir", tmp_path / "sweep")
    results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    (of_seed,) = (x for x in results["members"] if x["member"] == 1)
    options = "--set", "sweep=null", "--set", "training.seed=3"
    alone = train(tmp_path / "field.yaml", tmp_path / "alone", *options)
    test = json.loads((alone / "summary.json").read_text())["test"]
    assert of_seed["test"]["loss"] == pytest.approx(test["loss"], rel=1e-3)


def test_shards_draw_elements_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "field.yaml").write_text(text(tmp_path))
    folder = train(tmp_path / "field.yaml", tmp_path / "run", "--set", "data.shards=2")
    assert json.loads((folder / "summary.json").read_text())["test"]["psnr"] > 20


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["data.volume=x.npy"], "expected only one of image and volume (null for the other)"),
        (["data.validation=0.1"], "expected no validation together with image"),
        (["data.augment=[flip]"], "expected no augment together with image"),
        (["data.test=0.1"], "expected no test together with image"),
        (["data.resample=never"], "expected points together with resample"),
        (["data.image=null", "data.dataset=mnist", "data.steps_per_epoch=null", "data.peak=1"],
         "expected image or volume together with peak"),
        (["model.layers.3.linear=1"], "found the output [1], expected [3], one for each of red, green, blue"),
        (["loss=cross_entropy"], "found cross_entropy for the numbers of red, green, blue, expected mse, l1 or huber, "
         "or binary_cross_entropy_with_logits for columns of 0 and 1\n"),
        (["loss={binary_cross_entropy_with_logits: {}}"], "expected 0 and 1 only"),
        (["optimizer=lbfgs"], "expected points, or a path whose examples are one batch: the optimizer lbfgs has"),
        (["training.metrics=[f1]"], "found f1, which are for classes; this task always has loss, psnr, rmse"),
        (["model.input=[3]"], "found [3], expected [2], the features of a row: y, x"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_a_field_are_refused(tmp_path: Path, overrides: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(tmp_path, *overrides)
    assert error in f"{raised.value}\n"


def test_more_coordinates_than_a_hash_grid_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found points of 5 coordinates, expected 1 to 4"):
        prepared(tmp_path, "model.layers=[{linear: 5}, hash_grid, {linear: 3}]")


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "field.yaml").write_text(text(tmp_path))
    result = command("train", tmp_path / "field.yaml", "--set", "data.image=no.png", "--device", "cpu", expect=2)
    assert result.stderr.strip().endswith("no.png: cannot be read (No such file or directory)")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_config_is_summarised_without_its_file() -> None:
    assert "hash_grid" in command("summary", "field", "--set", "data.image=no.png").stdout
