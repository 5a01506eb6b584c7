"""Tables with categories and empty cells: their features, and rows of other files."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtrain import data
from adtrain.data import DataError, DataOptionError, DataSet, Options, Split, csv_table, table_encoder
from adtrain.data.chunks import FIRST_ROWS
from adtrain.data.part import Column, Columns, Known

ADULTS = "age,city,zip,kind\n22,Berlin,1,a\n,Rome,2,b\n35.5,,1,a\n41,Berlin,2,b\n"

texts = st.text(st.sampled_from("abcXYZ é,;\t\"'"), min_size=1, max_size=6).map(lambda x: f"w{x}w")
numbers = st.floats(-1e6, 1e6, width=32).map(repr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def load(path: Path, **options: Any) -> DataSet:
    return data.load(path=path, options=Options(**options), need_test=False)


def features(found: DataSet, part: Split | None = None) -> np.ndarray:
    """The features of the training part, or of another part, before the subtraction of the offset."""
    return np.asarray((part or found.train).images)[:, :, 0, 0] + found.offset


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[str]], list[bool], int]:
    """Rows of cells, whether each column has categories, and the number of rows that are for training."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    columns = [st.just("") | (draw(st.lists(texts, min_size=1, max_size=3).map(st.sampled_from)) if kind else numbers)
               for kind in kinds]  # fmt: skip
    rows = draw(st.lists(st.tuples(*columns).map(list), min_size=2, max_size=12))
    for j, kind in enumerate(kinds):
        rows[0][j] = rows[0][j] or ("first" if kind else "0.5")  # no column is empty
    return rows, kinds, draw(st.integers(1, len(rows)))


def oracle(rows: list[list[str]], kinds: list[bool], training: int, missing: str) -> tuple[list[str], np.ndarray]:
    """The names and values of the features of all rows, learnt from the first `training` ones; NaN where not filled."""
    names, columns = [], []
    for j, has_categories in enumerate(kinds):
        cells = [row[j].strip() for row in rows]
        values = sorted({x for x in cells[:training] if x}) if has_categories else [None]
        for value in values:
            names.append(f"c{j}" if value is None else f"c{j}={value}")
            found = [math.nan if not x else np.float32(x) if value is None else float(x == value) for x in cells]
            known = [float(x) for x in found[:training] if not math.isnan(x)]
            fill = {"mean": sum(known) / max(len(known), 1), "zero": 0.0}.get(missing, math.nan)
            columns.append([fill if math.isnan(x) else x for x in found])
    return names, np.array(columns, np.float32).T


@settings(max_examples=40)
@given(tables(), st.sampled_from(["mean", "zero", "drop"]), st.sampled_from([",", ";", "\t"]), st.randoms())
def test_features_equal_those_of_an_oracle(
    folder: Path, table: tuple[list[list[str]], list[bool], int], missing: str, delimiter: str, random: Any
) -> None:
    rows, kinds, training = table
    names = [f"c{j}" for j in range(len(kinds))]

    def table_of(part: list[list[str]], order: list[int], name: str) -> Path:
        content = io.StringIO()
        writer = csv.writer(content, delimiter=delimiter, lineterminator="\r\n")
        writer.writerow([*(names[j] for j in order), "label"])
        writer.writerows([*(row[j] for j in order), str(i)] for i, row in enumerate(part))
        return write(folder / name, content.getvalue())

    order = list(range(len(kinds)))
    train = table_of(rows[:training], order, "train.csv")
    random.shuffle(order)
    test = table_of(rows[training:], order, "test.csv") if training < len(rows) else None
    expected_names, expected = oracle(rows, kinds, training, missing)
    kept = ~np.array([missing == "drop" and not all(x.strip() for x in row) for row in rows])
    if missing == "drop":  # the categories of rows that are left out are not learnt
        kept_rows = [row for row, keep in zip(rows, kept, strict=True) if keep]
        expected_names, expected = oracle(kept_rows, kinds, int(kept[:training].sum()), missing)
    else:
        expected = expected[kept]
    count = int(kept[:training].sum())
    options = {"missing": missing, "delimiter": delimiter, "header": True}
    if test is not None and kept[training:].any():
        found = load(train, test_path=str(test), **options)
        np.testing.assert_allclose(features(found, found.test), expected[count:], rtol=1e-6)
    else:
        found = load(train, **options)
    np.testing.assert_allclose(features(found), expected[:count], rtol=1e-6)
    assert list(found.features) == expected_names


