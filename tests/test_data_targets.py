"""Numbers to predict as labels: columns of CSV files and arrays of NPZ files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtrain import data
from adtrain.data import DataError, DataOptionError, Options
from adtrain.data.statistics import target_statistics

TABLE = "area,price,rooms\n50,1.25,2\n80,-3e2,3\n20,7,1\n"

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def load(folder: Path, content: str | dict[str, np.ndarray], integers: bool = False, **options: object) -> data.DataSet:
    path = folder / ("x.csv" if isinstance(content, str) else "x.npz")
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        np.savez(path, **content)  # type: ignore[arg-type]
    return data.load(path=path, options=Options(**options), need_test=False, numbers=integers)  # type: ignore[arg-type]


def test_target_columns_are_read_as_numbers_in_the_given_order(folder: Path) -> None:
    one = load(folder, TABLE, target="price")
    assert (one.classes, one.targets, one.features) == ((), ("price",), ("area", "rooms"))
    np.testing.assert_array_equal(one.train.labels, [[1.25], [-300], [7]])
    np.testing.assert_array_equal(np.asarray(one.train.images)[:, :, 0, 0], [[50, 2], [80, 3], [20, 1]])
    two = load(folder, TABLE, target=("rooms", 0))
    assert (two.targets, two.features) == (("rooms", "area"), ("price",))
    np.testing.assert_array_equal(two.train.labels, [[2, 50], [3, 80], [1, 20]])


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_targets_keep_the_precision_of_float64(folder: Path, rows: list[tuple[float, float]]) -> None:
    values = [(x, y + y * 2**-40) for x, y in rows]
    found = load(folder, "".join(f"{x!r},{y!r}\n" for x, y in values), target=1, header=False)
    np.testing.assert_array_equal(found.train.labels[:, 0], [y for _, y in values])


@pytest.mark.parametrize("pair", [("no", "yes"), ("No", "YES"), ("False", "true")])
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=2000))
@settings(max_examples=10)
def test_targets_of_yes_and_no_are_those_of_1_and_0(
    folder: Path, pair: tuple[str, str], rows: list[tuple[bool, bool]]
) -> None:
    found = load(folder, "a,x,y\n" + "".join(f"1,{pair[x]},{int(y)}\n" for x, y in rows), target=("x", "y"))
    np.testing.assert_array_equal(found.train.labels, rows)


def test_float_arrays_and_several_columns_of_an_npz_file_are_targets(folder: Path) -> None:
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    one = load(folder, {"x_train": x, "y_train": np.array([0.5, 1, 2, 3])})
    assert (one.targets, one.train.labels.tolist()) == (("y_train",), [[0.5], [1], [2], [3]])
    two = load(folder, {"x_train": x, "y_train": np.array([[0, 1], [1, 1], [0, 0], [1, 0]])})
    assert two.targets == ("y_train[0]", "y_train[1]")
    assert two.train.labels.dtype == np.float64


def test_integer_labels_are_numbers_only_on_request(folder: Path) -> None:
    content = {"x_train": np.eye(3, dtype=np.float32), "y_train": np.array([7, 5, 7])}
    assert load(folder, content).classes == ("5", "7")
    found = load(folder, content, integers=True)
    assert (found.classes, found.targets, found.train.labels.tolist()) == ((), ("y_train",), [[7], [5], [7]])
    assert load(folder, "a,label\n1,5\n2,7\n", integers=True).targets == ("label",)
    assert load(folder, "a,label\n1,x\n2,y\n", integers=True).classes == ("x", "y")


@given(st.integers(20, 200), st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(0, 2**32 - 1))
def test_robust_statistics_of_targets_leave_out_extreme_ones(count: int, mean: float, std: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    usual = mean + std * rng.uniform(-1, 1, (count, 2))  # none of them is beyond a fence
    far = mean + std * rng.uniform(1e2, 1e6, (count // 20, 2)) * rng.choice([-1, 1], (count // 20, 2))
    labels = rng.permutation(np.concatenate([usual, far]))
    np.testing.assert_allclose(target_statistics(labels, robust=True), target_statistics(usual), rtol=1e-9, atol=1e-12)


@given(st.lists(numbers, min_size=1, max_size=9))
def test_no_target_is_extreme_where_the_quartiles_are_equal(others: list[float]) -> None:
    labels = np.array([*[1.5] * 40, *others])[:, np.newaxis]
    assert target_statistics(labels, robust=True) == target_statistics(labels)


def test_test_and_validation_parts_of_numbers_are_drawn_at_random(folder: Path) -> None:
    rows = "".join(f"{i},{i / 7}\n" for i in range(40))
    found = load(folder, rows, target=1, test=0.25)
    assert (len(found.train), len(found.test)) == (30, 10)
    train, validation = data.split_validation(found.train, 0.2, seed=0)
    assert validation is not None
    assert (len(train), len(validation)) == (24, 6)
    parts = [train.labels, validation.labels, found.test.labels]
    np.testing.assert_allclose(np.sort(np.concatenate(parts)[:, 0]), np.arange(40) / 7)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            TABLE,
            {"label": "price"},
            r"data.label: found 1.25 in column 1 \(price\) of .*, expected classes; .*price,",
        ),
        (
            TABLE.replace("7,", "yes,"),
            {"target": "price"},
            r"x.csv:4: found 'yes' in column 1 \(price\), expected a finite number",
        ),
        (
            TABLE.replace("1.25,", "yes,").replace("-3e2,", "no,"),
            {"target": "price"},
            r"x.csv:4: found '7' in column 1 \(price\), expected no or yes",
        ),
        (TABLE, {"target": "cost"}, "data.target: found 'cost', which is not a column of .*: the columns are"),
        (TABLE, {"target": ("price", 1)}, r"data.target: found \['price', 1\], expected each column once"),
        (TABLE, {"target": (0, 1, 2)}, "data.target: found all 3 columns of .*, expected at least one other column"),
        (
            TABLE.replace("7,", "?,"),
            {"target": "price"},
            r"x.csv:4: found '\?' in column 1 \(price\), which stands for an empty cell",
        ),
        (
            TABLE.replace("7,", ","),
            {"target": "price"},
            r"x.csv:4: found an empty cell in column 1 \(price\), expected a target",
        ),
        (
            TABLE.replace("7,", "1e39,"),
            {"target": "price"},
            r"x.csv:4: found '1e39' in column 1 \(price\), expec",
        ),
        (
            {"x_train": np.eye(2), "y_train": np.array([1, np.nan])},
            {},
            "y_train.npy: found nan in row 1, expected a fin",
        ),
        (
            {"x_train": np.eye(2), "y_train": np.ones((3, 2))},
            {},
            "y_train.npy: found 3 targets, expected 2, on",
        ),
        (
            {"x_train": np.eye(2), "y_train": np.ones((2, 1, 1))},
            {},
            "expected an integer, a string or numbers",
        ),
        (
            {"x_train": np.eye(2), "y_train": np.ones((2, 2)), "x_test": np.eye(2), "y_test": np.ones(2)},
            {},
            "y_test.npy: found 1 target, expected 2 as in .*y_train.npy",
        ),
        (
            {"x_train": np.eye(2), "y_train": np.ones(2), "x_test": np.eye(2), "y_test": np.array(["a", "b"])},
            {},
            "y_test.npy: found texts as labels, expected numbers as in .*y_train.npy",
        ),
    ],
)
def test_wrong_targets_are_reported_in_one_line(
    folder: Path, content: str | dict[str, np.ndarray], options: dict[str, object], message: str
) -> None:
    with pytest.raises((DataError, DataOptionError), match=message) as caught:
        load(folder, content, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
