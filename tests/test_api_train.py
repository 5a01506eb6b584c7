"""`adtrain.train`: the same training as on the command line, from a config and arrays."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import threading
from base64 import b64decode
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from command_line import invoke
from safetensors import safe_open
from safetensors.numpy import save_file
from training_runs import images_of, write_config

import adtrain as ad
from adtrain import config, training
from adtrain.api import History, Metrics, TrainingResult
from adtrain.core import tree
from adtrain.data.datasets import class_values
from adtrain.training import Epoch

pytestmark = pytest.mark.unfused

LABELS = np.arange(90) % 3
IMAGES = images_of(LABELS, 0)
TEST = images_of(LABELS[:30], 1), LABELS[:30]
VALUES: dict[str, Any] = {
    "name": "small",
    "data": {"batch_size": 16},
    "model": {"input": [36], "layers": [{"linear": 16}, "relu", {"linear": 3}]},
    "loss": "cross_entropy",
    "optimizer": {"adam": {"lr": 0.01}},
    "training": {"epochs": 3},
}
EMBEDDING = {"model": {"layers": [{"embedding": {"num_embeddings": 5, "embedding_dim": 2}}, "flatten", {"linear": 3}]}}
NPZ = VALUES | {"data": {"path": "data.npz", "batch_size": 16}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(given: Any = VALUES, data: Any = (IMAGES, LABELS), **options: Any) -> TrainingResult:
    return ad.train(given, data, **{"device": "cpu", "progress": False, **options})


def equal(x: Any, y: Any) -> bool:
    pairs = zip(tree.leaves(x), tree.leaves(y), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def test_a_run_from_python_equals_that_of_the_command_line(folder: Path) -> None:
    path = write_config(folder)
    found = train(path, None, output_dir="python", epochs=2, seed=7, overrides={"optimizer.adam.lr": 0.02})
    arguments = ["--epochs", "2", "--seed", "7", "--set", "optimizer.adam.lr=0.02", "--output-dir", "shell"]
    done = invoke("train", str(path), *arguments, "--device", "cpu")
    assert done.exit_code == 0, done.output
    for name in ("config.yaml", "model.safetensors", "last.safetensors", "best.safetensors"):
        assert Path("python", name).read_bytes() == Path("shell", name).read_bytes()
    assert sorted(os.listdir("python")) == sorted(os.listdir("shell"))
    assert found.path == Path("python")
    assert repr(found).startswith("TrainingResult(config tiny, test loss ")


def test_the_history_has_the_metrics_of_every_epoch() -> None:
    found = train(output_dir="run", overrides={"data.validation": 0.2})
    epochs = [line for line in training.read_metrics(Path("run")) if isinstance(line, Epoch)]
    scores = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
    assert list(found.history) == ["epoch", "step", *scores, "learning_rate", "seconds", "images_per_second"]
    assert found.history["epoch"].tolist() == [1, 2, 3]
    for name in scores:
        split, _, field = name.partition("_")
        assert found.history[name].tolist() == [getattr(getattr(line, split), field) for line in epochs]


def test_every_form_of_a_config_trains_the_same_model() -> None:
    expected = train(NPZ | {"data": VALUES["data"]}, test_data=TEST)
    np.savez("data.npz", x_train=IMAGES, y_train=LABELS, x_test=TEST[0], y_test=TEST[1])
    cfg = config.from_values(NPZ)
    Path("x.yaml").write_text(config.dump(cfg))
    for given in (Path("x.yaml"), cfg, NPZ):
        found = train(given, None)
        assert equal(found.params, expected.params)
        assert found.test == expected.test


def test_without_test_data_a_part_is_held_out() -> None:
    for settings, count in (({}, 18), ({"data.test": 0.5}, 45)):
        train(output_dir=f"run{count}", overrides=settings, epochs=1)
        cfg = config.load(f"run{count}/config.yaml")
        assert len(training.prepare(cfg).test) == count


NUMBERS: dict[str, Any] = VALUES | {
    "data": {"batch_size": 16, "normalize_targets": True},
    "model": {"input": [36], "layers": [{"linear": 16}, "relu", {"linear": 1}]},
    "loss": "mse",
}


def test_numbers_are_predicted_in_their_units() -> None:
    labels = LABELS * 2.5 - 1
    found = train(NUMBERS, (IMAGES, labels), test_data=(TEST[0], labels[:30]), output_dir="run", epochs=20)
    assert len(found.history["train_rmse"]) == 20
    values = ad.load("run").predict_values(TEST[0])
    np.testing.assert_array_equal(values, found.model.predict_values(TEST[0]))
    squared = np.square(values[:, 0] - labels[:30]).mean()
    score = found.test._asdict()
    np.testing.assert_allclose([score["rmse"], score["r2"]], [squared**0.5, 1 - squared / labels.var()])
    assert score["r2"] > 0.7
    assert (found.model.classes, found.model.targets, values.shape) == ((), ("y_train",), (30, 1))
    assert "1 target," in repr(found.model)
    with pytest.raises(ad.AdtrainError, match="call predict_values"):
        found.model.predict(IMAGES)
    done = invoke("train", "--resume", "run", "--epochs", "21", "--device", "cpu")
    assert done.exit_code == 0, done.output


def test_a_model_of_classes_has_no_values() -> None:
    with pytest.raises(ad.AdtrainError, match="predict_values: the model was trained on classes, not on numbers; call"):
        train(epochs=1).model.predict_values(IMAGES)


def test_several_labels_of_arrays_have_probabilities() -> None:
    labels = np.stack([LABELS > 0, LABELS > 1], axis=1).astype(int)
    given = NUMBERS | {
        "data": {"batch_size": 16},
        "model": {"input": [36], "layers": [{"linear": 2}]},
        "loss": "binary_cross_entropy_with_logits",
    }
    found = train(given, (IMAGES, labels), epochs=20)
    values = found.model.predict_values(IMAGES)
    assert found.model.targets == ("y_train[0]", "y_train[1]")
    assert ((values > 0.5) == labels).all(axis=1).mean() > 0.9


def test_the_folder_of_a_run_on_arrays_is_complete() -> None:
    names = np.array(["cat", "dog", "eel"])
    found = train(data=(IMAGES, names[LABELS]), test_data=(TEST[0], names[TEST[1]]), output_dir="run")
    done = invoke("eval", "run", "--device", "cpu")
    assert f"accuracy {found.test._asdict()['accuracy']:.2%} of 30 examples" in done.output
    loaded = ad.load("run")
    assert loaded.classes == ("cat", "dog", "eel")
    for x, y in zip(loaded.predict(IMAGES), found.model.predict(IMAGES), strict=True):
        np.testing.assert_array_equal(x, y)


def test_nothing_is_written_without_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    train(epochs=1)
    assert os.listdir() == []
    assert capfd.readouterr() == ("", "")
    train(epochs=2, progress=True)
    assert [line.split(":")[0] for line in capfd.readouterr().err.splitlines()] == ["epoch 1/2", "epoch 2/2"]


class StopAt:
    """A callback that ends the training after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.seen = epoch, list[Metrics]()

    def on_epoch(self, metrics: Metrics) -> bool:
        self.seen.append(metrics)
        return metrics["epoch"] == self.epoch


