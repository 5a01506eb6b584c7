from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain import data
from adtrain.data import DataError, DataOptionError, DataSet, Options, csv_table
from adtrain.data.part import Part

IRIS = "length,width,species\n5.1,3.5,setosa\n\n7,3.2,versicolor\n6.3,-3e-1,setosa\n"

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csv")


def read(folder: Path, text: str, **options: object) -> Part:
    path = folder / "x.csv"
    path.write_text(text, encoding="utf-8", newline="")
    return csv_table.read(path, Options(**options)).train  # type: ignore[arg-type]


def load(folder: Path, text: str, **options: object) -> DataSet:
    path = folder / "x.csv"
    path.write_text(text, encoding="utf-8", newline="")
    return data.load(path=path, options=Options(**options), need_test=False)  # type: ignore[arg-type]


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=1, max_size=8)))
def test_numbers_are_read_exactly(folder: Path, rows: list[list[float]]) -> None:
    text = "".join(f"{i}," + ",".join(map(repr, row)) + "\n" for i, row in enumerate(rows))
    for header in ("", "label," + ",".join(f"f{i}" for i in range(len(rows[0]))) + "\r\n"):
        found = read(folder, header + text, label=0)
        np.testing.assert_array_equal(found.images[:, :, 0, 0], np.array(rows, np.float32))
        np.testing.assert_array_equal(found.labels, np.arange(len(rows)))
        assert found.columns is not None
        names = [f"f{i}" if header else None for i in range(len(rows[0]))]
        assert [column.name for column in found.columns.features] == names


@given(st.integers(1020, 1030))
def test_all_rows_are_read_around_the_chunk_size(folder: Path, count: int) -> None:
    found = read(folder, "".join(f"{i},{i}\n" for i in range(count)), label=-1)
    np.testing.assert_array_equal(np.asarray(found.images).ravel(), np.arange(count))
    np.testing.assert_array_equal(found.labels, np.arange(count))


def test_text_labels_become_classes_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "iris.csv").write_text(IRIS)
    found = data.load(path=tmp_path / "iris.csv", options=Options(label="species", test=0.4))
    assert (found.name, found.classes, found.features) == ("iris", ("setosa", "versicolor"), ("length", "width"))
    assert found.scale == 1
    assert found.train.images.shape == (2, 2, 1, 1)
    assert found.train.images.dtype == np.float32


def test_rows_with_a_shape_are_uint8_if_all_values_are_pixels(tmp_path: Path) -> None:
    text = "label,a,b\n0,255,0\n1,7,3\n"
    assert load(tmp_path, text, shape=(1, 1, 2)).train.images.dtype == np.uint8
    assert load(tmp_path, text).train.images.dtype == np.float32
    for other in ("256", "-1", "0.5"):
        assert load(tmp_path, text.replace("255", other), shape=(1, 1, 2)).train.images.dtype == np.float32


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            IRIS,
            {},
            "data.label: missing, expected the name of the column of .*x.csv .*; the columns are length, width, ",
        ),
        (IRIS, {"label": "kind"}, "data.label: found 'kind', which is not a column of .*: the columns are length"),
        (IRIS, {"label": 3}, "data.label: found 3, which is not a column"),
        (IRIS, {"label": 2, "header": False}, r"x.csv:1: found 'length' in column 0, expected a finite number"),
        ("1,2\n3,4\n", {}, "data.label: missing, .*; there is no header, the columns are 0 to 1"),
        ("1,2\n3,4\n", {"label": "a"}, "data.label: found 'a', which is not a column"),
        (
            IRIS.replace("3.2", "?"),
            {"label": "species"},
            r"x.csv:4: found '\?' in column 1 \(width\), which stands for an empty cell unless data.missing",
        ),
        (
            IRIS.replace("3.2", " "),
            {"label": -1},
            r"x.csv:4: found an empty cell in column 1 \(width\), expected a value; data.missing: mean, zero",
        ),
        (IRIS.replace("3.2", "nan"), {"label": -1}, r"x.csv:4: found 'nan' in column 1 \(width\)"),
        (IRIS.replace("3.2", "1e39"), {"label": -1}, r"x.csv:4: found '1e39' in column 1 \(width\)"),
        (IRIS.replace("3.2", "1,2"), {"label": -1}, "x.csv:4: found 4 values, expected 3 as in the first line"),
        (IRIS.replace(",setosa", ", "), {"label": -1}, r"x.csv:2: found an empty cell in column 2 \(species\)"),
        (IRIS.replace("7", '"7'), {"label": -1}, r"x.csv:\d: found invalid CSV"),
        (
            "a;b;label\n1;2;3\n",
            {},
            "x.csv: found 1 column, expected at least 2, separated by commas; set data.delimiter to ';'",
        ),
        ("", {}, "x.csv: found no lines, expected one for each example"),
        ("a,label\n", {}, "x.csv: found no rows"),
        ("a,label\n1,2\n", {"shape": (1, 2, 2)}, r"data.shape: found \[1, 2, 2\], but .* has images of shape \[1\]"),
    ],
)
def test_errors_name_line_and_column(tmp_path: Path, text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, text, **options)
    assert "\n" not in str(caught.value)


