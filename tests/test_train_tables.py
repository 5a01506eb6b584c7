"""A table with categories and empty cells end to end: train, resume, eval, predict, export."""

from __future__ import annotations

import csv
import json
import re
import shutil
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import command
from npz_files import write_npz
from report_runs import one_line

import adtrain as ad
from adtrain import config, training
from adtrain.core.errors import AdtrainError
from adtrain.data.notation import is_number
from adtrain.training import model_file

pytestmark = pytest.mark.unfused

CITIES = ("Berlin", "Rome", "Oslo")
TEXT = """\
name: trips
data:
  path: trips.csv
  label: kind
  drop: [id]
  categories: [zone]
  missing: mean
  test: 0.25
  validation: 0.2
  batch_size: 16
model: {input: [7], layers: [{linear: 16}, relu, {linear: 2}]}
loss: cross_entropy
optimizer: {adam: {lr: 0.02}}
training: {epochs: 4, seed: 0}
"""


def write_table(path: Path, count: int = 160) -> Path:
    """A table whose column `kind` follows from a number, a text and a code; some of its cells are empty."""
    rng = np.random.default_rng(0)
    lines = ["id,hours,city,zone,price,kind"]
    for i in range(count):
        hours, city, zone = rng.normal(5, 2), CITIES[rng.integers(3)], rng.integers(1, 3)
        price = 10 * hours + 5 * CITIES.index(city) + rng.normal()
        kind = "long" if hours + 2 * (city == "Oslo") > 5.5 else "short"
        cells = [f"{hours:.3f}", city, str(zone), f"{price:.2f}"]
        if i % 9 == 0:
            cells[i // 9 % 4] = ""
        lines.append(",".join([str(i), *cells, kind]))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, a config, and a finished run in `run`."""
    folder = tmp_path_factory.mktemp("tables")
    write_table(folder / "trips.csv")
    (folder / "trips.yaml").write_text(TEXT.replace("trips.csv", str(folder / "trips.csv")))
    train(folder / "trips.yaml", folder / "run")
    return folder


def train(cfg: Path, folder: Path, *options: str) -> None:
    command("train", cfg, "--output-dir", folder, "--device", "cpu", "--eager", *options)


def test_numbers_are_predicted_from_categories_and_empty_cells(made: Path, tmp_path: Path) -> None:
    text = (made / "trips.yaml").read_text().replace("label: kind", "target: hours\n  normalize_targets: true")
    table = tmp_path / "trips.csv"
    lines = [line.split(",") for line in (made / "trips.csv").read_text().splitlines()]
    table.write_text("".join(",".join(line) + "\n" for line in lines if line[1]))
    text = text.replace(str(made / "trips.csv"), str(table)).replace("cross_entropy", "mse")
    text = (
        text.replace("input: [7]", "input: [8]")
        .replace("{linear: 2}", "{linear: 1}")
        .replace("epochs: 4", "epochs: 20")
    )
    (tmp_path / "trips.yaml").write_text(text)
    train(tmp_path / "trips.yaml", tmp_path / "run")
    score = json.loads(command("eval", tmp_path / "run", "--json", "--device", "cpu").stdout)["test"]
    assert score["r2"] > 0.8
    (tmp_path / "new.csv").write_text("kind,zone,city,price\nlong,1,Oslo,80\nshort,2,Rome,\n")
    found = json.loads(command("predict", tmp_path / "run", tmp_path / "new.csv", "--json", "--device", "cpu").stdout)
    assert [list(x["predicted"]) for x in found] == [["hours"], ["hours"]]
    assert 5 < found[0]["predicted"]["hours"] < 9


def test_a_run_reads_decimal_commas_and_dates_as_its_training_did(tmp_path: Path) -> None:
    rows = [f"{i},25;{i % 28 + 1}/03/2024;{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "sales.csv").write_text("\n".join(["amount;sold;kind", *rows]) + "\n")
    values = yaml.safe_load(TEXT) | {"data": {"path": str(tmp_path / "sales.csv"), "label": "kind", "delimiter": ";"}}
    values["data"] |= {"decimal": ",", "dates": ["sold"], "date_format": "%d/%m/%Y", "test": 0.2, "batch_size": 16}
    values["model"]["input"], values["training"]["epochs"] = [6], 1
    (tmp_path / "sales.yaml").write_text(yaml.safe_dump(values))
    train(tmp_path / "sales.yaml", tmp_path / "run")
    (tmp_path / "new.csv").write_text("sold;amount\n13/03/2024;1.234,5\n")
    (found,) = json.loads(command("predict", tmp_path / "run", tmp_path / "new.csv", "--json").stdout)
    model: Any = ad.load(tmp_path / "run", device="cpu")
    in_memory = model.predict({"amount": [1234.5], "sold": [date(2024, 3, 13)]})
    assert in_memory.probabilities.max() == found["probability"]
    (tmp_path / "new.csv").write_text("sold;amount\n2024-03-13;1\n")
    error = one_line(command("predict", tmp_path / "run", tmp_path / "new.csv", expect=2))
    assert "new.csv:2: found '2024-03-13' in column 0 (sold), expected a date written as %d/%m/%Y" in error


def test_eval_reproduces_the_score_in_the_summary(made: Path) -> None:
    found = json.loads(command("eval", made / "run", "--json", "--device", "cpu").stdout)
    assert found["test"] == json.loads((made / "run" / "summary.json").read_text())["test"]
    assert found["test"]["accuracy"] > 0.8


def test_eval_reads_another_table_with_the_options_of_the_run(made: Path, tmp_path: Path) -> None:
    header, *lines = (made / "trips.csv").read_text().splitlines()
    short = [line for line in lines if line.endswith("short")]
    (tmp_path / "short.csv").write_text("\n".join([header, *short]) + "\n")
    found = json.loads(
        command("eval", made / "run", "--data", tmp_path / "short.csv", "--json", "--device", "cpu").stdout
    )
    assert found["images"] == len(short)
    assert found["test"]["accuracy"] > 0.8


def test_a_resumed_run_has_the_same_bytes(made: Path, tmp_path: Path) -> None:
    train(made / "trips.yaml", tmp_path / "run", "--epochs", "2")
    options = ("--epochs", "4", "--device", "cpu", "--eager")
    command("train", "--resume", tmp_path / "run", *options)
    for name in ("model.safetensors", "last.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (made / "run" / name).read_bytes()


def test_new_rows_are_classified_as_rows_of_the_training_table(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Columns in another order, one more column, no label; an empty cell, and an unseen category."""
    lines = [line.split(",") for line in (made / "trips.csv").read_text().splitlines()]
    names, table = lines[0], lines[1:]
    new = tmp_path / "new.csv"
    order = [4, 2, 1, 3]
    rows = [names, *table, ["x", "5", "Paris", "1", "60", "?"]]
    new.write_text("".join(",".join([*(row[i] for i in order), "more"]) + "\n" for row in rows))
    result = command("predict", made / "run", new, "--json", "--device", "cpu")
    predictions = json.loads(result.stdout)
    assert [x["index"] for x in predictions] == list(range(len(table) + 1))
    assert np.mean([x["class"] == row[5] for x, row in zip(predictions, table, strict=False)]) > 0.8
    unseen = "found 'Paris' in column city (1 row), which no training row has: the column's features are 0"
    assert caplog.messages == [f"adtrain: warning: {new}: {unseen}"]
    trained = model_file.load(made / "run")
    assert trained.encoder is not None
    names_of_features = ("hours", "city=Berlin", "city=Oslo", "city=Rome", "zone=1", "zone=2", "price")
    assert trained.encoder.features == names_of_features
    oracle = np.array([_features(row, trained.encoder.fill) for row in rows[1:]], np.float32)
    arrays = write_npz(tmp_path / "new.npz", {"X": oracle})
    assert [x["probability"] for x in json.loads(command("predict", made / "run", arrays, "--json").stdout)] == [
        x["probability"] for x in predictions
    ]


def test_predictions_as_csv_have_identifiers_and_the_probability_of_each_class(made: Path) -> None:
    table = made / "trips.csv"
    names, *rows = csv.reader(table.read_text().splitlines())
    found = list(csv.reader(command("predict", made / "run", table, "--csv", "--device", "cpu").stdout.splitlines()))
    expected = json.loads(command("predict", made / "run", table, "--json", "--device", "cpu").stdout)
    classes = model_file.load(made / "run").classes
    assert found[0] == ["file", "index", "id", "class", *(f"probability {name}" for name in classes)]
    for row, x in zip(found[1:], expected, strict=True):
        assert row[:4] == [str(table), str(x["index"]), rows[x["index"]][names.index("id")], x["class"]]
        numbers = np.array(row[4:], np.float32)
        assert numbers.max() == np.float32(x["probability"])
        assert numbers.sum() == pytest.approx(1)
    for other in ("--json", "--top-k=2"):
        line = one_line(command("predict", made / "run", table, "--csv", other, expect=2))
        assert line.startswith(f"--csv prints all probabilities in one form; leave out {other[:7].rstrip('=')}")


COLUMNS = ["id", "hours", "city", "zone", "price", "kind"]


@pytest.mark.parametrize(
    ("drop", "columns", "first", "expected"),
    [
        ("0", COLUMNS, "id", ["id"]),
        ("-6", COLUMNS, "id", ["id"]),
        ("id, 0", COLUMNS, "id", ["id"]),
        ("0", COLUMNS, "", ["column 0"]),
        ("0", COLUMNS, "city", ["city"]),  # the name of a feature
        ("0", COLUMNS[:-1], "id", ["id"]),  # without labels
        ("0", COLUMNS[1:], "hours", []),
        ("0", ["hours", "id", *COLUMNS[2:]], "hours", []),  # at other places than in the training
        ("id", ["hours", "id", *COLUMNS[2:]], "hours", ["id"]),
    ],
)
def test_predictions_as_csv_have_columns_that_were_dropped_by_number(
    made: Path, tmp_path: Path, drop: str, columns: list[str], first: str, expected: list[str]
) -> None:
    """`columns` of the training are in the table, of which the first has another name."""
    run, table = shutil.copytree(made / "run", tmp_path / "run"), tmp_path / "new.csv"
    written = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(written.replace("drop: [id]", f"drop: [{drop}]"))
    rows = list(csv.DictReader((made / "trips.csv").read_text().splitlines()))
    with table.open("w") as file:
        csv.writer(file).writerows([[first, *columns[1:]], *([row[name] for name in columns] for row in rows)])
    found = list(csv.DictReader(command("predict", run, table, "--csv").stdout.splitlines()))
    plain = list(csv.DictReader(command("predict", made / "run", made / "trips.csv", "--csv").stdout.splitlines()))
    for row, other in zip(found, plain, strict=True):
        identifiers, others = [other.pop("id")] * len(expected), {**other, "file": str(table)}
        assert row == {**dict(zip(expected, identifiers, strict=True)), **others}


@pytest.mark.parametrize("form", ["columns", "rows", "frame", "path"])
def test_a_loaded_run_predicts_rows_in_every_form_as_the_command_does(made: Path, tmp_path: Path, form: str) -> None:
    texts = {
        "price": ["60", "", "80"],
        "zone": ["1", "2", ""],
        "hours": ["5", "4.5", "6"],
        "city": ["Oslo", "Rome", ""],
    }
    lines = [",".join(row) for row in zip(*texts.values(), strict=True)]
    path = tmp_path / "new.csv"
    path.write_text("\n".join([",".join(texts), *lines]) + "\n")
    expected = json.loads(command("predict", made / "run", path, "--json", "--device", "cpu").stdout)
    columns: dict[str, list[Any]] = {
        "price": [60, None, np.float32(80)],
        "zone": [1.0, 2, float("nan")],
        "hours": ["5", 4.5, 6],
        "city": ["Oslo", "Rome", None],
        "more": [0, 0, 0],
    }
    given: Any = columns
    if form == "rows":
        given = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    elif form == "frame":
        given = pytest.importorskip("pandas", reason="needs pandas").DataFrame(columns)
    elif form == "path":
        given = path
    model: Any = ad.load(made / "run", device="cpu")
    found = model.predict(given)
    assert [*found.labels] == [x["class"] for x in expected]
    assert found.probabilities.max(axis=1).tolist() == [x["probability"] for x in expected]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"hours": [1], "city": ["Rome"]},
            "rows: found no column zone, expected it as in training: the columns are hou",
        ),
        (
            {"hours": 1, "city": "Rome"},
            "rows: found the value 1 of column hours, expected a list of values; write [row]",
        ),
        ({"hours": [1], "city": []}, "rows: found columns of different lengths {'hours': 1, 'city': 0}, expected one"),
        ([{"hours": 1, "city": "Rome"}, {"hours": 1}], "rows:1: found no column city, expected it as in row 0"),
        (
            [{"hours": "x", "city": "Rome", "zone": 1, "price": 2}],
            "rows:0: found 'x' in column 0 (hours), expected a fi",
        ),
        ({name: [] for name in ("hours", "city", "zone", "price")}, "rows: found no rows, expected one per example"),
        ("", "predict: found an empty path"),
    ],
)
def test_wrong_rows_in_memory_are_one_line(made: Path, rows: Any, message: str) -> None:
    model: Any = ad.load(made / "run", device="cpu")
    with pytest.raises(AdtrainError) as caught:
        model.predict(rows)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("place", ["row", "column"])
