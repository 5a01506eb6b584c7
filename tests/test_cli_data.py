from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from npz_files import parts, write_npz
from PIL import Image

from adtrain import config
from adtrain.data import catalogue, images

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> catalogue.Entry:
    """MNIST with only its two small files, so that the tests do not hash the large ones."""
    entry = catalogue.CATALOGUE["mnist"]
    small = replace(entry, sha256={name: digest for name, digest in entry.sha256.items() if "labels" in name})
    monkeypatch.setitem(catalogue.CATALOGUE, "mnist", small)
    return small


def test_list_names_every_data_set() -> None:
    shown, rows = invoke("data", "list"), json.loads(invoke("data", "list", "--json").stdout)
    assert [row["name"] for row in rows] == list(catalogue.CATALOGUE)
    assert all(row["name"] in shown.stdout and Path(row["folder"]).is_dir() == row["here"] for row in rows)
    assert "not here; fetch it: adtrain data fetch kmnist\n" in shown.stdout


def test_verify_passes_on_the_packaged_files(small_mnist: catalogue.Entry) -> None:
    result = invoke("data", "verify")
    assert result.exit_code == 0
    assert result.stdout.count(": ok\n") == 2
    found = json.loads(invoke("data", "verify", "mnist", "--json").stdout)
    assert found["passed"] is True
    assert {row["file"]: row["found"] for row in found["rows"]} == small_mnist.sha256


def test_verify_exits_1_on_a_mismatch(small_mnist: catalogue.Entry) -> None:
    name, digest = next(iter(small_mnist.sha256.items()))
    small_mnist.sha256[name] = "0" * 64
    result = invoke("data", "verify", "mnist")
    assert result.exit_code == 1
    assert f"mnist/{name}: FAILED: {digest}, expected SHA-256 {'0' * 64}\n" in result.stdout
    result = invoke("data", "verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False


def test_verify_of_an_unknown_data_set_is_a_usage_error() -> None:
    result = invoke("data", "verify", "minst")
    assert result.exit_code == 2
    assert result.stderr.startswith("adtrain: error: unknown data set 'minst'; known: mnist")


def test_devices_shows_the_cpu_and_why_there_is_no_gpu(without_gpu: None) -> None:
    shown, found = invoke("devices"), json.loads(invoke("devices", "--json").stdout)
    assert found["gpu"] is None
    assert "pip install 'adtrain[gpu]'" in found["gpu_reason"]
    assert found["cpu"]["usable_cores"] >= 1
    for key in ("name", "blas", "numpy", "python"):
        assert found["cpu"][key]
        assert found["cpu"][key] in shown.stdout


TABLE = "length,width,species\n" + "".join(f"{i},{-i},{'ab'[i % 3 == 0]}\n" for i in range(9))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "flowers.csv"
    path.write_text(TABLE)
    return path


def test_inspect_counts_classes_and_columns(table: Path) -> None:
    shown = invoke("data", "inspect", str(table), "--set", "label=species")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines() == [
        "flowers: 9 training and 0 test examples",
        "each 2 x 1 x 1 float32",
        "",
        "class  training  share  test",
        "a             6  66.7%     0",
        "b             3  33.3%     0",
        "",
        "channel  mean  deviation  least  greatest",
        "length      4      2.582      0         8",
        "width      -4      2.582     -8         0",
    ]
    parted = invoke("data", "inspect", str(table), "--set", "label=species", "--set", "test=0.3", "--json")
    found = json.loads(parted.stdout)
    assert (found["train"], found["test"], found["scale"], found["skipped"]) == (6, 3, 1.0, [])
    assert found["classes"] == [
        {"name": "a", "train": 4, "validation": 0, "test": 2},
        {"name": "b", "train": 2, "validation": 0, "test": 1},
    ]


def test_inspect_of_a_config_is_that_of_its_data(table: Path, tmp_path: Path) -> None:
    path = tmp_path / "flowers.yaml"
    path.write_text(invoke("new", str(table), "--set", "label=species").stdout)
    keys = config.load(path).data.model_dump(exclude_unset=True, include={"header", "missing", "test"})
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    shown = invoke("data", "inspect", str(table), "--set", "label=species", *settings)
    assert invoke("data", "inspect", str(path)).stdout == shown.stdout != ""
    changed = invoke("data", "inspect", str(path), "--set", "test=0.5")
    assert (changed.exit_code, changed.stdout == shown.stdout) == (0, False)
    refused = invoke("data", "inspect", str(CONFIGS / "poisson.yaml"))
    assert refused.exit_code == 2
    assert "found no files to inspect, expected path or dataset" in refused.stderr


def test_inspect_counts_images_of_a_validation_folder_apart_from_those_for_training(tmp_path: Path) -> None:
    for part, counts in {"train": (3, 1), "val": (1, 2), "test": (1, 1)}.items():
        for name, count in zip("ab", counts, strict=True):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (2, 2)).save(tmp_path / part / name / f"{i}.png")
    lines = invoke("data", "inspect", str(tmp_path)).stdout.splitlines()
    assert lines[0].endswith(": 4 training, 3 validation and 2 test examples")
    assert lines[3:6] == [
        "class  training  share  validation  test",
        "a             3  75.0%           1     1",
        "b             1  25.0%           2     1",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "data.label: missing, expected the name of the column of "),
        (["lable=species"], "--set data.lable: unknown key; did you mean label?"),
        (["label=species", "test=1.5"], "--set data.test: found 1.5, expected a number in [0, 1)"),
        (["label=species", "channels=1"], "data.channels: an option of an archive of images or a folder of images"),
    ],
)
def test_inspect_names_the_invalid_option(table: Path, settings: list[str], message: str) -> None:
    result = invoke("data", "inspect", str(table), *(part for setting in settings for part in ("--set", setting)))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"adtrain: error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_contact_sheet_shows_the_first_images_of_each_class(tmp_path: Path) -> None:
    pixels = np.zeros((30, 8, 8), np.uint8)
    pixels[1::2] = 200  # class 1 is grey, class 0 black
    path = write_npz(tmp_path / "x.npz", parts(pixels))
    assert invoke("data", "inspect", str(path), "--contact-sheet", str(tmp_path / "sheet.png")).exit_code == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        width = images.COLUMNS * (images.SMALLEST + images.GAP) + images.MARGIN
        pixels = np.asarray(sheet)[:, -width:]
    shades, counts = np.unique(pixels[..., 0], return_counts=True)
    area = images.COLUMNS * images.SMALLEST**2
    assert dict(zip(shades.tolist(), counts.tolist(), strict=True)).items() >= {0: area, 200: area}.items()
    assert invoke("data", "inspect", str(tmp_path / "none"), "--contact-sheet", "x.png").exit_code == 2


