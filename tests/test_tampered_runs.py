"""A run's files and results of `adtrain bench` are input: any change of a value is read or refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tampered_runs import FILES, make, tamper

from adtrain import report, training
from adtrain.bench import compare, page, text
from adtrain.core.errors import AdtrainError


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
@settings(max_examples=60)
@given(data=st.data())
def test_a_tampered_value_is_read_or_refused_in_one_line(run: Path, name: str, data: st.DataObject) -> None:
    copy = run.parent / "copy"
    if not copy.exists():
        shutil.copytree(run, copy)
        shutil.copy(run / "result.json", copy / "result.original.json")
    (copy / name).write_bytes(tamper(name, (run / name).read_bytes(), lambda n: data.draw(st.integers(0, n - 1))))
    try:
        READERS[name](copy)
    except AdtrainError as error:
        line = str(error)
        assert line.startswith(f"{copy / name}: ") or name == "result.json"
        assert "\n" not in line
        assert len(line) < 500
    finally:
        shutil.copy(run / name, copy / name)