def test_callbacks_see_the_metrics_and_end_the_training() -> None:
    stopping, logged = StopAt(2), list[float]()
    found = train(callbacks=[stopping, lambda metrics: logged.append(metrics["train_loss"])])
    assert (found.summary.ended, found.summary.epochs) == ("callback", 2)
    assert logged == found.history["train_loss"].tolist() == [row["train_loss"] for row in stopping.seen]


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_keeps_a_checkpoint_that_continues_to_the_same_model() -> None:
    def interrupt(metrics: Metrics) -> None:
        if metrics["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    expected = train()
    with pytest.raises(KeyboardInterrupt, match="continue with: adtrain train --resume run"):
        train(callbacks=[interrupt], output_dir="run")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    experiment, run, start, notes = training.resume(Path("run"))
    assert (start.checkpoint.progress.epochs_done, notes) == (2 + bool(start.checkpoint.progress.batches), [])
    result = training.run_in_folder(run, experiment, start=start)
    assert equal(result.state.params, expected.params)


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_without_a_folder_is_a_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step \d+ \(epoch \d\)$"):
        train(callbacks=[lambda metrics: os.kill(os.getpid(), signal.SIGINT)])
    assert os.listdir() == []


@pytest.mark.usefixtures("default_signals")
def test_a_second_ctrl_c_ends_at_once_and_the_folder_can_be_resumed() -> None:
    def twice(metrics: Metrics) -> None:
        if metrics["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[twice], output_dir="run")
    assert training.resume(Path("run")).start.checkpoint.progress.epochs_done == 1


def test_a_thread_can_train() -> None:
    found: list[TrainingResult] = []
    thread = threading.Thread(target=lambda: found.append(train(epochs=1)))
    thread.start()
    thread.join()
    assert found[0].summary.epochs == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"given": 3}, "train: config: found an object of type int, expected a path or name, a Config or a dict"),
        ({"given": "mpl"}, "mpl: neither a file nor a packaged config; did you mean mlp?"),
        ({"given": VALUES | {"los": 1}}, "config: los: unknown key; did you mean loss?"),
        ({"data": IMAGES}, "data: found a NumPy array, expected a pair of arrays (images, labels)"),
        ({"data": "x.csv"}, "data: found a str, expected a pair of arrays (images, labels); the config names files"),
        ({"data": (IMAGES,)}, "data: found a tuple of 1, expected a pair of arrays (images, labels)"),
        ({"data": (IMAGES, LABELS[:9])}, "data: labels: found 9 labels, expected 90, one for each image"),
        ({"data": (IMAGES, LABELS / 2)}, "config: loss: found cross_entropy for the numbers of y_train, expected mse"),
        ({"data": ([[1, 2], [3]], [0, 1])}, "data: images: found no array of numbers (nested lists have differ"),
        ({"data": ([object()], [0])}, "data: images: found elements of type object, expected numbers"),
        ({"data": (IMAGES[:, :5], LABELS)}, "config: model.input: found [36], expected [1, 5, 6]"),
        ({"given": VALUES | EMBEDDING}, "config: data.normalize: found true, expected false: an embedding takes"),
        (
            {
                "data": (IMAGES.astype(np.uint8), LABELS),
                "given": VALUES | EMBEDDING,
                "overrides": {"data.normalize": False},
            },
            "data: data.path: found integers from 0 to 255, which are read as pixels",
        ),
        ({"data": (IMAGES * np.float32("nan"), LABELS)}, "data: found a number that is not finite in row 0"),
        ({"data": None, "test_data": TEST}, "train: found test_data without data, expected both or neither"),
        ({"overrides": {"data.path": "x"}}, "train: found data and the override data.path, expected one of them"),
        ({"overrides": {"data.label": "y"}}, "overrides: data.label: an option of a CSV file, found arrays"),
        ({"epochs": "3"}, "epochs: training.epochs: found '3', expected an integer in [1, 2^31)"),
        ({"overrides": ["seed=3"]}, "train: overrides: found an object of type list, expected a dict"),
        ({"output_dir": ""}, "train: output_dir: found an empty path"),
        ({"output_dir": 3}, "train: output_dir: found an object of type int, expected a path"),
        ({"callbacks": len}, "train: callbacks: found an object of type builtin_function_or_method, expected a list"),
        ({"callbacks": [3]}, "train: found a callback of type int, expected a function, or an object with on_epoch"),
        ({"callbacks": [len]}, "train: a callback returned an int, expected True to end the training, or None"),
        ({"device": "tpu"}, "device 'tpu' is not available; this version runs on: cpu, gpu"),
    ],
)
def test_a_wrong_argument_is_one_line_and_writes_nothing(arguments: dict[str, Any], message: str) -> None:
    folder = {} if "callbacks" in arguments else {"output_dir": "run"}
    with pytest.raises(ad.AdtrainError) as error:
        train(**{**folder, **arguments})
    (line,) = error.value.lines
    assert line.startswith(message)
    assert os.listdir() == []