def test_a_contact_sheet_of_a_table_or_a_text_is_refused(table: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    result = invoke("data", "inspect", str(table), "--set", "label=species", "--contact-sheet", str(sheet))
    assert result.exit_code == 2
    assert "flowers: found examples of shape (2, 1, 1), expected images to show" in result.stderr
    (tmp_path / "book.txt").write_text("to be or not to be " * 10)
    result = invoke("data", "inspect", str(tmp_path / "book.txt"), "--contact-sheet", str(sheet))
    assert result.exit_code == 2
    assert "book: found examples of shape (1, 1, 128), expected images to show" in result.stderr
    assert not sheet.exists()


@pytest.mark.parametrize("rare", [0, 1, 9, 10])
def test_new_and_inspect_warn_of_a_class_with_fewer_than_10_examples(
    tmp_path: Path, rare: int, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "x.csv"
    table.write_text("a,label\n" + "".join(f"{i},{'r' if i < rare else 'bc'[i % 2]}\n" for i in range(60)))
    inspect = ("data", "inspect", table)
    for arguments, has_test in (("new", table), True), (inspect, False), ((*inspect, "--set", "test=0.2"), True):
        caplog.clear()
        assert invoke(*map(str, arguments)).exit_code == 0
        few = [message for message in caplog.messages if "few examples" in message]
        assert len(few) == (0 < rare < 10)
        assert all(f"class r ({rare}" in message for message in few)
        assert all(("in the test part" in message) == has_test for message in few)


def test_a_class_that_only_lacks_test_examples_is_not_said_to_have_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, classes in ("train", "bbrc"), ("test", "bbcc"):
        rows = "".join(f"{i},{classes[i % 4]}\n" for i in range(80))
        (tmp_path / f"{name}.csv").write_text(f"a,label\n{rows}")
    paths = f"test_path={tmp_path / 'test.csv'}", "label=label"
    assert (
        invoke("data", "inspect", str(tmp_path / "train.csv"), *(x for p in paths for x in ("--set", p))).exit_code == 0
    )
    (message,) = caplog.messages
    assert message.endswith("train: found no test examples of class r (20): it has no scores")


def test_new_and_inspect_name_equal_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also columns of categories, and columns that are equal with other numbers of digits.

    Columns that differ by a large constant, which is subtracted from each, are not equal.
    """
    table = tmp_path / "x.csv"
    rows = [f"{3 * i},{'rs'[i % 2]},{3 * i}.0,{10**9 + i},{2 * 10**9 + i},{'rs'[i % 2]},{'bc'[i % 3 == 0]}"
            for i in range(60)]  # fmt: skip
    table.write_text("\n".join(["a,city,again,d,e,town,label", *rows]) + "\n")
    for arguments in ("new", table), ("data", "inspect", table):
        caplog.clear()
        assert invoke(*map(str, arguments)).exit_code == 0
        (message,) = caplog.messages
        assert message.endswith("x: found equal columns: a = again, city = town; data.drop leaves columns out")


def test_inspect_names_the_columns_that_are_read_without_their_signs(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(
        "share,price,n,label\n" + "".join(f"{i}%,$ {i},{i},{'ab'[i % 2]}\n" for i in range(9))
    )
    shown = invoke("data", "inspect", str(tmp_path / "x.csv")).stdout
    assert "read without their signs: share (%), price ($)" in shown


def test_inspect_shows_the_statistics_of_targets(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("area,price\n50,1.5\n80,2.5\n20,0.5\n")
    arguments = ("data", "inspect", str(tmp_path / "prices.csv"), "--set", "target=price")
    found = json.loads(invoke(*arguments, "--json").stdout)
    assert found["classes"] == []
    assert found["targets"] == [
        {"name": "price", "mean": 1.5, "std": pytest.approx((2 / 3) ** 0.5), "min": 0.5, "max": 2.5}
    ]
    assert any(
        line.split() == ["price", "1.5", "0.8165", "0.5", "2.5"] for line in invoke(*arguments).stdout.splitlines()
    )
