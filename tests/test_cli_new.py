"""`adtrain new` proposes configs that train as they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import command
from npz_files import write_npz
from PIL import Image
from report_runs import one_line
from test_train_tables import write_table
from training_runs import write_data

import adtrain
from adtrain import config
from adtrain.cli import new

pytestmark = pytest.mark.unfused

RNG = np.random.default_rng(0)


def write_images(folder: Path) -> Path:
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for size in range(20, 26):
            pixels = RNG.integers(0, 256, (size, 30), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{size}.png")
    return folder


def write_houses(path: Path) -> Path:
    rows = [f"{i},{RNG.normal():.3f},{'12x'[i % 3]},{RNG.normal():.2f}" for i in range(60)]
    path.write_text("\n".join(["id,area,zone,price", *rows]) + "\n")
    return path


def write_passengers(path: Path) -> Path:
    """Each name and each cabin but A occurs once, so the test part has cabins that the training part lacks."""
    rows = [f"name {i},{f'cabin {i}' if i < 20 else 'A'},{i},{'xy'[i % 2]}" for i in range(60)]
    path.write_text("\n".join(["name,cabin,age,label", *rows]) + "\n")
    return path


KINDS: dict[str, tuple[Any, dict[str, Any], list[int], str]] = {
    "table of classes": (
        lambda folder: write_table(folder / "trips.csv"),
        {"label": "kind", "missing": "mean", "drop": ["id"], "test": 0.2},
        [6],
        "cross_entropy",
    ),
    "table of numbers": (
        lambda folder: write_houses(folder / "houses.csv"),
        {"target": "price", "normalize_targets": True, "drop": ["id"], "categories": ["zone"]},
        [4],
        "mse",
    ),
    "table of names and rare categories": (
        lambda folder: write_passengers(folder / "passengers.csv"),
        {"label": "label", "drop": ["name"]},
        [20],
        "cross_entropy",
    ),
    "labels of 0 and 1": (
        lambda folder: write_npz(
            folder / "x.npz", {"X": RNG.normal(size=(50, 4)), "y": np.eye(2, dtype=int)[[0, 1] * 25]}
        ),
        {"test": 0.2},
        [4],
        "binary_cross_entropy_with_logits",
    ),
    "images of several sizes": (
        lambda folder: write_images(folder / "images"),
        {"image_size": [23, 30]},
        [1, 23, 30],
        "cross_entropy",
    ),
    "IDX files": (lambda folder: write_data(folder / "data"), {"validation": 0.1}, [36], "cross_entropy"),
    "a named data set": (lambda folder: "mnist", {"dataset": "mnist", "batch_size": 128}, [1, 28, 28], "cross_entropy"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_proposed_for(tmp_path: Path, kind: str) -> None:
    """`new` itself prepares the training, so that a config that does not fit the data is an error."""
    make, expected, shape, loss = KINDS[kind]
    found = yaml.safe_load(command("new", make(tmp_path)).stdout)
    assert expected.items() <= found["data"].items()
    assert (found["model"]["input"], found["loss"]) == (shape, loss)


def test_the_config_of_a_table_trains_and_learns(tmp_path: Path) -> None:
    cfg = tmp_path / "trips.yaml"
    cfg.write_text(command("new", write_table(tmp_path / "trips.csv"), "--set", "drop=[id]").stdout)
    shown = command("train", cfg, "--device", "cpu", "--output-dir", tmp_path / "run").stdout
    assert float(shown.split("test ")[1].split("accuracy ")[1].split("%")[0]) > 80


@pytest.mark.parametrize("rows", [60, 700, 10_000, 19_000])
def test_a_table_is_trained_for_2000_steps_or_200_epochs(tmp_path: Path, rows: int) -> None:
    table = tmp_path / "x.csv"
    table.write_text("a,y\n" + "".join(f"{i % 7},{i / 8}\n" for i in range(rows)))
    found = yaml.safe_load(command("new", table).stdout)
    epochs, steps = found["training"]["epochs"], math.ceil(0.8 * 0.9 * rows / found["data"]["batch_size"])
    assert epochs == new.MOST_EPOCHS or epochs * steps >= new.LEAST_STEPS
    assert (epochs - 10) * steps < new.LEAST_STEPS or epochs == 20


def test_settings_replace_what_is_inferred(tmp_path: Path) -> None:
    """Keys can have the prefix `data.`, with which messages name them."""
    table, changes = write_houses(tmp_path / "houses.csv"), ("data.target=area", "drop=[id, zone]", "validation=0.3")
    found = yaml.safe_load(command("new", table, *(word for change in changes for word in ("--set", change))).stdout)
    assert (found["data"]["target"], found["data"]["drop"]) == ("area", ["id", "zone"])
    assert (found["data"]["validation"], found["model"]["input"]) == (0.3, [1])


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1\n")
    assert one_line(command("new", tmp_path / "x.csv", expect=2)) == (
        f"{tmp_path}/x.csv:2: found 1 values, expected 2 as in the first line"
    )
    assert one_line(command("new", tmp_path / "none.csv", expect=2)).startswith(f"{tmp_path}/none.csv: found nothing")
    (tmp_path / "y.csv").write_text("a;b\n" + "".join(f"{i + 1},500;{i}\n" for i in range(40)))
    error = one_line(command("new", tmp_path / "y.csv", "--set", "delimiter=;", expect=2))
    reads = 'data.decimal: "," reads 1.234,5, and "." reads 1,234.5'
    assert error.startswith(f"{tmp_path}/y.csv:2: found '1,500' in column 0 (a), expected a finite number")
    assert reads in error
    for key in ("label", "target"):
        error = one_line(command("new", tmp_path / "y.csv", "--set", "delimiter=;", "--set", f"{key}=z", expect=2))
        assert error.startswith(f"data.{key}: found 'z', which is not a column of {tmp_path}/y.csv")
    assert "data.labl: unknown key" in one_line(command("new", tmp_path / "x.csv", "--set", "labl=b", expect=2))


def row(cells: str) -> str:
    return f"{cells},{RNG.normal():.3f},{RNG.choice(['a', 'b'])}"


GUESSES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "an index without a name": ([",x,label", *(row(str(i)) for i in range(60))], {"drop": [0]}),
    "an index that pandas has read": (["Unnamed: 0,x,label", *(row(f"{i}") for i in range(60))],
                                      {"drop": ["Unnamed: 0"]}),
    "numbers of rows without a header": ([row(str(i)) for i in range(60)], {"drop": [0], "label": 2}),
    "a number for each customer": (
        ["customer_id,x,label", *(row(str(900 - 7 * i)) for i in range(60))],
        {"drop": ["customer_id"]},
    ),
    "names of which a few repeat": (["who,x,label", *(row(f"n{max(i, 9)}") for i in range(200))], {"drop": ["who"]}),
    "dates": (["day,x,label", *(row(f"2024-0{i % 9 + 1}-05") for i in range(60))], {"dates": ["day"]}),
    "dates with empty cells": (
        ["day,x,label", *(row(f"{i % 28 + 1}.3.2024" if i else "") for i in range(60))],
        {"dates": ["day"], "missing": "mean"},
    ),
    "dates of another format": (
        ["a,b,x,label", *(row(f"{i % 28 + 1:02}/03/2024 08:{i:02},04/05/2024 11:00") for i in range(60))],
        {"dates": ["a", "b"], "date_format": "%d/%m/%Y %H:%M"},
    ),
    "ambiguous dates": (["day,x,label", *(row(f"0{i % 9 + 1}/03/2024") for i in range(60))], {"drop": ["day"]}),
    "decimal commas": (
        ["a;b;c;label", *(f"{i},5;{i % 9 + 1}.{i + 100},25;{i % 4};{'ab'[i % 2]}" for i in range(60))],
        {"delimiter": ";", "decimal": ","},
    ),
    "separators of thousands": (
        ["a;b;label", *(f"{i % 9 + 1},{i + 100}.5;1,{i + 100};{'ab'[i % 3 == 0]}" for i in range(60))],
        {"delimiter": ";", "decimal": "."},
    ),
    "prices and shares": (
        ["a,b,price", *(f'{i % 9 + 0.5}%,€ {i * 7},"${i + 1},{i + 100}.50"' for i in range(60))],
        {"decimal": ".", "target": "price"},
    ),
    "tabs": (["n\tx\tlabel", *(f"{i},{i % 3}\t{i}\t{'ab'[i % 2]}" for i in range(60))],
             {"delimiter": "\t", "decimal": ","}),
    "a column without values": (["e,x,label", *(row("NA" if i % 2 else "") for i in range(60))], {"drop": ["e"]}),
    "a marker among numbers": (["n,x,label", *(row("?" if i % 9 == 4 else f"{i * i}") for i in range(60))],
                               {"missing": "mean"}),
    "a text among many numbers": (["n,x,label", *(row("k.A." if i % 9 == 4 else f"{i * i}") for i in range(60))],
                                  {"missing": "mean"}),
    "dates in three notations": (
        ["day,x,label", *(row(("2024-03-0{}", "0{}.03.2024", "2024030{}")[i % 3].format(i % 7 + 1)) for i in range(9))],
        {"dates": ["day"]},
    ),
    "rows without a label": (["x,w,label", *(f"{i / 7},{i},{['a', 'b', ''][i % 3]}" for i in range(60))],
                             {"missing": "drop"}),
    "rows without a target": (["x,w,price", *(f"{i / 7},{i * i},{['', i / 3][i % 2]}" for i in range(60))],
                              {"missing": "drop", "target": "price"}),
    "a text among numbers": (["n,x,label", *(row("k.A." if i % 9 == 4 else f"{i * i % 11}") for i in range(60))],
                             {"categories": ["n"]}),
    "postal codes": (["zip,n,x,label", *(row(f"{i % 9 * 1234:05},{i * 13}") for i in range(60))],
                     {"categories": ["zip"]}),
    "a code for each customer": (["who,x,label", *(row(f"{977 * i:05}") for i in range(60))], {"drop": ["who"]}),
    "years as names": (["2019,2020,label", *(row(f"{i / 7}") for i in range(60))], {"header": True, "label": "label"}),
    "names that look like numbers": (["x,w,1e3", *(row(f"{i / 7}") for i in range(60))], {"label": "1e3"}),
    "two columns of one name": (["w,w,label", *(row(f"{i / 7}") for i in range(60))], {"drop": [0]}),
    "four rows": (["x,w,label", "1,2,a", "2,2,b", "1,3,a", "0,2,b"], {"test": 0.2}),
    "two rows": (["x,w,label", "1,2,a", "2,2,b"], {"test": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", GUESSES)
def test_proposal_for_a_table_with(tmp_path: Path, kind: str) -> None:
    lines, expected = GUESSES[kind]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    given = ["--set", "drop=[0]"] if kind == "two columns of one name" else []
    text = command("new", tmp_path / "x.csv", *given).stdout
    (tmp_path / "x.yaml").write_text(text)
    found = config.load(tmp_path / "x.yaml").data.model_dump(mode="json", exclude_unset=True)
    assert {key: found.get(key) for key in expected} == expected
    assert set(found) & {"drop", "categories", "missing", "dates", "date_format", "decimal", "delimiter"} <= set(
        expected
    )
    assert ("validation" in yaml.safe_load(text)["data"]) is (len(lines) > 5)
    assert ("fills empty cells, which include '?' in column 0 (n), see missing_values" in text) is (
        kind == "a marker among numbers"
    )
    assert (
        "columns of codes, or of numbers and texts, such as 'k.A.' in column 0 (n), see missing_values" in text
    ) is (kind == "a text among numbers")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x,label", *(f"{i},a" for i in range(40))], "found one class, a, in all examples; expected at least two"),
        (["x,label"], "x.csv: found no rows, expected one per example"),
        (["x,label", "1,a"], "found 1 example, expected two or more: one of them for the test"),
        (
            ["x,label", *(f"{i},{['a', 'nan'][i % 2]}" for i in range(40))],
            "found one class, a, in all examples; expected at least two",
        ),
        (
            ["x,who", *(f"{i},n{i}" for i in range(40))],
            "data.label: found 40 different texts in column 1 (who), expected",
        ),
        (
            ["x,part", "0,0", *(f"{i},{i}%" for i in range(1, 40))],
            "data.label: found '1%' in column 1 (part), expected a finite number without the sign %",
        ),
        (
            ["part,label", "0,a", *(f"{i}%,{'ab'[i % 2]}" for i in range(1, 40))],
            "x.csv:3: found '1%' in column 0 (part), expected",
        ),
        (["y,label,label", *(f"{i},a,a" for i in range(9))], "x.csv:1: found two columns named label, 1 and 2, expect"),
    ],
)
def test_a_table_without_anything_to_learn_is_an_error_with_its_place(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    assert message in one_line(command("new", tmp_path / "x.csv", expect=2))


def test_a_warning_about_the_data_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the path is relative, and the data are read for the proposal and for its check."""
    rows = [f"{i},{3 * i + 1}" for i in range(60)]
    (tmp_path / "leaky.csv").write_text("\n".join(["area,price", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    command("new", "leaky.csv")
    (message,) = caplog.messages
    assert "column area leaks what is to be predicted" in message


@pytest.mark.parametrize("positives", [1, 12])
def test_unequal_classes_are_weighted_and_ranked_by_f1(tmp_path: Path, positives: int) -> None:
    rows = [f"{RNG.normal():.3f},{i % 7},{'yes' if i < positives else 'no'}" for i in range(120)]
    (tmp_path / "rare.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    text = command("new", tmp_path / "rare.csv").stdout
    found = yaml.safe_load(text)
    assert found["loss"] == {"cross_entropy": {"weight": "balanced"}}
    assert found["training"]["best_by"] == "validation_f1"
    (tmp_path / "rare.yaml").write_text(text)
    command("train", tmp_path / "rare.yaml", "--epochs", "2", "--device", "cpu", "--output-dir", tmp_path / "run", "-q")
    command("summary", tmp_path / "rare.yaml")
    command("gradcheck", tmp_path / "rare.yaml")
    command("graph", tmp_path / "rare.yaml", "--program", "-o", tmp_path / "step.svg")


@pytest.mark.parametrize(
    ("usual", "rare", "proposed"),
    [((32, 32), (48, 80), [32, 32]), ((32, 32), (8, 8), [32, 32]), ((90, 200), (9, 9), [64, 64])],
)
def test_photos_get_the_median_of_their_sizes(
    tmp_path: Path, usual: tuple[int, int], rare: tuple[int, int], proposed: list[int]
) -> None:
    """Unless it is large."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(8):
            Image.fromarray(RNG.integers(0, 256, rare if i < 2 else usual, dtype=np.uint8)).save(
                tmp_path / name / f"{i}.png"
            )
    assert yaml.safe_load(command("new", tmp_path).stdout)["data"]["image_size"] == proposed


def test_extreme_targets_do_not_spoil_what_is_learnt_from_the_others(tmp_path: Path) -> None:
    """Among 800 prices every hundredth is wrong by a factor of 10 to 100."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 3))
    usual = 300 + x @ [50, -30, 20] + rng.normal(0, 5, 800)
    extreme = np.where(np.arange(800) % 100 == 7, usual * rng.uniform(10, 100, 800), usual)
    proposals = []
    for name, prices in ("usual", usual), ("extreme", extreme):
        table = tmp_path / f"{name}.csv"
        np.savetxt(table, np.c_[x, prices], fmt="%.6g", delimiter=",", header="a,b,c,price", comments="")
        shown = command("new", table).stdout
        proposals.append(yaml.safe_load(shown))
    assert "without the extreme targets, of 8 examples\n" in shown
    first, second = proposals
    assert (first["loss"], first["data"]["normalize_targets"]) == ("mse", True)
    assert (second["loss"], second["data"]["normalize_targets"]) == ("huber", "robust")
    assert second["training"]["best_by"] == "validation_mae"
    # In 200 steps, which are a tenth of those that are proposed.
    given = {**second, "training": {**second["training"], "epochs": 20}, "optimizer": {"adam": {"lr": 0.01}}}
    model = adtrain.train(given).model
    names = {name: x[:, i].tolist() for i, name in enumerate("abc")}
    errors = model.predict_values(names)[:, 0] - usual
    assert 1 - np.square(errors).sum() / np.square(usual - usual.mean()).sum() > 0.95
    assert (model.predict_values(names) > 0).all()


def test_images_that_cannot_be_read_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_images(tmp_path / "images")
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    text = command("new", folder).stdout
    assert yaml.safe_load(text)["data"]["skip_broken"] is True
    assert "broken.jpg" in caplog.text