def test_the_held_out_rows_do_not_change_what_is_learnt(tmp_path: Path) -> None:
    text = "".join(f"{i},{'even' if i % 2 else 'odd'}{i % 3},{i % 2}\n" for i in range(20))
    path = write(tmp_path / "x.csv", "n,word,label\n1000,rare,1\n,often,0\n" + text)
    found = load(path, test=0.5, missing="mean")
    assert found.encoder is not None
    rows = features(found)
    words = {name.removeprefix("word=") for name in found.features if name.startswith("word=")}
    assert found.encoder.columns.features[1].categories == tuple(sorted(words))
    assert (rows[:, 1:].sum(axis=0) > 0).all()  # each category is one of a training row
    held_out = np.asarray(found.test.images)[:, 0].ravel()
    numbers = [1000, *range(20)]
    training = [x for x in numbers if x not in held_out.tolist()]
    assert found.encoder.fill[0] == pytest.approx(np.mean(training))


def test_an_unseen_category_is_zeros_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(tmp_path / "a.csv", "city,label\nBerlin,0\nRome,1\n")
    test = write(tmp_path / "b.csv", "city,label\nParis,0\nOslo,1\nRome,1\nParis,0\n")
    found = load(train, test_path=str(test))
    assert np.asarray(found.test.images)[:, :, 0, 0].tolist() == [[0, 0], [0, 0], [0, 1], [0, 0]]
    assert caplog.messages == [
        f"adtrain: warning: {test}: found 'Paris' and 1 more in column city (3 rows), which no training row has: "
        "the column's features are 0"
    ]


def test_rows_with_empty_cells_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = load(write(tmp_path / "x.csv", ADULTS), label="kind", missing="drop")
    assert features(found).tolist() == [[22, 1, 1], [41, 1, 2]]
    assert caplog.messages == [
        f"adtrain: warning: {tmp_path}/x.csv: left out 2 of 4 rows with an empty cell, the first in line 3"
    ]


def test_rows_keep_their_numbers_where_others_are_left_out(tmp_path: Path) -> None:
    cells = ["" if i % 7 == 3 else str(i) for i in range(2 * FIRST_ROWS + 5)]
    path = write(tmp_path / "x.csv", "n,label\n" + "".join(f"{cell},0\n" for cell in cells))
    options = Options(missing="drop")
    found = csv_table.read_rows(path, options, Known(Columns((Column("n", 0),), 2)))
    expected = [i for i, cell in enumerate(cells) if cell]
    assert found.rows.tolist() == expected
    assert found.values.ravel().tolist() == expected
    parts = csv_table.read(path, options)
    assert len(parts.train.labels) == len(expected)


