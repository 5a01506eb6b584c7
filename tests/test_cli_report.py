from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from browser import Browser, assert_fits
from idx_files import write_idx
from report_runs import Elements, assert_needs_no_network, command, one_line, summary, train
from training_runs import write_config

from adtrain import report, training
from adtrain.core.errors import OutOfMemory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, a run in `run` with mistakes and timed operations, and its page in `run.html`."""
    folder = tmp_path_factory.mktemp("made")
    cfg = write_config(folder)
    slow = ("--set", "optimizer.adam.lr=0.0002")
    train(cfg, folder / "run", *slow, "--epochs", "2", "--set", "data.validation=0.2", "--profile-steps", "2")
    assert summary(folder / "run")["test"]["accuracy"] < 0.9
    command("report", folder / "run", "--device", "cpu", "-o", folder / "run.html")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test can modify."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def test_a_browser_shows_the_numbers_of_the_summary(made: Path, browser: Browser) -> None:
    browser.open(made / "run.html")
    shown, found = Elements(browser.source()).by_id, summary(made / "run")
    assert shown == {
        "test-accuracy": f"{found['test']['accuracy']:.2%}",
        "test-loss": f"{found['test']['loss']:.4f}",
        "training": f"{found['train_seconds']:.1f} s",
        "images/s": f"{found['images_per_second']:,.0f}",
        "step-median": f"{found['step_ms']['median']:.2f} ms",
        "parameters": f"{found['parameters']:,}",
    }


def test_the_page_fits_wide_and_narrow_windows_in_light_and_dark(made: Path, browser: Browser) -> None:
    assert_fits(browser, made / "run.html")


def test_the_page_needs_no_network(made: Path) -> None:
    text = (made / "run.html").read_text()
    assert Elements(text).addresses
    assert_needs_no_network(text)


def test_the_page_is_written_into_the_run_by_default(run: Path) -> None:
    result = command("report", run, "--device", "cpu")
    assert result.stdout == f"{run}/report.html\n"
    assert result.stderr == ""
    assert Elements((run / "report.html").read_text()).headings == [
        "Learning curves", "Confusion matrix", "Classes", "Worst mistakes", "Where the time went", "What was run"
    ]  # fmt: skip


def test_an_unfinished_run_has_a_report(run: Path) -> None:
    (run / "summary.json").unlink()
    result = command("report", run, "--device", "cpu")
    line = "the run is not finished (2 of 2 epochs are complete): no test result and no times"
    assert result.stderr == f"{run}: {line}\n"
    text = (run / "report.html").read_text()
    assert line[1:] in text
    found = Elements(text)
    assert "Where the time went" not in found.headings
    assert "Confusion matrix" in found.headings
    assert list(found.by_id) == ["train-accuracy", "train-loss", "validation-accuracy", "validation-loss"]


def test_the_report_of_a_stopped_run_names_the_reason(run: Path) -> None:
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "stopped", "reason": "not_finite", "epoch": 3, "step": 11}\n')
    line = "the run is not finished (2 of 2 epochs are complete, not finite at step 11): no test result and no times"
    assert command("report", run, "--device", "cpu").stderr == f"{run}: {line}\n"


def test_missing_times_are_left_out(run: Path) -> None:
    found = {**summary(run), "images_per_second": None, "step_ms": None}
    (run / "summary.json").write_text(json.dumps(found))
    command("report", run, "--device", "cpu")
    assert list(Elements((run / "report.html").read_text()).by_id) == [
        "test-accuracy", "test-loss", "training", "parameters"
    ]  # fmt: skip


def test_a_run_before_its_first_epoch_has_a_report(run: Path) -> None:
    for name in ("summary.json", "model.safetensors"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text("")
    lines = command("report", run, "--device", "cpu").stderr.splitlines()
    assert lines[0].endswith("(0 of 2 epochs are complete): no test result and no times")
    assert lines[1].startswith(f"{run}: no predictions: {run}: found no model.safetensors")
    text = (run / "report.html").read_text()
    assert "No epoch is complete." in text
    assert Elements(text).headings == ["Learning curves", "What was run"]


def test_a_run_without_its_data_has_a_report_without_predictions(tmp_path: Path) -> None:
    run = train(write_config(tmp_path), tmp_path / "run", "--epochs", "1")
    shutil.rmtree(tmp_path / "data")
    (line,) = command("report", run, "--device", "cpu").stderr.splitlines()
    assert line.startswith(f"{run}: no predictions: {tmp_path}/data: found nothing")
    text = (run / "report.html").read_text()
    assert Elements(text).headings == ["Learning curves", "Where the time went", "What was run"]
    assert "The operations were not timed (--profile-steps 0)." in text


def test_names_are_escaped(tmp_path: Path) -> None:
    (folder := tmp_path / "a<b>&c").mkdir()
    run = train(write_config(folder), folder / "run", "--steps", "1")
    command("report", run, "--device", "cpu", "-o", tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert "a&lt;b&gt;&amp;c" in text
    assert "a<b>" not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", "{", "/summary.json: found no valid JSON"),
        ("summary.json", "[]", "/summary.json: found [], expected an object"),
        ("summary.json", '{"config": 1}', "/summary.json: config: found 1, expected an object"),
        ("config.yaml", "name: x", "/config.yaml"),
    ],
)
def test_a_damaged_run_is_a_one_line_error_and_no_page(run: Path, name: str, content: str, message: str) -> None:
    (run / name).write_text(content)
    result = command("report", run, "--device", "cpu", expect=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"adtrain: error: {run}{message}")
    assert not (run / "report.html").exists()


def test_a_device_error_is_reported_and_writes_no_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Path, device: str, trust: training.Trust) -> NoReturn:
        raise OutOfMemory("the device is full")

    monkeypatch.setattr(report, "predict", full)
    assert one_line(command("report", run, "--device", "cpu", expect=2)) == "the device is full"
    assert not (run / "report.html").exists()


def test_a_path_without_a_run_is_a_one_line_error(tmp_path: Path) -> None:
    assert one_line(command("report", tmp_path / "none", expect=2)) == (
        f"{tmp_path}/none: found nothing, expected the folder of a run"
    )
    assert one_line(command("report", tmp_path, expect=2)) == (
        f"{tmp_path}: found no config.yaml, expected the folder of a run of adtrain train"
    )


def test_a_page_that_cannot_be_written_is_a_one_line_error(run: Path, tmp_path: Path) -> None:
    assert one_line(command("report", run, "--device", "cpu", "-o", tmp_path / "none" / "x.html", expect=2)) == (
        f"{tmp_path}/none/x.html: cannot be written (No such file or directory)"
    )


def test_png_files_are_drawn(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    result = command("report", run, "--device", "cpu", "--png", tmp_path / "png")
    names = ["learning_curves.png", "confusion_matrix.png", "worst_mistakes.png"]
    assert result.stdout.splitlines() == [f"{run}/report.html", *(f"{tmp_path}/png/{name}" for name in names)]
    for name in names:
        with image.open(tmp_path / "png" / name) as drawn:
            pixels = np.asarray(drawn.convert("L"))
        assert min(pixels.shape) > 400
        assert pixels.std() > 5


def test_without_matplotlib_png_is_refused_but_the_page_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert one_line(command("report", run, "--device", "cpu", "--png", tmp_path / "png", expect=2)) == (
        "drawing PNG files needs matplotlib; pip install 'adtrain[report]'"
    )
    assert not (run / "report.html").exists()
    assert not (tmp_path / "png").exists()
    command("report", run, "--device", "cpu")
    assert (run / "report.html").exists()


def test_data_that_are_not_images_have_no_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    cfg = write_config(tmp_path)
    for part, count in (("train", 90), ("t10k", 30)):
        pixels = (np.arange(count) % 3 * 80).astype(np.uint8).reshape(count, 1, 1)
        write_idx(tmp_path / "data" / f"{part}-images-idx3-ubyte", pixels)
    run = train(cfg, tmp_path / "run", "--steps", "1", "--set", "model.input=[1]")
    result = command("report", run, "--device", "cpu", "--png", tmp_path / "png")
    assert [Path(line).name for line in result.stdout.splitlines()] == [
        "report.html", "learning_curves.png", "confusion_matrix.png"
    ]  # fmt: skip
    assert "have no pictures" in (run / "report.html").read_text()