def test_a_row_or_a_column_of_a_frame_is_refused_with_what_to_write(made: Path, place: str) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    frame = pandas.DataFrame({"hours": [1.5], "city": ["Rome"], "zone": [1], "price": [2]})
    model: Any = ad.load(made / "run", device="cpu")
    with pytest.raises(AdtrainError, match=r"found one row or column, a Series, .*frame.iloc\[\[i\]\] is the table"):
        model.predict(frame.iloc[0] if place == "row" else frame["hours"])
    assert len(model.predict(frame.iloc[[0]]).labels) == 1


def _features(row: list[str], fill: tuple[float, ...]) -> list[float]:
    _, hours, city, zone, price, _ = row
    cities = [float(city == name) for name in sorted(CITIES)] if city else list(fill[1:4])
    zones = [float(zone == name) for name in "12"] if zone else list(fill[4:6])
    return [float(hours or fill[0]), *cities, *zones, float(price or fill[6])]


def test_what_was_learnt_is_not_learnt_anew_from_a_changed_table(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace(str(made / "trips.csv"), str(tmp_path / "trips.csv")))
    text = (made / "trips.csv").read_text().replace("Oslo", "Paris")
    (tmp_path / "trips.csv").write_text(text)
    command("eval", tmp_path / "run", "--device", "cpu")
    (warning,) = caplog.messages
    assert "found 'Paris' in column city" in warning
    line = one_line(command("train", "--resume", tmp_path / "run", "--epochs", "5", expect=2))
    assert "the run was trained with another config or other data: " in line
    assert "the data's feature city=Oslo: 2 -> nothing; the data's feature city=Paris: nothing -> 2" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "hours,city,price\n1,Rome,2\n",
            "new.csv:1: found no column zone, expected it as in training: the columns are",
        ),
        ("hours,city,zone,price\nx,Rome,1,2\n", "new.csv:2: found 'x' in column 0 (hours), expected a finite number"),
        ("hours,city,zone,price\n1,Rome,1\n", "new.csv:2: found 3 values, expected 4 as in the first line"),
        ("hours,city,zone,price\n", "new.csv: found no rows, expected one per example"),
        ("hours;city;zone;price\n1;Rome;1;2\n", "new.csv:1: found no column hours, expected it as in training: the c"),
    ],
)
def test_a_wrong_row_is_one_line(made: Path, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "new.csv"
    path.write_text(content)
    line = one_line(command("predict", made / "run", path, "--device", "cpu", expect=2))
    assert line.startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((2, 3))}, "new.npz: found rows of shape [3, 1, 1], expected [7, 1, 1] as in training"),
        ({"X": np.full((2, 7), np.nan)}, "new.npz: found a number that is not finite in row 0, expected finite ones"),
        ({"a": np.zeros(2), "b": np.zeros(2)}, "new.npz: found 'a', 'b', expected X, images, x_test, X_test, or a sin"),
        ({"X": np.array([["a"] * 7])}, "new.npz:X.npy: found elements of type <U1, expected integers or floats"),
    ],
)
def test_wrong_arrays_are_one_line(made: Path, tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    path = write_npz(tmp_path / "new.npz", arrays)
    assert one_line(command("predict", made / "run", path, expect=2)).startswith(f"{tmp_path}/{message}")


def test_an_input_that_is_no_table_is_one_line(made: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    line = one_line(command("predict", made / "run", tmp_path / "notes.txt", expect=2))
    assert line == f"{tmp_path}/notes.txt: found no table, expected a .csv or .tsv file, or rows in .npz or IDX"


def test_rows_of_a_run_without_a_table_are_one_line(made: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    x[:, 0] += 4 * y
    data = write_npz(tmp_path / "x.npz", {"X": x, "y": y})
    cfg = tmp_path / "x.yaml"
    cfg.write_text(
        f"name: x\ndata: {{path: {data}, test: 0.2, batch_size: 8}}\nmodel: {{input: [3], layers: [{{linear: 2}}]}}\n"
        "loss: cross_entropy\noptimizer: {sgd: {lr: 0.1}}\ntraining: {epochs: 20}\n"
    )
    train(cfg, tmp_path / "run")
    predictions = json.loads(command("predict", tmp_path / "run", data, "--json", "--device", "cpu").stdout)
    assert np.mean([x["class"] == str(label) for x, label in zip(predictions, y, strict=True)]) > 0.9
    line = one_line(command("predict", tmp_path / "run", made / "trips.csv", expect=2))
    assert (
        line == f"{made}/trips.csv: found a table, but the run was not trained on one; expected images, or rows in .npz"
    )


EMBEDDED = """\
- concat:
  - [{select: [0, 3]}]
  - [{select: [1]}, {embedding: {num_embeddings: 4, embedding_dim: 2}}, flatten]
  - [{select: [2]}, {embedding: {num_embeddings: 3, embedding_dim: 1}}, flatten]
- linear: 16
- relu
- linear: 2
"""


@pytest.fixture(scope="module")
def embedded(made: Path) -> Path:
    """A run whose network has an embedding for each column of categories."""
    cfg = yaml.safe_load((made / "trips.yaml").read_text())
    cfg["data"] |= {"category_encoding": "index"}
    cfg["model"] = {"input": [4], "layers": yaml.safe_load(EMBEDDED)}
    cfg["training"]["epochs"] = 6
    (made / "embedded.yaml").write_text(yaml.safe_dump(cfg))
    train(made / "embedded.yaml", made / "embedded")
    return made / "embedded"


def test_embeddings_learn_from_the_numbers_of_categories(
    embedded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = json.loads(command("eval", embedded, "--json", "--device", "cpu").stdout)
    assert found["test"]["accuracy"] > 0.8
    trained = model_file.load(embedded)
    assert trained.encoder is not None
    assert trained.encoder.features == ("hours", "city", "zone", "price")
    assert (trained.network.mean[1:3], trained.network.std[1:3]) == ((0, 0), (1, 1))
    (tmp_path / "new.csv").write_text("hours,city,zone,price\n5,Rome,2,60\n5,Paris,,60\n")
    texts = json.loads(command("predict", embedded, tmp_path / "new.csv", "--json", "--device", "cpu").stdout)
    assert ["'Paris' in column city (1 row)" in message for message in caplog.messages] == [True]
    write_npz(tmp_path / "new.npz", {"X": np.array([[5, 3, 2, 60], [5, 0, 0, 60]], np.float32)})
    numbers = json.loads(command("predict", embedded, tmp_path / "new.npz", "--json", "--device", "cpu").stdout)
    assert [x["probability"] for x in texts] == [x["probability"] for x in numbers]


def test_an_onnx_file_with_embeddings_predicts_the_same_classes(embedded: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    about = json.loads(command("export", embedded, tmp_path / "model.onnx", "--json").stdout)
    assert about["check"]["different"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "1.1.embedding.num_embeddings=3",
            "found num_embeddings 3, expected at least 4: column city has 3 categories, and 0 stands for others",
        ),
        ("1.0.select=[0]", "column hours has numbers, expected categories before an embedding; select picks columns"),
    ],
)
def test_an_embedding_that_does_not_fit_its_column_is_refused(embedded: Path, change: str, message: str) -> None:
    cfg = config.load(embedded.parent / "embedded.yaml", [f"model.layers.0.concat.branches.{change}"])
    with pytest.raises(config.ConfigError) as caught:
        training.prepare(cfg)
    assert str(caught.value).endswith(f"model.layers: {message}")


@pytest.mark.parametrize(
    ("dtype", "shape", "normalize", "rows", "message"),
    [
        ("uint8", [3], True, 9, "data.normalize: found true, expected false: an embedding takes integers as they are"),
        ("uint8", [1, 3], False, 9, "found integers from 0 to 255, which are read as pixels and divided by 255, "),
        ("float32", [3], False, 8, "model.layers: found numbers from 0 to 8 before an embedding, expected 0 to "
         "num_embeddings - 1 = 7"),
        ("float32", [3], False, 9, None),
        ("uint8", [3], False, 9, None),
    ],
)  # fmt: skip
def test_an_embedding_takes_integers_that_are_not_scaled(
    tmp_path: Path, dtype: str, shape: list[int], normalize: bool, rows: int, message: str | None
) -> None:
    tokens = np.arange(60).reshape(20, *shape) % 9
    write_npz(tmp_path / "tokens.npz", {"X": tokens.astype(dtype), "y": np.arange(20) % 2})
    (tmp_path / "tokens.yaml").write_text(
        f"data: {{path: {tmp_path}/tokens.npz, test: 0.2, normalize: {str(normalize).lower()}}}\n"
        f"model: {{input: [3], layers: [embedding: {{num_embeddings: {rows}, embedding_dim: 2}}, mean, linear: 2]}}\n"
        "loss: cross_entropy\noptimizer: {sgd: 0.1}\ntraining: {epochs: 1}\n"
    )
    with nullcontext() if message is None else pytest.raises(config.ConfigError, match=re.escape(message)):
        training.prepare(config.load(tmp_path / "tokens.yaml"))


def test_augmentations_of_numbers_of_categories_are_refused(embedded: Path) -> None:
    cfg = config.load(embedded.parent / "embedded.yaml", ["data.augment=[noise]"])
    with pytest.raises(config.ConfigError, match=r"data.augment: expected none with data.category_encoding: index"):
        training.prepare(cfg)


def test_the_width_of_the_network_must_be_that_of_the_features(made: Path) -> None:
    cfg = config.load(made / "trips.yaml", ["model.input=[4]"])
    with pytest.raises(
        config.ConfigError, match=r"found \[4\], expected \[7\], the features of a row: hours, city=Berl"
    ):
        training.prepare(cfg)


def test_features_with_control_characters_are_named_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('word,label\n"a\n\x1b",0\n"b\nc",1\n')
    cfg = tmp_path / "x.yaml"
    cfg.write_text(TEXT.replace("[id]", "[]").replace("[zone]", "[]").replace("label: kind", "label: label"))
    changed = config.load(cfg, [f"data.path={tmp_path}/x.csv", "data.test=0.5", "data.validation=0"])
    with pytest.raises(config.ConfigError, match=r"the features of a row: 'word=") as caught:
        training.prepare(changed)
    assert str(caught.value).isprintable()


def test_an_export_names_the_columns(made: Path, tmp_path: Path) -> None:
    command("export", made / "run", tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    columns = json.loads(header["__metadata__"]["adtrain"])["encoder"]["columns"]["features"]
    assert [x["name"] for x in columns] == ["hours", "city", "zone", "price"]
    assert columns[1]["categories"] == sorted(CITIES)
    assert columns[2]["categories"] == ["1", "2"]
    assert all(map(is_number, columns[2]["categories"]))


def test_exported_c_says_what_each_number_is_and_what_to_give_for_an_empty_cell(made: Path, tmp_path: Path) -> None:
    command("export", made / "run", tmp_path / "net.c")
    text, trained = (tmp_path / "net.c").read_text(), model_file.load(made / "run")
    assert trained.encoder is not None
    for i, (name, fill) in enumerate(zip(trained.encoder.features, trained.encoder.fill, strict=True)):
        assert f"number {i}  {name}, {fill!r} for an empty cell" in text


def test_an_onnx_file_predicts_the_same_classes(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    about = json.loads(command("export", made / "run", tmp_path / "model.onnx", "--json").stdout)
    assert about["check"]["different"] == 0
    assert about["inputs"]["rows"] == {"dtype": "float32", "shape": [7, 1, 1]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"\"position\": 1", r"\"position\":-1"),
        (r"\"width\": 6", r"\"width\": 1"),
        (r"\"Oslo\", ", ""),
        ("city", "c\\u0000"),
        (r"\"is_date\": false", r"\"is_date\": true"),
    ],
)
def test_a_tampered_encoder_is_refused_in_one_line(made: Path, tmp_path: Path, old: str, new: str) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode()
    assert old in header
    changed = header.replace(old, new, 1).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(AdtrainError) as caught:
        model_file.load(tmp_path / "run").test_split()
    assert "\n" not in str(caught.value)
