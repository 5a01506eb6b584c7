"""The files of runs and sweeps, and results of `adtrain bench`, are input: any change of a value is read, or refused in
one line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_runs import run as prepared_run
from tampered_runs import FILES, STATE, SWEEP_FILES, make, make_sweep, tamper

from adtrain import config, report, training
from adtrain.bench import compare, page, text
from adtrain.cli import compare as compare_cli
from adtrain.config import ConfigError
from adtrain.core.errors import AdtrainError
from adtrain.report import pages
from adtrain.sweeps import finished
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.session import Session, reopened
from adtrain.training import RunFolder, Trust, model_file
from adtrain.training.checkpoint import fetch

pytestmark = pytest.mark.unfused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"))


def show(run: Path) -> None:
    report.pages.run_page(report.read(run), "no model was loaded")


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
@settings(max_examples=8)
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


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("sweeps"))


@pytest.fixture(scope="module")
def found(sweep: Path) -> Session:
    return reopened(sweep, "cpu", Trust())[0]


def show_sweep(found: Session, path: Path) -> None:
    folder = SweepFolder.open(path)
    compare_cli.sweep_row(path, finished.finished_results(folder))
    pages.sweep_page(folder, finished.finished_results(folder), None)


def export_member(found: Session, path: Path) -> None:
    folder = SweepFolder.open(path)
    shutil.rmtree(path / "members", ignore_errors=True)
    finished.write_run(found, folder, None)
    finished.evaluate(found, folder, finished.members_of(folder, 1))


def resume_sweep(found: Session, path: Path) -> None:
    (path / "results.json").unlink(missing_ok=True)
    prepared_run(found, path).run()


SWEEP_READERS: dict[str, tuple[Callable[[Session, Path], object], ...]] = {
    "options.json": (resume_sweep,),
    "metrics.jsonl": (show_sweep, export_member, resume_sweep),
    "results.json": (show_sweep, export_member),
    STATE: (export_member, resume_sweep),
}


@pytest.mark.parametrize("name", SWEEP_FILES)
@settings(max_examples=3)
@given(data=st.data())
def test_a_tampered_value_of_a_sweep_is_read_or_refused_in_one_line(
    sweep: Path, found: Session, name: str, data: st.DataObject
) -> None:
    changed = tamper(name, (sweep / name).read_bytes(), lambda n: data.draw(st.integers(0, n - 1)))
    for read in SWEEP_READERS[name]:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(sweep, Path(folder, "sweep")))
            (copy / name).write_bytes(changed)
            assert "\n" not in refusal(partial(read, found), copy)


def with_lines(sweep: Path, folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    """A copy of the sweep, without its results, and with changed lines of metrics."""
    copy = Path(shutil.copytree(sweep, folder / "sweep", ignore=shutil.ignore_patterns("results.json")))
    lines = (sweep / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(change(lines)))
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "found no line for epoch 1 of member [0-2], which was trained"),
        (lambda lines: lines[1:], "found no line for epoch 1 of member [0-2], which was trained"),
        (lambda lines: [lines[0], b"nonsense\n", *lines[2:]], "found no line for epoch 2 of member [0-2], which was"),
        (lambda lines: [b"[]\n" for _ in lines], "found no line for epoch [12] of member [0-2], which was trained"),
        (
            lambda lines: [x.replace(b'"member": 1', b'"member": 7') for x in lines],
            "found epoch 1 of member 7, which the sweep does not have",
        ),
        (
            lambda lines: [x.replace(b'"epoch": 2', b'"epoch": 9') for x in lines],
            r"found epoch 9 of member \d, which the sweep does not have",
        ),
        (
            lambda lines: [x.replace(b'"accuracy": ', b'"f1": 0.5, "accuracy": ') for x in lines],
            r"found metrics of member \d other than loss, accuracy",
        ),
    ],
)
def test_a_sweep_whose_metrics_lack_what_was_trained_is_not_resumed(
    sweep: Path, found: Session, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    copy = with_lines(sweep, tmp_path, change)
    with pytest.raises(AdtrainError, match=f"^{copy}/metrics.jsonl: {message}.*; the file is damaged, or of another"):
        resume_sweep(found, copy)


def test_a_sweep_that_was_killed_within_a_line_is_resumed(sweep: Path, found: Session, tmp_path: Path) -> None:
    copy = with_lines(sweep, tmp_path, lambda lines: [*lines, lines[-1][:40]])
    resume_sweep(found, copy)
    results = [SweepFolder.open(path).results() for path in (sweep, copy)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].members == results[1].members


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rank_by": "validation_accuracy"', '"rank_by": "speed"', "rank_by: found 'speed', expected a metric such as"),
        ('"rank_by": "validation_accuracy"', '"rank_by": "test_r2"', "found rank_by test_r2, which the members do not"),
        (
            '"training.seed": 1',
            f'"training.seed": 1{"0" * 400}',
            r"members\[\d\].values: found a mapping with 'training",
        ),
        ('"rank": 2', '"rank": 1', "found other ranks than 1, 2, ..."),
        ('"training.seed": 2', '"seed": 2', "found members with values for other keys"),
        (
            '"status": "finished"',
            '"status": "best"',
            r"members\[0\].status: found 'best', expected 'finished', 'dropped'",
        ),
    ],
)
def test_impossible_results_of_a_sweep_are_refused(
    sweep: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    copy = Path(shutil.copytree(sweep, tmp_path / "sweep"))
    content = (copy / "results.json").read_text()
    assert old in content
    (copy / "results.json").write_text(content.replace(old, new, 1))
    with pytest.raises(AdtrainError, match=f"^{copy}/results.json: {message}"):
        SweepFolder.open(copy).results()


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
    assert warning.startswith(f"adtrain: warning: {copy}/metrics.jsonl:1: found no valid JSON (")
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
    text = report.pages.run_page(record, "no model was loaded")
    assert "<strong>loss</strong>" in text
    assert "<strong>learning rate</strong>" not in text


def test_a_class_whose_name_is_no_text_has_its_escape(run: Path) -> None:
    experiment = training.prepare(config.load(run / "config.yaml"))
    named = replace(experiment, data=replace(experiment.data, classes=("a\udcff", "b", "c"), class_type="str"))
    copy = Path(shutil.copytree(run, run.parent / "one"))
    RunFolder(copy).write_model(named, fetch(named.initial_state("cpu"))())
    assert model_file.load(copy).classes == (r"a\udcff", "b", "c")