def test_columns_are_dropped_and_listed_as_categories_by_name_or_number(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", ADULTS)
    for drop, categories in (("age", "zip"), (0, 2), (-4, -2)):
        found = load(path, label="kind", missing="zero", drop=(drop,), categories=(categories,))
        assert found.features == ("city=Berlin", "city=Rome", "zip=1", "zip=2")


def test_tables_without_a_header_are_matched_by_position(tmp_path: Path) -> None:
    train = write(tmp_path / "a.csv", "1,red,x\n2,blue,y\n")
    test = write(tmp_path / "b.csv", "3,red,x\n")
    found = load(train, label=-1, test_path=str(test))
    assert found.features == ("0", "1=blue", "1=red")
    assert np.asarray(found.test.images).ravel().tolist() == [3, 0, 1]
    write(test, "3,red\n")
    with pytest.raises(DataError, match=r"b.csv: found 2 columns, expected 3 as in training, without a header"):
        load(train, label=-1, test_path=str(test))
    assert found.encoder is not None
    rows = csv_table.read_rows(test, Options(label=-1), Known(found.encoder.columns))
    assert found.encoder.encode(rows.values, rows.columns, "b.csv").tolist() == [[3, 0, 1]]


def test_a_table_is_read_again_where_one_of_two_columns_of_a_name_was_dropped_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,a,b,label\n1,7,3,x\n2,8,4,y\n")
    options = Options(drop=(0,))
    found = data.load(path=path, options=options, need_test=False)
    assert features(found).tolist() == [[7, 3], [8, 4]]
    assert found.encoder is not None
    known = found.encoder.columns
    assert csv_table.read_rows(path, options, Known(known)).values.tolist() == [[7, 3], [8, 4]]
    assert csv_table.read_dropped(path, options, known) == {"a": ["1", "2"]}
    moved = write(tmp_path / "b.csv", "b,label,a,a\n3,x,1,7\n")
    with pytest.raises(DataError, match=r"b\.csv:1: found two columns named a, expected one"):
        csv_table.read_rows(moved, options, Known(known))


def test_dropped_columns_of_a_table_without_a_header_are_read_by_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "11,1.5,x\n12,2.5,y\n")
    options = Options(drop=(0,), label=-1)
    found = data.load(path=path, options=options, need_test=False)
    assert found.encoder is not None
    assert csv_table.read_dropped(path, options, found.encoder.columns) == {"column 0": ["11", "12"]}