def test_a_folder_that_holds_a_run_is_refused() -> None:
    train(output_dir="run", epochs=1)
    with pytest.raises(
        ad.AdtrainError, match=r"run: already holds a run \(.*\); give another output folder, or remove"
    ):
        train(output_dir="run", epochs=1)


def test_a_result_shows_itself_in_a_notebook_with_all_text_escaped() -> None:
    page = train(output_dir="<b>\u202e", epochs=2)._repr_html_()
    assert "<dd>&lt;b&gt;\\u202e</dd>" in page
    assert page.count("<tr>") == 3
    page = train(epochs=21)._repr_html_()
    assert "the last 20 of 21 epochs" in page
    assert page.count("<tr>") == 21


def test_a_result_draws_the_curves_of_its_scores_in_a_notebook() -> None:
    page = train(epochs=3)._repr_html_()
    encoded = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)', page)
    pictures = [ElementTree.fromstring(b64decode(x)) for x in encoded]
    assert [picture.get("aria-label") for picture in pictures] == ["loss over epochs", "accuracy over epochs"]
    assert all(len(picture.findall(".//{*}circle")) >= 3 for picture in pictures)


def test_a_history_becomes_a_data_frame_where_pandas_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History.of([{"epoch": 1, "train_loss": 0.5}, {"epoch": 2, "train_loss": 0.25}])
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert {name: x.tolist() for name, x in history.to_pandas().items()} == {"epoch": [1, 2], "train_loss": [0.5, 0.25]}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ad.AdtrainError, match=r"to_pandas needs pandas; pip install 'adtrain\[pandas\]'"):
        history.to_pandas()


