from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from browser import Browser, assert_fits
from command_line import command
from report_runs import Elements, assert_needs_no_network, one_line, summary, train
from training_runs import write_config

from adtrain import report, training
from adtrain.core.errors import OutOfMemory

pytestmark = pytest.mark.unfused


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, a run in `run` with mistakes and timed operations, and its page in `run.html`."""
    folder = tmp_path_factory.mktemp("made")
    cfg = write_config(folder)
    slow = ("--set", "optimizer.adam.lr=0.0002")
    train(cfg, folder / "run", *slow, "--epochs", "2", "--set", "data.validation=0.2", "--profile")
    assert summary(folder / "run")["test"]["accuracy"] < 0.9
    command("report", folder / "run", "--device", "cpu", "-o", folder / "run.html")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test can modify."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def test_a_page_says_when_and_by_which_command_it_was_made(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/adtrain", "report", "a <b>"])
    text = report.pages.run_page(report.read(made / "run"), "none")
    assert "<code>adtrain report &#39;a &lt;b&gt;&#39;</code>" in text
    assert re.search(r'class="made">\d{4}-\d\d-\d\dT', text)


@pytest.mark.exhaustive
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
        "Network", "Learning curves", "Confusion matrix", "Classes", "Worst mistakes", "Filters of the first layer",
        "Where the time went", "What was run"
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
    assert "No step is complete." in text
    assert Elements(text).headings == ["Network", "Learning curves", "What was run"]


def test_a_run_without_its_data_has_a_report_without_predictions(tmp_path: Path) -> None:
    run = train(write_config(tmp_path), tmp_path / "run", "--epochs", "1")
    shutil.rmtree(tmp_path / "data")
    (line,) = command("report", run, "--device", "cpu").stderr.splitlines()
    assert line.startswith(f"{run}: no predictions: {tmp_path}/data: found nothing")
    text = (run / "report.html").read_text()
    assert Elements(text).headings == ["Network", "Learning curves", "Where the time went", "What was run"]
    assert "The operations were not timed: neither by the training (--profile)" in text


def test_the_report_times_the_operations_on_the_device_of_the_training(tmp_path: Path) -> None:
    run = train(write_config(tmp_path), tmp_path / "run", "--epochs", "1")
    assert summary(run)["ops"] == []
    command("report", run, "--device", "cpu")
    assert "Kernels of the same layers and phase are one row" in (run / "report.html").read_text()
    assert summary(run)["ops"] == []
    found = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**found, "device_name": "another one"}))
    command("report", run, "--device", "cpu")
    assert "The operations were not timed" in (run / "report.html").read_text()


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


def test_a_run_that_stopped_in_its_first_epoch_has_curves_over_steps(run: Path) -> None:
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"epoch": 1' in line and "interval" in line))
    command("report", run, "--device", "cpu")
    text = (run / "report.html").read_text()
    assert 'aria-label="loss over steps"' in text
    assert "No step is complete." not in text


def test_several_runs_share_charts_with_a_band_over_seeds(made: Path, tmp_path: Path, browser: Browser) -> None:
    for name, options in {"seed1": ["--seed", "1"], "slow": ["--set", "optimizer.adam.lr=0.0001"]}.items():
        train(made / "tiny.yaml", tmp_path / name, "--set", "data.validation=0.2", "--epochs", "2", *options)
    train(made / "tiny.yaml", tmp_path / "seed0", "--set", "data.validation=0.2", "--epochs", "2")
    runs = [tmp_path / name for name in ("seed0", "seed1", "slow")]
    result = command("report", *runs, "-o", tmp_path / "runs.html")
    assert result.stdout == f"{tmp_path}/runs.html\n"
    text = (tmp_path / "runs.html").read_text()
    assert_needs_no_network(text)
    found = Elements(text)
    assert [row[0] for row in found.rows if len(row) == 7] == list(map(str, runs))
    assert text.count("<polygon") == 3, "loss on both scales, and accuracy"
    assert "seed0 and 1 more" in text
    assert ["optimizer.adam.lr", "seed0, seed1", "0.01"] in found.rows
    assert_fits(browser, tmp_path / "runs.html")


def test_several_runs_need_a_file_to_write(made: Path) -> None:
    result = command("report", made / "run", made / "run", expect=2)
    assert "several runs have no default page" in result.stderr


def test_rows_of_a_table_are_called_rows(tmp_path: Path, browser: Browser) -> None:
    kinds = ("red", "blue", "a class of a rather long name")
    lines = [f"{i % 7},{i % 5},{kinds[i % 3]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,kind", *lines]) + "\n")
    (tmp_path / "t.yaml").write_text(
        f"name: t\ndata: {{path: {tmp_path}/t.csv, label: kind, test: 0.3, batch_size: 8}}\n"
        "model: {input: [2], layers: [linear: 3]}\nloss: cross_entropy\noptimizer: {sgd: {lr: 0.1}}\n"
        "training: {epochs: 1, seed: 0}\n"
    )
    run = train(tmp_path / "t.yaml", tmp_path / "run")
    command("report", run, "--device", "cpu")
    text = (run / "report.html").read_text()
    assert "test rows are classified correctly" in text
    assert "<img" not in text
    assert_fits(browser, run / "report.html")


def test_every_command_says_which_epoch_the_weights_are_of(tmp_path: Path) -> None:
    settings = "data.validation=0.2", "training.best_by=validation_loss", "optimizer={sgd: {lr: 3.0}}"
    options = [x for setting in settings for x in ("--set", setting)]
    run, path = tmp_path / "run", write_config(tmp_path)
    trained = command("train", path, "--device", "cpu", "--output-dir", run, *options).stdout
    summary = json.loads((run / "summary.json").read_text())
    epoch = summary["model_epoch"]
    assert epoch == summary["best"]["epoch"] < summary["epochs"] == 3
    expected = f"of epoch {epoch} of 3, the best by validation_loss"
    assert f"\nweights {expected}\n" in trained
    images = tmp_path / "data/t10k-images-idx3-ubyte"
    for arguments in (("eval", run), ("predict", run, images), ("export", run, tmp_path / "model.safetensors")):
        assert f"{run}: the weights are {expected}\n" in command(*arguments).stderr
    assert json.loads(command("eval", run, "--json").stdout)["model_epoch"] == epoch
    command("report", run)
    assert expected in (run / "report.html").read_text()
    (run / "summary.json").unlink()
    assert f"{run}: found no summary.json, so the run is not finished" in command("eval", run).stderr