def test_targets_stand_beside_categories_and_empty_cells(tmp_path: Path) -> None:
    table = write(tmp_path / "a.csv", "price,city,rooms,rent\n1.25,Oslo,2,10\n-3,Rome,,20\n7,Oslo,4,30.5\n")
    found = load(table, target=("rent", "price"), missing="mean")
    assert (found.targets, found.features) == (("rent", "price"), ("city=Oslo", "city=Rome", "rooms"))
    assert found.train.labels.tolist() == [[10, 1.25], [20, -3], [30.5, 7]]
    assert np.asarray(found.train.images)[:, :, 0, 0].tolist() == [[1, 0, 2], [0, 1, 3], [1, 0, 4]]
    dropped = load(table, target="price", missing="drop")
    assert dropped.train.labels.tolist() == [[1.25], [7]]
    assert (dropped.target_mean, dropped.target_std) == ((4.125,), (2.875,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "n", "drop": ("n",)}, r"data.drop: found a column of the targets, column 1 \(n\)"),
        ({"target": ("m", "n"), "categories": (1,)}, r"data.categories: found a column of the targets, column 1 \(n\)"),
        ({"target": ("m", "n"), "drop": (0,)}, "data.drop: found all columns but the targets, expected one that stays"),
        (
            {"target": "n"},
            r"x.csv:3: found an empty cell in column 1 \(n\), expected a target; data.missing: mean, zero or drop",
        ),
    ],
)
def test_targets_are_no_features_and_empty_only_with_missing(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises((DataError, DataOptionError), match=message):
        load(write(tmp_path / "x.csv", "a,n,m\n1,2,3\n4,,5\n"), **options)


@pytest.mark.parametrize("missing", ["mean", "zero", "drop"])
def test_rows_without_a_label_or_target_are_left_out_with_a_warning(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = write(tmp_path / "x.csv", "n,a,k\n,1,\n2,2,p\n,3,none\n4,4,q\n")
    targets, labels = (
        load(table, target="n", drop=("k",), missing=missing),
        load(table, label="k", drop=("n",), missing=missing),
    )
    for found in targets, labels:
        assert np.asarray(found.train.images).ravel().tolist() == [2, 4]
    assert (targets.train.labels.tolist(), labels.classes) == ([[2], [4]], ("p", "q"))
    lacks = "with an empty cell" if missing == "drop" else "without a {}"
    first, second = (f"left out 2 of 4 rows {lacks.format(kind)}" for kind in ("target", "label"))
    assert f"{first}, the first in line 2" in caplog.text
    assert f"{second} (also 'none'), the first in line 2" in caplog.text
    options = Options(target="n", missing=missing)  # type: ignore[arg-type]
    csv_table.parts_of(table_encoder.table_in_memory({"n": [None, 2.0], "a": [1, 2]}, options), options)
    assert f"left out 1 of 2 rows {lacks.format('target')}, the first in row 0" in caplog.text


def test_the_targets_of_a_test_table_are_found_by_name(tmp_path: Path) -> None:
    table = write(tmp_path / "a.csv", "a,n,m\n1,2,3\n4,5,6\n")
    test = write(tmp_path / "b.csv", "m,more,n,a\n7,0,8,9\n")
    found = load(table, target=("n", "m"), test_path=str(test))
    assert (found.test.labels.tolist(), np.asarray(found.test.images).ravel().tolist()) == ([[8, 7]], [9])


def test_rows_without_a_header_may_lack_all_targets_at_the_end(tmp_path: Path) -> None:
    encoder = load(write(tmp_path / "a.csv", "1,red,5,6\n2,blue,7,8\n"), target=(-1, 2)).encoder
    assert encoder is not None
    for text in ("3,red\n", "3,red,0,0\n"):
        rows = csv_table.read_rows(write(tmp_path / "b.csv", text), Options(target=(-1, 2)), Known(encoder.columns))
        assert encoder.encode(rows.values, rows.columns, "b.csv").tolist() == [[3, 0, 1]]
    with pytest.raises(DataError, match="found 3 columns, expected 4 as in training, without a header"):
        csv_table.read_rows(write(tmp_path / "b.csv", "3,red,0\n"), Options(target=(-1, 2)), Known(encoder.columns))
    with pytest.raises(DataError, match="found 2 columns, expected 4 as in training, without a header"):
        csv_table.read_rows(write(tmp_path / "b.csv", "3,red\n"), Options(target=(1, 2)), Known(encoder.columns))


def test_tsv_files_have_tabs(tmp_path: Path) -> None:
    found = load(write(tmp_path / "x.tsv", "a\tb\tlabel\n1\tx,y\t0\n2\tz\t1\n"))
    assert found.features == ("a", "b=x,y", "b=z")


MIXED = "a,word,label\n1,x,0\n2,y,1\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            MIXED.replace("y", "7"),
            {},
            r"x.csv:2: found 'x' in column 1 \(word\), expected a finite number; if the column has",
        ),
        (
            MIXED.replace("x", "2024-02-01").replace("y", "2024-02-02"),
            {},
            r"expected a finite number; if the column has dates, list it in data.dates",
        ),
        (MIXED.replace("x", "$12").replace("y", "13"), {}, r"x.csv:3: found '13' in .* number with the sign \$"),
        (MIXED.replace("x", "12").replace("y", "$13"), {}, r"x.csv:3: found '\$13' in .* without the sign \$"),
        (MIXED.replace("x", "1.5 €").replace("y", "2 $"), {"decimal": "."}, "x.csv:3: .* number with the sign €"),
        (MIXED.replace("x", '"$1,200"').replace("y", "$1"), {}, "x.csv:2: .* such as 1.5; data.decimal"),
        (MIXED.replace("x", "$$5").replace("y", "$1"), {}, "x.csv:2: .* expected a finite number;"),
        (MIXED.replace("2,y", "?,y"), {}, r"x.csv:3: found '\?' in column 0 \(a\), which stands for an empty cell"),
        (MIXED.replace("x", "15_0").replace("y", "2_0"), {}, r"x.csv:2: found '15_0' in column 1"),
        (MIXED.replace(",x", ',"1,5"').replace(",y", ',"2,5"'), {}, r"x.csv:2: found '1,5' in column 1 \(word\)"),
        (MIXED.replace("y", ""), {}, r"x.csv:3: found an empty cell in column 1 \(word\), expected a value; data.miss"),
        (MIXED, {"drop": ("b",)}, r"data.drop: found 'b', which is not a column of .*: the columns are a, word, label"),
        (MIXED, {"categories": (3,)}, "data.categories: found 3, which is not a column of"),
        (MIXED, {"drop": ("label",)}, r"data.drop: found the column of the labels, column 2 \(label\)"),
        (MIXED, {"drop": (0, 1)}, "data.drop: found all columns but the labels, expected one that stays"),
        (MIXED, {"drop": ("a",), "categories": (0,)}, r"data.drop: found column 0 \(a\), which data.categories lists"),
        (MIXED, {"categories": ("a",), "shape": (1, 1, 2)}, "data.categories: found together with data.shape, whose"),
        (MIXED, {"shape": (1, 1, 2)}, r"x.csv:2: found 'x' in column 1 \(word\), expected a finite number$"),
        (
            MIXED,
            {"missing": "drop", "delimiter": ";"},
            "found 1 column, expected at least 2, separated by ';'; set data.delimiter to ','",
        ),
        (MIXED.replace("word", "a"), {}, "x.csv:1: found two columns named a, 0 and 1, expected different names"),
        (
            "a,label\n,0\n,1\n",
            {"missing": "mean"},
            "x.csv: column a: found no value in the training rows, expected one",
        ),
        ("a,label\n,0\n,1\n", {"missing": "drop"}, "x.csv: found an empty cell in each of 2 rows, expected one per ex"),
        ("a,label\n,0\n", {"missing": "zero", "categories": ("a",)}, "found no value in the columns of the training"),
        (
            "red,apple\nyellow,pear\n",
            {"label": -1},
            "data.header: missing, expected true or false: no column of .* has",
        ),
        (
            "a,label\n" + "".join(f"x{i},0\n" for i in range(1001)),
            {},
            r"x.csv:1002: found 'x1000' in column 0 \(a\), expected at most 1,000 categories; data.drop leaves",
        ),
    ],
)
def test_a_wrong_table_is_one_line_with_its_place(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / "x.csv", text), **options)
    assert "\n" not in str(caught.value)


