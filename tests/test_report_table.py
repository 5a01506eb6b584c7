"""The report of a run on a table: the importance of its columns, and the values of mistakes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import command
from hypothesis import given
from hypothesis import strategies as st
from report_runs import Elements
from test_data_spreadsheets import load
from test_train_tables import TEXT, train, write_table

from adtrain import report
from adtrain.report.classes import worst_mistakes
from adtrain.report.predictions import Predictions
from adtrain.report.tables import MOST_COLUMNS, REPEATS, Importance, NumberPredictions, TableColumns
from adtrain.training import evaluation, model_file

pytestmark = pytest.mark.unfused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, so that it makes mistakes."""
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "trips.csv")
    (folder / "trips.yaml").write_text(TEXT.replace("trips.csv", str(folder / "trips.csv")))
    train(folder / "trips.yaml", folder / "run", "--epochs", "2")
    return folder / "run"


def columns_of(run: Path) -> TableColumns:
    found = report.predict(run, "cpu")
    assert isinstance(found, (Predictions, NumberPredictions))
    assert found.columns is not None
    return found.columns


def test_importance_is_the_rise_of_the_loss_where_all_features_of_a_column_are_shuffled(run: Path) -> None:
    found, trained = columns_of(run), model_file.load(run)
    test = trained.test_split()
    images, labels = np.asarray(test.images), np.asarray(test.labels)

    def loss(images: np.ndarray) -> float:
        rows = evaluation.predictions(trained.network, trained.params, trained.statistics, images, "cpu")
        return float(-np.log(rows[np.arange(len(labels)), labels]).mean())

    assert trained.encoder is not None
    assert found.rows == len(labels)
    assert found.loss == pytest.approx(loss(images), rel=1e-5)
    titles = [column.title for column in trained.encoder.columns.features]
    assert [x.mean for x in found.found] == sorted((x.mean for x in found.found), reverse=True)
    assert sorted(x.column for x in found.found) == sorted(titles)
    of_city = [i for i, column in enumerate(trained.encoder.sources) if column.title == "city"]
    assert len(of_city) == 3
    rises = []
    for repeat in range(REPEATS):
        order = np.random.default_rng([titles.index("city"), repeat]).permutation(len(images))
        shuffled = images.copy()
        shuffled[:, of_city] = images[order][:, of_city]
        rises.append(loss(shuffled) - loss(images))
    assert next(x for x in found.found if x.column == "city").rises == pytest.approx(rises, abs=1e-5)
    assert columns_of(run).found == found.found


def test_the_column_that_decides_is_the_first(run: Path) -> None:
    found = columns_of(run)
    assert found.found[0].column == "hours"
    bars = found.bars()
    assert (bars[0][0], bars[0][1]) == ("hours", 1.0)
    assert all(0 <= share <= 1 for _, share, _, _ in bars)


def test_a_page_has_the_importance_and_the_values_of_mistakes(run: Path) -> None:
    text = report.pages.run_page(report.read(run), found := report.predict(run, "cpu"))
    page = Elements(text)
    assert "Importance of the columns" in page.headings
    assert [row[0] for row in page.rows if row and row[0] in ("hours", "city", "zone", "price")] == [
        x.column for x in columns_of(run).found
    ]
    assert isinstance(found, Predictions)
    worst = worst_mistakes(found, 1)[0].image
    shown = re.search(rf"test row {worst}\b(.*?)<ul>", text, re.DOTALL)
    assert shown is not None
    values = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown[1]))
    assert set(values) == {"hours", "city", "zone", "price"}
    assert values["city"] in ("Berlin", "Rome", "Oslo", "")
    assert float(values["hours"]) == pytest.approx(float(found.images[worst][0, 0, 0]), rel=1e-6)


def test_a_page_lists_the_most_important_of_many_columns(run: Path) -> None:
    found = columns_of(run)
    many = [Importance(f"column {i}", (-i / 2,)) for i in range(MOST_COLUMNS + 5)]
    several = replace(found, found=many)
    assert [bar[0] for bar in several.bars()] == [x.column for x in many[:MOST_COLUMNS]]
    assert "5 columns of lower importance are left out" in several.note()
    assert {bar[1] for bar in several.bars()} == {0}
    assert "left out" not in found.note()


def test_a_page_of_predicted_numbers_has_the_importance_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{x:.4f},{y:.4f},{3 * x:.4f}" for x, y in rng.normal(size=(80, 2))]
    (tmp_path / "x.csv").write_text("\n".join(["x,other,y", *rows]) + "\n")
    values = yaml.safe_load(TEXT) | {"loss": "mse", "model": {"input": [2], "layers": [{"linear": 1}]}}
    values["data"] = {"path": str(tmp_path / "x.csv"), "target": "y", "test": 0.3, "batch_size": 8}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    train(tmp_path / "x.yaml", tmp_path / "run", "--epochs", "6")
    assert [x.column for x in columns_of(tmp_path / "run").found] == ["x", "other"]
    command("report", tmp_path / "run", "--device", "cpu")
    assert "Importance of the columns" in Elements((tmp_path / "run" / "report.html").read_text()).headings


@pytest.mark.parametrize("encoding", ["one_hot", "index"])
@given(
    rows=st.lists(st.tuples(st.integers(-999, 999), st.sampled_from("xyz"), st.integers(1, 28)), min_size=3, max_size=9)
)
def test_the_values_of_a_row_are_those_of_the_file(
    encoding: str, rows: list[tuple[int, str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = [f"{n / 8},{text},2024-05-{day:02},{i % 2}" for i, (n, text, day) in enumerate(rows)]
    text = "\n".join(["n,word,day,label", *lines])
    found = load(tmp_path_factory.getbasetemp(), text, dates=("day",), category_encoding=encoding)
    assert found.encoder is not None
    offset = np.array(found.offset or 0.0)
    for (n, word, day), features in zip(rows, np.asarray(found.train.images)[:, :, 0, 0], strict=True):
        values = found.encoder.texts(features + offset)
        assert values == {"n": f"{n / 8:.7g}", "word": word, "day": f"2024-05-{day:02}"}