@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: x[:, None], lambda x: x.reshape(len(x), 36), np.ndarray.tolist]
)
def test_predictions_take_the_images_in_every_form(form: Any) -> None:
    model = train().model
    found = model.predict(form(TEST[0]))
    assert found.probabilities.shape == (30, 3)
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, rtol=1e-5)
    assert found.classes.tolist() == found.probabilities.argmax(axis=1).tolist() == list(map(int, found.labels))
    assert (found.classes == TEST[1]).mean() > 0.9


def test_rows_of_numbers_are_classified_and_labels_are_those_of_the_data() -> None:
    rows = np.random.default_rng(0).normal(size=(90, 4)) + 4 * np.eye(3, 4)[LABELS]
    values = VALUES | {"model": {"input": [4], "layers": [{"linear": 3}]}}
    model = train(values, (rows, 10 * LABELS + 5), epochs=20).model
    found = model.predict(rows)
    assert (found.labels == 10 * LABELS + 5).mean() > 0.9
    assert model.predict(np.ones((2, 4), np.uint8)).probabilities.shape == (2, 3)
    with pytest.raises(ad.AdtrainError, match="predict: found a number that is not finite in row 1"):
        model.predict([[1.0] * 4, [np.inf] * 4])


TYPED: dict[str, Any] = {
    "int64": 10 * LABELS - 5,
    "int8": LABELS.astype(np.int8),
    "uint8": LABELS.astype(np.uint8),
    "str": np.array(["no", "yes", "2"])[LABELS],
    "object": np.array(["no", "yes", "2"], object)[LABELS],
    "list": LABELS.tolist(),
    "bool": LABELS > 0,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.exhaustive if i % 2 else ()) for i, x in enumerate(TYPED)]
)
def test_predicted_labels_have_the_type_of_those_of_the_training_also_after_loading(tmp_path: Path, kind: str) -> None:
    labels = TYPED[kind]
    outputs = {"model.layers": [{"linear": 16}, "relu", {"linear": len(set(labels))}]}
    found = train(VALUES, (IMAGES, labels), epochs=9, output_dir=tmp_path / "run", overrides=outputs)
    for model in (found.model, ad.load(tmp_path / "run")):
        predicted = model.predict(IMAGES).labels
        assert (predicted == np.asarray(labels)).mean() > 0.9
        assert predicted.dtype.kind == {"str": "U", "object": "U", "bool": "b"}.get(kind, "i")


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["3", "-7"], [3, -7]),
        (["True", "False"], [True, False]),
        (["01", "02"], ["01", "02"]),
    ],
)
def test_predicted_labels_of_a_table_have_the_type_that_all_of_them_are_written_in(
    tmp_path: Path, texts: list[str], values: list[Any]
) -> None:
    rows = [f"{(-1) ** i + 0.01 * i},{texts[i % 2]}" for i in range(40)]
    (tmp_path / "t.csv").write_text("a,label\n" + "\n".join(rows) + "\n")
    config = {
        "data": {"path": str(tmp_path / "t.csv"), "test": 0.2, "batch_size": 8},
        "model": {"layers": [{"linear": 2}]},
    }
    found = train(VALUES | config | {"training": {"epochs": 30}}, None, output_dir=tmp_path / "run")
    for model in (found.model, ad.load(tmp_path / "run")):
        predicted = model.predict({"a": [1.0, -1.0]}).labels
        assert predicted.tolist() == values
        assert {type(x) for x in predicted.tolist()} == {type(values[0])}


