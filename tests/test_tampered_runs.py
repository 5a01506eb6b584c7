"""A run's files and results of `adtrain bench` are input: any change of a value is read or refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tampered_runs import FILES, make, tamper

from adtrain import config, report, training
from adtrain.bench import compare, page, text
from adtrain.config import ConfigError
from adtrain.core.errors import AdtrainError
from adtrain.training import RunFolder, model_file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"))


def show(run: Path) -> None:
    report.page.render(report.read(run), "no model was loaded")


def compare_results(run: Path) -> None:
    original = str(run / "result.original.json")
    for paths in ((original, str(run / "result.json")), (str(run / "result.json"), original)):
        result = compare.result(*paths)
        page.render(result)
        text.render(result, 80)


READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": show,
    "metrics.jsonl": show,
    "model.safetensors": lambda run: report.predict(run, "cpu"),
    "last.safetensors": lambda run: training.resume(run, longer=["training.epochs=3"]),
    "best.safetensors": lambda run: training.resume(run, longer=["training.epochs=3"]),
    "result.json": compare_results,
}


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25)
@given(data=st.data())
def test_a_tampered_value_is_read_or_refused_in_one_line(run: Path, name: str, data: st.DataObject) -> None:
    copy = run.parent / "copy"
    if not copy.exists():
        shutil.copytree(run, copy)
        shutil.copy(run / "result.json", copy / "result.original.json")
    (copy / name).write_bytes(tamper(name, (run / name).read_bytes(), lambda n: data.draw(st.integers(0, n - 1))))
    try:
        assert "\n" not in refusal(READERS[name], copy)
    finally:
        shutil.copy(run / name, copy / name)


def refusal(read: Callable[[Path], object], run: Path) -> str:
    """The message of the error; empty if there is none, or for a config, whose mistakes have a line each."""
    try:
        read(run)
    except ConfigError:
        return ""
    except AdtrainError as error:
        return str(error)
    return ""


def tampered(run: Path, name: str, old: str, new: str) -> Path:
    """A copy of the run, `old` in the file replaced by `new` of the same length."""
    assert len(old) == len(new)
    copy = Path(shutil.copytree(run, run.parent / "one"))
    content = (copy / name).read_bytes()
    assert old.encode() in content
    (copy / name).write_bytes(content.replace(old.encode(), new.encode(), 1))
    return copy


@pytest.fixture(autouse=True)
def _remove_copy(run: Path) -> Iterator[None]:
    yield
    shutil.rmtree(run.parent / "one", ignore_errors=True)


def test_damaged_lines_of_metrics_are_skipped_with_one_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = tampered(run, "metrics.jsonl", '"learning_rate": 0', '"learning_rate": x')
    with (copy / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\xff\n")
    lines = training.read_metrics(run)
    assert training.read_metrics(copy) == lines[1:]
    (warning,) = caplog.messages
    assert warning.startswith(f"adtrain: {copy}/metrics.jsonl:1: found no valid JSON (")
    assert warning.endswith("; this line is skipped, and 1 more")


def test_a_damaged_record_of_the_best_epoch_is_found_anew_from_the_metrics(run: Path) -> None:
    copy = tampered(run, "last.safetensors", r"\"waited\": 0", r"\"waited\":-1")
    _, _, start, notes = training.resume(copy, longer=["training.epochs=3"])
    expected = training.resume(run, longer=["training.epochs=3"]).start
    assert start.checkpoint.progress == expected.checkpoint.progress
    assert start.best is not None
    assert expected.best is not None
    assert start.best.progress == expected.best.progress
    epoch = expected.checkpoint.progress.best.epoch
    assert notes[-1] == f"{copy}: the record of the best epoch is damaged; by the metrics it is epoch {epoch}"


def test_test_images_of_another_type_than_in_training_are_refused(run: Path) -> None:
    copy = tampered(run, "model.safetensors", r"\"scale\": 255.0", r"\"scale\": 1.0  ")
    with pytest.raises(
        AdtrainError,
        match=r"found images of type uint8\[1, 6, 6\], expected float32\[1, 6, 6\] as the run was trained on$",
    ):
        report.predict(copy, "cpu")


def test_a_run_with_epochs_and_without_intervals_is_shown(run: Path) -> None:
    copy = tampered(run, "metrics.jsonl", "interval", "INTERVAL")
    path = copy / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"interval"', b'"INTERVAL"'))
    record = report.read(copy)
    assert record.epochs
    assert not record.intervals
    text = report.page.render(record, "no model was loaded")
    assert "<strong>loss</strong>" in text
    assert "<strong>learning rate</strong>" not in text


def test_a_class_whose_name_is_no_text_has_its_escape(run: Path) -> None:
    experiment = training.prepare(config.load(run / "config.yaml"))
    named = replace(experiment, data=replace(experiment.data, classes=("a\udcff", "b", "c"), class_type="str"))
    copy = Path(shutil.copytree(run, run.parent / "one"))
    RunFolder(copy).write_model(named, named.initial_state("cpu"))
    assert model_file.load(copy).classes == (r"a\udcff", "b", "c")