def test_a_kind_that_changes_after_many_rows_is_one_line(tmp_path: Path) -> None:
    words, digits = "x,0\n" * FIRST_ROWS, "1,0\n" * FIRST_ROWS
    line = FIRST_ROWS + 2
    with pytest.raises(
        DataError, match=rf"x.csv:{line}: found '1' in column 0 \(a\), expected a category such as 'x'; "
    ):
        load(write(tmp_path / "x.csv", "a,label\n" + words + digits))
    with pytest.raises(DataError, match=rf"x.csv:{line}: found 'x' in column 0 \(a\), expected a finite number"):
        load(write(tmp_path / "x.csv", "a,label\n" + digits + words))
    found = load(tmp_path / "x.csv", categories=("a",))
    assert found.features == ("a=1", "a=x")


def test_a_column_that_a_test_file_lacks_is_one_line_and_others_are_ignored(tmp_path: Path) -> None:
    train = write(tmp_path / "a.csv", "n,word,label\n1,x,0\n2,y,1\n")
    test = write(tmp_path / "b.csv", "label,more,word,n\n0,?,y,3\n")
    assert np.asarray(load(train, test_path=str(test)).test.images).ravel().tolist() == [3, 0, 1]
    write(test, "label,more,n\n0,?,3\n")
    with pytest.raises(
        DataError, match=r"b.csv:1: found no column word, expected it as in training: the columns are la"
    ):
        load(train, test_path=str(test))


@given(
    st.lists(st.sampled_from([b"1", b"2.5", b",", b"\n", b'"', b"a", b"\0", b"\xff", b"nan", b" ", b"x", b"label"])),
    st.sampled_from(["error", "mean", "zero", "drop"]),
    st.sampled_from([(), (0,), ("a",)]),
)
def test_arbitrary_bytes_are_a_table_or_one_line(
    folder: Path, pieces: list[bytes], missing: str, categories: tuple[str | int, ...]
) -> None:
    path = folder / "arbitrary.csv"
    path.write_bytes(b"a,b,label\n1,x,0\n" + b"".join(pieces))
    refusal = None
    try:
        found = load(path, missing=missing, categories=categories)
    except DataError as error:
        refusal = error
    else:
        assert np.isfinite(features(found)).all()
        assert len(found.features) == features(found).shape[1]
    assert refusal is None or (str(path) in str(refusal) and "\n" not in str(refusal))
    assert not isinstance(refusal, DataOptionError) or refusal.option in ("label", "categories")