@given(
    st.lists(st.sampled_from([b"1", b"2.5", b",", b"\n", b"\r", b'"', b"label", b"\0", b"\xff", b"nan", b" ", b"x"])),
    st.sampled_from([None, 0, -1, "label"]),
    st.sampled_from([None, True, False]),
)
def test_arbitrary_bytes_are_read_as_a_table_or_raise_data_error(
    folder: Path, pieces: list[bytes], label: str | int | None, header: bool | None
) -> None:
    path = folder / "arbitrary.csv"
    path.write_bytes(b"".join(pieces))
    try:
        found = csv_table.read(path, Options(label=label, header=header)).train
    except DataError as error:
        refusal: DataError | None = error
    else:
        refusal = None
        assert len(found.images) == len(found.labels) > 0
        assert np.isfinite(found.images).all()
    assert refusal is None or (str(path) in str(refusal) and "\n" not in str(refusal))
    assert not isinstance(refusal, DataOptionError) or refusal.option == "label"


@pytest.mark.parametrize("text", ["1_000", "\u0661", "\uff11", "1\u00a0000", "\u22121", "0x10", "1e", "1,"[:-1] + "f"])
def test_numbers_of_other_notations_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"x\.csv:2: found .* in column 0 \(a\), expected a finite number"):
        read(tmp_path, f"a,label\n{text},0\n")


def test_labels_are_equal_if_their_texts_are(tmp_path: Path) -> None:
    texts = ["1", "01", "+1", "\u0661", "-0", "0", "1_0", "10"]
    path = tmp_path / "x.csv"
    path.write_text("a,label\n" + "".join(f"1,{text}\n" for text in texts), encoding="utf-8")
    assert data.load(path=path, options=Options(test=0.5)).classes == tuple(sorted(texts))
    assert read(tmp_path, "a,label\n1,10\n1,9\n1,-2\n").labels.tolist() == [10, 9, -2]


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1), (4, 1, 1)])
def test_columns_name_the_channels_unless_a_shape_regroups_them(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    found = load(tmp_path, "a,b,c,d,label\n1,2,3,4,x\n", shape=shape)
    assert found.train.images.shape == (1, *shape)
    assert found.features == (("a", "b", "c", "d") if shape == (4, 1, 1) else ())


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
def test_a_table_in_another_encoding_is_an_error_with_the_command_that_converts_it(
    tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("café,label\n1,a\n", encoding=encoding)
    advice = rf"; if it is {encoding}, iconv -f {encoding} -t utf-8 FILE converts it"
    with pytest.raises(DataError, match=rf"x\.csv: found an invalid byte at \d+, expected UTF-8 text{advice}"):
        csv_table.read(path, Options())
