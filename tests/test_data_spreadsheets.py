"""Tables as spreadsheets, pandas and people write them: markers of missing values, headers, blanks, separators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from npz_files import write_npz

from adtrain import data
from adtrain.data import DataError, DataOptionError, DataSet, Options, table_encoder
from adtrain.data.csv_file import MISSING_VALUES, names_columns
from adtrain.data.datasets import leaks

ROWS = [f"{i},{i * 0.5},{'ab'[i % 2]}" for i in range(40)]
TABLE = "\n".join(["n,half,label", *ROWS]) + "\n"


def load(folder: Path, text: str, name: str = "x.csv", **options: Any) -> DataSet:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return data.load(path=path, options=Options(**options), need_test=False)


def features(found: DataSet) -> list[list[float]]:
    table: list[list[float]] = np.asarray(found.train.images)[:, :, 0, 0].tolist()
    return table


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\ufeff" + TABLE, id="byte order mark"),
        pytest.param(TABLE.replace("\n", "\r\n"), id="CRLF"),
        pytest.param("sep=;\r\n" + TABLE.replace(",", ";"), id="the line sep=; of Excel"),
        pytest.param(TABLE.replace("\n", ",\n"), id="a comma after each line"),
        pytest.param(TABLE.replace("\n", ",\n", 1), id="a comma after the header"),
        pytest.param(
            TABLE.replace("label\n", "label\0").replace("\n", ",\n").replace("\0", "\n"), id="after rows only"
        ),
        pytest.param(TABLE.replace(",", ", "), id="blanks"),
        pytest.param(TABLE.replace(",b", ', "b"'), id="a blank before a quote"),
        pytest.param(TABLE.replace(",", "\u00a0,\u202f"), id="no-break spaces"),
        pytest.param("\n" + TABLE + "\n \n", id="empty and blank lines"),
    ],
)
def test_a_table_is_the_same_however_it_is_written(tmp_path: Path, text: str) -> None:
    found = load(tmp_path, text)
    assert (found.features, found.classes) == (("n", "half"), ("a", "b"))
    assert features(found) == features(load(tmp_path, TABLE))


def test_letters_are_equal_in_all_forms_of_unicode(tmp_path: Path) -> None:
    composed, decomposed = "Z\u00fcrich", "Zu\u0308rich"
    rows = [f"{[composed, decomposed, 'Bern'][i % 3]},{i},{[composed, decomposed][i % 2]}" for i in range(12)]
    found = load(tmp_path, "\n".join([f"{decomposed},n,label", *rows, "Bern,1,x"]), drop=(composed,))
    assert (found.features, found.classes) == (("n",), (composed, "x"))
    both = load(tmp_path, "\n".join([f"{decomposed},n,label", *rows, "Bern,1,x"]))
    assert both.features == (f"{composed}=Bern", f"{composed}={composed}", "n")


@pytest.mark.parametrize("marker", [*MISSING_VALUES, "nan", "n/a", "NULL", "none"])
def test_a_marker_is_an_empty_cell(tmp_path: Path, marker: str) -> None:
    text, empty = (TABLE.replace("\n3,1.5", f"\n3,{x}").replace("\n5,2.5", f"\n5, {x} ") for x in (marker, ""))
    for missing in ("mean", "zero", "drop"):
        found, expected = (load(tmp_path, x, missing=missing) for x in (text, empty))
        assert features(found) == features(expected)
    assert expected.encoder is not None
    rows = {"n": [1, 2], "half": [marker, 1]}
    cells = table_encoder.rows_in_memory(rows, Options(missing="drop"), expected.encoder.columns)
    assert cells.rows.tolist() == [1]
    with pytest.raises(DataError, match=r"x.csv:5: found '.*' in column 1 \(half\), which stands for an empty cell"):
        load(tmp_path, text)
    with pytest.raises(DataError, match=r"x.csv:3: found '.*' in column 2 \(label\), which stands for an empty cell"):
        load(tmp_path, TABLE.replace("1,0.5,b", f"1,0.5,{marker}"))


def test_missing_values_of_the_config_replace_the_default_markers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join(["n,word,label", *(f"{-999 if i == 3 else i},{'NA' if i % 2 else 'x'},{i % 3}" for i in range(9))])
    found = load(tmp_path, text, missing="drop", missing_values=("-999",))
    assert len(found.train) == 8
    assert found.features == ("n", "word=NA", "word=x")
    same = load(tmp_path, text.replace("-999", "-999.0"), missing="drop", missing_values=("-999",))
    assert features(same) == features(found)
    assert [x for x in caplog.messages if "as empty cells" in x] == []
    assert load(tmp_path, text, missing="mean").features == ("n", "word=x")
    expected = "column 1 (word): read 'NA' (4) as empty cells; data.missing_values: [] reads such texts as categories"
    assert [expected in x for x in caplog.messages if "as empty cells" in x] == [True]


@pytest.mark.parametrize(
    ("first", "rows", "expected"),
    [
        ("a,b,label", ["1,2,x", "3,4,y"], True),
        ("1,2,x", ["3,4,x", "5,6,y"], False),
        ("2019,2020,label", ["0.5,0.1,x", "-1,3,y"], True),
        ("2019,2020,2021", ["0.5,0.1,3", "-1,3,2"], True),
        ("2019,2020,x", ["2018,2011,y", "2001,2002,x"], False),
        ("1e3,x,label", ["1,2,a", "3,4,b"], True),
        ("1,2,3", ["4,5,6"], False),
        ("5.1,3.5,setosa", ["4.9,3.0,setosa", "7.0,3.2,versicolor"], False),
        ("18.0,ford pinto", ["15.0,fiat 128", "17.0,vw golf"], False),
        ("3,4,c", ["1,2,a", "3,4,a", "3,4,b", "3,4,b"], None),
    ],
)
def test_a_header_is_distinguished_from_values_by_the_lines_below(
    first: str, rows: list[str], expected: bool | None
) -> None:
    assert names_columns(first.split(","), [row.split(",") for row in rows]) is expected


def test_a_first_line_that_could_be_either_is_refused(tmp_path: Path) -> None:
    text = "\n".join(["3,4,c", *(f"{i},{i},{'ab'[i % 2]}" for i in range(20))])
    with pytest.raises(DataOptionError, match=r"data.header: missing, expected true or false: line 1 of "):
        load(tmp_path, text, label=-1)
    assert load(tmp_path, text, label=-1, header=False).classes == ("a", "b", "c")


@pytest.mark.parametrize("option", ["label", "target"])
def test_a_second_column_of_the_same_name_is_no_feature(tmp_path: Path, option: str) -> None:
    text = "\n".join(["x,y,y", *(f"{i},{i % 2},{i % 2}" for i in range(20))])
    with pytest.raises(DataOptionError, match=f"data.{option}: found 'y', the name of columns 1 and 2 of"):
        load(tmp_path, text, "x.csv", **{option: "y"})
    with pytest.raises(DataError, match="found two columns named y, 1 and 2, expected different names"):
        load(tmp_path, text, "x.csv", **{option: -1})
    assert load(tmp_path, text, "x.csv", **{option: -1}, drop=(1,)).features == ("x",)


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_column_that_determines_the_result_is_found_and_others_are_not(seed: int, has_classes: bool) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 400) if has_classes else rng.normal(size=(400, 2))
    chance = rng.integers(0, 5, (400, 3)), rng.normal(size=(400, 3))
    leak = labels * 7 % 5 if has_classes else 32 + 1.8 * labels[:, 1]
    table = np.column_stack([*chance, leak]).astype(float)
    assert [i for i, _ in leaks(table, labels)] == [6]
    table[::7, 6] = np.nan if not has_classes else table[::7, 6]
    assert [i for i, _ in leaks(table, labels)] == [6]


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_leak_is_a_warning_with_the_column(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    rows = np.array([[i, 10 + i % 2] for i in range(40)])
    if kind == "csv":
        load(tmp_path, "\n".join(["n,code,label", *(f"{a},{b},{b % 2}" for a, b in rows.tolist())]))
    else:
        data.load(path=write_npz(tmp_path / "x.npz", {"X": rows, "y": rows[:, 1] % 2}), need_test=False)
    name = "code" if kind == "csv" else "1"
    assert [
        f"column {name} leaks what is to be predicted: each of its 2 values has only one" in x for x in caplog.messages
    ] == [True]


def test_a_class_of_the_test_part_only_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "test.csv").write_text(TABLE.replace("0,0.0,a", "0,0.0,new"))
    assert load(tmp_path, TABLE, test_path=str(tmp_path / "test.csv")).classes == ("a", "b", "new")
    assert ["found 1 test example of class new, without a training example" in x for x in caplog.messages] == [True]


def test_integers_beyond_float64_are_a_warning_with_the_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, "\n".join(["key,label", *(f"{10**18 + i},{i % 3}" for i in range(9))]))
    assert ["column 0 (key): float64 loses the last digits of 100000" in x for x in caplog.messages] == [True]


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, TABLE.replace("\n3,1.5", f"\n{'0' * 140_000}3,1.5")).features == ("n", "half")


def test_a_file_of_any_name_is_read_as_a_table_on_request(tmp_path: Path) -> None:
    for name in ("x.data", "x.txt", "x"):
        assert load(tmp_path, TABLE, name, format="csv").classes == ("a", "b")
    with pytest.raises(DataError, match=r"found the extension .data, .*; data.format: csv, npz, text or archive reads"):
        load(tmp_path, TABLE, "x.data")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array([True, False, True]), ("False", "True")),
        (np.array([[True], [False], [True]]), ("False", "True")),
        (np.array([b"yes", b"no", "gr\u00fcn".encode()]), ("gr\u00fcn", "no", "yes")),
    ],
)
def test_labels_may_be_booleans_or_bytes(tmp_path: Path, labels: np.ndarray, classes: tuple[str, ...]) -> None:
    path = write_npz(tmp_path / "x.npz", {"X": np.eye(3), "y": labels})
    assert data.load(path=path, need_test=False).classes == classes


def test_bytes_that_are_no_text_are_refused_as_labels(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", {"X": np.eye(2), "y": np.array([b"\xff", b"a"])})
    with pytest.raises(DataError, match=r"x.npz:y.npy: found bytes as labels .*, expected text in UTF-8"):
        data.load(path=path, need_test=False)


def test_booleans_in_memory_are_the_texts_of_the_table(tmp_path: Path) -> None:
    found = load(
        tmp_path, "\n".join(["on,n,label", *(f"{['true', 'false'][i % 2]},{i % 3 % 2},{i % 5}" for i in range(9))])
    )
    assert found.encoder is not None
    cells = table_encoder.rows_in_memory({"on": [True, False], "n": [True, False]}, Options(), found.encoder.columns)
    features_of = found.encoder.encode(cells.values, cells.columns, "rows")
    assert features_of.tolist() == [[0, 1, 1], [1, 0, 0]]