def test_a_model_file_that_does_not_say_the_type_of_its_labels_predicts_texts(tmp_path: Path) -> None:
    train(VALUES, (IMAGES, LABELS), output_dir=tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    with safe_open(path, "numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (key,) = (key for key, text in metadata.items() if '"class_type"' in text)
    record = json.loads(metadata[key])
    del record["class_type"]
    save_file(arrays, path, metadata | {key: json.dumps(record)})
    assert ad.load(tmp_path / "run").predict(IMAGES).labels.dtype.kind == "U"


def test_an_output_without_a_class_has_its_number_as_label() -> None:
    assert class_values(("no", "yes"), "str", 3).tolist() == ["no", "yes", "2"]
    assert class_values(("-1", "1"), "int", 3).tolist() == [-1, 1, 2]
    assert class_values(("False", "True"), "bool", 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            IMAGES[:, :5],
            r"found images of shape \(90, 5, 6\), expected N images of shape \(1, 6, 6\) or rows of 36 numb",
        ),
        (IMAGES[0], r"found images of shape \(6, 6\), expected"),
        (IMAGES[:0], r"found no images \(shape \(0, 6, 6\)\), expected"),
        (IMAGES / 255, "found float64 numbers, expected integers from 0 to 255, as the model was trained on"),
        (3, r"found the shape \(\), expected"),
        (["a.png"], "found elements of type <U5, expected integers or floats"),
    ],
)
def test_images_that_do_not_fit_the_model_are_refused(images: Any, message: str) -> None:
    with pytest.raises(ad.AdtrainError, match=f"^predict: {message}"):
        train(epochs=1).model.predict(images)


def test_a_model_can_be_pickled() -> None:
    model = train().model
    copy = pickle.loads(pickle.dumps(model))
    assert copy.config == model.config
    np.testing.assert_array_equal(copy.predict(IMAGES).probabilities, model.predict(IMAGES).probabilities)


ROW_CONFIG: dict[str, Any] = {
    "name": "rows",
    "data": {"label": "kind", "dates": ["sold"], "missing": "mean", "decimal": ",", "delimiter": ";", "batch_size": 8},
    "model": {"layers": [{"linear": 8}, "relu", {"linear": 2}]},
    "loss": "cross_entropy",
    "optimizer": {"adam": {"lr": 0.01}},
    "training": {"epochs": 2},
}


def table_of(count: int) -> dict[str, list[Any]]:
    return {
        "size": [None if i % 7 == 0 else i / 8 for i in range(count)],
        "town": [["Ulm", "Bonn"][i % 2] for i in range(count)],
        "sold": [float("nan") if i % 9 == 0 else date(2010 + i % 20, 1 + i % 12, 10) for i in range(count)],
        "open": [i % 3 == 0 for i in range(count)],
        "kind": ["ab"[i % 3 == 0] for i in range(count)],
    }


def test_a_table_in_memory_is_trained_on_as_its_file(folder: Path) -> None:
    table = table_of(60)
    found = train(ROW_CONFIG, table, output_dir="run")
    as_file = ROW_CONFIG | {"data": ROW_CONFIG["data"] | {"path": "run/rows.csv", "test": 0.2}}
    assert equal(train(as_file, None).params, found.params)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    assert equal(train(ROW_CONFIG, rows).params, found.params)
    assert list(found.model.predict(rows[:2]).labels) == list(found.model.predict(table_of(2)).labels)
    assert invoke("eval", "run", "--device", "cpu").stdout.startswith("test    loss ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_data": table_of(9)}, "found test_data with a table, expected none: data.test holds out rows of it"),
        ({"data": {"kind": [], "size": []}}, "rows: found no rows, expected one for each example"),
        ({"data": table_of(9) | {"size": np.ones((9, 2))}}, "rows:0: found '[1. 1.]' in column 0 (size), expected a"),
        ({"data": {"kind": ["a"], " kind": ["b"]}}, "rows: found two columns named kind, expected different names"),
        ({"overrides": {"data.label": "sort"}}, "found 'sort', which is not a column of rows: the columns are size, "),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ad.AdtrainError) as raised:
        train(ROW_CONFIG, **{"data": table_of(30), **options})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_model_is_evaluated_on_arrays_tables_and_files(folder: Path) -> None:
    found = train(test_data=TEST, output_dir="run")
    assert found.model.evaluate(TEST) == found.test
    assert found.model.evaluate() == found.test
    assert ad.load("run").evaluate(TEST) == found.test
    of_one = TEST[1] == 2
    share = np.mean(found.model.predict(TEST[0][of_one]).classes == 2)
    assert found.model.evaluate((TEST[0][of_one], TEST[1][of_one]))._asdict()["accuracy"] == share
    with pytest.raises(ad.AdtrainError, match="classes that the run was not trained on, such as 5"):
        found.model.evaluate((TEST[0], TEST[1] + 5))
    table = train(ROW_CONFIG, table_of(60), output_dir="rows").model
    assert table.evaluate(table_of(60)) == table.evaluate("rows/rows.csv")
    assert table.evaluate(table_of(9))._asdict()["accuracy"] <= 1


@pytest.mark.parametrize("label", ["open", 3])
def test_labels_of_a_table_that_are_booleans_are_predicted_as_booleans(label: str | int, tmp_path: Path) -> None:
    config = ROW_CONFIG | {"data": ROW_CONFIG["data"] | {"label": label}}
    found = train(config, table_of(60), output_dir=tmp_path / "run")
    for model in (found.model, ad.load(tmp_path / "run")):
        assert model.classes == ("False", "True")
        assert model.predict(table_of(9)).labels.dtype == bool
        assert model.evaluate(table_of(60)).loss > 0


@pytest.mark.parametrize(
    "labels", [["1", "0"], ["10", "9"], ["True", "False"], [2.0, 1.0], [2, 1], [True, False], ["b", "a"]], ids=str
)
def test_labels_of_a_table_in_memory_are_predicted_in_their_type(labels: list[Any], folder: Path) -> None:
    table = {"size": [float(i % 2) for i in range(40)], "label": [labels[i % 2] for i in range(40)]}
    config = {**ROW_CONFIG, "data": {"test": 0.2, "batch_size": 8}, "training": {"epochs": 20}}
    found = train(config, table, output_dir="run", overrides={"optimizer.adam.lr": 0.1})
    invoke("train", "--resume", "run", "--epochs", "21", "-q")  # the file of the run does not say the type
    for model in (found.model, ad.load("run")):
        predicted = model.predict({"size": [0.0, 1.0]}).labels.tolist()
        assert predicted == labels
        assert {type(x) for x in predicted} == {type(labels[0])}


def test_labels_of_several_types_are_predicted_as_texts() -> None:
    table = {"size": [0.0, 1.0] * 20, "label": [True, 1] * 20}
    config = {**ROW_CONFIG, "data": {"test": 0.2, "batch_size": 8}}
    assert train(config, table).model.predict({"size": [0.0]}).labels.dtype.kind == "U"


def test_a_data_frame_is_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    table = table_of(60)
    frame = pandas.DataFrame(table)
    frame["sold"] = pandas.to_datetime(frame["sold"])
    assert equal(train(ROW_CONFIG, frame).params, train(ROW_CONFIG, table).params)
